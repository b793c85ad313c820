"""transformers' Trainer and accelerate read an ExtractingDataset, unmodified."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.integration.clients.environment import ClientEnvironment
from tests.models.checkpoints import make_checkpoint

NUM_PROMPTS, EPOCHS = 40, 3


def test_each_epoch_has_each_sample_and_the_loss_falls(
    clients: ClientEnvironment, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_5")
    program = Path(__file__).with_name("trainer_loops.py")
    printed = clients.run_beside(program, str(model), str(tmp_path / "work"))
    for found in json.loads(printed.splitlines()[-1]):
        assert Counter(found["seen"]) == dict.fromkeys(range(NUM_PROMPTS), EPOCHS)
        epochs = [found["seen"][i * NUM_PROMPTS : (i + 1) * NUM_PROMPTS] for i in range(EPOCHS)]
        assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
        losses, count = found["losses"], len(found["losses"]) // EPOCHS
        assert sum(losses[-count:]) < 0.8 * sum(losses[:count])

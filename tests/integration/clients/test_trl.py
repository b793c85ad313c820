"""TRL 1.16 from the registry, unmodified: its client, and its trainer with a teacher on a server.

About 40 s on two cores once the clients' environment is there. This package is installed beside
TRL, which imports names of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entrypoints.serve_process import serve
from tests.integration.clients.environment import ClientEnvironment
from tests.integration.clients.trl_data import LENGTHS, SEQUENCES, TEMPERATURE
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("teacher") / "model", "llama")


@pytest.fixture(scope="module")
def found(model: Path, clients: ClientEnvironment) -> dict[str, Any]:
    """Run the program beside this file, and return what it prints."""
    flags = ("--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs")
    with serve(model, None, *flags) as server:
        program = Path(__file__).with_name("trl_student.py")
        printed = clients.run_beside(program, str(model), server.url)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def test_scores_are_those_of_transformers(found: dict[str, Any], model: Path) -> None:
    scores = found["scores"]
    for index, (ids, length) in enumerate(zip(SEQUENCES, LENGTHS, strict=True)):
        logits = reference_run(model, ids).logits.float() / TEMPERATURE
        for place, position in enumerate(range(length, len(ids))):
            row = logits.log_softmax(-1)[position - 1]
            top = row.topk(4)
            assert scores["logprob_token_ids"][index][place] == top.indices.tolist()
            assert scores["logprobs"][index][place] == pytest.approx(top.values.tolist(), abs=1e-4)
            assert scores["actual_token_ids"][index][place] == [ids[position]]


def test_generation(found: dict[str, Any]) -> None:
    generated = found["generated"]
    assert generated["prompt_ids"] == SEQUENCES
    assert [len(ids) for ids in generated["completion_ids"]] == [3] * 6
    for ids, rows in zip(generated["completion_ids"], generated["logprob_token_ids"], strict=True):
        assert all(
            token in row and len(row) in (2, 3) for token, row in zip(ids, rows, strict=True)
        )
    assert [len(ids) for ids in found["chat"]["completion_ids"]] == [2, 2]


def test_the_rest(found: dict[str, Any]) -> None:
    assert found["world_size"] == 1
    assert "VLLM_SERVER_DEV_MODE=1" in found["refusal"]


@pytest.mark.parametrize("beta", ["0.0", "1.0"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    beta: str, found: dict[str, Any]
) -> None:
    """The divergence is 0 exactly if the server's log-probabilities are the model's own at the
    trainer's temperature."""
    losses = [entry["loss"] for entry in found["logs"][beta] if "loss" in entry]
    assert len(losses) == 2
    assert torch.tensor(losses).abs().max() < 1e-6

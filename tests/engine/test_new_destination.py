"""One more destination of rows is one more class: here a ring in memory that a thread reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)

Checkpoint = Callable[..., Path]


class Ring:
    """The last rows of all requests, for one reader."""

    def __init__(self, num_pieces: int) -> None:
        self.pieces: deque[tuple[str, torch.Tensor | list[int] | None]] = deque()
        self.num_pieces = num_pieces
        self.changed = threading.Condition()

    def put(self, piece: tuple[str, torch.Tensor | list[int] | None]) -> None:
        """Waits while the ring is full."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.pieces) < self.num_pieces)
            self.pieces.append(piece)
            self.changed.notify_all()

    def take(self) -> tuple[str, torch.Tensor | list[int] | None]:
        with self.changed:
            self.changed.wait_for(lambda: self.pieces)
            piece = self.pieces.popleft()
            self.changed.notify_all()
            return piece


class RingDestination:
    """A request's place in the ring: pieces of rows, then its token ids, or None."""

    def __init__(self, name: str, ring: Ring) -> None:
        self.name, self.ring = name, ring

    def append(self, rows: torch.Tensor) -> None:
        self.ring.put((self.name, rows.clone()))

    def finish(self, token_ids: list[int]) -> None:
        self.ring.put((self.name, token_ids))

    def discard(self) -> None:
        self.ring.put((self.name, None))


class RingConnector(ExampleHiddenStatesConnector):
    """Files become pieces of the ring."""

    ring: ClassVar[Ring]

    def make_destinations(self, row_cache: torch.Tensor) -> Any:
        return lambda path, lock, num_rows: RingDestination(Path(path).stem, self.ring)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}])
def test_rows_arrive_in_a_ring(
    options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    prompts = random_prompts(6, [40, 3, 70, 17])
    with engine(checkpoint("qwen3_5")) as llm:
        samples = llm.extract(prompts, [3, 1], ordered=True)
        expected = {tuple(s.token_ids.tolist()): s.hidden_states for s in samples}
    RingConnector.ring = Ring(num_pieces=2)
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def read() -> None:
        pieces: dict[str, list[torch.Tensor]] = {}
        while len(found) < len(prompts):
            name, piece = RingConnector.ring.take()
            if isinstance(piece, torch.Tensor):
                pieces.setdefault(name, []).append(piece)
            elif piece is not None:
                found[tuple(piece)] = torch.cat(pieces.pop(name))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    config = extraction_config([3, 1], tmp_path)
    config["kv_transfer_config"] |= {
        "kv_connector": "RingConnector",
        "kv_connector_module_path": __name__,
    }
    with engine(checkpoint("qwen3_5"), **options, **config) as llm:
        outputs = llm.generate(prompts, greedy(1), use_tqdm=False)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    reader.join(timeout=60)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not list(tmp_path.glob("*.safetensors"))

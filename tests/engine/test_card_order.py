"""Streams: nothing is read before it is written, or overwritten before it was read.

A card of host memory does its work late, in an order drawn by a seed, or keeps clocks of who
waited for whom. Each has to catch faults that are put in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import fake_card as cards
from tests.engine.card_order import AtOnce, Clocks, Late
from tests.engine.fake_card import fake_card
from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.grids import at_night
from tests.kv_connector.loading import OFFLOADING, beside_extraction, num_cached
from tests.worker.test_recorded_steps import Recorder
from tests.worker.test_row_extractor import extract
from vllm.utils.transfers import HostCopy
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.rows.leaving import LeavingRows
from vllm.v1.worker import gpu_model_runner, gpu_worker, row_extractor

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16]
PROMPTS = random_prompts(5, LENGTHS)
SMALL: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 200, "dtype": "bfloat16",
}  # fmt: skip


@contextmanager
def card_of(order: AtOnce, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (gpu_model_runner, gpu_worker):
        monkeypatch.setattr(module, "record_cuda_graph", Recorder)
    with fake_card(monkeypatch, order):
        yield
        order.finish()


def rows_to_callers(folder: Path, dtype: str) -> list[torch.Tensor]:
    """Rows as they are, or cast on the way; and tokens."""
    with engine(folder, device="cuda", **SMALL) as llm:
        samples = list(llm.extract(PROMPTS, [1, 2], dtype=dtype, on_error="yield"))
    return [getattr(sample, "hidden_states", torch.empty(0)).float() for sample in samples]


def rows_to_files(folder: Path, storage: Path) -> list[torch.Tensor]:
    """Twice: then with prefix hits, whose blocks are copied and whose states are resumed."""
    with engine(folder, device="cuda", **SMALL, **extraction_config([0, 2], storage)) as llm:
        outputs = [llm.generate(PROMPTS, greedy(5), use_tqdm=False) for _ in range(2)]
    rows = []
    for output in outputs[0] + outputs[1]:
        failed = output.outputs[0].finish_reason == "error"
        rows.append(torch.empty(0) if failed else rows_of(output))
        rows.append(torch.tensor(output.outputs[0].token_ids))
    return rows


def rows_after_loads(folder: Path, storage: Path) -> list[torch.Tensor]:
    """The second time from host memory, a prompt as long as the pool holds at once."""
    arguments = beside_extraction(storage, OFFLOADING)
    with engine(folder, device="cuda", **SMALL, **arguments) as llm:
        first = llm.generate(PROMPTS, greedy(5), use_tqdm=False)
        llm.reset_prefix_cache()
        second = llm.generate(PROMPTS, greedy(5), use_tqdm=False)
        assert max(num_cached(second)) >= 64
    return [rows_of(o) for o in first + second] + [
        torch.tensor(o.outputs[0].token_ids) for o in first + second
    ]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "dtype", "seed"),
    [("qwen3_5", "auto", 0), ("llama", "fp8", 1)]
    + [at_night(family, dtype, seed)
       for family in ("llama", "qwen3_5") for dtype in ("auto", "fp8") for seed in range(2, 7)],
)  # fmt: skip
def test_rows_to_callers_late(
    family: str, dtype: str, seed: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with card_of(AtOnce(), monkeypatch):
        expected = rows_to_callers(checkpoint(family), dtype)
    order = Late(seed)
    with card_of(order, monkeypatch):
        found = rows_to_callers(checkpoint(family), dtype)
    assert not order.errors and are_equal(found, expected)


@pytest.mark.parametrize(
    ("family", "seed"),
    [("qwen3_5", 3)] + [at_night(f, seed) for f in ("llama", "qwen3_5") for seed in range(4, 9)],
)
def test_rows_to_files_late(
    family: str,
    seed: int,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with card_of(AtOnce(), monkeypatch):
        expected = rows_to_files(checkpoint(family), tmp_path / "at once")
    order = Late(seed)
    with card_of(order, monkeypatch):
        found = rows_to_files(checkpoint(family), tmp_path / "late")
    assert not order.errors and are_equal(found, expected)


@pytest.mark.parametrize(
    ("family", "seed"),
    [at_night("qwen3_5", 1)] + [at_night("llama", seed) for seed in range(2, 6)],
)
def test_rows_after_loads_late(
    family: str,
    seed: int,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with card_of(AtOnce(), monkeypatch):
        expected = rows_after_loads(checkpoint(family), tmp_path / "at once")
    order = Late(seed)
    with card_of(order, monkeypatch):
        found = rows_after_loads(checkpoint(family), tmp_path / "late")
    assert not order.errors and are_equal(found, expected)
    clocks = Clocks()
    with card_of(clocks, monkeypatch):
        rows_after_loads(checkpoint(family), tmp_path / "clocks")
    assert not clocks.findings


@pytest.mark.parametrize("family", ["qwen3_5", at_night("llama")])
def test_clocks(
    family: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Clocks()
    with card_of(order, monkeypatch):
        for dtype in ("auto", "fp8"):
            rows_to_callers(checkpoint(family), dtype)
        rows_to_files(checkpoint(family), tmp_path)
    assert not order.findings


def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream does not wait for the rows to be there."""
    monkeypatch.setattr(cards._Stream, "wait_event", lambda self, event: None)


def gives_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging tensor is let go of as soon as the copies are queued."""
    send = row_extractor.send_rows

    def forget(*args: Any) -> LeavingRows:
        rows = send(*args)
        rows._source = torch.empty(0)
        return rows

    monkeypatch.setattr(row_extractor, "send_rows", forget)


def reads_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes pinned memory before the copy to it has ended."""
    monkeypatch.setattr(HostCopy, "result", lambda self: self._host.clone())


def reuses_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is handed out again while a copy to it may be on its way, or unread."""
    used: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def copy(self: HostCopy, tensor: torch.Tensor) -> None:
        key = tensor.shape, tensor.dtype
        if key not in used:
            used[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._host = used[key]
        self._host.copy_(tensor, non_blocking=True)
        self._arrival = torch.Event(tensor.device, blocking=True)
        self._arrival.record()

    monkeypatch.setattr(HostCopy, "__init__", copy)


FAULTS = {
    fault.__name__: fault for fault in (never_waits, gives_back_early, reads_early, reuses_early)
}


def are_right_after_one_step(order: AtOnce, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether rows of a step arrive as they were, with the next step queued behind it."""
    with card_of(order, monkeypatch):
        streams = [torch.randn(90, 72), torch.randn(90, 72)]
        expected = torch.stack(streams, 1).half()  # whose memory the card is given
        extractor, _ = extract(cards.CARD, streams, "float16")
        assert extractor._store is not None
        may_arrive = threading.Event()
        extractor._store.submit(may_arrive.wait)
        step = extractor.end_step()
        main = cards.THE_CARD.current_stream()
        next_step = torch.zeros(180, 1, 72, device=cards.CARD, dtype=torch.float16) + 1
        next_copy = HostCopy(next_step)
        if isinstance(order, Late) and order.drawn(0.5):
            order.synchronize_stream(main)
        may_arrive.set()
        assert step is not None
        output = ModelRunnerOutput()
        step.read(output)
        del next_step
        if "r" not in output.extracted_rows or not bool((next_copy.result() == 1).all()):
            return False
    return torch.equal(output.extracted_rows["r"].hidden_states, expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_late_work_shows_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        # Most orders hide the fault, and threads have a say in which is drawn.
        wrong = (s for s in range(200) if not are_right_after_one_step(Late(s), patch))
        shown = next(wrong, None)
    assert shown is not None
    # Without it all are right, of no fewer orders.
    assert all(are_right_after_one_step(Late(s), monkeypatch) for s in range(max(8, shown + 1)))


@pytest.mark.parametrize("fault", ["never_waits", "gives_back_early", "reuses_early"])
def test_clocks_show_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Clocks()
    assert are_right_after_one_step(right, monkeypatch) and not right.findings
    FAULTS[fault](monkeypatch)
    wrong = Clocks()
    are_right_after_one_step(wrong, monkeypatch)
    assert wrong.findings

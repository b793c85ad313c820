"""A step is queued without waiting for the device, whatever it does: on a card of host memory.

``tests/gpu`` has the same for a real one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.fake_card import CARD, FakeCard, Waited, fake_card, unwrap
from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.engine.sampling_settings import ALL_SETTINGS, all_params
from tests.grids import at_night
from tests.worker.test_recorded_steps import Recorder
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_saver import RowSaver
from vllm.hidden_states import HiddenStatesSample
from vllm.ops.cuda.flashinfer_attention import plan_pages
from vllm.ops.layout import SequenceLayout
from vllm.ops.operation import Operation
from vllm.outputs import RequestOutput
from vllm.platforms.cuda import CudaPlatform
from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.engine import EngineCoreRequest, ExtractionSpec, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.rows import leaving
from vllm.v1.rows.fields import fp8
from vllm.v1.rows.leaving import LARGEST_PIECE_BYTES, LeavingRows
from vllm.v1.worker import gpu_model_runner, gpu_worker

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16]
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 200,
                         "max_logprobs": -1}  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    for module in (gpu_model_runner, gpu_worker):
        monkeypatch.setattr(module, "record_cuda_graph", Recorder)
    with fake_card(monkeypatch) as card:
        yield card


@contextmanager
def engine_that_never_waits(card: FakeCard, checkpoint: Path, **options: Any) -> Iterator[LLM]:
    """A step that waits for the card ends in an error."""
    with engine(checkpoint, device="cuda", **{**SMALL, **options}) as llm:
        runner = core_of(llm).executor.worker.model_runner
        execute = runner.execute_model

        def watched(scheduled: Any) -> Any:
            with card.no_waiting():
                return execute(scheduled)

        runner.execute_model = watched
        yield llm


def good(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        assert output.outputs[0].finish_reason != "error", output.outputs[0].stop_reason
    return outputs


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "truth": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask, written": lambda x: x.__setitem__(x > 0, 0.0),
    "unique": lambda x: x.unique(),
    "a list": lambda x: torch.tensor([1, 2], device=CARD),
    "a list of the same dtype": lambda x: x.new_tensor([1, 2]),
    "pageable": lambda x: torch.arange(3).to(CARD, non_blocking=True),
    "pageable, into a buffer": lambda x: x.copy_(torch.ones(6), non_blocking=True),
    "index on the host": lambda x: x[torch.tensor([1, 2])],
    "blocking": lambda x: x.copy_(torch.ones(6).pin_memory()),
    "cast on the way": lambda x: x.copy_(torch.arange(6).pin_memory(), non_blocking=True),
    "an event": lambda x: HostCopy(x).result(),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_fake_card_notices(what: str, card: FakeCard) -> None:
    x = to_device(np.arange(6, dtype=np.float32), CARD)
    WAITS[what](x)
    with card.no_waiting(), pytest.raises(Waited):
        WAITS[what](x)


def test_the_fake_card_lets_pass_what_does_not_wait(card: FakeCard) -> None:
    with card.no_waiting():
        x = to_device(np.arange(6, dtype=np.float32), CARD)
        x[to_device(np.array([1]), CARD)] = 9.0
        copy = HostCopy(torch.where(x > 4, x * 2, x)[1:])
    assert copy.result().tolist() == [18.0, 2.0, 3.0, 4.0, 10.0]


@pytest.mark.parametrize(
    ("family", "eager"),
    [("llama", True), ("qwen3_5", False), at_night("llama", False), at_night("qwen3_5", True)],
)
def test_sampling(family: str, eager: bool, card: FakeCard, checkpoint: Checkpoint) -> None:
    """Step by step, and decoding as it is recorded on a card."""
    prompts = random_prompts(50, LENGTHS * 4)[: len(ALL_SETTINGS)]
    with engine_that_never_waits(card, checkpoint(family), enforce_eager=eager) as llm:
        found = good(llm.generate(prompts, all_params(9), use_tqdm=False))
        steps = core_of(llm).stats().num_steps
    with engine(checkpoint(family), device="cpu", **SMALL) as llm:
        expected = good(llm.generate(prompts, all_params(9), use_tqdm=False))
        assert steps < 1.7 * core_of(llm).stats().num_steps
    for one, other, settings in zip(found, expected, ALL_SETTINGS, strict=True):
        if "top_p" in settings and "top_k" not in settings:
            continue  # drawn from a sorted vocabulary here, from the most likely tokens there
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, settings
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, settings
        assert one.prompt_logprobs == other.prompt_logprobs, settings


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "minicpm3"])
def test_rows_to_files(family: str, card: FakeCard, checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = random_prompts(51, LENGTHS)
    with engine(checkpoint(family), device="cpu", **SMALL,
                **extraction_config([0, 2, 4], tmp_path / "cpu")) as llm:  # fmt: skip
        expected = [rows_of(o) for o in llm.generate(prompts, greedy(5), use_tqdm=False)]
    config = extraction_config([0, 2, 4], tmp_path / "card")
    with engine_that_never_waits(card, checkpoint(family), **config) as llm:
        for _ in range(2):  # then with prefix hits: blocks are copied, states resumed
            outputs = llm.generate(prompts, greedy(5), use_tqdm=False)
            assert all(torch.equal(rows_of(o), e) for o, e in zip(outputs, expected, strict=True))


def test_rows_of_all_requests_leave_for_files_together(
    card: FakeCard, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Beside the computation, with as many operations for one request as for six."""
    found = []
    config = extraction_config([0, 2, 4], tmp_path)
    with engine(checkpoint("llama"), device="cuda", **SMALL, **config) as llm:
        for lengths in ([120], [20] * 6):
            card.launches.clear()
            good(llm.generate(random_prompts(58, lengths), greedy(1), use_tqdm=False))
            found.append(
                {name: n for (stream, name), n in card.launches.items() if stream == "side"}
            )
    assert found[0] == found[1] and found[0]["find_bad_cells"] == 1


def test_who_writes_tensors_of_others_waits_for_no_step(
    card: FakeCard, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """They are on the host; the card may be at a later step, and an event that spins is refused."""
    config = extraction_config([0, 2, 4], tmp_path)
    config["kv_transfer_config"] |= {
        "kv_connector": "HalvingConnector",
        "kv_connector_module_path": "tests.kv_connector.out_of_tree_connectors",
    }
    with engine(checkpoint("llama"), device="cuda", **SMALL, **config) as llm:
        for output in good(llm.generate(random_prompts(59, [70]), greedy(2), use_tqdm=False)):
            path = output.kv_transfer_params["hidden_states_path"]  # type: ignore[index]
            assert len(load_file(path)["hidden_states"]) >= 70


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "fp8"])
def test_rows_to_the_caller(dtype: str, card: FakeCard, checkpoint: Checkpoint) -> None:
    """Looked at, cast and copied on a stream of their own."""
    prompts = random_prompts(52, LENGTHS)
    options: dict[str, Any] = {"dtype": "bfloat16"}
    with engine(checkpoint("llama"), device="cpu", **SMALL, **options) as llm:
        expected = list(llm.extract(prompts, [1, 4], dtype=dtype, ordered=True))
    with engine_that_never_waits(card, checkpoint("llama"), **options) as llm:
        card.copies.clear()
        samples = list(llm.extract(prompts, [1, 4], dtype=dtype, ordered=True))
    for sample, other in zip(samples, expected, strict=True):
        assert isinstance(sample, HiddenStatesSample) and isinstance(other, HiddenStatesSample)
        assert torch.equal(sample.hidden_states.float(), other.hidden_states.float())
    assert {stream for stream, *_ in card.copies} == {"side"}
    kept = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(dtype)
    wanted = kept or getattr(torch, dtype)
    num_bytes = sum(size for _, copied, size in card.copies if copied == wanted)
    assert num_bytes == sum(LENGTHS) * 2 * expected[0].hidden_states.shape[-1] * wanted.itemsize


def test_pinned_memory_is_there_from_the_start(card: FakeCard, checkpoint: Checkpoint) -> None:
    """The driver is asked for none later, which would hold the device up."""
    with engine(checkpoint("qwen3_5"), device="cuda", **SMALL) as llm:
        assert max(card.pinned_bytes) == 1 << LARGEST_PIECE_BYTES.bit_length() - 1
        assert sum(card.pinned_bytes) < 1 << 30
        card.pinned_bytes.clear()
        list(llm.extract(random_prompts(55, LENGTHS), ":", dtype="fp8"))
        llm.generate(random_prompts(56, LENGTHS), greedy(3), use_tqdm=False)
        assert not card.pinned_bytes


def test_a_device_has_room_for_the_pieces_of_two_steps(
    card: FakeCard, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The last of each is a whole one, however few rows are in it."""
    files, sizes = extraction_config([0, 1, 2, 3, 4], tmp_path), {"max_num_batched_tokens": 30_000}
    with engine(checkpoint("llama"), device="cuda", **{**SMALL, **sizes}, **files) as llm:
        saver = core_of(llm).executor.worker.model_runner.connector.connector._saver
        assert isinstance(saver, RowSaver)
        pieces = -(-sizes["max_num_batched_tokens"] // saver._rows_per_piece)
        piece_bytes = saver._rows_per_piece * saver._row_bytes
        assert saver._budget._limit_bytes >= 2 * pieces * piece_bytes > 64 << 20


def test_kernels_run_first_where_memory_is_measured(
    card: FakeCard, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that tune themselves at their first call (FLA's) take memory that the plan leaves."""
    measured: set[str] = set()
    late: set[str] = set()
    is_measured, call = False, Operation.__call__

    def watched(self: Operation[Any], *args: Any, **kwargs: Any) -> None:
        if is_measured:
            measured.add(self.name)
        elif self.name not in measured:
            late.add(self.name)
        call(self, *args, **kwargs)

    def measure(self: CudaPlatform, run: Callable[[], None]) -> int:
        nonlocal is_measured
        is_measured = True
        run()
        is_measured = False
        return 2**20

    monkeypatch.setattr(Operation, "__call__", watched)
    monkeypatch.setattr(CudaPlatform, "measure_peak_bytes", measure)
    with engine(checkpoint("qwen3_5"), device="cuda", **SMALL) as llm:
        llm.generate(random_prompts(58, LENGTHS), greedy(3), use_tqdm=False)
        list(llm.extract(random_prompts(59, LENGTHS), ":"))
    assert {"gated_delta_rule", "causal_conv1d", "paged_attention"} <= measured
    assert not late


@pytest.mark.exhaustive
def test_pinned_memory_for_files_is_there_from_the_start(
    card: FakeCard, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows wait for a slow disk: pieces of one size, as many as there may be."""
    arrive, is_there = LeavingRows.arrive, threading.Event()

    def late(*args: Any) -> Any:
        assert is_there.wait(60)
        return arrive(*args)

    monkeypatch.setattr(LeavingRows, "arrive", late)
    files = extraction_config([0, 1, 2, 3, 4], tmp_path)
    lengths = {"max_model_len": 512, "max_num_batched_tokens": 2048, "max_num_seqs": 32}
    with engine(
        checkpoint("llama"), device="cuda", **lengths, **files, kv_cache_memory_bytes=2**26
    ) as llm:
        card.pinned_bytes.clear()
        core = core_of(llm)
        for number, prompt in enumerate(random_prompts(57, [500] * 24)):
            request = EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt["prompt_token_ids"],
                sampling_params=greedy(1),
                arrival_time=0.0,
            )
            core.add_request(request)
        for _ in range(6):
            core.step()
        is_there.set()
        while core.has_unfinished_requests():
            core.step()
        assert not card.pinned_bytes


@pytest.mark.parametrize(
    ("family", "most"),
    [("llama", 10 * 4 + 22), ("qwen3_5", 11 * 2 + 10 * 3 + 42), ("qwen3", 10 * 4 + 22)],
)
def test_budgets_of_a_step(family: str, most: int, card: FakeCard, checkpoint: Checkpoint) -> None:
    """Launches, one operation one, and copies, of a step with six prompts and all their rows.

    Ten of a Llama layer: four products, two norms, rotation, stores, attention, activation. A
    layer of Qwen3 has as many, since the norms of its heads are in the rotation; one of Qwen3.5
    too, and with attention the gate.
    """
    prompts = random_prompts(57, [20] * 6)
    with engine(checkpoint(family), device="cuda", enforce_eager=True, **SMALL) as llm:
        core = core_of(llm)
        before = core.stats().num_steps
        card.launches.clear()
        card.copies.clear()
        list(llm.extract(prompts, ":"))
        assert core.stats().num_steps - before <= 3  # one that computes
    by_stream: Counter[str] = Counter()
    for (stream, _), count in card.launches.items():
        by_stream[stream] += count
    captured = card.launches["main", "capture_rows"]
    assert by_stream["main"] - captured <= most
    assert by_stream["side"] <= 3 and len(card.copies) == 2  # rows, and what a look found


def run_full_steps(core: EngineCore, storage_dtype: str) -> None:
    """Steps of 128 tokens: 16 of them with the rows of 64 layers, the others sample."""
    most = SamplingParams(
        max_tokens=1, seed=0, top_p=0.9, presence_penalty=1.0, logprobs=1, prompt_logprobs=1
    )
    stored = None if storage_dtype == "auto" else storage_dtype
    for number, prompt in enumerate(random_prompts(54, [16, 112] * 3)):
        extracts = number % 2 == 0
        spec = ExtractionSpec((*range(10), *[number] * 54), storage_dtype=stored)
        core.add_request(
            EngineCoreRequest(
                request_id=f"full-{storage_dtype}-{number}",
                prompt_token_ids=prompt["prompt_token_ids"],
                sampling_params=SamplingParams(max_tokens=0) if extracts else most,
                arrival_time=0.0,
                extraction=spec if extracts else None,
            )
        )
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.finish_reason is FinishReason.LENGTH, output.stop_reason


@pytest.mark.parametrize(
    ("asynchronous", "dtype"), [at_night(True, "bfloat16"), at_night(False, "float32")]
)
def test_no_request_takes_more_memory_than_was_measured(
    asynchronous: bool,
    dtype: str,
    card: FakeCard,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers, one layer over and over, a list of layers for each request, beside sampling."""
    folder = checkpoint("llama", num_hidden_layers=9)
    # Casts of a step's rows in many slices, of 16 KiB as float32.
    monkeypatch.setattr(fp8, "DEVICE_VALUES_AT_ONCE", 1 << 12)
    monkeypatch.setattr(leaving, "DEVICE_VALUES_AT_ONCE", 1 << 12)
    measured: list[Counter[str]] = []

    def measure(self: CudaPlatform, run: Callable[[], None]) -> int:
        measured.append(card.memory.measure_peaks(run))
        return measured[0].total()

    monkeypatch.setattr(CudaPlatform, "measure_peak_bytes", measure)
    prompts = random_prompts(53, [190, 3, 128, 70])
    options: dict[str, Any] = {"dtype": dtype, "async_scheduling": asynchronous,
                               "enforce_eager": True}  # fmt: skip
    with engine(folder, device="cpu", max_model_len=200, dtype=dtype) as llm:
        expected = list(llm.extract(prompts, ":", ordered=True))
    with engine_that_never_waits(card, folder, **options) as llm:
        runner = core_of(llm).executor.worker.model_runner
        step_cells: list[int] = []
        begin_step = runner.extractor.begin_step

        def watch(batch: Any) -> Any:
            result = begin_step(batch)
            staged = [group.memory.row_cache for group in runner.extractor._groups]
            step_cells.append(sum(rows.shape[1] * rows.shape[2] for rows in staged))
            return result

        runner.extractor.begin_step = watch
        lists: list[Any] = [":", [2] * 60, list(range(8))]
        for storage in ("auto", "float32", "fp8"):
            for layers in lists:
                found = card.memory.measure_peaks(
                    lambda: list(llm.extract(prompts, layers, dtype=storage))  # noqa: B023
                )
                assert found <= measured[0], (storage, layers)
            found = card.memory.measure_peaks(lambda: run_full_steps(core_of(llm), storage))  # noqa: B023
            assert found <= measured[0], storage
            assert 0.9 * measured[0]["main"] <= found["main"], storage
            if storage == "fp8":  # whose making takes most
                assert 0.9 * measured[0]["side"] <= found["side"]
        samples = list(llm.extract(prompts, ":", ordered=True))
    assert max(step_cells) == 128 * 8  # of 10 layers no more than of 8
    for sample, other in zip(samples, expected, strict=True):
        assert isinstance(sample, HiddenStatesSample) and isinstance(other, HiddenStatesSample)
        assert torch.equal(sample.hidden_states, other.hidden_states)


def test_a_token_is_waited_for_where_a_request_looks_back_only() -> None:
    for settings in ALL_SETTINGS:
        looks_back = {"repetition_penalty", "frequency_penalty", "presence_penalty", "bad_words"}
        params = SamplingParams(**settings)
        params.set_bad_words_token_ids([[1, 2]] if "bad_words" in settings else [])
        assert params.looks_back == bool(looks_back & set(settings)), settings


def test_flashinfer_is_planned_without_waiting(card: FakeCard) -> None:
    """Its pages are found on the host, and named on the card."""
    start, lens = np.array([0, 1, 9], dtype=np.int32), np.array([40, 8], dtype=np.int32)
    table = np.array([[3, 1, 2], [4, 0, 0]], dtype=np.int32)
    plans = []
    for device in (torch.device("cpu"), CARD):
        kv_cache = torch.empty(5, 1, 16, 2, 8, device=device)
        tables = to_device(table, device)
        starts, lengths = to_device(start, device), to_device(lens, device)
        layout = SequenceLayout(starts, lengths, 8, 40, torch.from_numpy(start),
                                torch.from_numpy(lens))  # fmt: skip
        with card.no_waiting():
            plans.append(plan_pages(layout, tables, kv_cache, None))
    assert plans[0].indices.tolist() == [3, 1, 2, 4] == unwrap(plans[1].indices).tolist()
    for one, other in zip(plans[0], plans[1], strict=True):
        assert one.tolist() == unwrap(other).tolist()
    assert all(card.is_pinned(part) for part in plans[1] if part is not plans[1].indices)

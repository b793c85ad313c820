"""Device memory of rows on their way: bounded, without waiting, and the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.engine.fake_card import CARD, FakeCard, Waited, fake_card, wrap
from tests.grids import grid
from vllm.forward_context import HIDDEN_STATES
from vllm.model_executor.hook_points import HookPoint
from vllm.ops import row_transport
from vllm.ops.row_transport import DeviceRows, RowReport, make_row_transport
from vllm.sampling_params import SamplingParams
from vllm.utils.transfers import PINNED_OF_A_LARGE_CLASS, HostCopy, to_device
from vllm.v1.engine import ExtractionSpec, GenerationSpec
from vllm.v1.outputs import ExtractedRows, ModelRunnerOutput
from vllm.v1.rows import leaving
from vllm.v1.rows.capture import RowCapture
from vllm.v1.rows.destinations import GrowingTensors
from vllm.v1.rows.fields import fp8
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.worker.input_batch import RequestState, make_batch
from vllm.v1.worker.row_extractor import RowExtractor, RowsOfStep

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    with fake_card(monkeypatch) as card:
        yield card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_at_rows_makes_no_copy_of_them(dtype: torch.dtype, card: FakeCard) -> None:
    rows = torch.randn(300, 3, 1024).to(dtype)
    rows[299, 2] = -0.0
    rows[17, 1, 5] = -INF
    on_card = wrap(rows)
    with card.no_waiting():
        taken = card.memory.measure_peak(lambda: DeviceRows().inspect(on_card))
    assert taken < rows.nbytes / 20
    assert DeviceRows().inspect(on_card).result() == RowReport(17, 1, 299, 2)


def no_hook(name: str) -> HookPoint:
    raise AssertionError(f"{name} was not requested")


def extract(
    device: torch.device, streams: list[torch.Tensor], storage_dtype: str | None
) -> tuple[RowExtractor, RequestState]:
    """A step in which a request wants all its rows, up to the end of the forward pass."""
    num_tokens, hidden_size = streams[0].shape
    dtype = streams[0].dtype
    extractor = RowExtractor(make_row_transport(device), hidden_size, dtype, device, 0, no_hook)
    spec = ExtractionSpec(tuple(range(len(streams))), storage_dtype=storage_dtype)
    rows = extractor.make_rows(spec, num_tokens)
    for there in rows.room(0, num_tokens).values():
        there.view(torch.uint8).fill_(255)
    params = SamplingParams(max_tokens=0)
    state = RequestState("r", [0] * num_tokens, params, None, [], rows)
    capture = RowCapture(extractor.begin_step(make_batch([state], [0], [num_tokens])))
    for layer_id, stream in enumerate(streams):
        hidden = stream if device.type == "cpu" else wrap(stream)
        capture.put(HIDDEN_STATES, layer_id, hidden, None)
    return extractor, state


def read(step: RowsOfStep | None) -> ModelRunnerOutput:
    output = ModelRunnerOutput()
    assert step is not None
    step.read(output)
    return output


@pytest.mark.parametrize(
    ("values_at_once", "storage_dtype"),
    grid(
        [1, 72, 1000, 4096, 1 << 30],
        [None, "float32", "float16", "fp8"],
        by_day=[
            (72, None),
            (72, "fp8"),
            (4096, "float16"),
            (4096, "fp8"),
            (1 << 30, "float32"),
            (1 << 30, "fp8"),
        ],
    ),
)
def test_rows_are_cast_a_few_at_a_time(
    values_at_once: int, storage_dtype: str | None, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [torch.randn(90, 72).to(torch.bfloat16) for _ in range(5)]
    extractor, state = extract(torch.device("cpu"), streams, storage_dtype)
    expected = read(extractor.end_step()).extracted_rows["r"]

    monkeypatch.setattr(fp8, "DEVICE_VALUES_AT_ONCE", values_at_once)
    monkeypatch.setattr(leaving, "DEVICE_VALUES_AT_ONCE", values_at_once)
    extractor, state = extract(CARD, streams, storage_dtype)
    outputs: list[ModelRunnerOutput] = []
    with card.no_waiting():
        taken = card.memory.measure_peak(lambda: outputs.append(read(extractor.end_step())))
    if values_at_once <= 4096:
        # fp8: the scaled values and what they become, and twice more in between.
        assert taken <= 16 * max(values_at_once, 72) + 2048
    assert state.rows is not None
    found = outputs.pop().extracted_rows["r"]
    assert torch.equal(found.hidden_states.float(), expected.hidden_states.float())
    if storage_dtype == "fp8":
        assert torch.equal(found.tensors["scales"], expected.tensors["scales"])
        assert torch.equal(found.tensors["fp8_errors"], expected.tensors["fp8_errors"])
    elif storage_dtype is None:
        assert torch.equal(found.hidden_states, torch.stack(streams, 1))


@pytest.mark.parametrize("storage_dtype", [None, "float32", "float16", "fp8"])
def test_rows_of_any_number_come_in_as_much_pinned_memory(
    storage_dtype: str | None, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 8 pieces here, one after another: no more than is had when an engine starts."""
    monkeypatch.setattr(leaving, "DEVICE_VALUES_AT_ONCE", 4096)
    streams = [torch.randn(90, 72).to(torch.bfloat16) for _ in range(5)]
    extractor, _ = extract(CARD, streams, storage_dtype)
    assert read(extractor.end_step()).extracted_rows
    assert 0 < sum(size > 2048 for size in card.pinned_bytes) <= PINNED_OF_A_LARGE_CLASS


@pytest.mark.parametrize("storage_dtype", [None, "float16", "fp8"])
def test_the_first_bad_row_is_named_whatever_is_cast_at_a_time(
    storage_dtype: str | None, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [torch.randn(40, 72) for _ in range(3)]
    streams[2][31, 7] = NAN
    streams[1][30] = 0.0
    streams[2][8, 71] = INF
    monkeypatch.setattr(leaving, "DEVICE_VALUES_AT_ONCE", 72 * 2)  # parts of a token's rows
    extractor, _ = extract(CARD, streams, storage_dtype)
    output = read(extractor.end_step())
    assert output.extracted_rows == {}
    assert output.failures["r"].message.startswith(
        "hidden states of token 8, layer 2 are not finite"
    )


def test_rows_stay_staged_until_they_have_arrived(card: FakeCard) -> None:
    """A step's end does not wait for its rows' readers, and they keep the memory until they end."""
    streams = [torch.randn(50, 72)]
    before = card.memory.used_bytes
    extractor, _ = extract(CARD, streams, "float16")
    assert extractor._store is not None
    may_arrive = threading.Event()
    extractor._store.submit(may_arrive.wait)
    step = extractor.end_step()
    assert step is not None
    assert card.memory.used_bytes - before >= streams[0].nbytes
    may_arrive.set()
    step.read(ModelRunnerOutput())
    del step
    extractor.shutdown()  # its thread lets go a moment after it told
    assert card.memory.used_bytes - before < streams[0].nbytes


def test_rows_of_the_pool_that_are_leaving_are_bounded(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card waits for the oldest to have left, the host waits for nothing."""
    pool = torch.full((9, 8, 3, 64), NAN)
    piece = 20 * 3 * 64 * 4
    monkeypatch.setattr(row_transport, "MAX_LEAVING_BYTES", 3 * piece)
    wanted = torch.randn(20, 3, 64)
    slots = torch.randperm(64)[:20] + 8
    pool[slots // 8, slots % 8] = wanted
    transfer, on_card, places = DeviceRows(), wrap(pool), to_device(slots.numpy(), CARD)
    pieces = []
    before = card.memory.used_bytes
    for number in range(8):
        out = torch.empty(wanted.shape, pin_memory=True)
        with card.no_waiting():
            pieces.append((out, transfer.gather(on_card, places, out)))
        used = card.memory.used_bytes - before
        assert min(number + 1, 3) * piece <= used < (min(number + 1, 3) + 0.5) * piece
        assert card.num_stream_waits == max(0, number - 2)
    for out, report in pieces:
        assert report.result().is_good
        assert torch.equal(out, wanted)
    del pieces, report
    assert card.memory.used_bytes - before < piece  # nothing stays behind
    large = to_device(np.arange(72)[:70], CARD)  # more than the bound, and alone
    out = torch.empty(70, 3, 64, pin_memory=True)
    transfer.gather(on_card, large, out).result()
    assert torch.equal(out.nan_to_num(7.0), pool.flatten(0, 1)[:70].nan_to_num(7.0))


def extract_of_many(
    num_requests: int, storage_dtype: str | None
) -> tuple[RowExtractor, list[RequestState]]:
    """A step of 240 tokens, up to the end of the forward pass."""
    count, hidden_size = 240 // num_requests, 72
    extractor = RowExtractor(make_row_transport(CARD), hidden_size, torch.float32, CARD, 0, no_hook)
    spec = ExtractionSpec((0, 1), storage_dtype=storage_dtype)
    params = SamplingParams(max_tokens=0)
    states = [
        RequestState(str(number), [0] * count, params, None, [], extractor.make_rows(spec, count))
        for number in range(num_requests)
    ]
    batch = make_batch(states, [0] * num_requests, [count] * num_requests)
    capture = RowCapture(extractor.begin_step(batch))
    for layer_id in range(2):
        capture.put(HIDDEN_STATES, layer_id, wrap(torch.randn(240, hidden_size)), None)
    return extractor, states


@pytest.mark.parametrize("storage_dtype", [None, "float16", "fp8"])
def test_what_is_queued_does_not_depend_on_the_number_of_requests(
    storage_dtype: str | None, card: FakeCard
) -> None:
    launches = []
    for num_requests in (1, 12, 240):
        extractor, states = extract_of_many(num_requests, storage_dtype)
        card.launches.clear()
        output = read(extractor.end_step())
        launches.append(dict(card.launches))
        assert len(output.extracted_rows) == len(states) and not output.failures
    assert launches[0] == launches[1] == launches[2]
    assert {stream for stream, _ in launches[0]} == {"side"} and sum(launches[0].values()) <= 40


def test_rows_leave_before_what_the_model_has_queued(card: FakeCard) -> None:
    """Kernels of theirs are small, and would wait behind whole products."""
    main = card.current_stream()
    with DeviceRows().beside(wrap(torch.randn(2, 1, 8)))():
        assert card.current_stream().priority < main.priority


def test_a_thread_that_waits_sleeps(card: FakeCard) -> None:
    """An event that is not blocking takes a whole core meanwhile."""
    for event in (torch.Event(CARD), torch.cuda.Event()):
        event.record()
        with pytest.raises(Waited, match="spins"):
            event.synchronize()
    HostCopy(wrap(torch.ones(3))).result()


@pytest.mark.parametrize("storage_dtype", [None, "fp8"])
def test_large_copies_are_left_to_another_thread(storage_dtype: str | None, card: FakeCard) -> None:
    stream = torch.randn(3000, 256)
    with card.no_waiting():
        extractor, _ = extract(CARD, [stream] * 4, storage_dtype)
        step = extractor.end_step()
    assert step is not None
    card.watched_thread = threading.get_ident()
    output = ModelRunnerOutput()
    step.read(output)
    card.watched_thread = None
    assert len(output.extracted_rows) == 1
    assert max(card.host_copies, default=0) <= 1 << 20


def test_rows_of_unknown_number_take_memory_as_they_come() -> None:
    """The memory held in excess is bounded by 512 rows; each row keeps its place."""
    hidden = HiddenStates((0, 1), 24, torch.float32, torch.float32)
    spec = GenerationSpec((0, 1), None, num_prompt_tokens=40)
    device = torch.device("cpu")
    extractor = RowExtractor(make_row_transport(device), 24, torch.float32, device, 0, no_hook)
    rows = extractor.make_rows(spec, 40)
    assert isinstance(rows, GrowingTensors)
    values = torch.randn(3000, 2, 24)
    ends = [40, *range(41, 60), 100, *range(101, 3001)]
    start = 0
    for end in ends:
        assert rows.positions_before(end).tolist() == list(range(end))
        room = rows.room(start, end - start)["hidden_states"]
        rows.append(ExtractedRows({"hidden_states": values[start:end]}))
        assert torch.equal(room, values[start:end])
        pieces = [piece.hidden_states.untyped_storage().nbytes() for piece in rows._pieces]
        assert sum(pieces) <= hidden.cells.num_bytes * (end + 2 * min(end, 256))
        start = end
    assert torch.equal(rows.whole().hidden_states, values)

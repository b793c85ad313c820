"""Recorded kernel calls give, at every repetition, what calling the kernels gives."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch
from cpu_features import why_no_bfloat16_products

from vllm.kernels.base import NotRecordableError, Record
from vllm.kernels.native_cpu import NativeCpuKernels, NativeKernelsUnavailable
from vllm.kernels.recorded_calls import RecordedCalls, TensorMemory, active_recorder

HIDDEN = 48


@pytest.fixture
def kernels() -> NativeCpuKernels:
    try:
        return NativeCpuKernels.load()
    except NativeKernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def record(kernels: NativeCpuKernels) -> Record:
    record = kernels.record_calls()
    assert record is not None
    return record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_recording_computes_when_it_is_repeated(
    dtype: torch.dtype, kernels: NativeCpuKernels, record: Record
) -> None:
    embeddings = torch.randn(50, 2 * HIDDEN).to(dtype)
    weight = torch.randn(HIDDEN).to(dtype)
    token_ids, residual = torch.zeros(5, dtype=torch.int64), torch.zeros(5, HIDDEN, dtype=dtype)

    def run() -> torch.Tensor:
        x = torch.nn.functional.embedding(token_ids, embeddings)
        for _ in range(3):  # tensors of one round are the memory of the next one's
            x = kernels.silu_and_mul(x)
            x = kernels.add_rms_norm(x, residual, weight, 1e-6)
            x = x.view(5, 2, HIDDEN // 2)
            x = kernels.sigmoid_gate(x, x).flatten(1)
            x = kernels.add_rms_norm(x, residual, weight, 1e-6)
            x = torch.nn.functional.embedding(token_ids, embeddings)
        return kernels.add_rms_norm(kernels.silu_and_mul(x), residual, weight, 1e-6)

    replay, result = record(run)
    assert residual.count_nonzero() == 0
    assert active_recorder() is None
    for seed in range(3):
        token_ids.copy_(torch.randint(50, (5,), generator=torch.Generator().manual_seed(seed)))
        residual.fill_(seed)
        expected, after = run(), residual.clone()
        residual.fill_(seed)
        result.fill_(float("nan"))
        replay()
        assert torch.equal(result, expected)
        assert torch.equal(residual, after)


@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_products(threads: int, kernels: NativeCpuKernels, record: Record) -> None:
    """Of weights in oneDNN's order, which threads that wait ask for; the last one ends there."""
    table = torch.randn(300, 96).bfloat16()
    weights = [torch.randn(rows, 96).bfloat16() / 10 for rows in (96, 96, 700, 33)]
    table, *weights = (
        tensor if packed is None else packed
        for tensor, packed in [
            (table, kernels.pack_table(table)),
            *((weight, kernels.pack_weight(weight)) for weight in weights),
        ]
    )
    norm, token_ids = torch.randn(96).bfloat16(), torch.zeros(16, dtype=torch.int64)
    torch.set_num_threads(threads)

    def run() -> torch.Tensor:
        x = kernels.embedding(token_ids, table)
        for weight in weights[:2]:
            x = kernels.rms_norm(kernels.linear(x, weight), norm, 1e-6)
        for weight in weights[2:]:
            y = kernels.linear(x, weight)
        return y

    try:
        replay, result = record(run)
    except NotRecordableError:
        pytest.skip("oneDNN forms these products")
    for seed in range(20):
        token_ids.copy_(torch.randint(300, (16,), generator=torch.Generator().manual_seed(seed)))
        replay()
        assert torch.equal(result, run())
    token_ids[5] = 300
    if table.is_mkldnn:
        with pytest.raises(RuntimeError, match="embedding: a slot"):
            replay()


def test_recordings_share_memory(kernels: NativeCpuKernels, record: Record) -> None:
    """A result stands until another recording is repeated; views and static tensors may be one."""
    x = torch.randn(4, 64)

    def norm() -> torch.Tensor:
        return kernels.rms_norm(x, None, 1e-6)

    runs: list[Callable[[], torch.Tensor]] = [
        lambda: kernels.silu_and_mul(norm()),
        lambda: kernels.sigmoid_gate(norm(), x),
        lambda: norm()[1:, ::2],
        lambda: norm().view(8, 32).t(),
        lambda: x,
        lambda: torch.nn.functional.embedding(torch.tensor([3, 1]), x),
    ]
    recordings = [record(run) for run in runs]
    assert isinstance(record, RecordedCalls)
    assert len(record._memory._pieces) <= 3
    for _ in range(2):
        for run, (replay, result) in zip(runs, recordings, strict=True):
            replay()
            assert torch.equal(result, run())
            x.mul_(-1.5)


def test_tensors_made_while_recording_are_not_given_away(
    kernels: NativeCpuKernels, record: Record
) -> None:
    """The memory of a recording's tensors stays its own when nobody else holds them."""
    x = torch.randn(7, 4096)
    replay, result = record(lambda: kernels.silu_and_mul(kernels.rms_norm(x, None, 1e-6)))
    bystanders = [torch.full((7, size), 7.0) for size in (4096, 2048) for _ in range(20)]
    replay()
    assert all(bool((bystander == 7.0).all()) for bystander in bystanders)
    assert torch.equal(result, kernels.silu_and_mul(kernels.rms_norm(x, None, 1e-6)))


X, INDICES = torch.randn(4, 64), torch.tensor([0, 1])
REFUSED: dict[str, Callable[[], object]] = {
    "add": lambda: X + 1.0,
    "mm or matmul": lambda: X @ X.T,
    "clone or contiguous": lambda: X.t().contiguous(),
    "mul_": lambda: X.view(-1).mul_(2.0),  # which must not even happen once
    "copy_": lambda: X[:2].copy_(X[2:]),
    "zeros": lambda: torch.zeros(3),
    "_local_scalar_dense or item": lambda: X[0, 0].item(),
    "gt": lambda: bool(X[0, 0] > 0),
    "is_nonzero or _local_scalar_dense or item": lambda: bool(X[0, 0]),
    "index": lambda: X[INDICES],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operation", REFUSED)
def test_what_a_recording_cannot_repeat_is_refused(
    operation: str, inference: bool, kernels: NativeCpuKernels, record: Record
) -> None:
    before, weight = X.clone(), torch.ones(64)
    y = torch.ones(4, 64)

    def run() -> torch.Tensor:
        kernels.add_rms_norm(X, y, weight, 1e-6)
        REFUSED[operation]()
        return y

    with torch.inference_mode(inference), pytest.raises(NotRecordableError) as error:
        record(run)
    # What torch takes apart it takes apart outside of inference mode only.
    found = re.fullmatch(r"aten\.(\w+)\.\w+ is no kernel of the library", str(error.value))
    assert found is not None and found[1] in operation.split(" or ")
    assert bool((y == 1.0).all()), "a kernel was run"
    assert torch.equal(X, before)
    assert active_recorder() is None
    assert torch.equal(kernels.rms_norm(y, None, 0.0), y)  # kernels run again


def test_other_threads_compute_meanwhile(kernels: NativeCpuKernels, record: Record) -> None:
    found: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(kernels.rms_norm(X, None, 1e-6)))
        thread.start()
        thread.join()
        return kernels.silu_and_mul(X)

    record(run)
    assert torch.equal(found[0], kernels.rms_norm(X, None, 1e-6))


def test_an_order_of_sums_that_is_not_known_yet_is_found_while_recording(
    kernels: NativeCpuKernels, record: Record
) -> None:
    if kernels.isa != "avx512_bf16":
        pytest.skip("products run in torch on this CPU")
    weight, x = torch.randn(80, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    replay, result = record(lambda: kernels.linear(x, weight))
    replay()
    assert torch.equal(result, kernels.linear(x, weight))


def test_rows_are_not_gathered_in_a_recording(kernels: NativeCpuKernels, record: Record) -> None:
    rows, slots, out = torch.ones(2, 4, 1, 8), torch.tensor([0, 3]), torch.empty(2, 1, 8)

    def run() -> torch.Tensor:
        kernels.gather_rows(rows, slots, out)
        return out

    with pytest.raises(NotRecordableError, match="gather_rows reports what it found"):
        record(run)


def test_a_call_that_fails_says_which_kernel_it_was(
    kernels: NativeCpuKernels, record: Record
) -> None:
    rows, slots = torch.zeros(2, 4, 1, 8), torch.tensor([0, 3])
    hidden = torch.ones(2, 8)

    def run() -> torch.Tensor:
        kernels.capture_rows(rows, slots, 0, hidden, None)
        return kernels.rms_norm(hidden, None, 1e-6)

    replay, result = record(run)
    slots[1] = 99
    with pytest.raises(RuntimeError, match="CPU kernel capture_rows: a slot, block id or position"):
        replay()
    slots[1] = 7
    replay()
    assert bool((rows.view(8, 8)[[0, 7]] == 1.0).all())
    assert bool((result > 0).all())


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_the_work_of_a_recording_together(
    threads: int, kernels: NativeCpuKernels, record: Record
) -> None:
    """Each kernel needs all of the one before; some threads may have no core at all."""
    x, weight = torch.randn(300, 2048), torch.randn(2048)
    head = torch.randn(640, 1024).bfloat16()

    def run() -> torch.Tensor:
        y = x
        for _ in range(12):
            left, right = y.view(300, 2, 1024).unbind(1)
            y = kernels.sigmoid_gate(kernels.rms_norm(y, weight, 1e-6), y)
            right = kernels.rms_norm(right, weight[:1024], 1e-6)
            kernels.add_rms_norm(left, right, weight[:1024], 1e-6)
            y = kernels.rms_norm(y, weight, 1e-6)
        return y

    expected = run()
    torch.set_num_threads(threads)
    replay, result = record(run)
    product, few = None, expected[:5, :1024].bfloat16()
    if why_no_bfloat16_products() is None:
        product = record(lambda: kernels.linear(few, head))
    for _ in range(20):
        result.fill_(float("nan"))
        replay()
        assert torch.equal(result, expected)
        if product is not None:
            product[1].fill_(float("nan"))
            product[0]()
            assert torch.equal(product[1], kernels.linear(few, head))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_ends_a_recording(
    threads: int, kernels: NativeCpuKernels, record: Record
) -> None:
    """What comes after it is left out, and the threads are free for what is asked next."""
    torch.set_num_threads(threads)
    rows, slots = torch.zeros(2, 4096, 1, 64), torch.arange(8192)
    hidden, after, weight = torch.ones(8192, 64), torch.ones(8192, 64), torch.ones(64)

    def run() -> torch.Tensor:
        kernels.capture_rows(rows, slots, 0, hidden, None)
        kernels.add_rms_norm(hidden, after, weight, 1e-6)
        return hidden

    replay, _ = record(run)
    slots[5000] = -7 + 2**20
    for _ in range(3):
        with pytest.raises(RuntimeError, match="CPU kernel capture_rows"):
            replay()
        assert bool((after == 1.0).all())
    slots[5000] = 5000
    replay()
    assert bool((rows == 1.0).all())
    assert bool((after == 2.0).all())


def test_memory_is_reused_when_nothing_stands_in_it() -> None:
    memory = TensorMemory()
    first = memory.empty((3, 5), torch.bfloat16)
    address = first.data_ptr()
    assert address % 64 == 0 and first.shape == (3, 5) and first.dtype is torch.bfloat16
    view = first[1:]
    del first
    assert memory.empty((3, 5), torch.bfloat16).data_ptr() != address, "a view stands in it"
    del view
    again = memory.empty((2, 5), torch.float16)
    assert again.data_ptr() == address
    large = memory.empty((128,), torch.float32)
    assert large.data_ptr() not in (address, 0)
    assert [piece.nbytes for piece, _ in memory._pieces] == [64, 64, 512]
    assert memory.empty((0, 8), torch.float32).shape == (0, 8)
    assert memory.empty((), torch.float32).shape == ()

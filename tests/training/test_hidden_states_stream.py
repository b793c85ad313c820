"""``HiddenStatesStream``: samples for a trainer in another process of the machine."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.engine.harness import engine, random_prompts
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states import FailedSample, HiddenStatesError, HiddenStatesSample
from vllm.outputs import CompletionOutput, Logprob
from vllm.training import HiddenStatesStream, StreamedDataset, StreamError

Checkpoint = Callable[..., Path]
LARGE = 1 << 17
"""Bytes of rows that are not copied out of their segment."""


def sample(index: int, num_bytes: int = 4000) -> HiddenStatesSample:
    rows = max(1, num_bytes // (3 * 7 * 4))
    generator = torch.Generator().manual_seed(index)
    return HiddenStatesSample(
        index=index,
        request_id=f"request-{index}",
        token_ids=torch.arange(rows),
        positions=torch.arange(rows),
        tensors={"hidden_states": torch.randn(rows, 3, 7, generator=generator)},
        layer_ids=(0, 5, "norm"),
    )


def assert_same(got: HiddenStatesSample, expected: HiddenStatesSample) -> None:
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype and got.tensors[name].shape == tensor.shape
        assert torch.equal(
            got.tensors[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)
        )
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.positions, expected.positions)
    for name in ("index", "request_id", "layer_ids", "record", "num_generated_tokens", "output"):
        assert getattr(got, name) == getattr(expected, name)
    assert dict(got.columns) == dict(expected.columns)
    assert {k: list(v) for k, v in got.constants.items()} == dict(expected.constants)


@contextmanager
def published(stream: HiddenStatesStream, items: Iterable[Any]) -> Iterator[list[Any]]:
    """Publish on a thread; yields the list that gets the count, or the exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(stream.publish(items))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(30)
        stream.close()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_segments() -> int:
    """Descriptors and mappings of shared memory that this process has."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread closed it
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    mapped = Path("/proc/self/maps").read_bytes().count(b"memfd:hidden-states")
    return sum("memfd:hidden-states" in target for target in targets) + mapped


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rows.sock")


def test_every_part_of_a_sample_arrives(path: str) -> None:
    plain = sample(3)
    tensors = {
        **plain.tensors,
        "scales": torch.rand(47, 3),
        "loss_mask": torch.arange(47) % 3 == 1,
        "blocks.1.hook_mlp_out": torch.randn(11, 47).t().to(torch.bfloat16),
        "top_token_ids": torch.zeros(47, 0, dtype=torch.int32),
    }
    logprobs = [{5: Logprob(-0.5, 1, "five"), 6: Logprob(-1.5)}]
    rich = dataclasses.replace(
        plain,
        tensors=tensors,
        record=12,
        constants={"expert_layers": [1, 2]},
        columns={"label": 4, "text": "wörter", "tags": ["a", None]},
        num_generated_tokens=1,
        output=CompletionOutput(0, "five", [5], -0.5, logprobs, "stop", 7),
    )
    items = [plain, rich, sample(4, LARGE)]
    with published(HiddenStatesStream(path, timeout=20.0), items) as result:
        for got, expected in zip(StreamedDataset(path), items, strict=True):
            assert_same(got, expected)
    assert result == [3]
    assert not os.path.exists(path)


def test_kept_samples_keep_their_values_while_memory_is_used_again(path: str) -> None:
    items = [sample(i, LARGE + 5000 * (i % 3)) for i in range(40)]
    before = num_segments()
    with published(HiddenStatesStream(path, credit_bytes=4 * LARGE, timeout=20.0), items):
        kept, segments = [], 0
        for got in StreamedDataset(path):
            if got.index % 10 == 0:
                kept.append(got)
            segments = max(segments, num_segments() - before)
    assert segments <= 3 * 16  # a descriptor and two mappings of each, of 40 samples
    for got in kept:
        assert_same(got, items[got.index])
    del kept, got
    assert num_segments() == before


def test_the_publisher_waits_for_credit(path: str) -> None:
    taken: list[int] = []

    def items() -> Iterator[HiddenStatesSample]:
        for i in range(12):
            taken.append(i)
            yield sample(i, LARGE)

    with published(HiddenStatesStream(path, 5 * LARGE, 20.0), items()):
        wait_for(lambda: len(taken) == 4)  # the fourth waits: a segment is 1.5 * LARGE
        reader = iter(StreamedDataset(path))
        for i in range(4):
            assert next(reader).index == i
        wait_for(lambda: len(taken) == 4 + 3)
        time.sleep(0.2)
        assert len(taken) == 7  # three of the four were acknowledged
        assert [one.index for one in reader] == list(range(4, 12))


def test_a_sample_above_the_credit_goes_alone(path: str) -> None:
    items = [sample(0, LARGE), sample(1, LARGE)]
    with published(HiddenStatesStream(path, credit_bytes=100, timeout=20.0), items) as result:
        assert [one.index for one in StreamedDataset(path)] == [0, 1]
    assert result == [2]


def test_a_next_reader_gets_what_was_not_acknowledged(path: str) -> None:
    items = [sample(i, LARGE) for i in range(12)]
    with published(HiddenStatesStream(path, credit_bytes=6 * LARGE, timeout=20.0), items) as result:
        first = iter(StreamedDataset(path))
        kept = [next(first) for _ in range(4)]
        first.close()  # type: ignore[attr-defined]
        assert [one.index for one in StreamedDataset(path)] == list(range(3, 12))
    assert result == [12]
    for got in kept:
        assert_same(got, items[got.index])


def test_acknowledging_by_call(path: str) -> None:
    items = [sample(i) for i in range(6)]
    with published(HiddenStatesStream(path, timeout=20.0), items) as result:
        dataset = StreamedDataset(path, acknowledge="by_call")
        reader = iter(dataset)
        assert [next(reader).index for _ in range(3)] == [0, 1, 2]
        dataset.acknowledge()
        assert [next(reader).index for _ in range(2)] == [3, 4]
        assert [one.index for one in dataset] == [3, 4, 5]
        time.sleep(0.2)
        assert not result  # until the end is acknowledged, too
        assert [one.index for one in dataset] == [3, 4, 5]
        dataset.acknowledge()
        wait_for(lambda: result == [6])


def test_each_call_of_publish_is_an_iteration(path: str) -> None:
    with HiddenStatesStream(path) as stream:
        dataset = StreamedDataset(path)
        for epoch in range(2):
            items = [sample(i + 10 * epoch) for i in range(3)]
            thread = threading.Thread(target=stream.publish, args=(items,))
            thread.start()
            assert [one.index for one in dataset] == [one.index for one in items]
            thread.join()


def test_a_data_loader_reads_with_one_worker(path: str) -> None:
    items = [sample(i, LARGE) for i in range(5)]
    with published(HiddenStatesStream(path, timeout=20.0), items):
        loader: Any = DataLoader(
            StreamedDataset(path), batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        for got, expected in zip(loader, items, strict=True):
            assert_same(got, expected)
    loader = DataLoader(StreamedDataset(path), batch_size=None, num_workers=2)
    with pytest.raises(RuntimeError, match=r"num_workers=2.*one reader"):
        next(iter(loader))


def test_a_reader_that_stops_reading(path: str) -> None:
    items = [sample(i, LARGE) for i in range(9)]
    with published(HiddenStatesStream(path, 3 * LARGE, timeout=0.5), items) as result:
        reader = iter(StreamedDataset(path))
        next(reader)
        wait_for(lambda: bool(result))
        assert isinstance(result[0], StreamError)
        assert result[0].failure.kind is FailureKind.STREAM_STALLED
        assert "acknowledged none of 2 samples for 0.5 seconds (timeout)" in str(result[0])
        assert next(reader).index == 1  # what was sent is there, then comes the reason
        with pytest.raises(StreamError, match="acknowledged none") as raised:
            next(reader)
        assert raised.value.failure.kind is FailureKind.STREAM_STALLED
    assert not os.path.exists(path)


def test_no_reader_at_all(path: str) -> None:
    with HiddenStatesStream(path, timeout=0.3) as stream:
        with pytest.raises(StreamError, match=r"no reader connected for 0\.3 seconds"):
            stream.publish([sample(0)])
        with pytest.raises(StreamError, match="no reader connected"):
            stream.put(sample(1))


def test_the_engine_goes_on_after_a_reader_that_stopped(checkpoint: Checkpoint, path: str) -> None:
    prompts = random_prompts(7, [40, 33, 21, 50, 9])
    with engine(checkpoint("qwen3_5")) as llm:
        expected = list(llm.extract(prompts, [2, "norm"]))
        stream = HiddenStatesStream(path, credit_bytes=1 << 16, timeout=0.3)
        with pytest.raises(StreamError, match="no reader connected"):
            stream.publish(llm.extract(prompts, [2, "norm"]))
        with published(HiddenStatesStream(path, timeout=20.0), llm.extract(prompts, [2, "norm"])):
            for got in StreamedDataset(path):
                assert torch.equal(got.hidden_states, expected[got.index].hidden_states)


def test_a_publisher_that_stops(path: str) -> None:
    with pytest.raises(StreamError, match=r"no process publishes there after 0\.1 s") as raised:
        next(iter(StreamedDataset(path, timeout=0.1)))
    assert raised.value.failure.kind is FailureKind.ENGINE_DEAD
    with HiddenStatesStream(path):
        with pytest.raises(StreamError, match=r"nothing was published for 0\.2 s") as raised:
            next(iter(StreamedDataset(path, timeout=0.2)))
        assert raised.value.failure.kind is FailureKind.STREAM_STALLED


def test_an_error_of_the_samples_reaches_the_reader(path: str) -> None:
    def items() -> Iterator[HiddenStatesSample]:
        yield sample(0)
        raise HiddenStatesError(1, Failure(FailureKind.ROWS_NOT_FINITE, "row 4 is not finite"))

    stream = HiddenStatesStream(path, timeout=20.0)
    reader = iter(StreamedDataset(path))
    with published(stream, items()) as result:
        assert next(reader).index == 0
        with pytest.raises(StreamError, match="row 4 is not finite") as raised:
            next(reader)
    assert raised.value.failure.kind is FailureKind.ROWS_NOT_FINITE
    assert isinstance(result[0], HiddenStatesError)


def test_samples_that_failed(path: str) -> None:
    failed = FailedSample(1, "b", Failure(FailureKind.ROWS_NOT_FINITE, "row 4"))
    with published(HiddenStatesStream(path, timeout=20.0), [sample(0), failed, sample(2)]):
        reader = iter(StreamedDataset(path))
        next(reader)
        with pytest.raises(HiddenStatesError, match="prompt 1: row 4") as raised:
            next(reader)
        assert raised.value.failure.kind is FailureKind.ROWS_NOT_FINITE
        dataset = StreamedDataset(path, on_error="skip")
        assert [one.index for one in dataset] == [2]
        assert dataset.num_skipped == 1


def test_a_second_reader_is_refused(path: str) -> None:
    with published(HiddenStatesStream(path, timeout=20.0), [sample(0), sample(1)]):
        first = iter(StreamedDataset(path))
        next(first)
        with pytest.raises(StreamError, match="has another reader already"):
            next(iter(StreamedDataset(path)))
        assert [one.index for one in first] == [1]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\x93\xa5taken\x01\xa1x", b"\x93\xa5taken\xcd\x7f\xff\x90"]
)
def test_a_reader_that_sends_something_else(data: bytes, path: str) -> None:
    """No message, one of a wrong type, and an acknowledgement of what was never sent."""
    items = [sample(i) for i in range(5)]
    with published(HiddenStatesStream(path, timeout=20.0), items) as result:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(path)
            other.send(data)
            while other.recv(1 << 16):
                pass
        assert [one.index for one in StreamedDataset(path, 20.0)] == list(range(5))
    assert result == [5]


def test_a_publisher_of_something_else(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        reader = iter(StreamedDataset(path, 20.0))
        connection, _ = listener.accept()
        with connection:
            connection.send(b"220 ready\r\n")
            with pytest.raises(StreamError, match="another program publishes there"):
                next(reader)


def test_an_error_that_utf8_cannot_hold(path: str) -> None:
    def items() -> Iterator[HiddenStatesSample]:
        yield sample(0)
        raise KeyError("\ud800")

    stream = HiddenStatesStream(path, timeout=20.0)
    reader = iter(StreamedDataset(path, 20.0))
    with published(stream, items()) as result:
        next(reader)
        with pytest.raises(StreamError, match=r"\\ud800"):
            next(reader)
    assert isinstance(result[0], KeyError)


def test_arguments_that_cannot_be_used(path: str, tmp_path: Path) -> None:
    for message, arguments in {
        "credit_bytes=0": (path, 0),
        "timeout=0": (path, 5, 0.0),
        "no socket can be made": (str(tmp_path / "missing" / "x"),),
        "path too long": (str(tmp_path / ("x" * 120)),),
    }.items():
        with pytest.raises(ValueError, match=message):
            HiddenStatesStream(*arguments)  # type: ignore[arg-type]
    for message, options in {
        "timeout=-1": {"timeout": -1},
        "acknowledge='never'": {"acknowledge": "never"},
        "on_error='yield'": {"on_error": "yield"},
    }.items():
        with pytest.raises(ValueError, match=message):
            StreamedDataset(path, **options)  # type: ignore[arg-type]
    with HiddenStatesStream(path) as stream:
        with pytest.raises(ValueError, match="another process publishes there"):
            HiddenStatesStream(path)
        with pytest.raises(ValueError, match=r"columns\['label'\]"):
            stream.put(dataclasses.replace(sample(0), columns={"label": torch.ones(1)}))
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        for value in ({1}, [date(2026, 3, 1)], {"a": (Decimal(1),)}, 1 << 70, "\ud800", cyclic):
            with pytest.raises(ValueError, match=r"columns\['a'\].*a stream takes"):
                stream.put(dataclasses.replace(sample(0), columns={"a": value}))
    Path(path).write_text("data")
    with pytest.raises(ValueError, match="is not a socket"):
        HiddenStatesStream(path)
    assert Path(path).read_text() == "data"


def test_only_this_user_may_connect(path: str) -> None:
    with HiddenStatesStream(path):
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_socket_that_was_left_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
    with published(HiddenStatesStream(path, timeout=20.0), [sample(0)]):
        assert [one.index for one in StreamedDataset(path)] == [0]


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that prints a line when it is ready."""
    script = "from tests.training.test_hidden_states_stream import *\nimport sys\n"
    script += textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


PUBLISHER = """
def items():
    for i in range(1000):
        if i == 5:
            print("ready", flush=True)
        yield sample(i, LARGE)
HiddenStatesStream(sys.argv[1], 8 * LARGE).publish(items())
"""
READER = """
for one in StreamedDataset(sys.argv[1]):
    if one.index == 4:
        print("ready", flush=True)
        time.sleep(100)
"""


def test_a_publisher_that_is_killed_leaves_nothing(path: str) -> None:
    before, shared = num_segments(), set(os.listdir("/dev/shm"))
    process = start(PUBLISHER, path)
    reader = iter(StreamedDataset(path))
    got = [next(reader) for _ in range(3)]
    kill(process)
    with pytest.raises(StreamError, match="the publishing process ended early") as raised:
        got += list(reader)
    assert raised.value.failure.kind is FailureKind.ENGINE_DEAD
    for i, one in enumerate(got):
        assert_same(one, sample(i, LARGE))
    wait_for(lambda: not os.path.exists(path))
    del got, one, reader, raised
    assert num_segments() == before
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_reader_that_is_killed_leaves_nothing(path: str) -> None:
    before = num_segments()
    items = [sample(i, LARGE) for i in range(20)]
    with published(HiddenStatesStream(path, 8 * LARGE, 20.0), items) as result:
        process = start(READER, path)
        kill(process)
        reader = StreamedDataset(path)
        assert [one.index for one in reader] == list(range(4, 20))
    assert result == [20]
    del reader
    assert num_segments() == before
    assert not os.path.exists(path)

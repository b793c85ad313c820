"""The messages and the shared memory between a stream of samples and its reader.

    publisher                                            reader
      memfd segment <- tensors, header                     maps the segment once
      Rows(number, segment, ...) with the descriptor  ->   sample, whose tensors are views
      the segment is used again                       <-   Taken(number, released segments)

Messages go through a Unix socket that keeps their boundaries. memfd memory belongs to no file
system, so it needs no /dev/shm, and it is gone when the last process that maps it ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import dtype_name
from vllm.outputs import CompletionOutput, Logprob

MESSAGE_BYTES = 1 << 16
"""Most bytes of a message."""
_ALIGNMENT = 64
_OUTPUT_FIELDS = (
    *("index", "text", "token_ids", "cumulative_logprob", "logprobs"),
    *("finish_reason", "stop_reason"),
)


class StreamError(FailureError):
    """A stream of samples ended early; the reason is ``failure``, with its kind."""


class Rows(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """A sample in a segment; the message carries the segment's descriptor if that is new."""

    number: int
    """Counts everything that is acknowledged, from 0."""
    segment: int
    segment_bytes: int
    header_start: int
    header_bytes: int
    forgotten: list[int]
    """Segments that will not come again."""


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """A sample that has no rows."""

    number: int
    index: int
    request_id: str
    kind: FailureKind
    message: str


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """Everything was published."""

    number: int


class Stopped(msgspec.Struct, frozen=True, tag="stopped", array_like=True):
    """The stream ended early."""

    kind: FailureKind
    message: str


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    """The reader needs nothing up to ``number`` again, and does not use the segments any more."""

    number: int
    released: list[int]


Published = Rows | Failed | End | Stopped
encode = msgspec.msgpack.Encoder().encode
_published = msgspec.msgpack.Decoder(Published)
_taken = msgspec.msgpack.Decoder(Taken)


def read_published(data: bytes) -> Published | None:
    """Return what a publisher sent; None if it is no message of a publisher."""
    try:
        message: Published = _published.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return message


def read_taken(data: bytes) -> Taken | None:
    """Return what a reader sent; None if it is no message of a reader."""
    try:
        return _taken.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def text_of(failure: Failure) -> str:
    """Return a failure's text, cut to the size of a message, with halves of pairs escaped."""
    return failure.message[: MESSAGE_BYTES // 8].encode(errors="backslashreplace").decode()


def stopped(failure: Failure) -> Stopped:
    """Return the message with a failure."""
    return Stopped(failure.kind, text_of(failure))


def map_segment(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Return the memory of a segment, uint8 [num_bytes], shared with other processes."""
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def new_segment(num_bytes: int) -> int:
    """Return the descriptor of new memory; raises RuntimeError if the system has no memfd."""
    try:
        descriptor = os.memfd_create("hidden-states")
    except OSError as error:
        raise RuntimeError(
            f"memfd_create: {error.strerror}; in a container, its seccomp profile has to allow "
            "the call (Docker's default profile does)"
        ) from error
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class PackedSample(NamedTuple):
    """A sample as it lies in a segment: tensors, each at its place, and then the header."""

    places: list[tuple[int, torch.Tensor]]
    header: bytes

    @property
    def header_start(self) -> int:
        """The first byte after the tensors."""
        start, tensor = self.places[-1]
        return start + tensor.nbytes

    @property
    def num_bytes(self) -> int:
        return self.header_start + len(self.header)

    def write(self, memory: torch.Tensor) -> None:
        """Copy everything to a segment."""
        for start, tensor in self.places:
            part = memory[start : start + tensor.nbytes]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        header = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        memory[self.header_start : self.num_bytes] = header


def pack(sample: HiddenStatesSample) -> PackedSample:
    """Lay out a sample. ValueError: a column has values that a message cannot hold."""
    tensors = {**sample.tensors, "positions": sample.positions, "token_ids": sample.token_ids}
    entries, places, end = [], [], 0
    for name, tensor in tensors.items():
        start = end + -end % _ALIGNMENT
        places.append((start, tensor))
        entries.append((name, dtype_name(tensor.dtype), list(tensor.shape), start))
        end = start + tensor.nbytes
    output = sample.output
    header = {
        "tensors": entries,
        "index": sample.index,
        "request_id": sample.request_id,
        "layer_ids": sample.layer_ids,
        "record": sample.record,
        "constants": dict(sample.constants),
        "num_generated_tokens": sample.num_generated_tokens,
        "output": output and {name: getattr(output, name) for name in _OUTPUT_FIELDS},
        "columns": {name: _checked(name, value) for name, value in sample.columns.items()},
    }
    return PackedSample(places, msgspec.msgpack.encode(header))


def unpack(memory: torch.Tensor, header: bytes) -> HiddenStatesSample:
    """Return the sample in a segment; its tensors are views of ``memory``."""
    fields: dict[str, Any] = msgspec.msgpack.decode(header, strict=False)
    tensors = {}
    for name, dtype_text, shape, start in fields.pop("tensors"):
        dtype = getattr(torch, dtype_text)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = memory[start:end].view(dtype).view(shape)
    return HiddenStatesSample(
        **{**fields, "layer_ids": tuple(fields["layer_ids"]), "output": _output(fields["output"])},
        token_ids=tensors.pop("token_ids"),
        positions=tensors.pop("positions"),
        tensors=tensors,
    )


def _output(fields: Mapping[str, Any] | None) -> CompletionOutput | None:
    if fields is None:
        return None
    output = CompletionOutput(**fields)
    if output.logprobs is not None:
        output.logprobs = [
            {token: Logprob(*values) for token, values in one.items()} for one in output.logprobs
        ]
    return output


def _checked(name: str, value: Any) -> Any:
    """Return a column's value. ValueError: it would not arrive, or as something else."""
    known = "a stream takes texts, numbers, and lists and dicts of them"
    try:
        if (kind := _other_type(value)) is not None:
            raise TypeError(f"a {kind} cannot be published")
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"columns[{name!r}]: {error}; {known}") from None
    return value


def _other_type(value: Any) -> str | None:
    """Name the type of a part that messages turn into something else; None: they turn nothing."""
    if value is None or isinstance(value, str | bytes | int | float):
        return None
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        parts = [*value]
    else:
        return type(value).__name__
    return next(filter(None, map(_other_type, parts)), None)

"""Messages between the front end and the engine core's process, as msgpack.

The core receives lists of :class:`CoreCommand`. It sends one :class:`CoreStarted`,
then one :class:`CoreReport` per step, and one when a signal has stopped a rank's process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm.exceptions import Failure
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

if TYPE_CHECKING:  # the server starts the core before it loads torch itself
    import torch


def command_address(folder: str) -> str:
    """Address of the core's commands, in a folder of this machine."""
    return f"ipc://{folder}/commands"


def report_address(folder: str) -> str:
    """Address of its reports there."""
    return f"ipc://{folder}/reports"


class AddRequest(msgspec.Struct, tag="add"):
    """Queue a request."""

    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, tag="abort"):
    """Drop requests and what they have written."""

    request_ids: list[str]


class FinishRequests(msgspec.Struct, tag="finish"):
    """End requests whose text reached a stop string."""

    stops: dict[str, str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget every cached prefix."""

    reset_connector: bool = False


class WorkerCall(NamedTuple):
    """A call of every worker, between two steps."""

    method: str | Callable[..., Any]
    """The name of a method, or a function that gets the worker first."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class CallWorkers(msgspec.Struct, tag="call"):
    """Call every worker; a :class:`CallAnswer` of that number follows."""

    number: int
    call: bytes
    """A WorkerCall, pickled."""


class FreezeRequests(msgspec.Struct, tag="freeze"):
    """Compute nothing until :class:`ThawRequests`; a :class:`CallAnswer` of that number follows."""

    number: int
    keeps_states: bool
    """False: requests are computed again from their tokens if a worker was called meanwhile."""


class ThawRequests(msgspec.Struct, tag="thaw"):
    """Let frozen requests go on; a :class:`CallAnswer` of that number follows."""

    number: int


class TakePart(msgspec.Struct, tag="take_part"):
    """Take part in the steps of the other engines that share experts, until none has work."""

    wave: int
    """Number of these steps without a pause; one that is over is meant by mistake."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Complete the files under way and end the process."""


AnsweredCommand = CallWorkers | FreezeRequests | ThawRequests
"""A command that a :class:`CallAnswer` follows."""
CoreCommand = (
    AddRequest
    | AbortRequests
    | FinishRequests
    | ResetPrefixCache
    | AnsweredCommand
    | TakePart
    | Shutdown
)


def joined(commands: Sequence[bytes]) -> bytes:
    """Make one message, a list, of encoded commands."""
    return b"\xdd" + len(commands).to_bytes(4, "big") + b"".join(commands)  # array 32 of msgpack


class CallAnswer(msgspec.Struct):
    """The end of a call of the workers, or of another answered command."""

    number: int
    results: bytes = b""
    """A list with the result of each worker, pickled."""
    failure: Failure | None = None
    """BAD_REQUEST: a worker raised ValueError."""


class EngineStats(msgspec.Struct, kw_only=True):
    """The state of the engine after a step; counts are since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    """Share of the pool's blocks that requests hold, 0 to 1."""
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    num_prompt_tokens: int = 0
    """Prompt tokens that were computed or found in the prefix cache; each counts once."""
    num_generation_tokens: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    files_written: int = 0
    bytes_in_flight: int = 0
    write_seconds: float = 0.0
    """Time that writer threads spent writing."""


class CoreReport(msgspec.Struct, kw_only=True):
    """Results of one step."""

    has_stopped_rank: bool | None = None
    """True if a signal has stopped a rank's process, False if all go on: the rest of the report is
    empty. None: this is a report of a step."""
    outputs: list[EngineCoreOutput] = []
    rejected: dict[str, Failure] = {}
    """Request id -> why the core did not take it."""
    answers: list[CallAnswer] = []
    stats: EngineStats
    wave: int = 0
    """Not 0: this engine begins these steps, in which the others have to take part."""
    kv_connector_stats: list[dict[str, Any]] = []
    """Stats of the connector in the step: ``data`` of its objects."""
    kv_cache_events: list[Any] = []
    """Events in msgpack's form (``vllm.distributed.kv_events``)."""


class ReportEncoder:
    """Encodes a report as frames: the message, then the bytes of each tensor in it, not copied."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._frame_of)
        self._frames: list[bytes | memoryview] = []

    def encode(self, report: CoreReport) -> list[bytes | memoryview]:
        self._frames = []
        message = self._encoder.encode(report)
        return [message, *self._frames]

    def _frame_of(self, tensor: torch.Tensor) -> tuple[str, list[int], int]:
        import torch

        self._frames.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(self._frames)


class ReportDecoder:
    """Reverses :class:`ReportEncoder`."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoreReport)

    def decode(self, frames: Sequence[bytes]) -> CoreReport:
        report = self._decoder.decode(frames[0])
        for output in report.outputs:
            rows = output.extracted
            if rows is not None:
                rows.tensors = {k: _tensor_of(v, frames) for k, v in rows.tensors.items()}
        return report


def _tensor_of(header: Any, frames: Sequence[bytes]) -> torch.Tensor:
    import torch

    dtype_name, shape, index = header
    dtype: torch.dtype = getattr(torch, dtype_name)
    if not frames[index]:  # frombuffer takes no empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(frames[index]), dtype=dtype).reshape(shape)


class CoreStarted(msgspec.Struct, kw_only=True):
    """The first message: the core is ready, or the reason why it is not."""

    failure: Failure | None = None
    """BAD_REQUEST: the configuration cannot be served."""
    max_model_len: int = 0
    num_blocks: int = 0
    block_bytes: int = 0
    shares_experts: bool = False
    """True if the other engines have some of the experts."""
    pool_description: list[str] = []
    """Contents of the pool, as lines for a person."""

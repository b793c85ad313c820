"""Results that the workers hand back after a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add
from typing import Any, NamedTuple

import msgspec

from vllm.exceptions import Failure


class LogprobsLists(msgspec.Struct, array_like=True):
    """Log-probabilities of some positions, row by row.

    Column 0 is the sampled (or prompt) token, then the top-k in falling order.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]
    """1-based rank of column 0 in the vocabulary."""


class ExtractedRows(msgspec.Struct):
    """All fields of some tokens of one request, dense, in host memory.

    The values are tensors inside a process; ``core_messages`` encodes them between processes.
    """

    tensors: dict[str, Any]
    """[rows, ...] each, by the names that files use: ``hidden_states`` [rows, layers, hidden]; for
    fp8 also ``scales`` and ``fp8_errors``, float32 [rows, layers]; then those of other fields."""
    constants: dict[str, list[int]] = {}
    """Values that fields state once for all tokens."""
    first: int = 0
    """Number of the first of them among the request's rows, if they come in parts."""

    @property
    def hidden_states(self) -> Any:
        """[rows, layers, hidden]"""
        return self.tensors["hidden_states"]

    def __len__(self) -> int:
        return len(self.hidden_states)

    def part(self, place: slice) -> ExtractedRows:
        """Some of the rows, in the same memory."""
        tensors = {name: tensor[place] for name, tensor in self.tensors.items()}
        return ExtractedRows(tensors, self.constants)


@dataclass(frozen=True)
class SaveStats:
    """Totals of a connector's writes since its start, and the bytes on their way."""

    num_rows: int = 0
    num_bytes: int = 0
    num_files: int = 0
    bytes_in_flight: int = 0
    write_seconds: float = 0.0
    """Time that threads spent writing, summed over threads."""

    def __add__(self, other: SaveStats) -> SaveStats:
        return SaveStats(*map(add, astuple(self), astuple(other)))


@dataclass
class KVConnectorOutput:
    """Report of a connector's worker side after a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failures: dict[str, Failure] = field(default_factory=dict)
    """Request id -> why its data could not be delivered."""
    completed_params: dict[str, dict[str, object]] = field(default_factory=dict)
    """Request id -> additions to its kv_transfer_params, known only after the write."""
    save_stats: SaveStats | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks whose load failed."""
    void_req_ids: set[str] = field(default_factory=set)
    """Requests that this step computed from a failed load, before anything of it left."""
    late_req_ids: set[str] = field(default_factory=set)
    """Such requests whose load was reported as failed only after rows had left."""
    load_error: str | None = None
    """Set if the connector raised while it began to load: no load of this step came."""
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    """Message from the connector's worker side to its scheduler side, in its own classes."""


@dataclass
class ModelRunnerOutput:
    """Sampled tokens of one step, by request."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Has only requests whose last known token was computed in this step."""
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    extracted_rows: dict[str, ExtractedRows] = field(default_factory=dict)
    """Requests all of whose rows are in host memory."""
    parts_of_rows: dict[str, ExtractedRows] = field(default_factory=dict)
    """New rows of requests that get them in parts."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """Request id -> what is wrong with its values."""
    kv_connector_output: KVConnectorOutput | None = None


class PendingOutput(NamedTuple):
    """A step that was started."""

    output: ModelRunnerOutput
    """The results known so far. The connector's report, which covers earlier steps too, is in it
    from the start, and stays true when :meth:`result` fails."""
    parts: Sequence[Callable[[ModelRunnerOutput], None]]
    """Functions that each wait for a part still being computed and put it into the output."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the complete output and return it. Call it once, in the order of the steps."""
        for read in self.parts:
            read(self.output)
        return self.output

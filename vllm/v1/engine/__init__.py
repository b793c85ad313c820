"""Messages between the front end (text) and the engine core (tokens)."""

from __future__ import annotations

import bisect
import enum
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm.exceptions import Failure
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.boundaries import LayerId
from vllm.v1.outputs import ExtractedRows, LogprobsLists


class FinishReason(enum.IntEnum):
    """The reason why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class ExtractionSpec(msgspec.Struct, frozen=True, tag="prompt"):
    """Hidden states that a request hands to its caller instead of to a connector."""

    layer_ids: tuple[LayerId, ...]
    """Layers in the order of the columns; duplicates are kept."""
    positions: list[int] | None = None
    """Prompt tokens whose rows are wanted, ascending; None: all of them."""
    storage_dtype: str | None = None
    """"float32", "bfloat16", "float16", "fp8"; None: the model's."""
    top_logprobs: int = 0
    """Most likely next tokens whose log-probabilities are kept with each row; 0: none."""
    logprob_temperature: float = 1.0
    token_after: int | None = None
    """The token after the request's prompt, if the caller's prompt has more tokens."""
    in_parts: bool = False
    """True if the rows of each step go to the caller at once."""
    hooks: tuple[str, ...] = ()
    """Names of hook points whose values are kept with each row."""
    hook_cells: int = 0
    """Memory of these values in a row, in hidden states of one layer; the core sets it."""

    @property
    def cells_per_row(self) -> int:
        """Memory of a row while its step runs, in hidden states of one layer."""
        return max(1, len(self.layer_ids) + self.hook_cells)

    def checked_positions(self, num_tokens: int) -> Sequence[int]:
        """Return the positions in a prompt. ValueError: they do not ascend, or exceed it."""
        positions = self.positions
        if positions is None:
            return range(num_tokens)
        ascends = all(first < second for first, second in itertools.pairwise(positions))
        if not ascends or (positions and not 0 <= positions[0] <= positions[-1] < num_tokens):
            raise ValueError(f"positions of rows have to ascend in [0, {num_tokens})")
        return positions

    def rank(self, position: int) -> int:
        """Count the wanted positions below one."""
        if self.positions is None:
            return position
        return bisect.bisect_left(self.positions, position)

    def position_at(self, rank: int) -> int:
        """The wanted position of this rank; ``sys.maxsize`` when there is none."""
        if self.positions is None:
            return rank
        return self.positions[rank] if rank < len(self.positions) else sys.maxsize

    def num_rows(self, start: int, end: int) -> int:
        """Count the wanted positions in [start, end)."""
        return self.rank(end) - self.rank(start)

    def end_of_rows(self, start: int, num_rows: int) -> int:
        """The largest end of [start, end) with at most ``num_rows`` wanted positions."""
        return self.position_at(self.rank(start) + num_rows)

    def next_position(self, num_tokens: int) -> int | None:
        """The first wanted position from ``num_tokens`` on; None when there is none."""
        position = self.position_at(self.rank(num_tokens))
        return None if position == sys.maxsize else position


class GenerationSpec(ExtractionSpec, frozen=True, tag="text"):
    """Rows of a request that generates, too: positions count over its prompt and its output.

    positions: tokens of the prompt, or of prompt and output; None: all tokens.
    """

    num_prompt_tokens: int = 0
    output_every: int = 0
    """Output tokens at multiples of this position are wanted, too; 0: only ``positions``."""

    def checked_positions(self, num_tokens: int) -> Sequence[int]:
        return super().checked_positions(num_tokens if self.output_every else sys.maxsize)

    @property
    def _first_multiple(self) -> int:
        return -(-self.num_prompt_tokens // self.output_every)

    def rank(self, position: int) -> int:
        rank = super().rank(position)
        if self.output_every and self.positions is not None:
            rank += max(0, -(-position // self.output_every) - self._first_multiple)
        return rank

    def position_at(self, rank: int) -> int:
        if not self.output_every or self.positions is None or rank < len(self.positions):
            return super().position_at(rank)
        return (self._first_multiple + rank - len(self.positions)) * self.output_every


class EngineCoreRequest(msgspec.Struct, kw_only=True):
    """A checked request: token ids and settings, no text."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the output unless ``ignore_eos`` (tokenizer and generation config)."""
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    prompt_embeds: bytes | None = None
    """[tokens, hidden] in the model's dtype, if the prompt came as embeddings. Its ids are
    ``NO_TOKEN`` then, and the salt identifies its content."""
    extraction: ExtractionSpec | GenerationSpec | None = None
    lora_request: LoRARequest | None = None


class EngineCoreOutput(msgspec.Struct, kw_only=True):
    """Results of one step for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: LogprobsLists | None = None
    """One row for each new token."""
    new_prompt_logprobs: LogprobsLists | None = None
    """Rows for prompt positions 1 .. n-1 that this step computed, in order."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string; the message when ``finish_reason`` is ERROR."""
    failure: Failure | None = None
    """Set when ``finish_reason`` is ERROR, or the step was interrupted."""
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    num_restarts: int = 0
    """In the last output: see :class:`vllm.outputs.CompletionOutput`."""
    first_scheduled_time: float | None = None
    """Unix time, seconds; None: it never left the queue."""
    extracted: ExtractedRows | None = None
    """Set in the last output of a request that asked for rows, and in those before it that bring
    parts of them."""

    def end(
        self, reason: FinishReason, stop_reason: int | str | None, failure: Failure | None = None
    ) -> None:
        """Make this the last output of its request."""
        self.finish_reason = reason
        self.stop_reason = stop_reason if failure is None else failure.message
        self.failure = failure

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct):
    """All results of one step."""

    outputs: list[EngineCoreOutput] = []
    kv_connector_stats: list[Any] = []
    """Stats of the connector, as objects of its own classes."""
    kv_cache_events: list[Any] = []
    """Events about cached blocks (``vllm.distributed.kv_events``)."""

    def add(self, other: EngineCoreOutputs) -> None:
        """Append the results of a later step."""
        self.outputs += other.outputs
        self.kv_connector_stats += other.kv_connector_stats
        self.kv_cache_events += other.kv_cache_events

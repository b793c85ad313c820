"""A request as the scheduler sees it: tokens, progress, status."""

from __future__ import annotations

import enum
from copy import deepcopy
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.steering import PARTS
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Status of a request; every one from FINISHED_STOPPED on is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    WAITING_FOR_REMOTE_KVS = 3
    """A connector loads the request's first tokens in the background."""
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status >= FIRST_FINAL


# Every step compares the status of each request with these, and Python 3.11 is slow to find the
# members of an enum.
RUNNING = RequestStatus.RUNNING
FIRST_FINAL = RequestStatus.FINISHED_STOPPED

FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class Ending(NamedTuple):
    """The end of a request whose last rows are still to be computed."""

    reason: FinishReason
    stop_reason: int | str | None
    output: EngineCoreOutput | None
    """The output with the last tokens, if it was not handed out."""


class Request:
    """Mutable state of one request; the scheduler is its only writer.

    Defaults of what few requests change belong to the class: instances with more than 30
    attributes do not share their keys, take five times the memory, and are slower to read.
    """

    pending_stop: int | str | None = None
    """A stop that the front end found while the request was being computed again."""
    computes_all = False
    """True if a load for the request failed: it does not load again."""
    void_steps = 0
    """Results of steps up to this number are dropped: they used a load that failed."""
    is_computed_from_forgotten = False
    """True if its blocks hold content that a reset of the prefix cache has forgotten."""
    num_preemptions = 0
    num_restarts = 0
    """Times that it began again because weights may have changed."""
    is_long = False
    """True if longer than longrope's limit: all its tokens get the factors for long ones."""
    is_steered_by_part = False
    """True if tokens of the prompt are steered with other vectors than generated ones."""
    num_captured_tokens = 0
    """Tokens computed before a preemption: the caller has their rows already."""

    def __init__(self, message: EngineCoreRequest) -> None:
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.sampling_params: SamplingParams = message.sampling_params
        if any(one.positions in PARTS for one in self.sampling_params.steering_specs):
            self.is_steered_by_part = True
        self.eos_token_ids = message.eos_token_ids
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.arrival_order = 0
        """Order among requests of one rank; set by the queue."""
        extra = message.sampling_params.extra_args or {}
        try:
            params: dict[str, Any] | None = deepcopy(extra.get("kv_transfer_params"))
        except RecursionError:
            raise ValueError(
                "kv_transfer_params: lists and dicts in it are nested too deeply to be copied"
            ) from None
        self.kv_transfer_params = params
        """The request's own copy, since connectors write into it; settings may be shared."""
        self.cache_salt = message.cache_salt
        self.prompt_embeds = message.prompt_embeds

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_tokens = message.sampling_params.max_tokens
        self.all_token_ids: list[int] = list(message.prompt_token_ids)
        """Prompt, then output."""
        self.num_computed_tokens = 0
        """Tokens of steps that were scheduled, whether they have ended or not."""
        self.num_finished_tokens = 0
        """Tokens of steps that have ended."""
        self.num_counted_tokens = 0
        """Prompt tokens that are counted in the engine's totals."""
        self.num_tokens_in_flight = 0
        """Output tokens of steps that have not ended: they exist, but are not known here."""
        self.num_cached_tokens = -1
        """Tokens found in the prefix cache, or loaded, when first scheduled; -1 before then."""
        self.first_scheduled_time: float | None = None
        """Unix time, seconds."""
        self.prefix_hashes: list[bytes] = []
        """Hashes of the first 16, 32, ... tokens (vllm.v1.core.prefix_hash)."""
        self.num_layers_to_run: int | None = None
        """Decoder layers that this request needs; None: all, and logits."""
        self.extraction = message.extraction
        self.generates_rows = self.extraction is not None and self.max_tokens != 0
        """True if the caller gets rows of output tokens, too."""
        self.ending: Ending | None = None
        """Set once the request generates nothing more; it ends when it has its rows."""

    @property
    def block_hashes(self) -> list[bytes]:
        """Upstream's name for :attr:`prefix_hashes`: one per 16 tokens, for any size of block.
        Complete up to the known tokens whenever a hook of a connector is called."""
        return self.prefix_hashes

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def next_row_position(self) -> int | None:
        """The first position whose row has yet to be computed; None when there is none."""
        if self.extraction is None:
            return None
        return self.extraction.next_position(self.num_captured_tokens)

    def lacks_rows(self, *, all_again: bool) -> bool:
        """Return whether rows of known tokens have yet to be computed, of a request that generates.

        all_again: rows that were computed do not count. Valid once the request's steps have ended.
        """
        if not self.generates_rows or self.extraction is None:
            return False
        done = 0 if all_again else max(self.num_finished_tokens, self.num_captured_tokens)
        position = self.extraction.next_position(done)
        return position is not None and position < self.num_tokens

    def num_cells(self, num_tokens: int) -> int:
        """Count the hidden states, one per token and layer, that the caller gets of next tokens."""
        if self.extraction is None:
            return 0
        start = self.num_computed_tokens
        num_rows = self.extraction.num_rows(start, start + num_tokens)
        return num_rows * self.extraction.cells_per_row

    def is_finished(self) -> bool:
        return self.status >= FIRST_FINAL

    def become_long(self) -> None:
        """Switch to the rotations for long sequences, and to other prefix hashes."""
        self.is_long = True
        self.prefix_hashes = []

    def count_prompt(self) -> int:
        """Prompt tokens that were finished since the last call. Tokens that are computed again
        are counted once."""
        new = min(self.num_finished_tokens, self.num_prompt_tokens) - self.num_counted_tokens
        if new <= 0:
            return 0
        self.num_counted_tokens += new
        return new

    def start_again(self) -> None:
        """Drop what was computed since a failed load: the request restarts without loading."""
        self.status = RequestStatus.PREEMPTED
        self.computes_all = True
        self.num_computed_tokens = self.num_finished_tokens = 0
        self.num_tokens_in_flight = 0
        self.num_cached_tokens = -1
        self.num_captured_tokens = 0  # the workers drop the caller's rows, too

    def append_output_token_ids(self, token_ids: list[int]) -> None:
        self.all_token_ids.extend(token_ids)

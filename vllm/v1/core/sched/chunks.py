"""The number of tokens of a request that a step computes, and the end of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.engine import ExtractionSpec, FinishReason
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig

_LENGTH = FinishReason.LENGTH  # Python 3.11 is slow to find the members of an enum


@dataclass(frozen=True)
class ChunkRules:
    """Limits on the tokens of one request, in one step and in total."""

    config: SchedulerConfig
    max_model_len: int
    alignment: int
    """Chunks end at multiples of this, for recurrent kernels that work in chunks."""
    max_step_cells: int
    """The most hidden states that a step hands to callers, one per token and layer."""
    host_sees_tokens: bool
    """True if something on the host, a connector, has to see every token before the next step."""
    blocks_are_read_at_end: bool
    """True if every block of a request may be read after it has ended."""
    longrope_limit: int | None = None
    """Tokens of the longest sequence that is rotated by the factors for short ones."""

    def has_outgrown(self, request: Request) -> bool:
        """Return whether a request has become too long for the rotation of its tokens."""
        limit = self.longrope_limit
        return limit is not None and not request.is_long and request.num_tokens > limit

    def check_rows_fit(self, request: Request, spec: ExtractionSpec) -> None:
        """Check that the smallest chunk's rows fit a step: the request would else wait forever."""
        most_tokens = request.num_prompt_tokens + (request.max_tokens or 0)
        num_rows = min(spec.num_rows(0, most_tokens), self.alignment)
        most_cells = self.max_step_cells // max(1, num_rows)
        if spec.cells_per_row > most_cells:
            hooks = f" and hooks {len(spec.hooks)}, as large as {spec.cells_per_row} layers"
            raise ValueError(
                f"layers names {len(spec.layer_ids)} layers{hooks if spec.hooks else ''}, but a "
                f"step hands out at most {most_cells} of {num_rows} tokens: name fewer, or raise "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens}"
            )

    def num_tokens_now(self, request: Request, computed: int, step: StepPlan) -> int:
        """Tokens of the request to compute in this step; 0 when it has to wait for budget."""
        remaining = len(request.all_token_ids) - computed
        if request.num_tokens_in_flight and self.goes_on_without_knowing(request):
            remaining += request.num_tokens_in_flight
        if self.longrope_limit is not None and not request.is_long:
            remaining = min(remaining, self.longrope_limit - computed)
        count = remaining
        if self.config.long_prefill_token_threshold > 0:
            count = min(count, self.config.long_prefill_token_threshold)
        if request.extraction is not None:
            num_rows = step.cell_budget // request.extraction.cells_per_row
            count = min(count, request.extraction.end_of_rows(computed, num_rows) - computed)
        if count > step.token_budget:
            if not self.config.enable_chunked_prefill:
                return 0
            count = step.token_budget
        if count < remaining:
            aligned_end = (computed + count) // self.alignment * self.alignment
            count = max(0, aligned_end - computed)
        return count

    def goes_on_without_knowing(self, request: Request) -> bool:
        """Return whether the worker may feed the token that it is sampling to the model at once.

        It may not when something on the host has to see the token first: a connector, or
        settings of the request that look back at its output. This is the one place where a
        request waits for the device. It may not when the token is certain to be the last,
        either. A stop that could not be foreseen costs one token, computed for nothing.
        """
        in_flight = request.num_tokens_in_flight
        if not in_flight or self.host_sees_tokens or request.ending is not None:
            return False
        if request.sampling_params.looks_back:
            return False
        is_last = request.max_tokens is not None and (
            request.num_output_tokens + in_flight >= request.max_tokens
        )
        return not is_last and request.num_tokens + in_flight < self.max_model_len

    def ends_with_what_is_planned(self, request: Request) -> bool:
        """Return whether the state after the request's last planned token is not needed."""
        if self.blocks_are_read_at_end:
            return False
        if request.generates_rows:  # the row of its last token takes another step
            return request.ending is not None
        num_output_tokens = request.num_output_tokens + request.num_tokens_in_flight
        return request.max_tokens is not None and num_output_tokens >= request.max_tokens

    def why_stop(self, request: Request) -> tuple[FinishReason | None, int | str | None]:
        """Return why the last token ends the request (None: it goes on), and the stop token id.

        A stop string that the front end found ends the request with the next token.
        """
        params = request.sampling_params
        if request.pending_stop is not None:
            return FinishReason.STOP, request.pending_stop
        if request.max_tokens == 0:
            is_done = request.num_finished_tokens >= request.num_prompt_tokens
            return (_LENGTH if is_done else None), None
        if request.num_output_tokens == 0:
            return None, None
        if request.num_output_tokens >= params.min_tokens:
            last = request.all_token_ids[-1]
            if not params.ignore_eos and last in request.eos_token_ids:
                return FinishReason.STOP, None
            if params.stop_token_ids and last in params.stop_token_ids:
                return FinishReason.STOP, last
        is_full = request.num_tokens >= self.max_model_len
        if is_full or (
            request.max_tokens is not None and request.num_output_tokens >= request.max_tokens
        ):
            return _LENGTH, None
        return None, None

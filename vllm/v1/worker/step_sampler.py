"""Sampling of tokens from a step's hidden states; some tokens only the device knows yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm.distributed.parallel_state import get_stage_group
from vllm.exceptions import Failure, FailureKind
from vllm.forward_context import only_rows
from vllm.utils.transfers import to_device
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.sample.logprobs import PendingLogprobs, gather_logprobs
from vllm.v1.sample.metadata import SamplerRow, SamplingMetadata
from vllm.v1.sample.sampler import PendingSample, Sampler
from vllm.v1.worker.input_batch import RequestState, StepBatch
from vllm.v1.worker.pipeline import Pipeline

PROMPT_LOGITS_ROWS = 256
"""Positions whose logits exist at once while prompt log-probabilities are computed."""
UNKNOWN_TOKEN = -1
"""Placeholder in a request's tokens for one that is sampled but not on the host yet."""


class SampledTokens:
    """Tokens that were chosen in a step, still on the device, and log-probabilities."""

    def __init__(
        self,
        states: list[RequestState],
        sampled: PendingSample | None,
        prompt_logprobs: list[tuple[str, PendingLogprobs]],
        *,
        fails_for_logits: bool,
    ) -> None:
        """``sampled``: one row for each of ``states``; None: there are none."""
        self._states = states
        self._fails_for_logits = fails_for_logits
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._row_of = {state.req_id: row for row, state in enumerate(states)}
        self._places = [state.tokens.length for state in states]
        for state in states:
            state.tokens.extend([UNKNOWN_TOKEN])

    def fill_in(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """Put the tokens where they are the last ones of the next step's requests."""
        places = np.flatnonzero(batch.token_ids == UNKNOWN_TOKEN)
        if len(places):
            assert self._sampled is not None
            states = [batch.states[index] for index in batch.request_of_token[places]]
            rows = to_device(
                np.array([self._row_of[state.req_id] for state in states]), token_ids.device
            )
            token_ids[to_device(places, token_ids.device)] = self._sampled.token_ids[rows]

    def after(self, batch: StepBatch) -> torch.Tensor:
        """Return the token sampled after each of the batch's tokens, int64 [tokens], -1: none."""
        after = torch.full((batch.num_tokens,), -1)
        if self._sampled is None:
            return after
        ends = zip(batch.states, batch.query_start[1:] - 1, strict=True)
        places = np.array([end for state, end in ends if state.req_id in self._row_of])
        after = after.to(self._sampled.token_ids.device)
        after[to_device(places, after.device)] = self._sampled.token_ids
        return after

    def read(self, output: ModelRunnerOutput) -> None:
        """Wait for the tokens, and put them in their places on the host."""
        for req_id, pending in self._prompt_logprobs:
            part = pending.result()
            so_far = output.prompt_logprobs.setdefault(req_id, LogprobsLists([], [], []))
            so_far.token_ids += part.token_ids
            so_far.logprobs += part.logprobs
            so_far.ranks += part.ranks
        if self._sampled is None:
            return
        token_ids, logprobs, is_finite = self._sampled.result()
        for row, (state, place) in enumerate(zip(self._states, self._places, strict=True)):
            token_id, lists = token_ids[row], logprobs[row]
            if place < state.tokens.length:  # otherwise the request restarts without it
                state.tokens.values[place] = token_id
            output.sampled_token_ids[state.req_id] = [token_id]
            if not is_finite[row] and self._fails_for_logits:
                output.failures[state.req_id] = Failure(
                    FailureKind.LOGITS_NOT_FINITE, f"logits of token {place - 1} are not finite"
                )
            if lists is not None:
                output.logprobs[state.req_id] = lists


class StepSampler:
    """Chooses the next tokens of a step's requests, without waiting for the device.

    ``compute_logits``: [rows, hidden] -> [rows, vocabulary]. fails_for_logits: a request fails
    for logits that are not finite. False: all requests have rows elsewhere, whose
    failure says more. reports_processed: log-probabilities come after temperature and cuts.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        fails_for_logits: bool,
        reports_processed: bool = False,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._compute_logits = compute_logits
        self._reports_processed = reports_processed
        self._fails_for_logits = fails_for_logits
        self._device = device
        self._sampler = Sampler(reports_processed=reports_processed)
        self._last: SampledTokens | None = None

    def fill_in(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """Put tokens of the last step that only the device knows into ``token_ids`` [tokens]."""
        if self._last is not None:
            self._last.fill_in(batch, token_ids)

    def sample(self, batch: StepBatch, hidden: torch.Tensor) -> SampledTokens:
        """Sample for every request whose last token is in the batch."""
        self._last = None
        has_head = self._pipeline is None or self._pipeline.stage.is_last
        prompt_logprobs = self._prompt_logprobs(batch, hidden) if has_head else []
        ends = (batch.num_computed + batch.num_scheduled).tolist()
        chosen = [
            row
            for row, state in enumerate(batch.states)
            if ends[row] == state.tokens.length and state.sampling_params.max_tokens != 0
        ]
        sampled, states = None, [batch.states[row] for row in chosen]
        if chosen and not has_head:
            assert self._pipeline is not None
            sampled = PendingSample.of_tokens(self._pipeline.sampled_elsewhere())
        elif chosen:
            rows: torch.Tensor | slice = slice(None)
            if len(chosen) < batch.num_tokens:
                rows = to_device(batch.query_start[1:][chosen] - 1, self._device)
            with only_rows(rows):
                logits = self._compute_logits(hidden[rows])
            sampled = self._choose(states, logits)
            if self._pipeline is not None:
                self._pipeline.hand_out_tokens(sampled.token_ids)
        self._last = SampledTokens(
            states, sampled, prompt_logprobs, fails_for_logits=self._fails_for_logits
        )
        return self._last

    def _choose(self, states: list[RequestState], logits: torch.Tensor) -> PendingSample:
        """Sample on the first rank; the others get its tokens."""
        ranks = get_stage_group()
        if not ranks.is_first_rank:
            return PendingSample.of_tokens(
                ranks.broadcast(logits.new_empty(len(states), dtype=torch.int64))
            )
        if all(state.takes_most_likely for state in states):
            sampled = self._sampler.most_likely(logits)
        else:
            rows = [self._sampler_row(state) for state in states]
            sampled = self._sampler(logits, SamplingMetadata.from_rows(rows))
        ranks.broadcast(sampled.token_ids)
        return sampled

    @staticmethod
    def _sampler_row(state: RequestState) -> SamplerRow:
        tokens, params = state.tokens.values, state.sampling_params
        assert not params.looks_back or tokens[-1] != UNKNOWN_TOKEN, "the scheduler has to wait"
        return SamplerRow(
            params,
            # The tokens of a prompt given as embeddings are not known.
            tokens[: 0 if state.prompt_embeds is not None else state.num_prompt_tokens],
            tokens[state.num_prompt_tokens :],
            state.edits,
            state.generator,
        )

    def _prompt_logprobs(
        self, batch: StepBatch, hidden: torch.Tensor
    ) -> list[tuple[str, PendingLogprobs]]:
        """Compute prompt log-probabilities of each request that wants them, in pieces in order."""
        pending = []
        for row, state in enumerate(batch.states):
            count = state.sampling_params.prompt_logprobs
            if count is None:
                continue
            computed = int(batch.num_computed[row])
            first = int(batch.query_start[row])
            # The row of position p predicts the token at p + 1. What was reported before a
            # preemption is not reported again.
            end = min(computed + int(batch.num_scheduled[row]), state.num_prompt_tokens - 1)
            for start in range(max(computed, state.num_prompt_logprobs), end, PROMPT_LOGITS_ROWS):
                stop = min(start + PROMPT_LOGITS_ROWS, end)
                offset = first - computed
                part = slice(offset + start, offset + stop)
                with only_rows(part):
                    logits = self._compute_logits(hidden[part])
                if self._reports_processed and not state.sampling_params.is_greedy:
                    logits = logits.float() / state.sampling_params.temperature
                targets = to_device(state.tokens.values[start + 1 : stop + 1], self._device)
                pending.append((state.req_id, gather_logprobs(logits, targets, count)))
            state.num_prompt_logprobs = max(end, state.num_prompt_logprobs)
        return pending

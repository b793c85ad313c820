"""From the hidden states of a step to tokens, some of which only the device knows yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logprobs import compute_prompt_logprobs
from vllm.v1.sample.metadata import SamplerRow, SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.input_batch import RequestState, StepBatch

PROMPT_LOGITS_ROWS = 256
"""Positions whose logits exist at once while prompt log-probabilities are computed."""
UNKNOWN_TOKEN = -1
"""Stands in a request's tokens for one that is sampled but not on the host yet."""


class SampledTokens:
    """Tokens that were chosen in a step and are still on the device."""

    def __init__(self, states: list[RequestState], token_ids: torch.Tensor) -> None:
        self._states = states
        self._token_ids = token_ids  # [requests]
        self._host = HostCopy(token_ids)
        self._row_of = {state.req_id: row for row, state in enumerate(states)}
        self._places = [state.tokens.length for state in states]
        for state in states:
            state.tokens.extend([UNKNOWN_TOKEN])

    def fill_in(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """Put them where they are the last tokens of the next step's requests."""
        places = np.flatnonzero(batch.token_ids == UNKNOWN_TOKEN)
        if len(places):
            states = [batch.states[index] for index in batch.request_of_token[places]]
            rows = np.array([self._row_of[state.req_id] for state in states])
            device = token_ids.device
            token_ids[to_device(places, device)] = self._token_ids[to_device(rows, device)]

    def read(self, output: ModelRunnerOutput) -> None:
        """Wait for them; they take their places on the host."""
        token_ids: list[int] = self._host.result().tolist()
        for state, place, token_id in zip(self._states, self._places, token_ids, strict=True):
            state.tokens.values[place] = token_id
            output.sampled_token_ids[state.req_id] = [token_id]


class StepSampler:
    """Chooses the next tokens of a step's requests.

    ``compute_logits``: [rows, hidden] -> [rows, vocabulary]. ``runs_ahead``: the next step is
    started before the tokens of this one are on the host.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        runs_ahead: bool,
    ) -> None:
        self._compute_logits = compute_logits
        self._device = device
        self._runs_ahead = runs_ahead
        self._sampler = Sampler()
        self._last: SampledTokens | None = None

    def fill_in(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """Put tokens of the last step that only the device knows into ``token_ids`` [tokens]."""
        if self._last is not None:
            self._last.fill_in(batch, token_ids)

    def sample(
        self, batch: StepBatch, hidden: torch.Tensor, output: ModelRunnerOutput
    ) -> SampledTokens | None:
        """Sample for every request whose last token is in the batch.

        Returns what is not known on the host yet: with async scheduling, when nobody has to
        see the tokens before the model does.
        """
        self._last = None
        self._prompt_logprobs(batch, hidden, output)
        ends = batch.num_computed + batch.num_scheduled
        chosen = [
            row
            for row, state in enumerate(batch.states)
            if ends[row] == state.tokens.length and state.sampling_params.max_tokens != 0
        ]
        if not chosen:
            return None
        last_tokens = to_device(batch.query_start[1:][chosen] - 1, self._device)
        logits = self._compute_logits(hidden[last_tokens])
        states = [batch.states[row] for row in chosen]
        if self._runs_ahead and all(s.sampling_params.is_plain_greedy for s in states):
            self._last = SampledTokens(states, logits.argmax(dim=-1))
            return self._last
        rows = [self._sampler_row(state) for state in states]
        sampled = self._sampler(logits, SamplingMetadata.from_rows(rows, logits.device))
        for row, state in enumerate(states):
            token_ids = [sampled.sampled_token_ids[row]]
            state.tokens.extend(token_ids)
            output.sampled_token_ids[state.req_id] = token_ids
            logprobs = sampled.logprobs[row]
            if logprobs is not None:
                output.logprobs[state.req_id] = logprobs
        return None

    @staticmethod
    def _sampler_row(state: RequestState) -> SamplerRow:
        tokens = state.tokens.values
        return SamplerRow(
            state.sampling_params,
            tokens[: state.num_prompt_tokens],
            tokens[state.num_prompt_tokens :],
            state.generator,
        )

    def _prompt_logprobs(
        self, batch: StepBatch, hidden: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
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
                logits = self._compute_logits(hidden[offset + start : offset + stop])
                targets = torch.from_numpy(state.tokens.values[start + 1 : stop + 1])
                part = compute_prompt_logprobs(logits, targets.to(self._device), count)
                so_far = output.prompt_logprobs.get(state.req_id)
                if so_far is None:
                    output.prompt_logprobs[state.req_id] = part
                else:
                    so_far.token_ids += part.token_ids
                    so_far.logprobs += part.logprobs
                    so_far.ranks += part.ranks
            state.num_prompt_logprobs = max(end, state.num_prompt_logprobs)

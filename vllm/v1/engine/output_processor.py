"""Turns the engine core's outputs into those that the user gets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.exceptions import FailureKind
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.steering import lens
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.logprobs import RequestLogprobs

logger = init_logger(__name__)


@dataclass(frozen=True)
class ProcessedOutputs:
    """Outputs for the user, and requests that have ended without the core knowing it."""

    request_outputs: list[RequestOutput]
    request_ids: list[str]
    """The engine's own id of each output's request, since users may use an id again."""
    reqs_to_finish: dict[str, str]
    """Request id -> the stop string that was found in its text."""


@dataclass
class _UserRequest:
    """One request as the user made it."""

    external_id: str
    request: EngineCoreRequest
    prompt: str | None
    metrics: RequestMetrics
    num_unfinished: int
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    completions: dict[int, CompletionOutput] = field(default_factory=dict)
    """Finished ones, kept until all are finished if the user wants a single output."""

    @property
    def is_of_lens(self) -> bool:
        """True if the user gets rows as vllm-lens returns them."""
        return lens.ROWS in (self.request.sampling_params.extra_args or {})


class _Completion:
    """One continuation: a request of the core, with the text it has so far."""

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        user_request: _UserRequest,
        tokenizer: TokenizerLike | None,
    ) -> None:
        params = request.sampling_params
        self.index = index
        self.user_request = user_request
        self.detokenizer = Detokenizer.for_request(tokenizer, params, request.prompt_token_ids)
        self.logprobs = RequestLogprobs(params, tokenizer)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last: EngineCoreOutput | None = None
        """The core's last output, once the request has ended."""
        self._num_tokens_sent = 0

    def take(self, output: EngineCoreOutput) -> str | None:
        """Add the tokens of one step; returns the stop string if they complete one."""
        self.logprobs.add_prompt(output.new_prompt_logprobs)
        stop = None
        if self.detokenizer.stop is None:
            before = len(self.detokenizer.token_ids)
            ended_by_token = output.finish_reason is FinishReason.STOP
            stop = self.detokenizer.update(output.new_token_ids, ended_by_token)
            num_added = len(self.detokenizer.token_ids) - before
            self.logprobs.add_samples(output.new_logprobs, num_added)
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason)
        return stop

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        self.detokenizer.finish()
        self.last, self.finish_reason, self.stop_reason = output, str(reason), output.stop_reason
        ended_as_asked = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self.detokenizer.stop is not None and ended_as_asked:
            self.finish_reason = str(FinishReason.STOP)
            self.stop_reason = self.detokenizer.stop

    def make_output(self, kind: RequestOutputKind) -> CompletionOutput:
        is_delta = kind is RequestOutputKind.DELTA
        start = self._num_tokens_sent if is_delta else 0
        token_ids = self.detokenizer.token_ids
        self._num_tokens_sent = len(token_ids)
        samples = self.logprobs.samples
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.take_text(is_delta),
            token_ids=token_ids[start:],
            cumulative_logprob=self.logprobs.cumulative,
            logprobs=samples if samples is None else samples[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            failure=None if self.last is None else self.last.failure,
            kv_transfer_params=None if self.last is None else self.last.kv_transfer_params,
            extracted=None if self.last is None else self.last.extracted,
            num_restarts=0 if self.last is None else self.last.num_restarts,
        )


class OutputProcessor:
    """Keeps the state of every request that has not ended."""

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._tokenizer = tokenizer
        self._completions: dict[str, _Completion] = {}

    def add_request(self, processed: ProcessedInput) -> list[EngineCoreRequest]:
        """Expect the outputs of a user's request; returns the core's requests for it."""
        children = fan_out(processed.request)
        metrics = RequestMetrics(arrival_time=processed.request.arrival_time)
        user_request = _UserRequest(*processed, metrics, len(children))
        for index, child in enumerate(children):
            completion = _Completion(child, index, user_request, self._tokenizer)
            self._completions[child.request_id] = completion
        return children

    def has_unfinished_requests(self) -> bool:
        return bool(self._completions)

    def get_num_unfinished_requests(self) -> int:
        """Number of the user's requests that have not ended."""
        return len({id(completion.user_request) for completion in self._completions.values()})

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests (the user's ids or internal ones); returns the core's ids for them."""
        core_ids = self.find_core_ids(request_ids)
        for core_id in core_ids:
            self._count_ended(self._completions.pop(core_id).user_request)
        return core_ids

    def find_core_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Map the user's ids or internal ones to the core's ids of requests that have not ended."""
        ids = set(request_ids)
        found = []
        for core_id, completion in self._completions.items():
            user = completion.user_request
            if not ids.isdisjoint((core_id, user.request.request_id, user.external_id)):
                found.append(core_id)
        return found

    def user_request_id(self, core_id: str) -> str | None:
        """Return the engine's id of the user's request to which a request of the core belongs."""
        completion = self._completions.get(core_id)
        return completion.user_request.request.request_id if completion is not None else None

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Take in one step's outputs; those of requests that are no longer known are dropped."""
        processed = ProcessedOutputs([], [], {})
        for output in outputs:
            completion = self._completions.get(output.request_id)
            if completion is None:
                continue
            stop = completion.take(output)
            self._note_progress(completion, output)
            if output.finished:
                del self._completions[output.request_id]
                self._count_ended(completion.user_request)
                if output.failure is not None and output.failure.kind is not FailureKind.ABORTED:
                    request_id = completion.user_request.request.request_id
                    logger.error("Request %s failed: %s", request_id, output.failure)
            elif stop is not None:
                # The core ends the request and reports it once more; that output is the last.
                processed.reqs_to_finish[output.request_id] = stop
                continue
            elif output.extracted is not None:
                part = CompletionOutput(completion.index, "", [], None, None, None)
                part.extracted = output.extracted
                processed.request_outputs.append(self._request_output(completion, [part]))
                processed.request_ids.append(completion.user_request.request.request_id)
                continue
            elif not output.new_token_ids:
                continue
            request_output = self._make_output(completion)
            if request_output is not None:
                processed.request_outputs.append(request_output)
                processed.request_ids.append(completion.user_request.request.request_id)
        return processed

    def _note_progress(self, completion: _Completion, output: EngineCoreOutput) -> None:
        user_request = completion.user_request
        times = user_request.metrics
        times.first_scheduled_time = times.first_scheduled_time or output.first_scheduled_time
        if output.new_token_ids:
            now = time.time()
            times.first_token_time = times.first_token_time or now
            times.last_token_time = now
        if completion.index == 0:
            user_request.num_cached_tokens = output.num_cached_tokens

    def _count_ended(self, user_request: _UserRequest) -> None:
        user_request.num_unfinished -= 1
        if user_request.num_unfinished == 0:
            user_request.metrics.finished_time = time.time()

    def _make_output(self, completion: _Completion) -> RequestOutput | None:
        """Make the user's output of this step; None when the requested kind has none now."""
        user_request = completion.user_request
        kind = user_request.request.sampling_params.output_kind
        if kind is not RequestOutputKind.FINAL_ONLY:
            return self._request_output(completion, [completion.make_output(kind)])
        if completion.finish_reason is None:
            return None
        user_request.completions[completion.index] = completion.make_output(kind)
        if user_request.num_unfinished:
            return None
        outputs = [user_request.completions[index] for index in sorted(user_request.completions)]
        return self._request_output(completion, outputs)

    def _request_output(
        self, completion: _Completion, outputs: list[CompletionOutput]
    ) -> RequestOutput:
        user_request = completion.user_request
        for output in outputs:
            if output.index == 0:
                user_request.kv_transfer_params = output.kv_transfer_params
        activations = None
        extracted = outputs[0].extracted
        if extracted is not None and user_request.is_of_lens:
            outputs[0].extracted = None
            prompt = user_request.request.prompt_token_ids
            num_rows = len(prompt) + len(completion.detokenizer.token_ids) - 1
            rows = extracted.hidden_states[:num_rows].transpose(0, 1).contiguous()
            activations = {"residual_stream": rows}
        prompt_logprobs = completion.logprobs.prompt
        if user_request.request.sampling_params.output_kind is RequestOutputKind.DELTA:
            completion.logprobs.prompt = None
        return RequestOutput(
            request_id=user_request.external_id,
            prompt=user_request.prompt,
            prompt_token_ids=user_request.request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=user_request.num_unfinished == 0,
            metrics=user_request.metrics,
            lora_request=user_request.request.lora_request,
            num_cached_tokens=user_request.num_cached_tokens,
            kv_transfer_params=user_request.kv_transfer_params,
            activations=activations,
        )


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Make the core's requests for the ``n`` continuations of a prompt, with ids ``<k>_<id>``.

    For n = 1 this is the request itself. Child k of a seeded request has the seed plus k, so
    that each is reproducible and no two are equal.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    children = []
    for index in range(params.n):
        own = params.copy()
        own.n = 1
        if params.seed is not None:
            own.seed = (params.seed + index) % 2**64
        request_id = f"{index}_{request.request_id}"
        children.append(
            msgspec.structs.replace(request, request_id=request_id, sampling_params=own)
        )
    return children

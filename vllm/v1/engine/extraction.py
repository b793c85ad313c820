"""The layer between the caller of ``extract()`` and the engine: prompts in, samples out.

A bounded number of prompts is under way at any time: samples do not pile up for a slow
consumer, and the engine stands still when it has nothing left to do.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch

from vllm.exceptions import Failure, FailureKind, NotReadyError
from vllm.hidden_states.layer_ids import Layers, layer_items, resolve_layer_ids
from vllm.hidden_states.positions import as_mask, resolve_positions
from vllm.hidden_states.sample import (
    ExtractRequest,
    FailedSample,
    HiddenStatesError,
    HiddenStatesSample,
    in_dtype,
    mean_of_rows,
)
from vllm.inputs import PromptType, as_record, is_conversation, is_token_sequence
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.steering import steering_specs
from vllm.transformers_utils.answer_masks import parse_mask_rule
from vllm.transformers_utils.answer_spans import render_masked
from vllm.transformers_utils.chat_template import ChatOptions, render_chat
from vllm.utils.boundaries import LayerId
from vllm.utils.mem_utils import format_bytes
from vllm.utils.text import brief, check_truth_values
from vllm.v1.engine import ExtractionSpec, GenerationSpec
from vllm.v1.engine.extraction_settings import (
    ExtractionSettings,
    check_logprobs,
    storage_dtype,
)
from vllm.v1.engine.generated_rows import RowsOfText
from vllm.v1.engine.input_processor import InputProcessor, ProcessedInput
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.activations import checked_hooks
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES, HiddenStates
from vllm.v1.rows.fields.layout import RowLayout, TensorForm
from vllm.v1.rows.fields.requested import requested_fields

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Item = HiddenStatesSample | FailedSample
STEPS_AHEAD = 4
"""Limit of the tokens under way, in steps of the engine."""


@dataclass(frozen=True)
class _Pending:
    """A prompt that the engine works on."""

    index: int
    token_ids: list[int]
    spec: ExtractionSpec
    order: torch.Tensor | None = None
    """int64 indices of the spec's rows that the sample has; None: all of them in their order."""
    loss_mask: torch.Tensor | None = None
    """bool, the mask at the token of each of the spec's rows; None: not known."""
    pooled_as: torch.dtype | None = None
    """Dtype of the mean of its rows, if that is wanted."""
    text: RowsOfText | None = None
    """Set if it generates; the order and the mask are known only at its end then."""


class Prepared(NamedTuple):
    """A prompt that was read: a request to run, or a result that needs none."""

    item: _Pending | Item
    processed: ProcessedInput | None = None


class RequestInParts(NamedTuple):
    """A request whose rows come step by step."""

    sample: HiddenStatesSample
    """Its tokens, positions and loss mask; no rows."""
    processed: ProcessedInput


def _check_own(options: ExtractRequest, allowed: frozenset[str]) -> None:
    for option, value in vars(options).items():
        if value is not None and option not in allowed | {"prompt"}:
            raise ValueError(f"ExtractRequest: {option}= has no place in this call; leave it out")


_resolve_layers = lru_cache(maxsize=256)(resolve_layer_ids)


class ExtractionFeed:
    """One call of ``extract()``: turns prompts into requests, and outputs into samples."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        processor: InputProcessor,
        prompts: Iterable[Any],
        settings: ExtractionSettings,
        chat_template: str | None = None,
    ) -> None:
        """``chat_template``: the one for conversations; None: the tokenizer's own."""
        self._chat_template = chat_template
        self._model_config = vllm_config.model_config
        self._num_layers = self._model_config.get_total_num_hidden_layers()
        scheduler = vllm_config.scheduler_config
        self._max_tokens = STEPS_AHEAD * scheduler.max_num_batched_tokens
        self._max_prompts = settings.max_in_flight or scheduler.max_num_seqs
        self._processor = processor
        self._settings = settings
        self.begins_together = settings.is_one_request
        """True if no prompt may begin before all were read."""
        self._num_restarts: int | None = None
        """``num_restarts`` of the first completion that ended; None before that."""
        if settings.pooling == "mean":
            self._model_config.check_means()
        if settings.layers is not None:
            self._layer_ids(settings.layers)  # raises for a mistake before anything runs
        self._prompts = _as_prompts(prompts)
        self.num_prompts = length_hint(self._prompts) or None
        """Number of prompts; None: unknown until they are read."""
        self._num_read = 0
        self._num_accepted = 0
        self._num_returned = 0
        self._num_tokens = 0  # of prompts under way
        self.num_bytes = 0
        """Bytes of all samples so far, or the most that they can be, if there is a limit."""
        self._pending: dict[str, _Pending] = {}
        self._num_ready = 0  # prompts whose items were put into _ready
        self._ready: deque[tuple[Item, bool]] = deque()
        """Items to hand out, each with whether it is the last of its prompt."""
        self._early: dict[int, list[Item]] = {}  # of prompts before their turn
        self.is_exhausted = False
        """True once all prompts were read."""

    @property
    def has_room(self) -> bool:
        """True if another prompt may be under way."""
        num_under_way = self._num_accepted - self._num_returned
        has_room = num_under_way < self._max_prompts and self._num_tokens < self._max_tokens
        return not self.is_exhausted and (has_room or num_under_way == 0)

    def prepare_next(self, request_id: str) -> Prepared | None:
        """Read and tokenise the next prompt; None when there is none.

        May run on another thread than the rest: only :meth:`accept` counts what is under way.
        """
        try:
            prompt = next(self._prompts)
        except StopIteration:
            self.is_exhausted = True
            return None
        return self.prepare(request_id, prompt)

    def prepare(self, request_id: str, prompt: Any) -> Prepared:
        """Do what :meth:`prepare_next` does, for a prompt that came in another way.

        A sample that exists already, or a failure, may take the place of a prompt.
        """
        index = self._num_read
        self._num_read += 1
        if isinstance(prompt, HiddenStatesSample | FailedSample):
            return Prepared(dataclasses.replace(prompt, index=index))
        try:
            return self._prepare(index, request_id, prompt)
        except ValueError as error:
            failure = Failure(FailureKind.BAD_REQUEST, str(error))
            return Prepared(FailedSample(index, request_id, failure))

    def accept(self, prepared: Prepared) -> ProcessedInput | None:
        """Return the request to hand to the engine; None when there is nothing to run.

        Raises ValueError for a prompt that cannot be served, unless failures are yielded.
        """
        item, processed = prepared
        if isinstance(item, FailedSample) and self._settings.on_error == "raise":
            raise ValueError(f"prompt {item.index}: {item.reason}")
        self._num_accepted += 1
        if isinstance(item, _Pending):
            assert processed is not None
            self._pending[processed.external_id] = item
            self._num_tokens += len(item.token_ids)
        else:
            self._deliver(item.index, [item])
        return processed

    def in_parts(self, prepared: Prepared) -> RequestInParts | None:
        """Return a request to run instead of the prepared one; None if its rows cannot come in
        parts, in their order. ValueError: it cannot be served."""
        item, processed = prepared
        if isinstance(item, FailedSample):
            raise ValueError(f"prompt {item.index}: {item.reason}")
        if not isinstance(item, _Pending) or processed is None:
            return None
        if item.order is not None or item.text is not None or item.pooled_as is not None:
            return None
        spec = msgspec.structs.replace(item.spec, in_parts=True)
        request = msgspec.structs.replace(processed.request, extraction=spec)
        none = ExtractedRows({})
        sample = self._sample_of(processed.external_id, item, none)
        return RequestInParts(sample, processed._replace(request=request))

    def _prepare(self, index: int, request_id: str, prompt: Any) -> Prepared:
        options = prompt if isinstance(prompt, ExtractRequest) else ExtractRequest(prompt)
        settings = self._settings
        if settings.own_options is not None:
            _check_own(options, settings.own_options)
        values = self._values(options)
        dtype = settings.dtype if options.dtype is None else options.dtype
        adds, params = options.add_special_tokens, options.sampling_params
        if adds is not None:
            check_truth_values(add_special_tokens=adds)
        params = settings.sampling_params if params is None else params
        steering = settings.steering if options.steering is None else options.steering
        prompt, mask_values = self._prompt(options, is_question=params is not None)
        processed = self._processor.process_extraction(
            request_id,
            prompt,
            settings.add_special_tokens if adds is None else adds,
            params,
            settings.truncate_prompt_tokens,
            settings.truncation_side,
            () if steering is None else steering_specs(steering),
            settings.priority,
            settings.lora_request if options.lora_request is None else options.lora_request,
        )
        token_ids = processed.request.prompt_token_ids
        positions = settings.positions if options.positions is None else options.positions
        if settings.most_tokens is not None and len(token_ids) > settings.most_tokens:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; this call takes {settings.most_tokens}"
                f"{settings.most_tokens_advice}"
            )
        if settings.choose_positions is not None:
            positions = settings.choose_positions(token_ids)
        mask = None
        if mask_values is not None:
            mask = torch.from_numpy(as_mask(mask_values, len(token_ids)))
        if params is not None:
            wanted = RowsOfText(positions, mask, settings.pooling)
            return self._prepare_text(index, processed, wanted, values, dtype)
        chosen = resolve_positions(positions, len(token_ids), mask)
        name, pooled_as = storage_dtype(dtype), None
        if settings.pooling == "last":
            chosen = [len(token_ids) - 1] if chosen is None else chosen[-1:]
        elif settings.pooling == "mean" and chosen != []:
            pooled_as = self._model_config.dtype if name is None else STORAGE_DTYPES[name]
            name = "float32"
        rows = None if chosen is None else sorted(set(chosen))
        # Only the model knows the form of activations, also of none.
        least = 0 if values["hooks"] else -1
        end = len(token_ids) if rows is None else [least, *rows][-1] + 1
        after = token_ids[end] if end < len(token_ids) else None
        spec = ExtractionSpec(positions=rows, storage_dtype=name, token_after=after, **values)
        self._check_bytes(spec, len(token_ids) if chosen is None else len(chosen))
        order = None if chosen == rows else torch.searchsorted(*map(torch.tensor, (rows, chosen)))
        if mask is not None:
            mask = None if settings.pooling != "none" else mask if rows is None else mask[rows]
        pending = _Pending(index, token_ids, spec, order, mask, pooled_as)
        if end == 0:
            return Prepared(self._sample(request_id, pending, None))
        # Tokens after the last wanted row do not affect it.
        embeds = processed.request.prompt_embeds
        if embeds is not None:
            embeds = embeds[: end * (len(embeds) // len(token_ids))]
        request = msgspec.structs.replace(
            processed.request,
            prompt_token_ids=token_ids[:end],
            prompt_embeds=embeds,
            extraction=spec,
        )
        request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        return Prepared(pending, processed._replace(request=request))

    def _prepare_text(
        self,
        index: int,
        processed: ProcessedInput,
        wanted: RowsOfText,
        values: dict[str, Any],
        dtype: str | torch.dtype | None,
    ) -> Prepared:
        """Prepare a request that generates."""
        token_ids = processed.request.prompt_token_ids
        max_tokens = processed.request.sampling_params.max_tokens
        assert max_tokens is not None
        rows, every = wanted.to_compute(len(token_ids), max_tokens)
        name, pooled_as = storage_dtype(dtype), None
        if wanted.pooling == "mean":
            pooled_as = self._model_config.dtype if name is None else STORAGE_DTYPES[name]
            name = "float32"
        spec = GenerationSpec(
            positions=rows,
            storage_dtype=name,
            **values,
            num_prompt_tokens=len(token_ids),
            output_every=every,
        )
        is_list = isinstance(wanted.positions, Sequence) and not isinstance(wanted.positions, str)
        listed = len(cast("Sequence[int]", wanted.positions)) if is_list else 0
        most = max(listed, spec.rank(len(token_ids) + max_tokens))
        self._check_bytes(spec, most * processed.request.sampling_params.n)
        request = msgspec.structs.replace(processed.request, extraction=spec)
        request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        pending = _Pending(index, token_ids, spec, pooled_as=pooled_as, text=wanted)
        return Prepared(pending, processed._replace(request=request))

    def _values(self, options: ExtractRequest) -> dict[str, Any]:
        """Return what is kept of each token of a request, as fields of its spec."""
        settings = self._settings
        layers = settings.layers if options.layers is None else options.layers
        hooks = checked_hooks(settings.hooks if options.hooks is None else options.hooks)
        if layers is None and not hooks:
            raise ValueError("no layers are named: give layers=, such as [2, 12, -1], or hooks=")
        count, temperature = options.top_logprobs, options.logprob_temperature
        count = settings.top_logprobs if count is None else count
        temperature = settings.logprob_temperature if temperature is None else temperature
        check_logprobs(count, temperature)
        # That of a call may be for those of its requests that ask for log-probabilities.
        is_own = options.logprob_temperature is not None or settings.is_one_request
        if is_own and temperature != 1.0 and not count:
            raise ValueError(
                f"logprob_temperature={temperature}: it has no effect without top_logprobs; set "
                "top_logprobs too, or leave it out"
            )
        if count > self._model_config.get_vocab_size():
            raise ValueError(
                f"top_logprobs={count}: the vocabulary has {self._model_config.get_vocab_size()} "
                "tokens; ask for fewer"
            )
        if count and settings.pooling == "mean":
            raise ValueError(
                f"top_logprobs={count} with pooling='mean': log-probabilities have no mean; use "
                "pooling='none' or 'last'"
            )
        return {
            "layer_ids": () if layers is None else self._layer_ids(layers),
            "hooks": hooks,
            "top_logprobs": int(count),
            "logprob_temperature": float(temperature),
        }

    def _check_bytes(self, spec: ExtractionSpec, num_rows: int) -> None:
        """Add the rows of a prompt to those of the call; ValueError if the limit is exceeded.

        Only the model knows the widths of hooks; they count as those of the stream.
        """
        limit, model = self._settings.byte_limit, self._model_config
        if limit is None:
            return
        row_bytes = sum(form.num_bytes for form in self._forms(spec).values())
        row_bytes += len(spec.hooks) * model.get_row_size() * model.dtype.itemsize
        self.num_bytes += num_rows * row_bytes
        if self.num_bytes > limit.num_bytes:
            raise ValueError(
                f"the rows take {format_bytes(self.num_bytes)} or more, and at most "
                f"{format_bytes(limit.num_bytes)} are allowed: {limit.advice}"
            )

    def _prompt(self, options: ExtractRequest, *, is_question: bool) -> tuple[PromptType, Any]:
        """Return the prompt, or for a conversation its rendered text as token ids, and the values
        of its mask (None: it has no mask)."""
        prompt, mask = options.prompt, options.mask
        if not is_conversation(prompt):
            if isinstance(mask, str):
                raise ValueError(
                    f"mask={brief(mask)}: only a conversation has answers; give a value for each "
                    "token"
                )
            return cast("PromptType", prompt), mask
        record = as_record(prompt)
        mask = self._settings.mask if mask is None else mask
        tokenizer = self._processor.need_tokenizer("messages go through a chat template")
        how: ChatOptions = {
            "chat_template": self._chat_template,
            "add_generation_prompt": is_question,
            "tools": record.get("tools"),
            "chat_template_kwargs": record.get("chat_template_kwargs"),
            "refuses_nulls": True,
        }
        values: Any = mask
        if isinstance(mask, str) and is_question:
            raise ValueError(
                f"mask={brief(mask)} with sampling_params: the mask is true for generated tokens; "
                "leave mask out, or give a value for each token of the prompt"
            )
        if isinstance(mask, str):
            rule = parse_mask_rule(mask)
            rendered, values = render_masked(tokenizer, record["messages"], rule, **how)
        else:
            rendered = render_chat(tokenizer, record["messages"], **how)
        rendered["cache_salt"] = record.get("cache_salt")
        return rendered, values

    def _layer_ids(self, layers: Layers) -> tuple[LayerId, ...]:
        return _resolve_layers(layer_items(layers), self._num_layers)

    def take(self, output: RequestOutput) -> None:
        """Take in the output of a request of this call that has ended."""
        pending = self._pending[output.request_id]
        items = [self.item_of(output.request_id, one) for one in output.outputs]
        self._end(output.request_id)
        self._deliver(pending.index, items)

    def item_of(self, request_id: str, completion: CompletionOutput) -> Item:
        """Make the item of a completion that has ended, of a request of this call."""
        pending = self._pending[request_id]
        if completion.extracted is None:
            kind = FailureKind.ABORTED if completion.failure is None else completion.failure.kind
            reason = completion.stop_reason or "the engine ended it"
            failure = Failure(kind, f"{completion.finish_reason}: {reason}")
        elif self._is_of_other_weights(completion):
            message = "the weights may have changed while others of the same request had ended"
            failure = Failure(FailureKind.NOT_READY, f"{message}; send it again")
        else:
            try:
                return self._sample(request_id, pending, completion)
            except HiddenStatesError as error:
                failure = error.failure
        return FailedSample(pending.index, request_id, failure)

    def _is_of_other_weights(self, completion: CompletionOutput) -> bool:
        """Return whether the weights may differ from those of completions that ended before."""
        if self._num_restarts is None:
            self._num_restarts = completion.num_restarts
        is_other = completion.num_restarts != self._num_restarts
        return is_other and self._settings.is_one_request

    def refuse(self, request_id: str, error: ValueError) -> None:
        """Take in that the engine refused a request of this call: ValueError or failed sample."""
        is_early = isinstance(error, NotReadyError)
        if self._settings.on_error == "raise":
            kind_of_error = NotReadyError if is_early else ValueError
            raise kind_of_error(f"prompt {self._pending[request_id].index}: {error}")
        kind = FailureKind.NOT_READY if is_early else FailureKind.BAD_REQUEST
        failure = Failure(kind, str(error))
        index = self._end(request_id).index
        self._deliver(index, [FailedSample(index, request_id, failure)])

    @property
    def pending_ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._pending)

    @property
    def is_done(self) -> bool:
        """True once everything was handed out."""
        return self.is_exhausted and self._num_returned == self._num_accepted

    def pop(self) -> Item | None:
        """Return the next sample, if it is ready. HiddenStatesError: its request failed."""
        if not self._ready:
            return None
        item, is_last = self._ready.popleft()
        self._num_returned += is_last
        if isinstance(item, FailedSample) and self._settings.on_error == "raise":
            raise HiddenStatesError(item.index, item.failure)
        return item

    def _end(self, request_id: str) -> _Pending:
        pending = self._pending.pop(request_id)
        self._num_tokens -= len(pending.token_ids)
        return pending

    def _deliver(self, index: int, items: list[Item]) -> None:
        """Hand out the items of a prompt, when it is their turn."""
        self._early[index] = items
        turn = self._num_ready if self._settings.is_ordered else index
        while (turn_items := self._early.pop(turn, None)) is not None:
            self._ready.extend((item, item is turn_items[-1]) for item in turn_items)
            self._num_ready = turn = self._num_ready + 1

    def _sample(
        self, request_id: str, pending: _Pending, completion: CompletionOutput | None
    ) -> HiddenStatesSample:
        """Make the sample of a request; ``completion`` None: no row was asked for."""
        token_ids, spec = pending.token_ids, pending.spec
        if pending.text is not None:
            assert isinstance(spec, GenerationSpec) and completion is not None
            sample = pending.text.make_sample(
                pending.index, request_id, token_ids, spec, completion
            )
            return self._pooled(sample, pending.pooled_as)
        if completion is None:
            extracted = self._no_rows(spec)
        else:
            assert completion.extracted is not None
            extracted = completion.extracted
        sample = self._sample_of(request_id, pending, extracted)
        if pending.order is not None:
            sample = sample.take_rows(pending.order)
        return self._pooled(sample, pending.pooled_as)

    def _pooled(self, sample: HiddenStatesSample, dtype: torch.dtype | None) -> HiddenStatesSample:
        """Return the mean of a sample's rows in ``dtype``; None: the sample itself."""
        if dtype is None:
            return sample
        if not len(sample.positions):
            return in_dtype(sample, dtype)
        return mean_of_rows(sample, dtype, self._model_config.dtype)

    def _sample_of(
        self, request_id: str, pending: _Pending, extracted: ExtractedRows
    ) -> HiddenStatesSample:
        """Make the sample of a prompt with these rows, in the order of their positions."""
        listed = pending.spec.positions
        sample = HiddenStatesSample(
            index=pending.index,
            request_id=request_id,
            token_ids=torch.tensor(pending.token_ids, dtype=torch.int64),
            positions=torch.arange(len(pending.token_ids))
            if listed is None
            else torch.tensor(listed, dtype=torch.int64),
            tensors=extracted.tensors,
            layer_ids=pending.spec.layer_ids,
            constants=extracted.constants,
        )
        if pending.loss_mask is not None:
            sample = sample.with_tensors(loss_mask=pending.loss_mask)
        return sample

    def _no_rows(self, spec: ExtractionSpec) -> ExtractedRows:
        from vllm.v1.rows.leaving import empty_rows

        return ExtractedRows(empty_rows(self._forms(spec), 0))

    def _forms(self, spec: ExtractionSpec) -> dict[str, TensorForm]:
        """Return the forms of the tensors that a request asks for."""
        model = self._model_config
        stored = model.dtype if spec.storage_dtype is None else STORAGE_DTYPES[spec.storage_dtype]
        hidden = HiddenStates(spec.layer_ids, model.get_row_size(), model.dtype, stored)
        sizes = (spec.top_logprobs, spec.logprob_temperature, model.get_vocab_size())
        return hidden.forms | RowLayout(hidden.cells, requested_fields(*sizes)).forms


def _as_prompts(prompts: Any) -> Iterator[Any]:
    """Return an iterator over one prompt or several."""
    is_list = isinstance(prompts, list | tuple) and bool(prompts)
    if is_list and isinstance(prompts[0], ExtractRequest):
        return iter(prompts)
    is_one = isinstance(prompts, str | Mapping | ExtractRequest) or is_conversation(prompts)
    if is_one or is_token_sequence(prompts):
        return iter((prompts,))
    try:
        return iter(prompts)
    except TypeError:
        raise ValueError(
            f"prompts of type {type(prompts).__name__}: has to be a prompt (text, token ids, a "
            "dict, an ExtractRequest) or an iterable of prompts"
        ) from None

"""Turns users' prompts and settings into checked requests for the engine core."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.inputs import NO_TOKEN, ParsedPrompt, PromptType, parse_prompt
from vllm.inputs.prompt_embeds import pack_prompt_embeds
from vllm.lora.request import LoRARequest, check_lora_request
from vllm.sampling_params import ALL_LOGPROBS, SamplingParams
from vllm.steering import SteeringSpec, lens, steering_digest
from vllm.transformers_utils.tokenizer import (
    TokenizerLike,
    has_second_bos,
    is_certainly_longer,
)
from vllm.utils.text import brief, check_text
from vllm.v1.engine import EngineCoreRequest, GenerationSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


TruncationSide = Literal["left", "right"]


class ProcessedInput(NamedTuple):
    """A request for the core, with the parts of it that only the front end keeps."""

    external_id: str
    request: EngineCoreRequest
    prompt: str | None


def too_long(message: str, max_model_len: int) -> VLLMValidationError:
    """Make the error for a prompt that exceeds the context, in words that clients look for."""
    return VLLMValidationError(
        f"This model's maximum context length is {max_model_len} tokens: {message}",
        parameter="input_tokens",
    )


class InputProcessor:
    """Checks everything that can be wrong with a request; errors are ``ValueError``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: TokenizerLike | None,
        no_tokenizer_reason: str = "",
    ) -> None:
        model_config = self._model_config = vllm_config.model_config
        self._tokenizer = tokenizer
        self._no_tokenizer_reason = no_tokenizer_reason
        self._enable_lora = vllm_config.lora_config.enable_lora
        self._extracts = vllm_config.speculative_config is not None
        self._scheduling_policy = vllm_config.scheduler_config.policy
        self._vocab_size: int = model_config.get_vocab_size()
        self._max_model_len: int = model_config.max_model_len
        self._max_logprobs: int = model_config.max_logprobs
        eos = None if tokenizer is None else tokenizer.eos_token_id
        ids = [*model_config.get_eos_token_ids(), *([] if eos is None else [eos])]
        self._eos_token_ids = tuple(dict.fromkeys(ids))
        self._number: Iterator[int] | None = None
        if vllm_config.parallel_config.is_external:
            self._number = itertools.count()  # the same in all processes

    def process(
        self,
        external_id: str,
        prompt: PromptType | ParsedPrompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        """Tokenise and check one request. Neither ``prompt`` nor ``params`` is changed.

        All checks are here: a wrong value that reached a step would fail the step's other requests.
        """
        if not isinstance(external_id, str):
            raise ValueError(f"request_id={brief(external_id)}: has to be a string")
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params of type {type(params).__name__}: has to be SamplingParams"
            )
        self._check_priority(priority)
        params = params.checked_copy()
        if params.max_tokens == 0 and not self._extracts:
            raise VLLMValidationError(
                "max_tokens=0: has to be at least 1, unless the engine extracts hidden states "
                '(speculative_config={"method": "extract_hidden_states", ...})',
                parameter="max_tokens",
            )
        processed = self._process(
            external_id, prompt, params, arrival_time, int(priority), lora_request=lora_request
        )
        return self._with_rows_of_lens(processed)

    def _with_rows_of_lens(self, processed: ProcessedInput) -> ProcessedInput:
        """Let a request return the rows that ``extra_args`` asks for, as vllm-lens has it."""
        request, params = processed.request, processed.request.sampling_params
        asked = (params.extra_args or {}).get(lens.ROWS)
        if asked is None or asked is False:
            return processed
        layer_ids = lens.rows_of(asked, self._model_config.get_total_num_hidden_layers())
        if params.n > 1:
            lens.fail(lens.ROWS, f"with n={params.n}: ask for one answer, or use extract()")
        if self._extracts:
            lens.fail(
                lens.ROWS,
                "this engine gives rows to its KV connector (speculative_config); use an engine "
                "without it",
            )
        spec = GenerationSpec(layer_ids, num_prompt_tokens=len(request.prompt_token_ids))
        return processed._replace(request=msgspec.structs.replace(request, extraction=spec))

    def _check_priority(self, priority: object) -> None:
        if not isinstance(priority, Integral) or not -(2**63) <= int(priority) < 2**63:
            raise ValueError(f"priority={brief(priority)}: has to be a 64-bit integer")
        if priority and self._scheduling_policy != "priority":
            raise ValueError(
                f"priority={priority}: has no effect with scheduling_policy="
                f'"{self._scheduling_policy}"; leave it out, or start the engine with "priority"'
            )

    def process_extraction(
        self,
        external_id: str,
        prompt: PromptType,
        add_special_tokens: bool,
        params: SamplingParams | None = None,
        keep: int | None = None,
        side: TruncationSide = "left",
        steering: Sequence[SteeringSpec] = (),
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        """Make a request whose rows are still to be named; without settings it generates no token.

        ``params`` is not changed. ``keep``, ``side``: as for :meth:`truncate`, but the special
        tokens around a text stay. ``steering``: added to that of ``params``.
        """
        self._check_priority(priority)
        if params is None:
            params = SamplingParams(max_tokens=0, temperature=0.0)
        else:
            params = _checked_for_rows(params)
        params.steering = [*params.steering_specs, *steering] or None
        cut = prompt if keep is None else self._cut(prompt, keep, side, add_special_tokens)
        return self._process(
            external_id,
            cut,
            params,
            priority=priority,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
        )

    def _cut(
        self, prompt: PromptType, keep: int, side: TruncationSide, add_special_tokens: bool
    ) -> ParsedPrompt:
        """Tokenise the prompt, and truncate it between the tokenizer's special tokens."""
        parsed = parse_prompt(prompt)
        if parsed.embeds is not None:
            _refuse_settings_about_tokens(SamplingParams(truncate_prompt_tokens=keep))
        add_special_tokens &= parsed.token_ids is None
        token_ids = parsed.token_ids
        if token_ids is None:
            token_ids = self.tokenize(
                parsed.text or "", may_be_long=True, add_special_tokens=add_special_tokens
            )
        cut = self.truncate(token_ids, keep, 0, side)
        if add_special_tokens and len(cut) < len(token_ids):
            plain = self.tokenize(parsed.text or "", may_be_long=True, add_special_tokens=False)
            num_more = len(token_ids) - len(plain)
            starts = (i for i in range(num_more + 1) if token_ids[i : i + len(plain)] == plain)
            begin = next(starts, num_more)
            if 0 < num_more < len(cut):
                kept = self.truncate(plain, len(cut) - num_more, 0, side)
                cut = [*token_ids[:begin], *kept, *token_ids[begin + len(plain) :]]
        return parsed._replace(token_ids=cut)

    def _process(
        self,
        external_id: str,
        prompt: PromptType | ParsedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        lora_request = check_lora_request(lora_request, is_enabled=self._enable_lora)
        arrived = time.time() if arrival_time is None else arrival_time
        parsed, embeds = parse_prompt(prompt), b""
        salt = parsed.cache_salt
        for name, value in (("request_id", external_id), ("cache_salt", salt)):
            check_text(name, value or "")
        if "\0" in (salt or ""):  # separates it from what else distinguishes prefixes
            raise ValueError("cache_salt: has a NUL character; use a text without it")
        if parsed.embeds is None:
            keep, token_ids = params.truncate_prompt_tokens, parsed.token_ids
            if token_ids is None:
                assert parsed.text is not None
                token_ids = self.tokenize(
                    parsed.text,
                    may_be_long=keep is not None,
                    add_special_tokens=add_special_tokens,
                )
            token_ids = self.truncate(token_ids, keep, params.max_tokens)
            self._check_tokens(token_ids)
        else:
            packed = pack_prompt_embeds(parsed.embeds, self._model_config)
            _refuse_settings_about_tokens(params)
            token_ids, embeds = [NO_TOKEN] * packed.num_tokens, packed.data
            salt = f"{salt or ''}\0prompt_embeds:{packed.digest}"
        if specs := params.steering_specs:
            salt = f"{salt or ''}\0steering:{steering_digest(specs)}"
        self._check_length(len(token_ids), params)
        request = EngineCoreRequest(
            request_id=f"{external_id}-{self._suffix()}",  # clients may use an id again
            prompt_token_ids=token_ids,
            sampling_params=self._resolve(params, len(token_ids)),
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrived,
            priority=priority,
            cache_salt=salt,
            prompt_embeds=embeds or None,
            lora_request=lora_request,
        )
        return ProcessedInput(external_id, request, parsed.text)

    def _suffix(self) -> str:
        return uuid.uuid4().hex[:8] if self._number is None else f"{next(self._number):08x}"

    def tokenize(
        self, text: str, *, may_be_long: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt. ValueError: it has none, or certainly more than the
        context holds, unless it ``may_be_long``."""
        tokenizer = self.need_tokenizer("the prompt is text")
        if not text:
            raise ValueError("the prompt is empty: at least one character or token id is needed")
        check_text("the prompt", text)
        limit = self._max_model_len
        if not may_be_long and is_certainly_longer(tokenizer, text, limit):
            raise too_long(
                f"the prompt has {len(text)} characters, which are more tokens than "
                f"max_model_len={limit}",
                limit,
            )
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        if add_special_tokens:
            has_second_bos(tokenizer, token_ids)  # warns
        return token_ids

    def need_tokenizer(self, use: str) -> TokenizerLike:
        if self._tokenizer is None:
            raise ValueError(
                f"{use}, but there is no tokenizer ({self._no_tokenizer_reason}); "
                'give {"prompt_token_ids": [...]}, or a tokenizer with tokenizer='
            )
        return self._tokenizer

    def truncate(
        self,
        token_ids: list[int],
        keep: int | None,
        max_tokens: int | None,
        side: TruncationSide = "left",
    ) -> list[int]:
        """Keep ``keep`` tokens and cut the others off at ``side``. None keeps all, -1 as many as
        leave room for ``max_tokens`` of output."""
        if keep is None:
            return token_ids
        if keep == 0 or keep > self._max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens={keep}: has to be at most max_model_len="
                f"{self._max_model_len}, and at least 1, or -1 for what fits",
                parameter="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self._max_model_len - (1 if max_tokens is None else max_tokens))
        return token_ids[:keep] if side == "right" else token_ids[-keep:]

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"Token id {token} is out of vocabulary: the model's ids are 0 to "
                    f"{self._vocab_size - 1} (vocabulary size {self._vocab_size})"
                )

    def _check_length(self, length: int, params: SamplingParams) -> None:
        limit = self._max_model_len
        if length > limit:
            raise too_long(
                f"the prompt is {length} tokens long, more than the context holds "
                f"(max_model_len={limit}); shorten it, raise max_model_len, or set "
                "truncate_prompt_tokens",
                limit,
            )
        if length == limit and params.max_tokens != 0:
            raise VLLMValidationError(
                f"max_tokens must be at least 1, got 0: the prompt is {length} tokens long and "
                f"fills the context (max_model_len={limit}): there is no room for one output token",
                parameter="max_tokens",
            )

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Check the settings, and fill in everything that depends on model and tokenizer."""
        self._check_model_limits(params)
        room = self._max_model_len - num_prompt_tokens
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.update_from_generation_config({}, self._eos_token_ids)
        params.set_bad_words_token_ids(self._tokenize_bad_words(params.bad_words or []))
        self._check_some_token_is_possible(params)
        return params

    def _check_model_limits(self, params: SamplingParams) -> None:
        if params.stop:
            self.need_tokenizer(f"stop={brief(params.stop)} is found in text")
        most = self._vocab_size if self._max_logprobs == ALL_LOGPROBS else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            num_tokens = self._vocab_size if count == ALL_LOGPROBS else count
            if num_tokens is not None and num_tokens > most:
                raise VLLMValidationError(
                    f"{name}={count}: has to be at most {most} "
                    "(the engine's max_logprobs; -1 there allows the whole vocabulary)",
                    parameter=name,
                )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self._vocab_size:
                    raise ValueError(
                        f"{name}: token id {token} is out of vocabulary "
                        f"(vocabulary size {self._vocab_size})"
                    )

    def _tokenize_bad_words(self, bad_words: list[str]) -> list[list[int]]:
        """Tokenise each word as it is spelt at the start of a text, after a space and after other
        text: many tokenizers put a space before the start."""
        if not bad_words:
            return []
        tokenizer = self.need_tokenizer(f"bad_words={brief(bad_words)} are text")

        def ids_of(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False, verbose=False)

        sequences: dict[tuple[int, ...], None] = {}
        before = ids_of("\n")
        for word in bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = ids_of(spelling)
                if not ids or max(ids) >= self._vocab_size:
                    raise ValueError(
                        f"bad_words: {brief(word)} is not made of tokens that the model knows"
                    )
                sequences[tuple(ids)] = None
            behind = ids_of("\n" + word.lstrip())
            if before and behind[: len(before)] == before and len(behind) > len(before):
                sequences[tuple(behind[len(before) :])] = None
        return [list(ids) for ids in sequences]

    def _check_some_token_is_possible(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is None:
            return
        banned = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
        if params.min_tokens:
            banned |= params.all_stop_token_ids
        if banned.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"allowed_token_ids={brief(params.allowed_token_ids)}: all of them are excluded by "
                "bad_words, or are stop tokens while min_tokens is above 0"
            )


def _checked_for_rows(params: object) -> SamplingParams:
    """Return an independent copy of settings for ``extract()``. ValueError: they do not fit."""
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"sampling_params of type {type(params).__name__}: has to be SamplingParams"
        )
    params = params.checked_copy()
    if params.max_tokens == 0:
        raise VLLMValidationError(
            "max_tokens=0: generates nothing; leave sampling_params out for rows of prompts alone",
            parameter="max_tokens",
        )
    if lens.ROWS in (params.extra_args or {}):
        lens.fail(lens.ROWS, "extract() returns the rows of its layers; leave it out")
    if params.prompt_logprobs is not None:
        raise VLLMValidationError(
            f"prompt_logprobs={params.prompt_logprobs}: extract() does not return them; use "
            "top_logprobs",
            parameter="prompt_logprobs",
        )
    return params


def _refuse_settings_about_tokens(params: SamplingParams) -> None:
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if (value := getattr(params, name)) is not None:
            raise VLLMValidationError(
                f"{name}={value} with prompt_embeds: it looks at the prompt's tokens, which are "
                "not known; leave it out",
                parameter=name,
            )

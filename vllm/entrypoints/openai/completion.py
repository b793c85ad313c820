"""/v1/completions: continuations of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product, takewhile, zip_longest
from typing import Any, NamedTuple

from fastapi import Request

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import (
    Generation,
    News,
    Wanted,
    finite,
    prompt_logprobs_body,
)
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.request_prompts import (
    prompt_of_embeds,
    split_embeds,
    split_prompts,
    tokenize,
)
from vllm.entrypoints.openai.responses import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from vllm.entrypoints.openai.state import ServerState
from vllm.inputs import ParsedPrompt
from vllm.outputs import Logprob
from vllm.sampling_params import MAX_CHOICES
from vllm.transformers_utils.token_texts import TextPlace

MAX_QUICK_TOKENS = 4096
"""Prompts of at most this many token ids in total are checked on the event loop: a thread costs
more."""
MAX_ADDED = 2
"""Special tokens that a tokenizer adds at one end of a text, at most."""
TOKENS_OF_A_PROMPT = 64
"""Fixed cost of a prompt, in token ids."""


class Echo(NamedTuple):
    """A prompt at the beginning of an answer."""

    text: str
    shown: range
    """Its tokens that the text has; the tokenizer added the others to the text."""


class Completion(Generation[CompletionRequest]):
    """One completion request, of one prompt or several."""

    id_prefix = "cmpl"
    default_max_tokens = 16
    reply_type = CompletionResponse
    chunk_type = CompletionChunk

    def __init__(self, state: ServerState, body: CompletionRequest, request: Request) -> None:
        super().__init__(state, body, request)
        self._embeds = split_embeds(state, body)
        self._inputs = split_prompts(body.prompt) if self._embeds is None else []
        are_ids = bool(self._inputs) and not isinstance(self._inputs[0], str)
        num_tokens = sum(TOKENS_OF_A_PROMPT + len(one) for one in self._inputs)
        are_few_ids = are_ids and num_tokens <= MAX_QUICK_TOKENS
        self.is_quick = are_few_ids and not body.echo and not body.bad_words
        self._shows_output = not (body.echo and body.max_tokens == 0)
        self._echoes: list[Echo] = []
        """The echo of each prompt if the answer begins with it."""
        self._places: dict[int, TextPlace] = {}
        """Place in the text of each choice that was begun, counted with log-probabilities."""

    def wanted(self) -> Wanted:
        body, num_prompts = self.body, len(self._inputs) + len(self._embeds or ())
        if body.suffix:
            raise bad_request("suffix is not supported", "suffix")
        if (body.n or 1) * num_prompts > MAX_CHOICES:
            raise bad_request(
                f"{num_prompts} prompts with n={body.n or 1} are more than {MAX_CHOICES} choices"
            )
        max_tokens = body.max_tokens if self._shows_output else 1
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        return Wanted(self._prompts(), max_tokens, body.logprobs, prompt_logprobs)

    def _prompts(self) -> Iterator[ParsedPrompt]:
        for prompt in self._inputs:
            yield tokenize(self.state, prompt, self.body)
        for embeds in self._embeds or ():
            yield prompt_of_embeds(embeds)

    def _prepare(self) -> None:
        super()._prepare()
        if self.body.echo:
            prompts = [processed.request.prompt_token_ids for processed in self.requests]
            self._echoes = [self._echo(*one) for one in zip_longest(prompts, self._inputs)]

    def _echo(self, token_ids: list[int], given: object) -> Echo:
        """Return a prompt as it was given. Token ids, and texts of which truncation left a part,
        are shown as they read."""
        decode, special = self.state.decode, self.state.token_texts.special_ids
        begins = takewhile(special.__contains__, token_ids)
        ends = takewhile(special.__contains__, reversed(token_ids))
        most = (len(list(islice(one, MAX_ADDED))) for one in (begins, ends))
        nearest: Echo | None = None
        for before, after in product(*(range(number + 1) for number in most)):
            shown = range(before, max(before, len(token_ids) - after))
            echo = Echo(decode(token_ids[shown.start : shown.stop]), shown)
            if echo.text == given:
                return echo
            nearest = nearest or echo
            if isinstance(given, str):
                nearest = min(nearest, echo, key=lambda one: abs(len(one.text) - len(given)))
        if isinstance(given, str) and self.body.truncate_prompt_tokens is None:
            # Normalisation, or spaces that the tokenizer leaves out or adds, changed it.
            return Echo(given, nearest.shown if nearest else range(0))
        return Echo(decode(token_ids), range(len(token_ids)))

    def request_id(self, prompt_index: int) -> str:
        return f"{self.id}-{prompt_index}"

    def make_choice(self, news: News) -> CompletionChoice:
        shows = self.body.prompt_logprobs is not None
        logprobs = prompt_logprobs_body(news.output.prompt_logprobs) if shows else None
        return CompletionChoice(**self._fields(news), prompt_logprobs=logprobs)

    def make_chunk_choice(self, news: News) -> CompletionChunkChoice:
        return CompletionChunkChoice(**self._fields(news))

    def _fields(self, news: News) -> dict[str, Any]:
        """Return the fields of a choice, the first time including those of its prompt."""
        index, output, completion = news
        is_first = index not in self._places
        text = completion.text if self._shows_output else ""
        if is_first and self._echoes:
            text = self._echoes[index // (self.body.n or 1)].text + text
        place = self._places.setdefault(index, TextPlace())
        logprobs = self._logprobs(news, is_first, place)
        shows_ids = self.body.return_token_ids and is_first
        shared = self.in_every_choice(news)
        if self.body.return_token_ids and not self._shows_output:
            shared["token_ids"] = []
        return {
            **shared,
            "text": text,
            "logprobs": logprobs,
            "prompt_token_ids": output.prompt_token_ids if shows_ids else None,
        }

    def _logprobs(self, news: News, is_first: bool, place: TextPlace) -> CompletionLogprobs | None:
        """Return the logprobs of the text from ``place`` on; None if not requested."""
        index, output, completion = news
        if completion.logprobs is None:
            return None
        logprobs, echo = CompletionLogprobs(), Echo("", range(0))
        rows: list[tuple[int, dict[int, Logprob] | None]] = []
        if is_first and self._echoes:
            echo = self._echoes[index // (self.body.n or 1)]
            # A request that was aborted may have only the first rows of its prompt.
            rows += zip_longest(output.prompt_token_ids or [], output.prompt_logprobs or [])
        num_echoed = len(rows)
        if self._shows_output:
            rows += zip(completion.token_ids, completion.logprobs, strict=True)
        texts, keeps = self.state.token_texts, self.body.skip_special_tokens is False
        special = texts.special_ids
        for number, (token_id, row) in enumerate(rows):
            entry = None if row is None else row[token_id]
            logprobs.tokens.append(self.token_name(token_id, entry))
            offset, is_echoed = place.offset, number < num_echoed
            is_shown = number in echo.shown if is_echoed else keeps or token_id not in special
            if is_shown:
                is_first_token = is_echoed and number == echo.shown.start
                text = self.token_text(token_id, None if is_first_token else entry)
                offset = place.add(text, texts.bytes_of(token_id, text))
            if is_echoed:
                offset = min(offset, len(echo.text))  # the prompt may read longer than it is
            is_end_of_prompt = number == num_echoed - 1
            if is_end_of_prompt and isinstance(self._inputs[0], str):
                place.offset = len(echo.text)  # the answer begins there
            logprobs.text_offset.append(offset)
            logprobs.token_logprobs.append(None if entry is None else finite(entry))
            logprobs.top_logprobs.append(None if row is None else self._top(row))
        return logprobs

    def _top(self, row: dict[int, Logprob]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, entry in row.items():
            top.setdefault(self.token_name(token_id, entry), finite(entry))
        return top

"""/v1/chat/completions: answers to conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.generation import (
    Generation,
    News,
    Wanted,
    finite,
    prompt_logprobs_body,
)
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.request_prompts import (
    render,
    render_with_mask,
    told_of_unread,
)
from vllm.entrypoints.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    Chunk,
    Delta,
    LastChatChunkChoice,
    TokenLogprob,
    TopLogprob,
)
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.tool_parsers import TOOL_PARSERS, ToolParser
from vllm.exceptions import VLLMValidationError
from vllm.inputs import ParsedPrompt
from vllm.outputs import Logprob, RequestOutput
from vllm.sampling_params import ALL_LOGPROBS


class Chat(Generation[ChatCompletionRequest]):
    """One chat request."""

    id_prefix = "chatcmpl"
    reply_type = ChatCompletionResponse
    chunk_type = ChatChunk

    def __init__(self, state: ServerState, body: ChatCompletionRequest, request: Request) -> None:
        super().__init__(state, body, request)
        self._tool_parser: type[ToolParser] | None = None
        """Finds tool calls in an answer; None: the answer is text."""
        self._parsers: dict[int, ToolParser] = {}
        """Parsers of the choices that a stream has begun."""

    def wanted(self) -> Wanted:
        body = self.body
        self._tool_parser = self._choose_tool_parser()
        if self._tool_parser is not None:
            find = self.state.token_texts.special_id
            if any(find(tag) is not None for tag in self._tool_parser.tags):
                body.skip_special_tokens = False  # which would leave the tags out
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs: only with logprobs=true", "top_logprobs")
        limit = body.max_completion_tokens
        return Wanted(
            self._prompts(),
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _prepare(self) -> None:
        try:
            super()._prepare()
        except VLLMValidationError as error:
            if error.parameter != "logprobs":
                raise
            # In a chat the number of them has another name.
            raise VLLMValidationError(f"top_{error}", parameter="top_logprobs") from error

    def _prompts(self) -> Iterator[ParsedPrompt]:
        body, extraction = self.body, self.extraction
        self._warnings += told_of_unread(self.state, body)
        if extraction is not None and extraction.mask_rule is not None:
            prompt, extraction.mask = render_with_mask(self.state, body, extraction.mask_rule)
            yield prompt
            return
        may_be_long = body.truncate_prompt_tokens is not None
        adds_special = bool(body.add_special_tokens)
        yield render(self.state, body.messages, body, adds_special, may_be_long)

    def _choose_tool_parser(self) -> type[ToolParser] | None:
        """Choose the parser; raises ApiError if the request uses tools in an unsupported way."""
        choice, settings = self.body.tool_choice, self.state.settings
        choice = "auto" if choice is None else choice
        if choice not in ("auto", "none"):
            raise bad_request(f"tool_choice={choice!r} is not supported: use 'auto' or 'none'")
        if not self.body.tools or choice == "none":
            return None
        if not settings.enable_auto_tool_choice or settings.tool_call_parser is None:
            raise bad_request(
                'tool_choice="auto" needs a server that was started with --enable-auto-tool-choice '
                "and --tool-call-parser"
            )
        return TOOL_PARSERS[settings.tool_call_parser]

    def make_choice(self, news: News) -> ChatChoice:
        completion = news.completion
        message, fields = AnswerMessage(content=completion.text), self._fields(news)
        if self._tool_parser is not None:
            message.content, calls = self._tool_parser.parse(completion.text)
            has_more = self.body.parallel_tool_calls is not False
            message.tool_calls = (calls if has_more else calls[:1]) or None
            if calls and completion.finish_reason == "stop":
                fields["finish_reason"] = "tool_calls"
        return ChatChoice(**fields, message=message)

    def more_of_reply(self, output: RequestOutput) -> dict[str, Any]:
        wants_ids = self.body.return_token_ids
        return {
            "prompt_logprobs": prompt_logprobs_body(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if wants_ids else None,
            "prompt_text": output.prompt if wants_ids else None,
        }

    def make_first_chunk(self, news: News) -> Chunk:
        """Make the event that names the role."""
        if self._tool_parser is not None:
            self._parsers[news.choice] = self._tool_parser()
        choice = ChatChunkChoice(index=news.choice, delta=Delta(role="assistant", content=""))
        shown_ids = news.output.prompt_token_ids if self.body.return_token_ids else None
        return self.make_chunk([choice], prompt_token_ids=shown_ids)

    def make_chunk_choice(self, news: News) -> ChatChunkChoice:
        completion = news.completion
        reason, parser = completion.finish_reason, self._parsers.get(news.choice)
        delta, fields = Delta(content=completion.text), self._fields(news)
        if parser is not None:
            content, calls = parser.push(completion.text, is_last=reason is not None)
            if self.body.parallel_tool_calls is False:
                calls = [call for call in calls if call.index == 0]
            delta = Delta(content=content or None, tool_calls=calls or None)
            if parser.num_calls and reason == "stop":
                fields["finish_reason"] = "tool_calls"
        kind = ChatChunkChoice if reason is None else LastChatChunkChoice
        return kind(**fields, delta=delta)

    def _fields(self, news: News) -> dict[str, Any]:
        logprobs, completion = None, news.completion
        if completion.logprobs is not None:
            rows = zip(completion.token_ids, completion.logprobs, strict=True)
            logprobs = ChatLogprobs(content=[self._token_logprob(*row) for row in rows])
        return {**self.in_every_choice(news), "logprobs": logprobs}

    def _token_logprob(self, token_id: int, row: Mapping[int, Logprob]) -> TokenLogprob:
        """Describe a token and the most likely tokens at its position, as many as requested."""
        num_top = self.body.top_logprobs or 0
        top = [
            self._top_logprob(other, entry)
            for other, entry in row.items()
            if num_top == ALL_LOGPROBS or (entry.rank is not None and entry.rank <= num_top)
        ]
        top.sort(key=lambda item: -item.logprob)
        chosen = self._top_logprob(token_id, row[token_id])
        return TokenLogprob(**chosen.__dict__, top_logprobs=top)

    def _top_logprob(self, token_id: int, entry: Logprob) -> TopLogprob:
        content = self.state.token_texts.bytes_of(token_id, self.token_text(token_id, entry))
        return TopLogprob(
            token=self.token_name(token_id, entry),
            logprob=finite(entry),
            bytes=None if content is None else list(content),
        )

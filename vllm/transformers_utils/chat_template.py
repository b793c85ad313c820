"""Conversations -> prompts, through the model's chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from threading import Lock
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, get_args
from weakref import WeakKeyDictionary

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.transformers_utils.chat_forms import PROBE_TOOLS, TemplateForms
from vllm.transformers_utils.chat_messages import (
    CallForm,
    ChatMessage,
    ContentForm,
    check_messages,
    content_text,
    write_message,
)
from vllm.transformers_utils.tokenizer import TokenizerLike

logger = init_logger(__name__)

ContentFormat = Literal["auto", "string", "openai"]
"""How templates get content: as one string, as a list of parts, or as they read it."""

_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Names that ``chat_template_kwargs`` cannot set: the request's own fields do."""


def load_chat_template(value: str | None) -> str | None:
    """A template from what a user gave: a file, or the text itself. ValueError: it is neither."""
    if value is None:
        return None
    if os.path.isfile(value):
        with open(value, encoding="utf-8") as file:
            return file.read()
    if "{" in value:
        return value
    raise ValueError(
        f"chat_template={value!r}: there is no such file, and it is no template either "
        "(a Jinja template holds '{{' or '{%')"
    )


def as_conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[list[ChatMessage]]:
    """One conversation or several -> several."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={messages!r}: has to be a list of at least one message")
    if isinstance(messages[0], Mapping):
        return [cast(list[ChatMessage], list(messages))]
    return [cast(list[ChatMessage], conversation) for conversation in messages]


class ChatOptions(TypedDict, total=False):
    """Options of :func:`chat_text`."""

    chat_template: str | None
    content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


class MarkedText(NamedTuple):
    """A rendered conversation and what its template marks as the assistant's."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """[start, end) in characters."""


def chat_text(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> str:
    """The text of one conversation, with the special tokens that the template writes.

    Messages reach the template in the forms that it reads (docs/extraction.md). ValueError: it
    cannot render the messages, or would leave out what one of them says.
    """
    return _Rendering(tokenizer, **options).render(messages, marks=False).text


def marked_chat_text(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> MarkedText | None:
    """:func:`chat_text` with the spans inside ``{% generation %}``. None: there are no marks."""
    rendering = _Rendering(tokenizer, **options)
    return rendering.render(messages, marks=True) if rendering.has_marks else None


def render_chat(
    tokenizer: TokenizerLike, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
) -> TokensPrompt:
    """The prompt of one conversation: token ids, and the :func:`chat_text` they come from.

    The template writes the special tokens, so none are added.
    """
    text = chat_text(tokenizer, messages, **options)
    token_ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return {"prompt_token_ids": token_ids, "prompt": text}


_forms: WeakKeyDictionary[Any, dict[tuple[str, ContentFormat, bool], TemplateForms]] = (
    WeakKeyDictionary()
)
"""By tokenizer: what its templates read, with tools and without."""


_FIXED_FORMS = {"string": ContentForm(True, False), "openai": ContentForm(False, True)}
_marks_lock = Lock()
"""transformers notes the marks of a rendering in an object that all renderings share."""


def check_content_format(value: str) -> None:
    """ValueError: there is no such :data:`ContentFormat`."""
    if value not in get_args(ContentFormat):
        raise ValueError(
            f"chat_template_content_format={value!r}: use {', '.join(get_args(ContentFormat))}"
        )


class _GenerationBlock(Extension):
    """Reads ``{% generation %}`` blocks, as scopes: Jinja itself makes none."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=64)
def marks_answers(template: str) -> bool:
    """Whether a template has ``{% generation %}`` blocks, however they are spelt."""
    try:
        tree = Environment(extensions=[_GenerationBlock, loopcontrols]).parse(template)
    except TemplateError:
        return False
    return tree.find(nodes.Scope) is not None


class _Rendering:
    """One conversation's way through a template."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        chat_template: str | None = None,
        content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True goes on with the last message, so "
                "add_generation_prompt has to be False"
            )
        if chat_template is None and tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: give one with chat_template= (--chat-template)"
            )
        variables = chat_template_kwargs or {}
        reserved = sorted(_RESERVED_VARIABLES.intersection(variables))
        if reserved:
            raise ValueError(f"chat_template_kwargs: {reserved[0]!r} is set by the request itself")
        check_content_format(content_format)
        self._tokenizer = tokenizer
        self._content_format = content_format
        self._tools = tools or None
        self._variables = variables
        self._ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        self._own_template = chat_template
        self._template = _choose_template(tokenizer, chat_template, self._tools)

    @property
    def has_marks(self) -> bool:
        """Whether the template says what the assistant wrote."""
        return not _renders_itself(self._tokenizer) and marks_answers(self._template)

    def render(self, messages: Sequence[ChatMessage], marks: bool) -> MarkedText:
        checked = check_messages(messages)
        forms = self._find_forms()
        written = [self._write(message, forms) for message in checked]
        try:
            rendered = self._apply(written, self._tools, self._variables, marks, **self._ends)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"the chat template refused the messages: {kind}{error}") from error
        for position, message in enumerate(checked):
            try:
                _check_kept(message, forms, rendered.text)
            except ValueError as error:
                raise ValueError(f"message {position}: {error}") from None
        return rendered

    def _find_forms(self) -> TemplateForms:
        fixed = _FIXED_FORMS.get(self._content_format)
        known = _forms.setdefault(self._tokenizer, {})
        key = (str(self._template), self._content_format, bool(self._tools))
        if key not in known:
            tools = PROBE_TOOLS if self._tools else None
            known[key] = TemplateForms(lambda probe: self._probe(probe, tools, {}), fixed)
        if known[key].content_form("user") is not None:
            return known[key]
        # It may need what this request has beside its messages.
        return TemplateForms(lambda probe: self._probe(probe, self._tools, self._variables), fixed)

    def _probe(self, messages: list[ChatMessage], tools: Any, variables: dict[str, Any]) -> str:
        return self._apply(messages, tools, variables, False, add_generation_prompt=False).text

    @staticmethod
    def _write(message: ChatMessage, forms: TemplateForms) -> ChatMessage:
        """In the forms of the template; a role whose form cannot be told gets a text."""
        form = forms.content_form(message["role"])
        if form is None or not any(form):
            form = ContentForm(True, False)
        call_form = forms.calls.form if "tool_calls" in message else CallForm()
        return write_message(message, form, call_form)

    def _apply(
        self,
        messages: list[ChatMessage],
        tools: Any,
        variables: dict[str, Any],
        marks: bool,
        **ends: bool,
    ) -> MarkedText:
        """Whatever a template raises."""
        if _renders_itself(self._tokenizer):
            template = self._own_template
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **ends, **variables
            )
            return MarkedText(text, ())
        from transformers.utils.chat_template_utils import render_jinja_template

        # What apply_chat_template of transformers' tokenizers does, but for content that is None:
        # some templates ask for it, and it would be left out.
        with _marks_lock if marks_answers(self._template) else nullcontext():
            (text,), spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                **{**self._tokenizer.special_tokens_map, **variables},
                **ends,
            )
        return MarkedText(text, tuple(map(tuple, spans[0])) if marks else ())


def _check_kept(message: ChatMessage, forms: TemplateForms, text: str) -> None:
    """ValueError: the template does not write what the message says."""
    role = message["role"]
    if "tool_calls" in message:
        calls = forms.calls
        names = [str(call["function"].get("name")) for call in message["tool_calls"]]
        said = content_text(message).strip()
        are_kept = calls.are_kept_beside_text if said else calls.are_kept
        if not are_kept and not all(name in text for name in names):
            beside = " beside a text" if calls.are_kept else ""
            raise ValueError(f"the chat template leaves out tool calls{beside}")
        if said and not calls.keep_text and said not in text:
            logger.warning_once(
                "The chat template leaves out the text of messages that have tool calls too."
            )
        return
    form, said = forms.content_form(role), content_text(message).strip()
    is_kept = said in text or (form is not None and any(form))
    if not is_kept:
        raise ValueError(f"the chat template leaves out the text of messages of role {role!r}")


def _renders_itself(tokenizer: Any) -> bool:
    """Whether a tokenizer has a way of its own of rendering conversations."""
    from transformers import PreTrainedTokenizerBase

    own: object = type(tokenizer).apply_chat_template
    return own is not PreTrainedTokenizerBase.apply_chat_template


def _choose_template(
    tokenizer: TokenizerLike, chat_template: str | None, tools: list[dict[str, Any]] | None
) -> Any:
    """The template's text: a tokenizer may have several, by name and for requests with tools."""
    if _renders_itself(tokenizer):
        return chat_template or tokenizer.chat_template
    return tokenizer.get_chat_template(chat_template, tools)


__all__ = [
    "ChatMessage",
    "ChatOptions",
    "ContentFormat",
    "MarkedText",
    "as_conversations",
    "chat_text",
    "check_content_format",
    "check_messages",
    "load_chat_template",
    "marked_chat_text",
    "marks_answers",
    "render_chat",
]

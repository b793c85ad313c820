"""One conversation's way through a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Literal, NamedTuple, TypedDict, get_args
from weakref import WeakKeyDictionary

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from vllm.transformers_utils.chat_forms import PROBE_TOOLS, TemplateForms
from vllm.transformers_utils.chat_messages import (
    CallForm,
    ChatMessage,
    ContentForm,
    write_message,
)
from vllm.transformers_utils.chat_outline import Marked, Outline, mark_messages, read_outline
from vllm.transformers_utils.tokenizer import TokenizerLike

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
_FIXED_FORMS = {"string": ContentForm(True, False), "openai": ContentForm(False, True)}
_MOST_OUTLINES = 512
_MOST_KNOWN = 64
_LONGEST_WATCHED = 40
"""Longer texts in a template are what it writes, not what it looks for."""


class ChatOptions(TypedDict, total=False):
    """Options of a rendering."""

    chat_template: str | None
    content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


def check_content_format(value: str) -> None:
    """ValueError: there is no such :data:`ContentFormat`."""
    if value not in get_args(ContentFormat):
        raise ValueError(
            f"chat_template_content_format={value!r}: use {', '.join(get_args(ContentFormat))}"
        )


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    marks: tuple[tuple[int, int], ...]
    """[start, end) in characters of what lies inside ``{% generation %}``."""


class Located(NamedTuple):
    """Where the texts of a conversation lie in its rendering."""

    marked: Marked
    outline: Outline
    places: list[tuple[int, int]]
    """[start, end) in characters for each marker of the outline."""


class _Known:
    """What is known of one template of one tokenizer."""

    def __init__(self, forms: TemplateForms) -> None:
        self.forms = forms
        self.outlines: dict[str, Outline | None] = {}
        """By everything that they depend on. None: the template refuses the markers."""


_known: WeakKeyDictionary[Any, dict[tuple[str, ...], _Known]] = WeakKeyDictionary()
_marks_lock = Lock()
"""transformers notes the marks of a rendering in an object that all renderings share."""


class _GenerationBlock(Extension):
    """Reads ``{% generation %}`` blocks, as scopes: Jinja itself makes none."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Source(NamedTuple):
    """What the source of a template says."""

    marks_answers: bool
    watched: frozenset[str]
    """Texts that it compares with, splits at, removes, ...: tags and the like, not words."""


@lru_cache(maxsize=64)
def _read_source(template: str) -> _Source:
    try:
        tree = Environment(extensions=[_GenerationBlock, loopcontrols]).parse(template)
    except TemplateError:
        return _Source(False, frozenset())
    looks = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign)
    texts = {
        constant.value
        for expression in tree.find_all(looks)
        for constant in expression.find_all(nodes.Const)
        if isinstance(constant.value, str)
    }
    watched = {
        text.strip()
        for text in texts
        if 3 <= len(text.strip()) <= _LONGEST_WATCHED and re.search(r"[^\w\s]", text)
    }
    return _Source(tree.find(nodes.Scope) is not None, frozenset(watched))


def marks_answers(template: str) -> bool:
    """Whether a template has ``{% generation %}`` blocks, however they are spelt."""
    return _read_source(template).marks_answers


class Rendering:
    """Renders conversations with one template and one set of options."""

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
        self.ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        self._own_template = chat_template
        self._renders_itself = _renders_itself(tokenizer)
        self._template = self._choose_template(chat_template)

    @property
    def has_marks(self) -> bool:
        """Whether the template says what the assistant wrote."""
        return not self._renders_itself and marks_answers(self._template)

    @property
    def first_token(self) -> str:
        """The token that begins every text."""
        return str(self._tokenizer.special_tokens_map.get("bos_token", ""))

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of a message that the template reads."""
        if self._known.forms.content_form("user") is not None:
            return self._known.forms
        # It may need what this request has beside its messages.
        return self._known_with(self._tools, self._variables).forms

    def render(self, messages: list[ChatMessage], marks: bool = False) -> Rendered:
        """Renders messages of ``check_messages``. ValueError: the template refuses them."""
        try:
            return self._apply(messages, self.ends, marks)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"the chat template refused the messages: {kind}{error}") from error

    def mark(self, messages: list[ChatMessage], only: int | None = None) -> Marked:
        """Puts markers in place of the texts of all messages, or of ``only`` one."""
        watched = () if self._renders_itself else _read_source(self._template).watched
        return mark_messages(messages, watched, only)

    def locate(self, marked: Marked, text: str) -> Located | None:
        """Finds what was marked in ``text``, the rendering of the same messages without marks.

        None: it is not certain, since the template writes the texts, or because of them, otherwise.
        """
        outline = self.outline(marked.messages, self.ends)
        places = None if outline is None else outline.places(text, marked.pieces)
        if outline is not None and places is None:
            fresh = self._make_outline(marked.messages, self.ends)
            if fresh is not None and fresh != outline:  # it has a date, and that was yesterday's
                self._known.outlines.clear()
                outline, places = fresh, fresh.places(text, marked.pieces)
        if outline is None or places is None:
            return None
        return Located(marked, outline, places)

    def outline(self, messages: list[ChatMessage], ends: Mapping[str, bool]) -> Outline | None:
        """The outline of marked messages. None: the template refuses them."""
        outlines = self._known.outlines
        key = f"{messages}{ends}{self._beside}"
        if key not in outlines:
            if len(outlines) >= _MOST_OUTLINES:
                outlines.clear()
            outlines[key] = self._make_outline(messages, ends)
        return outlines[key]

    def _make_outline(
        self, messages: list[ChatMessage], ends: Mapping[str, bool]
    ) -> Outline | None:
        try:
            return read_outline(self._apply(messages, ends).text)
        except Exception:  # a template may raise anything
            return None

    @cached_property
    def _beside(self) -> str:
        """What a rendering depends on beside its messages."""
        return repr((self._tools, self._variables))

    @cached_property
    def _known(self) -> _Known:
        return self._known_with(PROBE_TOOLS if self._tools else None, {})

    def _known_with(self, tools: Any, variables: dict[str, Any]) -> _Known:
        known = _known.setdefault(self._tokenizer, {})
        key = (str(self._template), self._content_format, repr((tools, variables)))
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            fixed = _FIXED_FORMS.get(self._content_format)

            def probe(messages: list[ChatMessage]) -> str:
                ends = {"add_generation_prompt": False}
                return self._apply_written(messages, tools, variables, False, ends).text

            known[key] = _Known(TemplateForms(probe, fixed))
        return known[key]

    def _apply(
        self, messages: list[ChatMessage], ends: Mapping[str, bool], marks: bool = False
    ) -> Rendered:
        """Whatever a template raises."""
        forms = self.forms
        written = [_write(message, forms) for message in messages]
        return self._apply_written(written, self._tools, self._variables, marks, ends)

    def _apply_written(
        self,
        messages: list[ChatMessage],
        tools: Any,
        variables: dict[str, Any],
        marks: bool,
        ends: Mapping[str, bool],
    ) -> Rendered:
        if self._renders_itself:
            template = self._own_template
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **ends, **variables
            )
            return Rendered(text, ())
        from transformers.utils.chat_template_utils import render_jinja_template

        # What apply_chat_template of transformers' tokenizers does, but for content that is None:
        # some templates ask for it, and it would be left out.
        with _marks_lock if self.has_marks else nullcontext():
            (text,), spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                **{**self._tokenizer.special_tokens_map, **variables},
                **ends,
            )
        return Rendered(text, tuple(map(tuple, spans[0])) if marks else ())

    def _choose_template(self, chat_template: str | None) -> Any:
        """The template's text: a tokenizer may have several, by name and for those with tools."""
        if self._renders_itself:
            return chat_template or self._tokenizer.chat_template
        return self._tokenizer.get_chat_template(chat_template, self._tools)


def _write(message: ChatMessage, forms: TemplateForms) -> ChatMessage:
    """Writes in the forms of the template; a role whose form cannot be told gets a text."""
    form = forms.content_form(message["role"])
    if form is None or not form.is_read:
        form = ContentForm(True, False)
    call_form = forms.call_form if "tool_calls" in message else CallForm()
    return write_message(message, form, call_form)


def _renders_itself(tokenizer: Any) -> bool:
    """Whether a tokenizer has a way of its own of rendering conversations."""
    from transformers import PreTrainedTokenizerBase

    own: object = type(tokenizer).apply_chat_template
    return own is not PreTrainedTokenizerBase.apply_chat_template

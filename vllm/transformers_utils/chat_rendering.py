"""Renders conversations with a chat template, and finds their texts in the result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypedDict, get_args
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from vllm.logger import init_logger
from vllm.transformers_utils.chat_forms import PROBE_TOOLS, TemplateForms
from vllm.transformers_utils.chat_messages import (
    REASONING_FIELDS,
    CallForm,
    ChatMessage,
    ContentForm,
    ContentFormat,
    move_reasoning,
    write_message,
)
from vllm.transformers_utils.chat_nulls import check_arguments, check_tools, check_variables
from vllm.transformers_utils.chat_outline import Marked, Outline, mark_messages, read_outline
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.utils.text import brief

logger = init_logger(__name__)

_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Names that ``chat_template_kwargs`` cannot set, since fields of the request set them."""
_FIXED_FORMS = {"string": ContentForm(True, False), "openai": ContentForm(False, True)}
_MOST_TOLD = 200
_told: set[str] = set()
"""Fields without effect that the log has named."""
_MOST_OUTLINES = 512
_MOST_KNOWN = 64


class ChatOptions(TypedDict, total=False):
    """Options of a rendering."""

    chat_template: str | None
    content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    refuses_nulls: bool
    """True if the conversation may be a row of a table (chat_nulls.py)."""


def check_content_format(value: str) -> None:
    """Raise ValueError if there is no such :data:`ContentFormat`."""
    if value not in get_args(ContentFormat):
        raise ValueError(
            f"chat_template_content_format={value!r}: use {', '.join(get_args(ContentFormat))}"
        )


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """[start, end) in characters of the assistant's answers, if they were asked for."""


class Located(NamedTuple):
    """The places of a conversation's texts in its rendering."""

    marked: Marked
    outline: Outline
    places: list[tuple[int, int]]
    """[start, end) in characters for each marker of the outline."""


class _Known(NamedTuple):
    """Results of probes of one template of one tokenizer."""

    forms: TemplateForms
    outlines: dict[str, Outline | None]
    """Outlines by all that they depend on. None: the template refuses the markers."""


_known: WeakKeyDictionary[Any, dict[tuple[str, ...], _Known]] = WeakKeyDictionary()
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode has for uses inside of programs: two stand around marked answers."""
_MARK_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARK_MACRO = "{{% macro vllm_marked() %}}{}{{{{ caller() }}}}{}{{% endmacro %}}\n"
"""Written before a template, which then begins on its own line."""


class _GenerationBlock(Extension):
    """Parses ``{% generation %}`` blocks as scopes. Jinja itself makes no scopes."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _parse(template: str) -> nodes.Template:
    return Environment(extensions=[_GenerationBlock, loopcontrols]).parse(template)


@lru_cache(maxsize=64)
def check_syntax(template: str) -> None:
    """Raise ValueError for a text that Jinja cannot read, with the line and the reason."""
    try:
        _parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the template: {error.message}") from None
    except RecursionError:
        raise ValueError("the template is nested too deeply") from None


@lru_cache(maxsize=64)
def marks_answers(template: str) -> bool:
    """Return whether a template has ``{% generation %}`` blocks, however they are spelt."""
    try:
        return _parse(template).find(nodes.Scope) is not None
    except (TemplateError, RecursionError):
        return False


@lru_cache(maxsize=64)
def _reasoning_fields(template: str) -> tuple[str, ...]:
    """Return the fields for reasoning that a template names, the most usual one first."""
    try:
        parsed = _parse(template)
    except (TemplateError, RecursionError):
        return ()
    named = {one.attr for one in parsed.find_all(nodes.Getattr)}
    named |= {str(one.value) for one in parsed.find_all(nodes.Const)}
    return tuple(field for field in REASONING_FIELDS if field in named)


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str] | None:
    """Return the names of the variables that a template reads. None: they are not known."""
    try:
        return frozenset(find_undeclared_variables(_parse(template)))
    except (TemplateError, RecursionError):
        return None


def _show_marks(template: str, signs: str) -> str:
    """Return a template that writes ``signs``, two characters, around what ``template`` marks.

    transformers counts characters from the beginning of the macro, ``{% set %}``, ``{% filter %}``
    or recursive loop that has the marks, not from the beginning of the text.
    """

    def write(tag: re.Match[str]) -> str:
        return f"{{%{tag[1]} {'endcall' if tag[2] else 'call vllm_marked()'} {tag[3]}%}}"

    return _MARK_MACRO.format(*signs) + _MARK_TAG.sub(write, template)


def _read_marks(shown: str, text: str, signs: str) -> Iterator[tuple[int, int]]:
    """Yield the marked spans of ``text``, found in the same text with ``signs`` around them.

    ValueError: beside these characters the texts differ, because the template changes what it
    marks.
    """
    pieces = re.split(f"([{signs}])", shown)
    if "".join(pieces[::2]) != text:
        raise ValueError(
            "where the answers lie cannot be told: the chat template changes what it has marked "
            "with {% generation %} (by a filter, for instance); mark what is written in the end, "
            "or give a mask column"
        )
    place = start = depth = 0
    for piece in pieces:
        if piece == signs[0]:
            start = start if depth else place
            depth += 1
        elif piece == signs[1]:
            depth -= 1
            if not depth and start < place:
                yield start, place
        else:
            place += len(piece)
    if depth and start < place:  # an answer that is to be continued
        yield start, place


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
        refuses_nulls: bool = False,
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
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(isinstance(x, str) for x in variables):
            raise ValueError(
                f"chat_template_kwargs={brief(variables)}: has to be a dict from names to values"
            )
        reserved = sorted(_RESERVED_VARIABLES.intersection(variables))
        if reserved:
            raise ValueError(f"chat_template_kwargs: {reserved[0]!r} is set by the request itself")
        check_content_format(content_format)
        self._tokenizer = tokenizer
        self._content_format = content_format
        are_tools = isinstance(tools, list | tuple) and all(isinstance(x, Mapping) for x in tools)
        if tools is not None and not are_tools:
            raise ValueError(f"tools={brief(tools)}: has to be a list of dicts")
        self._tools = tools or None
        self._refuses_nulls = refuses_nulls
        if refuses_nulls:
            check_variables(variables)
            check_tools(tools or ())
        self._variables = variables
        self._asks = add_generation_prompt
        self._continues = continue_final_message
        self._own_template = chat_template
        self._renders_itself = _renders_itself(tokenizer)
        self._template = self._choose_template(chat_template)
        for name in (one[:100] for one in self.unread):
            if name not in _told and len(_told) < _MOST_TOLD:  # clients choose the names
                _told.add(name)
                logger.warning("The chat template does not read %r, which has no effect", name)

    @property
    def unread(self) -> list[str]:
        """Fields of the request that have no effect, because the template does not read them."""
        read = None if self._renders_itself else _variables(self._template)
        if read is None:
            return []
        tools = [] if "tools" in read or not self._tools else ["tools"]
        return tools + [f"chat_template_kwargs.{x}" for x in self._variables if x not in read]

    @property
    def has_marks(self) -> bool:
        """True if the template marks the assistant's answers."""
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
        # The template may need the tools and variables of this request.
        return self._known_with(self._tools, self._variables).forms

    def render(self, messages: list[ChatMessage], marks: bool = False) -> Rendered:
        """Render messages of ``check_messages``. ValueError: the template refuses them or would
        write a value's type in its place, or an argument is null that the called tool does not
        declare.

        marks: return the spans that the template marks. ValueError also: they cannot be told.
        """
        if self._refuses_nulls:
            check_arguments(messages, self._tools or ())
        shown = signs = ""
        try:
            text = self._apply(messages, self._asks, self._continues)
            if marks:
                signs = "".join([one for one in _NONCHARACTERS if one not in text][:2])
                shown = self._apply(messages, self._asks, self._continues, signs)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"the chat template refused the messages: {kind}{error}") from error
        for value in _other_values([messages, self._tools, self._variables]):
            kind = type(value).__name__
            if f"<{kind}>" in text:  # as transformers writes it
                raise ValueError(
                    f"{brief(value)} of type {kind} has no form in a prompt: give text"
                )
        return Rendered(text, tuple(_read_marks(shown, text, signs)) if marks else ())

    def mark(self, messages: list[ChatMessage], only: int | None = None) -> Marked:
        """Put markers in place of the texts of all messages, or of ``only`` one."""
        return mark_messages(messages, str(self._template), only)

    def locate(self, marked: Marked, text: str) -> Located | None:
        """Find the marked texts in ``text``, the rendering of the same messages without markers.

        None: the places are not certain, since the template treats the texts and the markers
        differently.
        """
        for _ in range(2):
            outline = self.outline(marked.messages)
            places = None if outline is None else outline.places(text, marked.pieces)
            if outline is None or places is not None:
                break
            self._known.outlines.clear()  # it may have a date that is over
        return Located(marked, outline, places) if outline and places is not None else None

    def outline(self, messages: list[ChatMessage], asks: bool | None = None) -> Outline | None:
        """Return the outline of marked messages. None: the template refuses them.

        asks: ``add_generation_prompt`` for the start of a conversation. None: as in the request.
        """
        ends = (self._asks, self._continues) if asks is None else (asks, False)
        outlines = self._known.outlines
        key = f"{messages}{ends}{self._beside}"
        if key not in outlines:
            if len(outlines) >= _MOST_OUTLINES:
                outlines.clear()
            try:
                outlines[key] = read_outline(self._apply(messages, *ends))
            except Exception:  # a template may raise anything
                outlines[key] = None
        return outlines[key]

    @cached_property
    def _beside(self) -> str:
        """All that a rendering depends on beside its messages."""
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
                return self._apply_written(messages, tools, variables, ends)

            known[key] = _Known(TemplateForms(probe, fixed), {})
        return known[key]

    def _apply(
        self, messages: list[ChatMessage], asks: bool, continues: bool, signs: str = ""
    ) -> str:
        """Render messages in the forms of the template. It may raise anything."""
        read = () if self._renders_itself else _reasoning_fields(self._template)
        written = [_write(move_reasoning(message, read), self.forms) for message in messages]
        ends = {"add_generation_prompt": asks, "continue_final_message": continues}
        return self._apply_written(written, self._tools, self._variables, ends, signs)

    def _apply_written(
        self,
        messages: list[ChatMessage],
        tools: Any,
        variables: dict[str, Any],
        ends: dict[str, bool],
        signs: str = "",
    ) -> str:
        if self._renders_itself:
            template = self._own_template
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **ends, **variables
            )
            return text
        from transformers.utils.chat_template_utils import render_jinja_template

        # apply_chat_template of transformers' tokenizers does the same, but leaves out content that
        # is None, which some templates look for.
        (text,), _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=_show_marks(self._template, signs) if signs else self._template,
            **{**self._tokenizer.special_tokens_map, **variables},
            **ends,
        )
        return text

    def _choose_template(self, chat_template: str | None) -> Any:
        """Return the template's text. A tokenizer may have several, by name and for tools."""
        if self._renders_itself:
            return chat_template or self._tokenizer.chat_template
        return self._tokenizer.get_chat_template(chat_template, self._tools)


def _other_values(value: object) -> Iterator[object]:
    """Yield the values in lists and dicts that JSON does not have, such as times of a table."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _other_values(one)
    elif isinstance(value, np.generic):
        yield from _other_values(value.item())
    elif value is not None and not isinstance(value, str | int | float):
        yield value


def _write(message: ChatMessage, forms: TemplateForms) -> ChatMessage:
    """Write a message in the forms of the template. If the form is not known, content is a text."""
    form = forms.content_form(message["role"])
    if form is None or not any(form):
        form = ContentForm(True, False)
    call_form = forms.call_form if "tool_calls" in message else CallForm()
    return write_message(message, form, call_form)


def _renders_itself(tokenizer: Any) -> bool:
    """Return whether a tokenizer renders conversations with its own code."""
    from transformers import PreTrainedTokenizerBase

    own: object = type(tokenizer).apply_chat_template
    return own is not PreTrainedTokenizerBase.apply_chat_template

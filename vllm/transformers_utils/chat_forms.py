"""The forms of a message that a chat template reads, found by rendering markers.

A template is a program, and its source tells little: content may be read by a filter, a macro, an
alias or an index. Only the output shows whether a form is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import product
from typing import NamedTuple, get_args

from vllm.transformers_utils.chat_messages import (
    Arguments,
    CallForm,
    CallShape,
    ChatMessage,
    ContentForm,
    NoContent,
    write_message,
)

Render = Callable[[list[ChatMessage]], str]
"""The text of a conversation. It may raise anything."""

PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "listed",
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]
"""Tools of probes for requests that have tools."""

_MOST_ROLES = 32
"""Number of roles whose forms are remembered. Clients may send any role."""
_TEXT, _SECOND, _UNREAD = "probetextq", "probesecondq", "probeunreadq"
_PART = {"type": "text", "text": _TEXT, "unread": _UNREAD}
_NAME, _KEY, _VALUE = "probecallq", "probekeyq", "probevalueq"
_CALL = {  # the id is as Mistral's templates demand it
    "id": "probe0001",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
}
_RESULT = {"tool_call_id": _CALL["id"], "name": _NAME}
"""Fields that tell which call a tool's message answers."""
_ASK = {"role": "user", "content": "Hello."}
_CALL_FORMS = tuple(
    CallForm(arguments, call, no_content)
    for call, arguments, no_content in product(*map(get_args, (CallShape, Arguments, NoContent)))
)
"""The most usual ones first."""


class _Found(IntEnum):
    """The result of a probe, from the worst to the best."""

    RAISED = 0
    LOST = 1
    UNTIDY = 2
    """The marker is there, but as Python or JSON quotes it, or beside the word None."""
    KEPT = 3


class _Context(NamedTuple):
    """Messages around the one with a marker."""

    before: list[ChatMessage]
    after: list[ChatMessage]

    def around(self, message: ChatMessage) -> list[ChatMessage]:
        return [*self.before, message, *self.after]


def _with_system(contexts: Iterable[_Context]) -> Iterator[_Context]:
    """Yield the contexts, then all of them behind a system message, which some templates demand."""
    tried = []
    for context in contexts:
        tried.append(context)
        yield context
    for before, after in tried:
        yield _Context([{"role": "system", "content": "Help."}, *before], after)


class TemplateForms:
    """The forms that one template reads.

    content_form: the form for every role, if a user has stated one.
    """

    def __init__(self, render: Render, content_form: ContentForm | None = None) -> None:
        self._render = render
        self._fixed = content_form
        self._by_role: dict[str, ContentForm | None] = {}

    def content_form(self, role: str) -> ContentForm | None:
        """Return the form for messages of ``role``. If nothing in it is true, their text is lost.

        None: the form is not known, since the template refused every probe.
        """
        if self._fixed is not None:
            return self._fixed
        if role in self._by_role:
            return self._by_role[role]
        form = self._find_content_form(role)
        if len(self._by_role) < _MOST_ROLES:
            self._by_role[role] = form
        return form

    @cached_property
    def call_form(self) -> CallForm:
        """The form for messages with tool calls, or the most usual one if none shows them."""
        best, form = _Found.RAISED, _CALL_FORMS[0]
        for tried in product(_CALL_FORMS, _with_system(self._call_contexts())):
            found = self._find_call(*tried)
            if found > best:
                best, form = found, tried[0]
            if best is _Found.KEPT:
                break
        return form

    def _find_content_form(self, role: str) -> ContentForm | None:
        has_rendered = False
        for context in _with_system(self._contexts(role)):
            text = self._find_text(context, role, _TEXT)
            one_part = parts = self._find_text(context, role, [_PART, {**_PART, "text": _SECOND}])
            if parts is not _Found.KEPT:
                one_part = self._find_text(context, role, [_PART])
            if _Found.KEPT in (text, one_part):
                return ContentForm(*(one is _Found.KEPT for one in (text, parts, one_part)))
            has_rendered |= max(text, one_part) > _Found.RAISED
        return ContentForm(False, False) if has_rendered else None

    def _contexts(self, role: str) -> Iterator[_Context]:
        """Yield messages that may stand before and after one of ``role``."""
        if role == "user":
            yield _Context([], [])
            return
        ask = self._ask()
        if role == "tool":
            called = self._call_message(self.call_form)
            yield _Context([ask, called], [])
            yield _Context([ask, called], [ask])
        elif role in ("system", "developer"):
            yield _Context([], [ask])
        yield _Context([ask], [])
        yield _Context([ask], [ask])
        yield _Context([], [ask])

    def _call_contexts(self) -> Iterator[_Context]:
        ask = self._ask()
        yield _Context([ask], [])
        for content in ("Done.", [{"type": "text", "text": "Done."}]):
            yield _Context([ask], [{"role": "tool", **_RESULT, "content": content}])

    def _ask(self) -> ChatMessage:
        form = self.content_form("user") or ContentForm(True, False)
        return write_message(_ASK, form, _CALL_FORMS[0])

    def _call_message(self, form: CallForm) -> ChatMessage:
        content_form = self.content_form("assistant")
        if content_form is None or not any(content_form):
            content_form = ContentForm(True, False)
        message: ChatMessage = {"role": "assistant", "tool_calls": [_CALL]}
        return write_message(message, content_form, form)

    def _try(self, messages: Sequence[ChatMessage]) -> str | None:
        try:
            return self._render(list(messages))
        except Exception:  # a template is a program: on what it does not take it may raise anything
            return None

    def _find_text(
        self, context: _Context, role: str, content: str | list[dict[str, str]]
    ) -> _Found:
        message = {"role": role, **(_RESULT if role == "tool" else {}), "content": content}
        text = self._try(context.around(message))
        if text is None:
            return _Found.RAISED
        markers = [_TEXT] if isinstance(content, str) else [part["text"] for part in content]
        is_kept = all(marker in text.lower() for marker in markers) and _UNREAD not in text
        return _Found.KEPT if is_kept else _Found.LOST

    def _find_call(self, form: CallForm, context: _Context) -> _Found:
        text = self._try(context.around(self._call_message(form)))
        if text is None:
            return _Found.RAISED
        if not all(marker in text for marker in (_NAME, _KEY, _VALUE)):
            return _Found.LOST
        quoted = (f"'{_KEY}'", f'\\"{_KEY}', f"'{{\"{_KEY}")
        says_none = text.count("None") > (self._try(context.before) or "").count("None")
        return _Found.UNTIDY if says_none or any(one in text for one in quoted) else _Found.KEPT

"""Parsers of the tool calls that models write into their text, by the name of the format.

One object reads one answer as it arrives.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from vllm.entrypoints.openai.responses import FunctionCall, ToolCall
from vllm.utils.text import parse_json


class ParsedText(NamedTuple):
    """An answer, or the new part of one: text, and tool calls, which may be pieces of a call."""

    content: str | None
    """None: a whole answer consists of calls only."""
    tool_calls: list[ToolCall]


_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def _escaped(text: str) -> str:
    """JSON, or the beginning of it, in which models wrote line breaks and tabs into strings as they
    are: clients' parsers take them escaped only."""

    def escape(string: re.Match[str]) -> str:
        return _CONTROL.sub(lambda character: f"\\u{ord(character[0]):04x}", string[0])

    return _STRING.sub(escape, text)


def _is_json(text: str) -> bool:
    try:
        parse_json(_escaped(text))
    except ValueError:
        return False
    return True


class ToolParser(ABC):
    """Reads one answer."""

    tags: ClassVar[tuple[str, ...]]
    """Texts around a call, which some tokenizers have as special tokens."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Number of tool calls found so far."""

    @abstractmethod
    def push(self, text: str, is_last: bool) -> ParsedText:
        """Add text. Text that may belong to a tool call is held back until that is known."""

    @classmethod
    def parse(cls, text: str) -> ParsedText:
        """Read a whole answer."""
        content, calls = cls().push(text, is_last=True)
        for call in calls:
            call.index = None
        return ParsedText((content or "").strip() or None if calls else content, calls)

    def _new_call(self, name: str, arguments: str) -> ToolCall:
        """Make the next call of this answer. ``arguments``: JSON, or the known beginning of it."""
        function = FunctionCall(name=name, arguments=arguments)
        self.num_calls += 1
        return ToolCall(
            index=self.num_calls - 1,
            id=f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
            type="function",
            function=function,
        )


class HermesToolParser(ToolParser):
    """Tool calls as Hermes and Qwen models write them.

    The form of each call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
    Text outside the tags is content; so is a tag whose inside is not a call. A call that begins
    in this way is sent piece by piece, any other call when it is complete. The next call's tag
    ends a call that lacks its closing tag.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    tags = (OPEN, CLOSE)
    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
    _END = re.compile(rf"\s*\}}\s*({CLOSE}|(?={OPEN}))")

    def __init__(self) -> None:
        super().__init__()
        self._pending = ""
        self._arguments: str | None = None
        """The part of the open call's arguments that was sent."""

    def push(self, text: str, is_last: bool) -> ParsedText:
        self._pending += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if self._arguments is not None and not self._push_arguments(calls, is_last):
                break
            before, tag, after = self._pending.partition(self.OPEN)
            if not tag:
                content.append(self._take_content(is_last))
                break
            content.append(before)
            head = self._HEAD.match(after)
            inside, end, rest = self._split(after, is_last)
            if head and (place := self._end_of_arguments(after, head.end())):
                calls.append(self._new_call(head[1], _escaped(after[head.end() : place.start()])))
                self._pending = after[place.end() :]
            elif is_last or (end and not head):
                self._pending = rest
                call = self._read_call(inside)
                content += [] if call else [tag + inside + end]
                calls += [call] if call else []
            elif head:
                calls.append(self._new_call(head[1], ""))
                self._arguments, self._pending = "", after[head.end() :]
            else:
                self._pending = tag + after
                break
        return ParsedText("".join(content), calls)

    def _split(self, text: str, is_last: bool) -> tuple[str, str, str]:
        """Split at the closing tag, which a string of the call may have, too. Before the last text
        there may be none yet."""
        place = _STRING.sub(lambda string: " " * len(string[0]), text).find(self.CLOSE)
        if place >= 0 and _is_json(text[:place]):
            return text[:place], self.CLOSE, text[place + len(self.CLOSE) :]
        return text.partition(self.CLOSE) if place >= 0 or is_last else (text, "", "")

    def _end_of_arguments(self, text: str, start: int) -> re.Match[str] | None:
        """Find the end of the call whose arguments begin at ``start``; None: it is not there."""
        try:
            return self._END.match(text, json.JSONDecoder(strict=False).raw_decode(text, start)[1])
        except (ValueError, RecursionError):
            return None

    def _push_arguments(self, calls: list[ToolCall], is_last: bool) -> bool:
        """Send the new part of the open call; returns True if it has ended and its tag was read."""
        sent = self._arguments or ""
        known = sent + self._pending
        try:
            end = json.JSONDecoder(strict=False).raw_decode(known)[1]
        except (ValueError, RecursionError):
            # What is in a string that is not closed yet may be a part of it.
            end = _STRING.sub(lambda string: " " * len(string[0]), known).find(self.CLOSE)
            end = len(known) if end < 0 else end
        if end > len(sent):
            # Characters are escaped one by one, so what was sent is the beginning of this.
            piece = FunctionCall(arguments=_escaped(known[:end])[len(_escaped(sent)) :])
            calls.append(ToolCall(index=self.num_calls - 1, function=piece))
        place = self._END.match(known, end)
        if place or self.CLOSE in known[end:] or is_last:
            rest = known[place.end() :] if place else known[end:].partition(self.CLOSE)[2]
            self._arguments, self._pending = None, rest
            return True
        self._arguments, self._pending = known[:end], known[end:]
        return False

    def _take_content(self, is_last: bool) -> str:
        """Take the pending text, without an end that may be the beginning of a tag."""
        begun = range(0 if is_last else len(self.OPEN) - 1, 0, -1)
        keep = next((n for n in begun if self._pending.endswith(self.OPEN[:n])), 0)
        end = len(self._pending) - keep
        content, self._pending = self._pending[:end], self._pending[end:]
        return content

    def _read_call(self, text: str) -> ToolCall | None:
        """Return the call in ``text``, or None if it is not one."""
        try:
            call = parse_json(_escaped(text))
            name = call["name"]
            key = "arguments" if "arguments" in call else "parameters"
            if key not in call and not call.keys() <= {"name", "id", "type"}:
                return None  # its arguments have a name that is not known
            arguments = call.get(key, {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            arguments = _escaped(arguments)
            if not _is_json(arguments):
                return None
            (name + arguments).encode()  # raises for half a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        return self._new_call(name, arguments)


TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesToolParser}
"""Value of ``tool_call_parser`` -> parser."""

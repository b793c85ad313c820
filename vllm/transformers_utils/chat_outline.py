"""Conversations with markers in place of texts, and their renderings: outlines.

A template writes a conversation of markers as it writes the conversation itself, unless it looks
into the texts. So the outline shows what the template leaves out, and the place of each text in
what the template itself writes. Conversations of one shape have one outline. The places are certain
if a rendering is the outline with the texts filled in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from vllm.transformers_utils.chat_messages import REASONING_FIELDS, ChatMessage

PieceKind = Literal["text", "call", "aside"]

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tags that open and close a reasoning block."""
_END_OF_STEPS = "[BEGIN FINAL RESPONSE]"
_CLOSES_REASONING = (*(closes for _, closes in REASONING_TAGS), _END_OF_STEPS)
_KEPT_TAGS = frozenset((*(tag for pair in REASONING_TAGS for tag in pair), _END_OF_STEPS))
_MARKER = re.compile(r"z(\d{6})vx|(?<!\d)9(\d{6})17(?!\d)", re.IGNORECASE)
"""Nine letters and digits, as Mistral's templates demand of the id of a call; or a number."""
_JSON_VALUE = re.compile(
    r'(?P<string>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)",
    re.DOTALL,
)
_TAG = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|/\w+|" + re.escape(_END_OF_STEPS))


class Piece(NamedTuple):
    """One thing that a message says."""

    message: int
    kind: PieceKind
    """An aside (reasoning, an id) may be left out."""
    part: int
    """The number of the text part or of the call."""
    text: str


class Outline(NamedTuple):
    """A rendering of markers."""

    literals: tuple[str, ...]
    """Texts that the template writes before, between and behind the markers."""
    numbers: tuple[int, ...]
    """The piece that each marker stands for."""

    def places(self, text: str, pieces: list[Piece]) -> list[tuple[int, int]] | None:
        """Return [start, end) of each piece in ``text``. None: ``text`` has another outline."""
        if not text.startswith(self.literals[0]):
            return None
        end, places = len(self.literals[0]), []
        for number, literal in zip(self.numbers, self.literals[1:], strict=True):
            if number >= len(pieces):
                return None
            start = end
            for written in _spellings(pieces[number]):
                end = start + len(written)
                if text.startswith(written, start) and text.startswith(literal, end):
                    break
            else:
                return None
            places.append((start, end))
            end += len(literal)
        return places if end == len(text) else None

    def has_anything_in_place(self, text: str) -> bool | None:
        """Return whether ``text`` has a text in place of the markers. None: the rest differs."""
        first, last = self.literals[0], self.literals[-1]
        if not text.startswith(first) or not text.endswith(last):
            return None
        return bool(text[len(first) : len(text) - len(last)].strip())


class Marked(NamedTuple):
    """A conversation of markers, and the pieces that they stand for."""

    messages: list[ChatMessage]
    pieces: list[Piece]


def mark_messages(messages: list[ChatMessage], template: str, only: int | None = None) -> Marked:
    """Put markers into messages of ``check_messages``, into all or into ``only`` one.

    Tags and switches (``/think``) that are in the template stay: it may look for them.
    """
    marking = _Marking(template)
    marked = [
        marking.mark(position, message) if only in (None, position) else message
        for position, message in enumerate(messages)
    ]
    return Marked(marked, marking.pieces)


def read_outline(rendered: str) -> Outline:
    """Return the outline that a rendering of markers shows."""
    literals, numbers, end = [], [], 0
    for match in _MARKER.finditer(rendered):
        literals.append(rendered[end : match.start()])
        numbers.append(int(match[1] or match[2]))
        end = match.end()
    return Outline((*literals, rendered[end:]), tuple(numbers))


class _Marking:
    def __init__(self, template: str) -> None:
        self.pieces: list[Piece] = []
        self._template = template
        self._ids: dict[str, str] = {}
        """Markers of the ids of calls, which results repeat."""

    def mark(self, position: int, message: ChatMessage) -> ChatMessage:
        marked = dict(message)
        for field in REASONING_FIELDS:
            if isinstance(message.get(field), str):
                marked[field] = self._mark_text(message[field], position, "aside")
        content, is_answer = message.get("content", ""), message["role"] == "assistant"
        if isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._mark_text(part["text"], position, "text", i, is_answer)}
                for i, part in enumerate(content)
            ]
        elif "content" in message or "tool_calls" not in message:
            marked["content"] = self._mark_text(content, position, "text", 0, is_answer)
            if "tool_calls" not in message and not self._ends_in(content, is_answer):
                text, end = marked["content"].rstrip(), self._marker("", position, "text", 0)
                marked["content"] = text + end + marked["content"][len(text) :]
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            marked["tool_calls"] = [self._mark_call(call, position, i) for i, call in calls]
        elif "tool_call_id" in message:
            called = message["tool_call_id"]
            marked["tool_call_id"] = self._ids.get(str(called), called)
        if isinstance(refusal := message.get("refusal"), str):
            marked["refusal"] = self._mark_text(refusal, position, "text")
        if isinstance(function := message.get("function_call"), Mapping):
            call = self._mark_call({"function": function}, position, 0)
            marked["function_call"] = call["function"]
        return marked

    def _mark_text(
        self,
        text: str,
        position: int,
        kind: PieceKind,
        index: int = 0,
        may_have_reasoning: bool = False,
    ) -> str:
        segments = self._split(text)
        closed = -1
        if may_have_reasoning:
            closed = max(
                (i for i, one in enumerate(segments) if one in _CLOSES_REASONING), default=-1
            )
        for i in range(0, len(segments), 2):
            core = segments[i].strip()
            if core:
                marker = self._marker(core, position, "aside" if i < closed else kind, index)
                segments[i] = segments[i].replace(core, marker)
        return "".join(segments)

    def _split(self, text: str) -> list[str]:
        """Split at tags that stay, which are every second element of the result."""
        parts, end = [], 0
        for match in _TAG.finditer(text):
            if match[0] in _KEPT_TAGS or match[0] in self._template:
                parts += [text[end : match.start()], match[0]]
                end = match.end()
        is_told = any(map(str.strip, [*parts[::2], text[end:]])) or _KEPT_TAGS.intersection(parts)
        return [*parts, text[end:]] if is_told else [text]

    def _ends_in(self, text: str, is_answer: bool) -> bool:
        """Return whether a marker stands for the end of a text, or in others than answers for any
        part of it."""
        texts = self._split(text)[::2]
        return bool("".join(texts[-1:] if is_answer else texts).strip())

    def _marker(self, text: str, position: int, kind: PieceKind, index: int) -> str:
        self.pieces.append(Piece(position, kind, index, text))
        return f"z{len(self.pieces) - 1:06d}vx"

    def _mark_call(self, call: dict[str, Any], position: int, index: int) -> dict[str, Any]:
        marked, function = dict(call), dict(call["function"])
        if isinstance(call.get("id"), str):
            marker = self._marker(call["id"], position, "aside", index)
            marked["id"] = self._ids[call["id"]] = marker
        if isinstance(name := function.get("name"), str) and name.strip():
            function["name"] = self._marker(name, position, "call", index)
        if arguments := function.get("arguments"):
            is_text = isinstance(arguments, str)
            stated = (
                arguments if is_text else json.dumps(arguments, ensure_ascii=False, default=str)
            )
            text = _JSON_VALUE.sub(lambda match: self._mark_value(match, position, index), stated)
            function["arguments"] = text if is_text else json.loads(text)
        return {**marked, "function": function}

    def _mark_value(self, match: re.Match[str], position: int, index: int) -> str:
        if number := match["number"]:
            marker = self._marker(number, position, "call", index)
            return f"9{marker[1:7]}17"
        text = "" if match["colon"] else json.loads(match["string"])
        if not text.strip():
            return match[0]
        core = text.strip()
        marked = text.replace(core, self._marker(core, position, "call", index))
        return json.dumps(marked, ensure_ascii=False)


def _spellings(piece: Piece) -> Iterator[str]:
    """Yield a text, and its forms inside of JSON and Python strings."""
    text = piece.text
    yield text
    if piece.kind == "aside":  # some of Mistral's templates write the end of an id
        yield text[-9:]
    for encoded in (json.dumps(text, ensure_ascii=False), json.dumps(text)):
        yield encoded[1:-1]
        yield json.dumps(encoded)[3:-3]
    yield repr(text)[1:-1]
    if text[-1:].isdigit():
        try:
            yield repr(json.loads(text))
        except ValueError:
            return

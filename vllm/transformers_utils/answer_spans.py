"""Where the assistant's answers lie in a rendered conversation, if its template marks none.

An answer begins behind what the template writes to ask for one (the generation prompt), and ends
with what it writes behind the answer's own text. Most templates write the start of a conversation
as they write the whole; then both places are lengths of renderings of its start. Others write an
answer differently once more messages follow (without its reasoning, with another end mark). There,
texts are replaced by markers, and what stays the same around a marker shows where the text lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]
"""[start, end) in characters."""

_MARKERS = ("qzjprobexv", "wykprobefh")
"""No character at an end of one is at that end of the other, so at most one of them can look like
the text that it replaces."""
_REASONING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What opens and closes a reasoning block."""
_EMPTY_REASONING = re.compile(
    "|".join(rf"\s*{re.escape(opens)}\s*{re.escape(closes)}\s*" for opens, closes in _REASONING)
)
_OPEN_REASONING = re.compile(
    "|".join(rf"{re.escape(opens)}\s*(?:{re.escape(closes)}\s*)?\Z" for opens, closes in _REASONING)
)


class _Place(NamedTuple):
    """Where the text of one message lies in a rendering of several."""

    rendered: str
    start: int
    end: int

    @property
    def rest(self) -> str:
        return self.rendered[self.end :]


class AnswerFinder:
    """Finds answers of one template.

    render(messages, add_generation_prompt) -> text; it raises ValueError.
    special_tokens: texts of tokens that end a message.
    """

    def __init__(
        self, render: Callable[[list[Any], bool], str], special_tokens: Collection[str] = ()
    ) -> None:
        self._render = render
        self._special_tokens = sorted(special_tokens, key=len, reverse=True)

    def find(self, messages: list[Any], text: str) -> tuple[Span, ...]:
        """The answers in ``text``, a rendering of all messages. ValueError: one cannot be told."""
        return tuple(
            self._by_lengths(messages, index, text) or self._by_markers(messages, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        )

    def _by_lengths(self, messages: list[Any], index: int, text: str) -> Span | None:
        """None: the start of the conversation is written differently than the whole."""
        through = self._render(messages[: index + 1], False)
        if index:
            before = self._render(messages[:index], True)
        else:  # few templates take an empty conversation: how they begin an answer behind one
            opening = self._render(messages[:1], True).removeprefix(through)
            before = through.partition(opening)[0] + opening if opening else ""
        if through.startswith(before) and text.startswith(through):
            return len(before), len(through)
        return None

    def _by_markers(self, messages: list[Any], index: int, text: str) -> Span:
        refusal = ValueError(
            f"where the answer in message {index} lies cannot be told: the chat template "
            "writes the start of a conversation in another way than the whole; mark "
            "answers in it with {% generation %}, or give a mask column"
        )
        if not index:
            raise refusal
        asked = self._place(messages, index - 1, text)
        answer = self._place(messages, index, text)
        alone = self._place(messages[: index + 1], index)
        opened = self._place(messages[:index], index - 1, add_generation_prompt=True)
        if None in (asked, answer, alone, opened):
            raise refusal
        assert asked and answer and alone and opened
        start = self._start(asked, answer, opened.rest)
        length = self._length_of_end(answer.rest, alone.rest)
        if start is None or length is None:
            raise refusal
        return start, answer.end + length

    @staticmethod
    def _start(asked: _Place, answer: _Place, opening: str) -> int | None:
        """``opening``: what is written behind the message before to ask for an answer."""
        between = answer.rendered[asked.end : answer.start]
        # A prompt may open or skip reasoning, which the whole leaves out, or has where it is empty.
        for opened in (opening, _OPEN_REASONING.sub("", opening)):
            if between.startswith(opened):
                return asked.end + len(opened)
        return answer.start if between and opening.startswith(between) else None

    def _length_of_end(self, rest: str, ending: str) -> int | None:
        """Characters of ``rest`` that end the answer, as ``ending`` does where it is the last."""
        if rest.startswith(ending):
            return len(ending)
        # The last answer's end mark may be a token of its own.
        same = _length_of_same_start(rest, ending)
        for last in self._special_tokens:
            start = ending.rfind(last, 0, same + len(last))
            if start < 0 or start + len(last) <= same:
                continue
            behind = ending[start + len(last) :]
            for mark in self._special_tokens:
                if rest[start:].startswith(mark + behind):
                    return start + len(mark) + len(behind)
        return None

    def _place(
        self,
        messages: list[Any],
        index: int,
        text: str | None = None,
        add_generation_prompt: bool = False,
    ) -> _Place | None:
        """Where message ``index`` lies in the rendering of all; None: its text does not show."""
        if text is None:
            text = self._render(messages, add_generation_prompt)
        start = end = len(text)
        for marker in _MARKERS:
            marked = list(messages)
            marked[index] = _with_marker(messages[index], marker)
            other = self._render(marked, add_generation_prompt)
            if marker not in other:
                return None
            start = min(start, _length_of_same_start(text, other))
            end = min(end, _length_of_same_start(text[::-1], other[::-1]))
        return _Place(text, start, max(start, len(text) - end))


def without_empty_reasoning(text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans that begin behind a reasoning block with nothing in it."""
    found = [(_EMPTY_REASONING.match(text, start, end), start, end) for start, end in spans]
    return tuple((match.end() if match else start, end) for match, start, end in found)


def _length_of_same_start(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _with_marker(message: Any, marker: str) -> Any:
    """A message whose text, or whose calls where it has some, are replaced by ``marker``."""
    if not message.get("tool_calls"):
        return {**message, "content": marker}
    calls = [
        {**call, "function": {**call["function"], "name": marker, "arguments": {marker: marker}}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}

"""Finds the assistant's answers in a rendered conversation.

If the template marks them with ``{% generation %}``, the marks decide. Otherwise an answer begins
behind the text that asks for one (the generation prompt), and ends with the text that ends a turn.
Both are found in outlines of the conversation, of its beginnings, and of short conversations that
show how the template separates messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Unpack

from vllm.transformers_utils.chat_messages import ChatMessage, check_messages
from vllm.transformers_utils.chat_outline import REASONING_TAGS, Outline
from vllm.transformers_utils.chat_rendering import ChatOptions, Located, Rendered, Rendering
from vllm.transformers_utils.chat_template import check_kept
from vllm.transformers_utils.chat_turns import Turns, read_turns
from vllm.transformers_utils.tokenizer import TokenizerLike

Span = tuple[int, int]
"""[start, end) in characters."""

_EMPTY_REASONING = re.compile(
    "|".join(rf"{re.escape(opens)}\s*{re.escape(closes)}\s*" for opens, closes in REASONING_TAGS)
)


def chat_answers(
    tokenizer: TokenizerLike,
    messages: Sequence[ChatMessage],
    *,
    with_empty_reasoning: bool = True,
    **options: Unpack[ChatOptions],
) -> Rendered:
    """Render a conversation as ``chat_text`` does, and find the answers.

    with_empty_reasoning: an empty reasoning block belongs to its answer.
    ValueError: that of ``chat_text``, or the place of an answer is not certain.
    """
    rendering, checked = Rendering(tokenizer, **options), check_messages(messages)
    text, spans = rendering.render(checked, rendering.has_marks)
    located = check_kept(rendering, checked, text)
    if rendering.has_marks and with_empty_reasoning:
        return Rendered(text, spans)
    if located is None:
        raise ValueError(
            "where the answers lie cannot be told: the chat template rewrites the texts of "
            "messages; mark answers in it with {% generation %}, or give a mask column"
        )
    finder = _AnswerFinder(rendering, located)
    if not rendering.has_marks:
        spans = tuple(finder.find())
    if not with_empty_reasoning:
        spans = tuple(_without(text, spans, list(finder.find_empty_reasoning())))
    return Rendered(text, spans)


_Cut = tuple[int, int]
"""The number of a text between two markers of the outline, and an offset in it."""


class _AnswerFinder:
    """Finds the answers of one conversation."""

    def __init__(self, rendering: Rendering, located: Located) -> None:
        self._rendering = rendering
        self._messages, self._pieces = located.marked
        self._outline = located.outline
        self._ends = [0, *(end for _, end in located.places)]
        """Places in which the texts between the markers begin."""

    def find(self) -> Iterator[Span]:
        """Yield the answers. ValueError: the place of one cannot be told."""
        before: _Cut | None = None
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            cuts = self._cut(index, before)
            if cuts is None:
                raise ValueError(
                    f"where the answer in message {index} lies cannot be told from what the chat "
                    "template writes around it; mark answers in it with {% generation %}, or give "
                    "a mask column"
                )
            start, before = cuts
            yield self._place(start), self._place(before)

    def find_empty_reasoning(self) -> Iterator[Span]:
        """Yield the empty reasoning blocks before the answers."""
        for index, message in enumerate(self._messages):
            first = self._first(self._outline, index)
            if message["role"] == "assistant" and first is not None:
                for block in _EMPTY_REASONING.finditer(self._outline.literals[first]):
                    yield self._ends[first] + block.start(), self._ends[first] + block.end()

    def _place(self, cut: _Cut) -> int:
        return self._ends[cut[0]] + cut[1]

    def _first(self, outline: Outline, index: int) -> int | None:
        """Return the number of the first marker of message ``index`` and of the text before it."""
        found = (i for i, n in enumerate(outline.numbers) if self._pieces[n].message == index)
        return next(found, None)

    def _cut(self, index: int, before: _Cut | None) -> tuple[_Cut, _Cut] | None:
        """Return the start and end of an answer. ``before``: the end of the answer before it."""
        through = self._outline_of(index + 1, False)
        first = self._first(self._outline, index)
        alone = None if through is None else self._first(through, index)
        if through is None or first is None or alone is None:
            return None
        # Earlier reasoning may be left out of the whole.
        own = tuple(n for n in through.numbers[alone:] if n in self._outline.numbers)
        last = first + len(own)
        if not own or self._outline.numbers[first:last] != own:
            return None
        is_last = index == len(self._messages) - 1
        start = self._start(index, first, before)
        end = self._turns.end(self._outline.literals[last], through.literals[-1], is_last)
        if start is None or end is None:
            return None
        return (first, start), (last, end)

    def _start(self, index: int, first: int, before: _Cut | None) -> int | None:
        """Return where an answer begins in the text before its first marker."""
        between = self._outline.literals[first]
        if index == 0:
            return self._turns.start_behind(between, 0, is_first=True)
        if self._messages[index - 1]["role"] == "assistant":
            if before is None or before[0] != first:
                return None
            return self._turns.start_behind(between, before[1])
        asked, plain = self._outline_of(index, True), self._outline_of(index, False)
        if asked is None or plain is None or not asked.numbers:
            return None
        if asked.numbers[-1:] != self._outline.numbers[:first][-1:]:
            return None
        return self._turns.start(between, asked.literals[-1], plain.literals[-1])

    def _outline_of(self, num_messages: int, asks: bool) -> Outline | None:
        return self._rendering.outline(self._messages[:num_messages], asks)

    @cached_property
    def _turns(self) -> Turns:
        return read_turns(self._rendering)


def _without(text: str, spans: Sequence[Span], blocks: Sequence[Span]) -> Iterator[Span]:
    """Yield ``spans`` without ``blocks`` and without white space that only precedes a block."""
    for start, end in spans:
        for block_start, block_end in blocks:
            if block_end <= start or block_start >= end:
                continue
            if text[start:block_start].strip():
                yield start, block_start
            start = block_end
        yield start, end

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
from typing import TYPE_CHECKING, Unpack

from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.transformers_utils.answer_masks import (
    MaskRule,
    Span,
    encode_with_offsets,
    mask_tokens,
)
from vllm.transformers_utils.chat_messages import ChatMessage, check_messages
from vllm.transformers_utils.chat_outline import REASONING_TAGS, Outline
from vllm.transformers_utils.chat_rendering import ChatOptions, Located, Rendered, Rendering
from vllm.transformers_utils.chat_template import check_kept
from vllm.transformers_utils.chat_turns import Turns, read_turns
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.utils.text import check_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = init_logger(__name__)

_ANSWERS = MaskRule()
_TRAINS = ("weight", "train", "loss")
"""Fields of answers that say whether they count, in the formats of OpenAI, Axolotl and ms-swift."""
_EMPTY_REASONING = re.compile(
    "|".join(rf"{re.escape(opens)}\s*{re.escape(closes)}\s*" for opens, closes in REASONING_TAGS)
)


def chat_answers(
    tokenizer: TokenizerLike,
    messages: Sequence[ChatMessage],
    *,
    rule: MaskRule = _ANSWERS,
    **options: Unpack[ChatOptions],
) -> Rendered:
    """Render a conversation as ``chat_text`` does, and find the answers that ``rule`` names.

    ValueError: that of ``chat_text``, or the place of an answer is not certain.
    """
    rendering, checked = Rendering(tokenizer, **options), check_messages(messages)
    for field in _TRAINS:
        if any(one["role"] == "assistant" and one.get(field, 1) in (0, False) for one in checked):
            logger.warning_once(
                "Answers with %r of 0 or false count in masks like others: give a mask column if "
                "they should not",
                field,
            )
    text, spans = rendering.render(checked, rendering.has_marks)
    located = check_kept(rendering, checked, text)
    if rendering.has_marks and rule.with_boilerplate and not rule.last_only:
        return Rendered(text, spans)
    if located is None:
        raise ValueError(
            "where the answers lie cannot be told: the chat template rewrites the texts of "
            "messages; mark answers in it with {% generation %}, or give a mask column"
        )
    finder = _AnswerFinder(rendering, located)
    if rule.last_only and rendering.has_marks:
        spans = finder.of_last(spans, _earlier_marks(rendering, checked, text))
    if not rendering.has_marks:
        spans = tuple(finder.find(rule.last_only))
    if not rule.with_boilerplate:
        headers = finder.find_headers(text, spans) if rendering.has_marks else ()
        blocks = sorted([*headers, *finder.find_empty_reasoning()])
        spans = tuple(_without(text, spans, blocks))
    return Rendered(text, spans)


def render_masked(
    tokenizer: TokenizerLike,
    messages: Sequence[ChatMessage],
    rule: MaskRule,
    **options: Unpack[ChatOptions],
) -> tuple[TokensPrompt, npt.NDArray[np.bool_]]:
    """Return the prompt of one conversation, as ``render_chat`` does, and its mask by ``rule``."""
    text, spans = chat_answers(tokenizer, messages, rule=rule, **options)
    check_text("the text of the messages", text)
    token_ids, offsets = encode_with_offsets(tokenizer, text)
    mask = mask_tokens(offsets, spans, rule.with_before)
    return {"prompt_token_ids": token_ids, "prompt": text}, mask


def _earlier_marks(rendering: Rendering, messages: list[ChatMessage], text: str) -> frozenset[Span]:
    """Return the marked spans of ``text`` that are there without the last answer, too."""
    last = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=0)
    try:
        earlier, spans = rendering.render(messages[:last], marks=True)
    except ValueError:
        return frozenset()
    return frozenset(span for span in spans if text.startswith(earlier[: span[1]]))


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
        roles = [message["role"] for message in self._messages]
        self._answers = [index for index, role in enumerate(roles) if role == "assistant"]

    def find(self, last_only: bool = False) -> Iterator[Span]:
        """Yield the answers, or the last one. ValueError: the place of one cannot be told."""
        before: _Cut | None = None
        answers = self._answers
        for index in answers:
            is_wanted = not last_only or index == answers[-1]
            if not is_wanted and not {*range(index, answers[-1])} <= {*answers}:
                continue  # the place of the last answer does not depend on it
            cuts = self._cut(index, before)
            if cuts is None:
                raise _cannot_be_told(index)
            start, before = cuts
            if is_wanted:
                yield self._place(start), self._place(before)

    def of_last(self, spans: Sequence[Span], earlier: frozenset[Span]) -> tuple[Span, ...]:
        """Return those of the marked ``spans`` that belong to the last answer.

        earlier: spans that do not. ValueError: no span belongs to it alone.
        """
        if not self._answers:
            return ()
        last = self._answers[-1]
        places = list(zip(self._ends[1:], self._outline.numbers, strict=True))
        before = max((end for end, n in places if self._pieces[n].message < last), default=0)
        after = (i for i, n in enumerate(self._outline.numbers) if self._pieces[n].message > last)
        behind = next(after, len(self._outline.numbers))
        end = self._ends[behind] + len(self._outline.literals[behind])
        own = tuple(one for one in spans if before <= one[0] < end and one not in earlier)
        if not own:
            raise ValueError(
                f"message {last}: the chat template does not mark this answer by itself, so "
                "that the last answer cannot be told; use mask=answers, or give a mask column"
            )
        return own

    def find_headers(self, text: str, spans: Sequence[Span]) -> Iterator[Span]:
        """Yield the headers of answers that marked ``spans`` begin with.

        ValueError: a span begins before its answer, which cannot be told from its header.
        """
        before: _Cut | None = None
        for index in self._answers:
            first, cuts = self._first(self._outline, index), self._cut(index, before)
            before = None if cuts is None else cuts[1]
            if first is None:
                continue
            begins, ends = self._ends[first], self._ends[first] + len(self._outline.literals[first])
            start = next((one for one, end in spans if begins <= one < ends), ends)
            if not _EMPTY_REASONING.sub("", text[start:ends]).strip():
                continue  # it begins with the answer itself
            if cuts is None:
                raise _cannot_be_told(index)
            yield start, self._place(cuts[0])

    def find_empty_reasoning(self) -> Iterator[Span]:
        """Yield the empty reasoning blocks before the answers."""
        for index in self._answers:
            first = self._first(self._outline, index)
            if first is not None:
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


def _cannot_be_told(index: int) -> ValueError:
    return ValueError(
        f"where the answer in message {index} lies cannot be told from what the chat template "
        "writes around it; mark answers in it with {% generation %}, or give a mask column"
    )


def _without(text: str, spans: Sequence[Span], blocks: Sequence[Span]) -> Iterator[Span]:
    """Yield ``spans`` without ``blocks`` and without white space that only precedes a block."""
    for start, end in spans:
        for block_start, block_end in blocks:
            if block_end <= start or block_start >= end:
                continue
            if text[start:block_start].strip():
                yield start, block_start
            start = block_end
        if start < end:
            yield start, end

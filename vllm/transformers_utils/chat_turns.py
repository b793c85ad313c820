"""Finds out how a chat template separates the turns of a conversation."""

from __future__ import annotations

import re
from typing import NamedTuple

from vllm.transformers_utils.chat_outline import REASONING_TAGS, Outline
from vllm.transformers_utils.chat_rendering import Rendering

_OPEN_REASONING = re.compile(
    "|".join(
        rf"{re.escape(opens)}\s*(?:{re.escape(closes)}\s*)?\Z" for opens, closes in REASONING_TAGS
    )
)
_START_OF_TAG = re.compile(r"[<\[][^<>\[\]\n]{0,80}\Z")
_END_OF_TAG = re.compile(r"\A[^<>\[\]\s]*[>\]]")
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


class Turns(NamedTuple):
    """Texts that a template writes between messages."""

    asks: bool
    """True if ``add_generation_prompt`` makes a difference."""
    openings: tuple[str, ...] | None
    """Texts behind which an answer begins, with a tag that opens its reasoning and without. None:
    they are not known."""
    user_end: str | None
    """The end of a message of the user."""
    closing: str
    """The end of an answer that has no end if it is the last message."""
    tail: str = ""
    """The end of a conversation that asks for no answer, whoever spoke last."""

    def start(self, between: str, asked: str, plain: str) -> int | None:
        """Return where an answer begins in ``between``, the text between the message before and it.

        asked, plain: the text behind that message if it is the last, with and without the prompt.
        None: the place is not certain.
        """
        if asked != plain or any(opening in asked for opening in self.openings or ()):
            # A prompt may open or skip reasoning. The whole leaves it out, or has an empty block.
            for opened in (asked, _OPEN_REASONING.sub("", asked)):
                if opened and between.startswith(opened):
                    return len(opened)
            return len(between) if asked.startswith(between) else self.start_behind(between, 0)
        if not between.startswith(asked):
            return None
        start = self.start_behind(between, len(asked))
        return len(asked) if start is None and self.asks else start

    def start_behind(self, between: str, end: int, is_first: bool = False) -> int | None:
        """Return the same without a prompt. ``end``: the end of the message before."""
        left = between[end:]
        for opening in self.openings or ():
            if left.count(opening) == 1:
                return end + left.index(opening) + len(opening)
        is_bare = self.openings == () or not left.strip()
        return end if is_bare and not is_first else None

    def end(self, rest: str, final: str, is_last: bool) -> int | None:
        """Return where an answer ends in ``rest``, the text behind it. None: it is not certain.

        final: the text behind the same answer if it is the last message.
        """
        final = final.removesuffix(self.tail)
        if not self.asks:
            always = (one for one in self.openings or () if final.endswith(one))
            final = final.removesuffix(next(always, ""))
        if final and rest.startswith(final):
            return len(final)
        if not final and not is_last and rest.startswith(self.closing):
            return len(self.closing)
        if not final or not rest:
            return 0
        if is_last and final.startswith(rest):  # it is to be continued
            return len(rest)
        same = _same_start(rest, final)
        if self.user_end is None:
            return None
        if same.endswith(self.user_end):
            return len(same)
        return len(same + self.user_end) if rest.startswith(same + self.user_end) else None


def read_turns(rendering: Rendering) -> Turns:
    """Read the turns of a template from the outlines of short conversations."""
    asked, plain = _outline(rendering, "u", True), _outline(rendering, "u", False)
    if asked is None or plain is None:
        return Turns(True, None, None, "")
    whole = _outline(rendering, "uau", False)
    before = asked.literals[-1] if whole is None else whole.literals[-3]
    closing = "" if whole is None else _closing(whole.literals[-2], plain.literals[-2])
    if asked == plain:
        return Turns(False, *_without_prompt(rendering, plain, before), closing)
    user_end = _same_start(asked.literals[-1], plain.literals[-1])
    always = "" if whole is None else _always(rendering, asked.literals[0], whole.literals[-2])
    if always and before.startswith(plain.literals[-1]) and plain.literals[-1].endswith(always):
        user_end = plain.literals[-1].removesuffix(always)
    openings = _openings(asked.literals[-1], before, user_end)
    return Turns(True, openings, user_end, closing, plain.literals[-1][len(user_end) :])


def _always(rendering: Rendering, first: str, between: str) -> str:
    """Return what ends every conversation whose last message is an answer, as a beginning of the
    next answer. ``first``: the start of a conversation; ``between``: the text behind an answer."""
    answered = _outline(rendering, "ua", False)
    if answered is None or between.startswith(answered.literals[-1]):
        return ""
    same = _without_beginning(rendering, _same_start(between, answered.literals[-1]), first)
    return answered.literals[-1][len(same) :]


def _without_prompt(
    rendering: Rendering, asked: Outline, before: str
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return openings and user_end of a template that writes a prompt always or never."""
    rest = asked.literals[-1]
    is_bare = before.startswith(rest) and not before[len(rest) :].strip()
    users = _outline(rendering, "uu", False)
    if users is None:
        return ((), rest) if is_bare else (None, None)
    between = users.literals[-2]
    if between.startswith(rest):  # never
        return () if is_bare else _openings(before, before, rest), rest
    same = _same_start(between, rest)
    user_end = _without_beginning(rendering, same, asked.literals[0])
    return _openings(rest, before, user_end), user_end


def _without_beginning(rendering: Rendering, end: str, first: str) -> str:
    """Return the end of a message without the beginning of the next one: that is a text which
    begins the conversation, too, since such a text does not end a message."""
    begins = first.removeprefix(rendering.first_token)
    starts = (i for i in range(len(end)) if begins.startswith(end[i:]))
    return end[: next(starts, len(end))]


def _openings(prompt: str, before: str, user_end: str) -> tuple[str, ...] | None:
    """Return what ``prompt`` has behind a user's message, whole and as far as ``before`` has it."""
    same = _same_start(prompt, before)
    if not same.startswith(user_end):
        return None
    found = (prompt, _OPEN_REASONING.sub("", prompt), same, _OPEN_REASONING.sub("", same))
    openings = dict.fromkeys(one[len(user_end) :] for one in found)
    return tuple(one for one in openings if one)


def _closing(between: str, begins: str) -> str:
    """Return the end of an answer in ``between``, the text before a question that ``begins`` so."""
    same = _common_prefix(between[::-1], begins[::-1])[::-1]
    if same not in (between, begins):
        same = _END_OF_TAG.sub("", same)
    end = len(between) - len(same)
    while 0 < end < len(between) and between[end].isspace():
        end += 1
    return between[:end]


def _same_start(first: str, second: str) -> str:
    """Return the start that both texts share, up to a whole tag."""
    same = _common_prefix(first, second)
    return same if same in (first, second) else _START_OF_TAG.sub("", same)


def _common_prefix(first: str, second: str) -> str:
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(differing, min(len(first), len(second)))]


def _outline(rendering: Rendering, roles: str, asks: bool) -> Outline | None:
    """Return the outline of a conversation of these roles, with a system message if need be."""
    for tried in (roles, "s" + roles):
        messages = [{"role": _ROLES[role], "content": "A text."} for role in tried]
        outline = rendering.outline(rendering.mark(messages).messages, asks)
        if outline is not None and outline.numbers == tuple(range(len(tried))):
            return outline
    return None

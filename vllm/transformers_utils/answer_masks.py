"""Loss masks of conversations: the rule that names them, and the tokens that it selects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from vllm.transformers_utils.tokenizer import TokenizerLike, make_decoder
from vllm.utils.text import brief

if TYPE_CHECKING:
    import numpy.typing as npt

Span = tuple[int, int]
"""[start, end) in characters."""

_BEFORE, _NO_BOILERPLATE = "before", "no-boilerplate"
_LONGEST_RUN = 16
"""Most tokens that share a character."""
_PARTIAL = "\ufffd"
"""The text of bytes that are only a part of a character."""
_WHITE_SPACE = re.compile(r"\s*")


class MaskRule(NamedTuple):
    """The tokens of a conversation that count."""

    last_only: bool = False
    """True if only the last answer counts."""
    with_before: bool = False
    """True if the token before each run of tokens that count does count, too."""
    with_boilerplate: bool = True
    """True if an empty reasoning block, and a header that the template marks, count as well."""

    def __str__(self) -> str:
        words = ["last-answer" if self.last_only else "answers"]
        words += [_BEFORE] * self.with_before
        return ",".join([*words, *[_NO_BOILERPLATE] * (not self.with_boilerplate)])


def parse_mask_rule(text: object) -> MaskRule:
    """Parse ``answers`` or ``last-answer``, with ``before`` and ``no-boilerplate`` behind it,
    separated by commas. ValueError: it is something else."""
    first, *others = text.replace(" ", "").split(",") if isinstance(text, str) else [""]
    is_known = first in ("answers", "last-answer") and {*others} <= {_BEFORE, _NO_BOILERPLATE}
    if not is_known:
        raise ValueError(
            f"mask={brief(text)}: use answers or last-answer, followed by ,before or "
            ",no-boilerplate or both if you want them"
        )
    return MaskRule(first == "last-answer", _BEFORE in others, _NO_BOILERPLATE not in others)


def mask_tokens(
    offsets: Sequence[Span], spans: Sequence[Span], with_before: bool = False
) -> npt.NDArray[np.bool_]:
    """Return bool [tokens], true for tokens that overlap ``spans``.

    offsets: the place of each token. with_before: see :class:`MaskRule`.
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        mask |= (ends > start) & (starts < end)
    if with_before:
        mask[:-1] |= mask[1:]
    return mask


def encode_with_offsets(tokenizer: TokenizerLike, text: str) -> tuple[list[int], list[Span]]:
    """Return the token ids of a text without special tokens of the tokenizer, and the place of
    each. ValueError: :func:`find_offsets` cannot tell them."""
    call: Any = tokenizer
    options = {"add_special_tokens": False, "verbose": False}
    encoded = call(text, return_offsets_mapping=tokenizer.is_fast, **options)
    token_ids = list(encoded["input_ids"])
    return token_ids, complete_offsets(tokenizer, text, token_ids, encoded.get("offset_mapping"))


def complete_offsets(
    tokenizer: TokenizerLike, text: str, token_ids: Sequence[int], told: Sequence[Span] | None
) -> list[Span]:
    """Return the place of each token. ``told``: the places that the tokenizer tells, or None.

    Llama 3's tokenizer, among others, leaves the spaces at the beginning of a token out of its
    place, so that a token of spaces has an empty one. ValueError: that of :func:`find_offsets`.
    """
    if told is None:
        return find_offsets(tokenizer, text, token_ids)
    post_processor = cast("Any", tokenizer).backend_tokenizer.post_processor
    if post_processor is None or b'"trim_offsets":true' not in post_processor.__getstate__():
        return list(told)
    offsets, before = [], 0
    for start, end in told:
        trimmed = text[before:start]
        if start == end and trimmed.strip(" "):  # a space that the tokenizer has put in
            start = end = before
            trimmed = ""
        offsets.append((before + len(trimmed.rstrip(" ")), end) if trimmed else (start, end))
        before = max(before, end)
    return offsets


def find_offsets(tokenizer: TokenizerLike, text: str, token_ids: Sequence[int]) -> list[Span]:
    """Find the place of each token in ``text``, for tokenizers that do not tell it.

    The tokens are decoded one by one, and those that share a character together. Spaces before a
    token may be in its text or in ``text`` alone. ValueError: the texts of the tokens are not
    ``text``, because the tokenizer rewrites it or does not know a word.
    """
    read = _Reader(tokenizer)
    offsets: list[Span] = []
    place = first = 0
    while first < len(token_ids):
        piece, end, run = read.piece(token_ids[first]), None, 0
        for run in range(1, min(_LONGEST_RUN, len(token_ids) - first) + 1):
            more = piece if run == 1 else read(token_ids[first : first + run])
            if end is not None and more != piece:
                run -= 1  # the tokens before this one are a whole
                break
            piece, end = more, _end_of(more, text, place)
            if end is not None and _PARTIAL not in piece:
                break
        if end is None:
            raise ValueError(
                f"the places of tokens in the text cannot be told: token {first} "
                f"({read.piece(token_ids[first])!r}) does not stand at "
                f"{text[place : place + 20]!r}, and the tokenizer tells no offsets; give a mask "
                "column, or use a fast tokenizer"
            )
        for shared in range(1, run):  # these tokens end inside of a character
            part = read(token_ids[first : first + shared]).rstrip(_PARTIAL)
            start = max(place, end - len(piece) + len(part))
            offsets.append((place, min(end, start + 1)))
            place = start
        offsets.append((place, end))
        place, first = end, first + run
    if text[place:].strip():
        raise ValueError(f"the tokens end before the text, at {text[place : place + 20]!r}")
    return offsets


class _Reader:
    """Decodes tokens as they are in the middle of a text, where their first space is kept."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._decode = make_decoder(tokenizer, spaces_between_special_tokens=False)
        self._before = tokenizer.encode("a", add_special_tokens=False, verbose=False)[-1:]
        self._text_before = self._decode(self._before)
        self._pieces: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> str:
        return self._decode([*self._before, *token_ids]).removeprefix(self._text_before)

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._pieces:
            self._pieces[token] = self([token])
        return self._pieces[token]


def _end_of(piece: str, text: str, place: int) -> int | None:
    """Return the end of ``piece``, which begins at ``place`` or behind white space there. None: it
    does not, or is empty."""
    behind = _WHITE_SPACE.match(text, place).end()  # type: ignore[union-attr]
    for written in (piece, piece.lstrip(" ")):
        for start in (place, behind):
            if piece and text.startswith(written, start):
                return start + len(written) if written else place
    return None

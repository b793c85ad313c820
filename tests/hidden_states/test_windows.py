"""Windows cut from joined texts, against a reference that goes token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from vllm.hidden_states import cut_windows
from vllm.hidden_states.windows import WindowCutter

BOS, SEPARATOR, PADDING = 1, 2, 0


def windows_of(
    texts: Sequence[Sequence[int]], length: int, separator: int | None, bos: int | None
) -> tuple[list[list[int]], list[int]]:
    """The full windows and the rest, as SAELens' concat_and_batch_sequences makes them."""
    windows: list[list[int]] = []
    window: list[int] = []

    def put(token: int) -> None:
        window.append(token)
        if len(window) == length:
            windows.append(window[:])
            window.clear()

    for text in texts:
        for place, token in enumerate(text):
            if place == 0 and window and separator is not None and token != separator:
                put(separator)
            if not window and bos is not None and token != bos:
                put(bos)
            put(token)
    return windows, window


@pytest.mark.parametrize("separator", [None, SEPARATOR, BOS])
@pytest.mark.parametrize("bos", [None, BOS])
def test_windows_and_their_texts(separator: int | None, bos: int | None) -> None:
    """Texts may begin with the separator or BOS, end with a window, and fill several."""
    rng = random.Random(5)
    for length in (2, 3, 7, 16):
        texts = [
            [rng.choice((BOS, SEPARATOR, 5, 6, 7)) for _ in range(rng.choice((0, 1, 2, 6, 40)))]
            for _ in range(60)
        ]
        expected, rest = windows_of(texts, length, separator, bos)
        found = list(cut_windows(texts, length, separator=separator, bos=bos))
        assert [window.token_ids.tolist() for window in found] == expected
        assert {window.mask for window in found} == {None}
        padded = list(cut_windows(texts, length, separator=separator, bos=bos, padding=PADDING))
        assert [window.token_ids.tolist() for window in padded[: len(found)]] == expected
        if rest:
            (last,) = padded[len(found) :]
            missing = length - len(rest)
            assert last.token_ids.tolist() == rest + [PADDING] * missing
            assert last.mask is not None
            assert last.mask.tolist() == [True] * len(rest) + [False] * missing
        # The parts are the texts, piece by piece; what is between them was inserted.
        pieces: dict[int, list[int]] = {}
        for window in padded:
            inserted = [True] * length
            for part in window.parts:
                piece = window.token_ids[part.start : part.end].tolist()
                assert part.offset == len(pieces.setdefault(part.text, []))
                pieces[part.text] += piece
                inserted[part.start : part.end] = [False] * len(piece)
            others = {
                int(t) for t, is_new in zip(window.token_ids, inserted, strict=True) if is_new
            }
            assert others <= {BOS, SEPARATOR, PADDING}
        assert pieces == {number: text for number, text in enumerate(texts) if text}


def test_masks_of_texts() -> None:
    """A token that is inserted counts if the text behind it has no mask."""
    cutter = WindowCutter(5, SEPARATOR, BOS)
    masked = np.array([5, 6, 7]), np.array([False, True, True])
    found = [*cutter.add("a", *masked), *cutter.add("b", np.array([8, 9, 10, 11]))]
    found += [*cutter.add("c", *masked), *cutter.pad(PADDING)]
    assert [window.token_ids.tolist() for window in found] == [
        [BOS, 5, 6, 7, SEPARATOR],
        [BOS, 8, 9, 10, 11],
        [BOS, 5, 6, 7, PADDING],
    ]
    assert [None if one.mask is None else one.mask.tolist() for one in found] == [
        [False, False, True, True, True],
        None,
        [False, False, True, True, False],
    ]
    assert [*cutter.pad(PADDING)] == []


def test_a_separator_at_the_end_of_a_window_follows_the_next_text() -> None:
    cutter = WindowCutter(4, SEPARATOR)
    found = [*cutter.add("a", np.array([5, 6, 7])), *cutter.add("b", np.array([8]), np.array([1]))]
    assert [window.token_ids.tolist() for window in found] == [[5, 6, 7, SEPARATOR]]
    assert [[*map(bool, window.mask)] for window in found if window.mask is not None] == [
        [True, True, True, False]
    ]


def test_a_window_of_one_token() -> None:
    with pytest.raises(ValueError, match="length=1: a window has at least 2 tokens"):
        next(cut_windows([[1]], 1))

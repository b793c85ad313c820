"""Tokens that keep their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.hidden_states.positions import parse_positions, resolve_positions


@pytest.mark.parametrize(
    ("text", "num_tokens", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ("last", 3, [2]),
        ("last", 1, [0]),
        ("every:1", 3, [0, 1, 2]),
        ("every:4", 9, [0, 4, 8]),
        (" every:100", 9, [0]),
        (f"every:{10**30}", 9, [0]),
    ],
)
def test_select(text: str, num_tokens: int, expected: list[int]) -> None:
    selection = parse_positions(text)
    assert selection.select(num_tokens).tolist() == expected
    assert selection.select(num_tokens).dtype == torch.int64
    assert str(selection) == text.strip()


def test_mask() -> None:
    selection = parse_positions("mask")
    assert selection.select(4, [0, 1, True, 0]).tolist() == [1, 2]
    assert selection.select(2, [False, False]).tolist() == []
    for mask in (torch.tensor([0, 1, 1, 0]), np.array([False, True, True, False])):
        assert selection.select(4, mask).tolist() == [1, 2]
    with pytest.raises(ValueError, match="a value for each of 3 tokens; it has 2 values"):
        selection.select(3, [1, 0])
    with pytest.raises(ValueError, match="none was passed"):
        selection.select(3)
    with pytest.raises(ValueError, match="mask: it holds -100, and 0 is for a token that does not"):
        selection.select(3, [-100, 5, 6])  # labels


@pytest.mark.parametrize("text", ["", "first", "every", "every:", "every:0", "every:-1", "all:2"])
def test_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"positions='{text}': use all, last, mask, generated, or every:K"
    ):
        parse_positions(text)


@pytest.mark.parametrize(
    "mask",
    [
        [[1]] * 4,
        torch.ones(4, 1),
        torch.ones(4, 3, dtype=torch.bool),
        [1.0, 0.0, 1.0, 0.0],
        [None] * 4,
        "1010",
        "mask",
        {0: 1},
        5,
        [[1], [1, 0]],
        [2**70] * 4,
        torch.ones(2, 2, dtype=torch.bool),
    ],
)
def test_masks_that_are_none(mask: object) -> None:
    with pytest.raises(ValueError, match=r"mask=.*: has to be a flat list of booleans or integers"):
        resolve_positions("mask", 4, mask)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("all", None),
        ("last", [4]),
        ([], []),
        ([3, -5, 3], [3, 0, 3]),
        (range(1, 4), [1, 2, 3]),
        (np.array([4, 0]), [4, 0]),
        (torch.tensor([-1, 2]), [4, 2]),
        ((np.int64(2), 3), [2, 3]),
        (2, [2]),
        (np.int32(-1), [4]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(-2, None), [3, 4]),
        (slice(None, None, -2), [4, 2, 0]),
    ],
)
def test_resolve(spec: object, expected: list[int] | None) -> None:
    assert resolve_positions(spec, 5) == expected


@pytest.mark.parametrize(
    "spec",
    [
        [0, True],
        None,
        True,
        1.0,
        [1.0],
        [True, False],
        [None],
        ["1"],
        [[1], [2]],
        torch.ones(5, 1, dtype=torch.int64),
        {1, 2},
        object(),
        [5],
        [-6],
        slice(0, 4, 0),
        slice("a", None),
    ],
)
def test_positions_that_are_none(spec: object) -> None:
    with pytest.raises(ValueError, match="positions"):
        resolve_positions(spec, 5)


@pytest.mark.parametrize("spec", ["all", "last", "every:2", [0, 1], 0, slice(0, 2)])
def test_a_mask_does_not_change_other_positions(spec: object) -> None:
    """It is the loss mask of the sample."""
    assert resolve_positions(spec, 2, [True, False]) == resolve_positions(spec, 2)

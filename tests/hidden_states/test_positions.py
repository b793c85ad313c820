"""Which tokens keep their rows."""

from __future__ import annotations

import pytest
import torch

from vllm.hidden_states.positions import parse_positions


@pytest.mark.parametrize(
    ("text", "num_tokens", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ("last", 3, [2]),
        ("last", 1, [0]),
        ("every:1", 3, [0, 1, 2]),
        ("every:4", 9, [0, 4, 8]),
        (" every:100", 9, [0]),
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
    with pytest.raises(ValueError, match="a value for each of 3 tokens; it has 2 values"):
        selection.select(3, [1, 0])
    with pytest.raises(ValueError, match="there is none"):
        selection.select(3)


@pytest.mark.parametrize("text", ["", "first", "every", "every:", "every:0", "every:-1", "all:2"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"positions='{text}': use all, last, mask, or every:K"):
        parse_positions(text)

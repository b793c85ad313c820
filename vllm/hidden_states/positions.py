"""Which tokens of a prompt keep their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

PositionKind = Literal["all", "last", "every", "mask"]
_PLAIN_KINDS: dict[str, PositionKind] = {"all": "all", "last": "last", "mask": "mask"}


@dataclass(frozen=True)
class PositionSelection:
    """``every``: the distance between rows, for that kind only (0 for the others)."""

    kind: PositionKind
    every: int = 0

    def __str__(self) -> str:
        return f"every:{self.every}" if self.kind == "every" else self.kind

    def select(self, num_tokens: int, mask: Sequence[bool | int] | None = None) -> torch.Tensor:
        """The positions, int64 [rows], ascending.

        ValueError: kind ``mask`` without a mask, or with one of another length.
        """
        if self.kind == "mask":
            if mask is None or len(mask) != num_tokens:
                found = "there is none" if mask is None else f"it has {len(mask)} values"
                raise ValueError(
                    f"positions=mask needs a mask with a value for each of {num_tokens} tokens; "
                    f"{found}"
                )
            return torch.as_tensor(mask).bool().nonzero().flatten()
        first = num_tokens - 1 if self.kind == "last" else 0
        return torch.arange(first, num_tokens, self.every or 1, dtype=torch.int64)


def parse_positions(text: str) -> PositionSelection:
    """``all``, ``last``, ``mask``, or ``every:K`` for the positions 0, K, 2K, ...

    ValueError for anything else.
    """
    kind, colon, number = text.strip().partition(":")
    if kind == "every" and number.isascii() and number.isdigit() and int(number) > 0:
        return PositionSelection("every", int(number))
    if not colon and kind in _PLAIN_KINDS:
        return PositionSelection(_PLAIN_KINDS[kind])
    raise ValueError(f"positions={text!r}: use all, last, mask, or every:K with K of at least 1")

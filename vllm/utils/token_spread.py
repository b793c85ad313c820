"""The tokens of a sequence, spread over the ranks of a context-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Numbers = TypeVar("Numbers", int, "npt.NDArray[np.int64]", "torch.Tensor")


@dataclass(frozen=True)
class TokenSpread:
    """Runs of ``interleave`` tokens go to the ranks in turn.

    On a rank its tokens follow each other without gaps. The number of a token among them is its
    *place*.
    """

    ranks: int = 1
    interleave: int = 1

    @property
    def is_whole(self) -> bool:
        """True if every token is on the one rank."""
        return self.ranks == 1

    @property
    def turn(self) -> int:
        """Tokens after which the first rank is next again."""
        return self.ranks * self.interleave

    def count(self, num_tokens: int, rank: int) -> int:
        """Count the tokens of a rank among the first ``num_tokens``."""
        turns, rest = divmod(num_tokens, self.turn)
        own = min(max(rest - rank * self.interleave, 0), self.interleave)
        return turns * self.interleave + own

    def rank_of(self, position: Numbers) -> Numbers:
        """Return the rank that has a token."""
        return position // self.interleave % self.ranks

    def place_of(self, position: Numbers) -> Numbers:
        """Return a token's place on the rank that has it."""
        return position // self.turn * self.interleave + position % self.interleave

    def position_of(self, place: Numbers, rank: int) -> Numbers:
        """Return the position of the token at a place of a rank."""
        first = place // self.interleave * self.turn + rank * self.interleave
        return first + place % self.interleave


WHOLE = TokenSpread()
"""Every rank has every token."""

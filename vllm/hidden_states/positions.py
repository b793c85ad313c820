"""The choice of tokens of a prompt whose rows are kept."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

PositionKind = Literal["all", "last", "every", "mask", "generated"]
MAX_VALUES = 2**24
"""Most positions of one prompt, or values of its mask."""
_PLAIN_KINDS: dict[str, PositionKind] = {
    "all": "all",
    "last": "last",
    "mask": "mask",
    "generated": "generated",
}


@dataclass(frozen=True)
class PositionSelection:
    """A rule for positions; ``every`` is the distance for the kind "every" (0 for the others)."""

    kind: PositionKind
    every: int = 0

    def __str__(self) -> str:
        return f"every:{self.every}" if self.kind == "every" else self.kind

    def select(self, num_tokens: int, mask: Sequence[bool | int] | None = None) -> torch.Tensor:
        """Return the positions, int64 [rows], ascending.

        Raises ValueError for ``mask`` without a mask, or with one that :func:`as_mask` refuses,
        and for ``generated``.
        """
        if self.kind == "generated":
            raise ValueError(
                "positions=generated: nothing is generated; give sampling_params (vllm extract: "
                "--generate), or use all, last, mask or every:K"
            )
        if self.kind == "mask":
            if mask is None:
                raise ValueError(
                    f"positions=mask needs a mask with a value for each of {num_tokens} tokens; "
                    "none was passed"
                )
            return torch.from_numpy(np.flatnonzero(as_mask(mask, num_tokens)))
        first = num_tokens - 1 if self.kind == "last" else 0
        step = min(self.every, num_tokens) or 1
        return torch.arange(first, num_tokens, step, dtype=torch.int64)


def parse_positions(text: str) -> PositionSelection:
    """Parse ``all``, ``last``, ``mask``, ``generated``, or ``every:K``: positions 0, K, 2K, ...

    Raises ValueError for anything else.
    """
    kind, colon, number = text.strip().partition(":")
    if kind == "every" and number.isascii() and number.isdigit() and int(number) > 0:
        return PositionSelection("every", int(number))
    if not colon and kind in _PLAIN_KINDS:
        return PositionSelection(_PLAIN_KINDS[kind])
    raise ValueError(
        f"positions={reprlib.repr(text)}: use all, last, mask, generated, or every:K with K of "
        "at least 1"
    )


def as_mask(mask: object, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Return bool [tokens] for a flat list, array or tensor of booleans or integers (0 is false).

    Raises ValueError if it is something else, has a negative number, or does not have one value for
    each token.
    """
    values = flat_array(mask, "biu")
    if values is None:
        raise ValueError(
            f"mask={reprlib.repr(mask)}: has to be a flat list of booleans or integers, a value "
            f"for each of {num_tokens} tokens"
        )
    if len(values) != num_tokens:
        raise ValueError(
            f"mask: has to have a value for each of {num_tokens} tokens; it has {len(values)} "
            "values"
        )
    if len(values) and values.min() < 0:  # such as labels, which have -100 where a mask has 0
        raise ValueError(
            f"mask: it holds {values.min()}, and 0 is for a token that does not count, 1 for others"
        )
    return values.astype(np.bool_)


def resolve_positions(
    spec: object,
    num_tokens: int,
    mask: object = None,
    num_prompt_tokens: int | None = None,
    *,
    whose: str = "the prompt has",
) -> list[int] | None:
    """Return positions in a text, in the order requested, with duplicates; None for all of them.

    spec: text for :func:`parse_positions`, one position, several (negative ones count from
        the end), or a slice. Only positions="mask" reads the mask. Raises ValueError if ``spec``
        is wrong, or a mask that is read.
    num_prompt_tokens: tokens that were not generated. None: nothing was generated; otherwise
        positions that do not exist are left out.
    whose: for an error, the owner of the tokens.
    """
    if isinstance(spec, str):
        selection = parse_positions(spec)
        if selection.kind == "all":
            return None
        if selection.kind == "generated" and num_prompt_tokens is not None:
            return list(range(num_prompt_tokens, num_tokens))
        positions: list[int] = selection.select(num_tokens, mask).tolist()  # type: ignore[arg-type]
        return positions
    try:
        listed: Any = range(num_tokens)[spec] if isinstance(spec, slice) else spec
    except (TypeError, ValueError) as error:
        raise ValueError(f"positions={spec}: {error}") from None
    if isinstance(spec, int | np.integer) and not isinstance(spec, bool):
        listed = (spec,)
    array = flat_array(listed, "iu")
    if array is None:
        raise ValueError(
            f"positions={reprlib.repr(spec)}: has to be all, last, mask, generated, every:K, or a "
            "list of whole numbers"
        )
    is_beyond = (array < -num_tokens) | (array >= num_tokens)
    if num_prompt_tokens is not None:
        array = array[~is_beyond]
    elif is_beyond.any():
        raise ValueError(f"positions holds {array[is_beyond][0]}, but {whose} {num_tokens} tokens")
    return [int(position) % num_tokens for position in array]


def positions_fit(
    positions: torch.Tensor, row_offsets: torch.Tensor, token_offsets: torch.Tensor
) -> bool:
    """Return whether the positions of consecutive samples ascend and lie within their tokens.

    Offsets: int64 [samples + 1], at which the rows and the tokens of each sample begin.
    """
    if len(positions) != row_offsets[-1]:
        return False
    lengths = row_offsets.diff()
    # Token numbers in the shard, which ascend over all samples exactly if the positions fit.
    tokens = positions + token_offsets[:-1].repeat_interleave(lengths)
    ends = token_offsets[1:].repeat_interleave(lengths)
    fits = (positions >= 0).all() and (tokens < ends).all() and (tokens.diff() > 0).all()
    return bool(fits)


def flat_array(value: Any, kinds: str) -> npt.NDArray[Any] | None:
    """Return ``value`` as an array [values] of one of numpy's ``kinds``, or None if it is not.

    Raises ValueError for more than ``MAX_VALUES``, which are not copied.
    """
    if isinstance(value, range | list | tuple) and len(value) > MAX_VALUES:
        raise ValueError(
            f"{len(value)} positions or values of a mask: at most {MAX_VALUES} are read"
        )
    try:
        array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_right = array.ndim == 1 and (array.dtype.kind in kinds or not len(array))
    if is_right and "b" not in kinds and isinstance(value, list | tuple):
        is_right = bool not in set(map(type, value))  # numpy makes numbers of them beside numbers
    return array if is_right else None

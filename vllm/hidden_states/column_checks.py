"""Checks of the tensors beside hidden states: values that no model can have given."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.hidden_states.mapped_file import MappedFile
from vllm.v1.rows.fields.activations import is_hook_name
from vllm.v1.rows.fields.fp8 import row_parts
from vllm.v1.rows.fields.logprobs import TopLogprobs

_TOLERANCE = 1e-3
"""Rounding of log-probabilities to float16, relative to those beyond 1."""


def find_bad_columns(
    file: MappedFile, row_offsets: torch.Tensor, token_offsets: torch.Tensor
) -> Iterator[str]:
    """Yield a line for each tensor of a file that has a bad row. The places were checked."""
    for name in filter(is_hook_name, sorted(file.names)):
        values = file.tensor(name)
        for part in row_parts(values):
            bad = (~values[part].isfinite()).flatten(1).any(-1).nonzero()
            if len(bad):
                yield f"{file.path}: {name} of row {part.start + int(bad[0])} is not finite"
                break
    if not {*TopLogprobs.tensor_names} <= file.names:
        return
    ids, top, following = (file.tensor(name) for name in TopLogprobs.tensor_names)
    next_ids = _next_ids(file, row_offsets, token_offsets)
    for part in row_parts(top):
        problems = _logprob_problems(ids[part], top[part].float(), following[part], next_ids[part])
        for what, is_bad in problems:
            if (bad := is_bad.nonzero()).numel():
                yield f"{file.path}: {what} of row {part.start + int(bad[0])}"
                return


def _logprob_problems(
    ids: torch.Tensor, top: torch.Tensor, following: torch.Tensor, next_ids: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what may be wrong, and bool [rows], where it is."""
    has_next, room = next_ids >= 0, _TOLERANCE * top.abs().clamp(min=1)
    ordered = ids.sort(-1).values
    yield (
        "top_token_ids are not different tokens",
        ((ids < 0).any(-1) | (ordered.diff() == 0).any(-1)),
    )
    yield "top_logprobs are not finite", ~top.isfinite().all(-1)
    yield "top_logprobs do not fall", (top.diff() > 0).any(-1)
    yield "top_logprobs are more than certain", top.exp().sum(-1) > 1 + _TOLERANCE
    yield (
        "token_logprobs are not NaN exactly where no token follows",
        (following.isnan() == has_next),
    )
    # The token that follows is among the most likely ones, or less likely than them.
    is_it = ids == next_ids[:, None]
    right = torch.where(is_it, top, 0).sum(-1)
    differs = (following - right).abs() > torch.where(is_it, room, 0).sum(-1)
    too_likely = following > top[:, -1] + room[:, -1]
    yield (
        "token_logprobs contradict top_logprobs",
        (has_next & torch.where(is_it.any(-1), differs, too_likely)),
    )


def _next_ids(
    file: MappedFile, row_offsets: torch.Tensor, token_offsets: torch.Tensor
) -> torch.Tensor:
    """Return the token that follows each row in its sample, -1 for the last."""
    token_ids = file.tensor("token_ids")
    following = torch.cat([token_ids[1:], torch.tensor([-1])])
    following[token_offsets[1:][token_offsets.diff() > 0] - 1] = -1
    num_rows = row_offsets.diff()
    starts = token_offsets[:-1].repeat_interleave(num_rows)
    if "positions" in file:
        places = file.tensor("positions")
    else:
        places = torch.arange(len(starts)) - row_offsets[:-1].repeat_interleave(num_rows)
    return following[starts + places]

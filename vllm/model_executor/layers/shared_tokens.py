"""Tokens that tensor-parallel ranks share between branches (``enable_sequence_parallel``).

Norms and sums with the stream compute every token alone. In a pass with
``ForwardContext.shared_tokens`` each rank has only its share of the tokens there:

    share -> norm -> all_tokens -> branch -> own_tokens -> share

The sum in a branch's last layer may make the share, too (:func:`sum_over_ranks`). All shares have
one size, so the last ones may have rows behind the last token. They are computed, but never
gathered.
"""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import current_shared_tokens


def own_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of [tokens, ...]; a share, and tokens that are not shared, as is.

    A single token is a share, too: on other ranks it is behind the last token.
    """
    num_tokens, ranks = current_shared_tokens(), get_tp_group()
    share = ranks.share_of_rows(num_tokens)
    if not num_tokens or len(values) == share:
        return values
    assert len(values) == num_tokens
    own = values[ranks.rank_in_group * share :][:share]
    if len(own) == share:
        return own
    return torch.cat([own, own.new_zeros((share - len(own), *own.shape[1:]))])


def all_tokens(share: torch.Tensor) -> torch.Tensor:
    """Return [tokens, ...] of all ranks from their shares; tokens that are not shared as they
    are."""
    num_tokens = current_shared_tokens()
    return get_tp_group().all_gather(share, 0)[:num_tokens] if num_tokens else share


def sum_over_ranks(values: torch.Tensor, *, ends_branch: bool) -> torch.Tensor:
    """Return the sum of [tokens, n] over the ranks; at the end of a branch the own share of it."""
    if not ends_branch or not (num_tokens := current_shared_tokens()):
        return get_tp_group().all_reduce(values)
    assert len(values) == num_tokens
    return get_tp_group().reduce_scatter_rows(values)

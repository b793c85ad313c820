"""Tokens that ranks share: each has equally many in a pass with ``ForwardContext.shared_tokens``.

Tensor-parallel ranks share them between branches (``enable_sequence_parallel``), where norms and
sums with the stream compute every token alone:

    share -> norm -> all_tokens -> branch -> own_tokens -> share

The sum in a branch's last layer may make the share, too (:func:`sum_over_ranks`).

Ranks with the same weights share them everywhere (``prefill_context_parallel_size``). Inside a
branch only attention that spreads cached tokens exchanges anything. Mixers that keep something else
of all tokens run on all of them, on every rank (:func:`run_branch`).

All shares have one size, so the last ones may have rows behind the last token. They are computed,
but never gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group, get_tp_group
from vllm.forward_context import (
    current_shared_tokens,
    get_forward_context,
    set_forward_context,
)


def sharing_group() -> GroupCoordinator:
    """Return the group of the ranks that share tokens, if any do."""
    return get_pcp_group() if shares_inside_branches() else get_tp_group()


def shares_inside_branches() -> bool:
    """Return whether ranks share the tokens inside of branches, too."""
    return get_pcp_group().world_size > 1


def own_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of [tokens, ...]; a share, and tokens that are not shared, as is.

    A single token is a share, too: on other ranks it is behind the last token.
    """
    num_tokens = current_shared_tokens()
    if not num_tokens:
        return values
    ranks = sharing_group()
    if len(values) == ranks.share_of_rows(num_tokens):
        return values
    assert len(values) == num_tokens
    return ranks.own_rows(values)


def all_tokens(share: torch.Tensor) -> torch.Tensor:
    """Return [tokens, ...] of all ranks from their shares; tokens that are not shared as they
    are."""
    num_tokens = current_shared_tokens()
    return sharing_group().all_gather(share, 0)[:num_tokens] if num_tokens else share


def all_tokens_of_branch(values: torch.Tensor) -> torch.Tensor:
    """Return [tokens, ...] of all ranks from what this one has inside a branch."""
    return all_tokens(values) if shares_inside_branches() else values


def sum_over_ranks(values: torch.Tensor, *, ends_branch: bool) -> torch.Tensor:
    """Return the sum of [tokens, n] over the ranks; at the end of a branch the own share of it."""
    num_tokens = current_shared_tokens()
    if not ends_branch or not num_tokens or shares_inside_branches():
        return get_tp_group().all_reduce(values)
    assert len(values) == num_tokens
    return get_tp_group().reduce_scatter_rows(values)


def run_branch(
    branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    share: torch.Tensor,
    beside: torch.Tensor,
    *,
    needs_all_tokens: bool,
) -> torch.Tensor:
    """Run a branch: this rank's share of its input, [tokens, hidden] -> the same of its output.

    beside: its second argument, [tokens, ...], of all tokens or of this rank's.
    """
    if not current_shared_tokens():
        return branch(share, beside)
    if not shares_inside_branches():
        return own_tokens(branch(all_tokens(share), beside))
    if not needs_all_tokens:
        with _only_own_tokens():
            return branch(share, own_tokens(beside))
    whole = all_tokens(share)
    with set_forward_context(replace(get_forward_context(), shared_tokens=0)):
        output = branch(whole, beside)
    return own_tokens(output)


def _only_own_tokens() -> AbstractContextManager[object]:
    """Return a block in which the context's values of tokens are those of this rank's."""
    context = get_forward_context()
    adapters, rotary = context.adapters, context.rotary_positions
    if adapters is None and rotary is None:
        return nullcontext()
    if adapters is not None:
        adapters = adapters.part(own_tokens(torch.arange(context.shared_tokens)))
    if rotary is not None:
        rotary = own_tokens(rotary)
    return set_forward_context(replace(context, adapters=adapters, rotary_positions=rotary))

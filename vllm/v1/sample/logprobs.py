"""Log-probabilities of chosen and of most likely tokens."""

from __future__ import annotations

import math

import torch

from vllm.sampling_params import ALL_LOGPROBS
from vllm.v1.outputs import LogprobsLists


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsLists:
    """Rows of ``token_ids`` and of the ``k`` most likely tokens.

    Args:
        logits: float32 [rows, vocab].
        token_ids: int64 [rows].
        k: how many, 0 for none, -1 for the whole vocabulary.

    A row's numbers do not depend on the others: softmax works row by row (torch's
    log_softmax and sum do not, for few rows), and the rest is done in Python's floats.
    """
    k = logits.shape[-1] if k == ALL_LOGPROBS else min(k, logits.shape[-1])
    columns = token_ids.unsqueeze(1)  # [rows, 1]
    chosen = logits.gather(1, columns)
    values, ids = chosen, columns
    if k > 0:
        top_values, top_ids = logits.topk(k)
        values = torch.cat([chosen, top_values], dim=1)  # [rows, 1 + k]
        ids = torch.cat([columns, top_ids], dim=1)
    ranks = (logits > chosen).sum(dim=1) + 1
    # softmax of the largest logit is 1 / sum(exp(logit - largest))
    largest = logits.amax(dim=1).tolist()
    largest_probability = logits.softmax(dim=1).amax(dim=1).tolist()
    logprobs = [
        [value - top + log_probability for value in row]
        for row, top, log_probability in zip(
            values.tolist(), largest, map(math.log, largest_probability), strict=True
        )
    ]
    return LogprobsLists(token_ids=ids.tolist(), logprobs=logprobs, ranks=ranks.tolist())


def compute_prompt_logprobs(
    logits: torch.Tensor, target_ids: torch.Tensor, k: int
) -> LogprobsLists:
    """How likely each prompt token was, given those before it.

    Args:
        logits: [positions, vocab], of the tokens before the targets.
        target_ids: int64 [positions], the tokens that follow in the prompt.
        k: most likely tokens to report besides.
    """
    return gather_logprobs(logits.float(), target_ids.to(logits.device, torch.int64), k)


__all__ = ["compute_prompt_logprobs", "gather_logprobs"]

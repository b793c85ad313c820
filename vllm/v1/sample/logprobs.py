"""Log-probabilities of chosen and of most likely tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm.sampling_params import ALL_LOGPROBS
from vllm.utils.transfers import HostCopy
from vllm.v1.outputs import LogprobsLists


class PendingLogprobs(NamedTuple):
    """Log-probabilities of some rows, on their way to the host."""

    numbers: HostCopy
    """float32 [rows, 1 + k + 2]: logits of the tokens, the largest logit, its probability."""
    integers: HostCopy
    """int64 [rows, 1 + k + 1]: the tokens, then the rank of the first."""

    def result(self) -> LogprobsLists:
        logprobs = []
        for *values, largest, probability in self.numbers.result().tolist():
            log_probability = math.log(probability)
            logprobs.append([value - largest + log_probability for value in values])
        integers = self.integers.result().tolist()
        return LogprobsLists(
            [row[:-1] for row in integers], logprobs, [row[-1] for row in integers]
        )


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> PendingLogprobs:
    """Gather the log-probabilities of ``token_ids`` and of the ``k`` most likely tokens.

    Args:
        logits: [rows, vocab], any float dtype.
        token_ids: int64 [rows].
        k: 0 for none, -1 for the whole vocabulary.

    A row's numbers do not depend on the others: softmax works row by row (torch's
    log_softmax and sum do not, for few rows), and the rest is done in Python's floats.
    """
    logits = logits.float()
    k = logits.shape[-1] if k == ALL_LOGPROBS else min(k, logits.shape[-1])
    columns = token_ids.unsqueeze(1)  # [rows, 1]
    chosen = logits.gather(1, columns)
    top_values, top_ids = logits.topk(k)
    ranks = (logits > chosen).sum(dim=1, keepdim=True) + 1
    largest = logits.amax(dim=1, keepdim=True)
    # softmax of the largest logit is 1 / sum(exp(logit - largest))
    probability = logits.softmax(dim=1).amax(dim=1, keepdim=True)
    numbers = torch.cat([chosen, top_values, largest, probability], dim=1)
    return PendingLogprobs(HostCopy(numbers), HostCopy(torch.cat([columns, top_ids, ranks], dim=1)))

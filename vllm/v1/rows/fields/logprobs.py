"""The teacher's probabilities: the most likely next tokens of each token, and the actual one.

A cell is int32 ``[1, 2 * k + 1]``: the ids of the k most likely next tokens, then the bits of their
float32 log-probabilities and of that of the token that follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.v1.rows.fields.layout import Cells, Field, TensorForm

OF_NEXT_TOKEN = frozenset({"token_logprobs"})
"""Tensors about the token that follows, NaN where none does."""
LOGITS = "logits"
"""The source: logits of the next token, which exist for a few rows at a time only."""
_BLOCK_BYTES = 60 << 20
_GROUP = 128
_MOST_EXCESS = 1e-3
"""Largest logarithm of the sum of a row's probabilities that rounding explains."""


class LogprobField(Field):
    """A field that is made from logits."""

    source: ClassVar[str] = LOGITS
    vocab_size: int

    def rows_at_once(self, logits_itemsize: int) -> int:
        """Return how many rows of logits may exist at once: 60 MiB with their float32 copies."""
        return max(1, _BLOCK_BYTES // (self.vocab_size * (logits_itemsize + 8)))


@dataclass(frozen=True)
class TopLogprobs(LogprobField):
    """The ``k`` largest log-probabilities at a temperature; of equal ones the lower ids."""

    name: ClassVar[str] = "top_logprobs"
    tensor_names: ClassVar[tuple[str, ...]] = ("top_token_ids", "top_logprobs", "token_logprobs")

    k: int
    temperature: float
    vocab_size: int

    @property
    def cells(self) -> Cells:
        return Cells(torch.int32, 1, 2 * self.k + 1)

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode logits [tokens, vocabulary] and the tokens that follow, int64 [tokens], -1 where
        none is known: its log-probability is NaN."""
        logits, next_token_ids = at_temperature(values[0], self.temperature), values[1]
        ids = top_ids(logits, self.k)
        is_known = next_token_ids >= 0
        chosen = torch.cat([ids, next_token_ids.clamp(min=0)[:, None]], dim=1)
        picked = logits.gather(1, chosen)
        largest = logits.gather(1, ids[:, :1])
        # softmax of the largest logit is 1 / sum(exp(logit - largest)); torch's softmax works row
        # by row, so that a row's bits do not depend on the others.
        share = logits.softmax(dim=1).gather(1, ids[:, :1])
        logprobs = picked - largest + share.double().log().float()
        logprobs[:, -1].masked_fill_(~is_known, math.nan)
        return torch.cat([ids.int(), logprobs.view(torch.int32)], dim=1), None

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        return {
            "top_token_ids": TensorForm(torch.int32, (self.k,)),
            "top_logprobs": TensorForm(torch.float32, (self.k,)),
            "token_logprobs": TensorForm(torch.float32, ()),
        }

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        row = cells[:, 0]
        logprobs = row[:, self.k :].contiguous().view(torch.float32)
        return {
            "top_token_ids": row[:, : self.k].contiguous(),
            "top_logprobs": logprobs[:, :-1].contiguous(),
            "token_logprobs": logprobs[:, -1].contiguous(),
        }

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        ids, logprobs = tensors["top_token_ids"], tensors["top_logprobs"]
        is_good = (ids >= 0) & (ids < self.vocab_size) & logprobs.isfinite()
        bad = (~is_good).any(-1).nonzero()
        if not len(bad):
            return None
        message = f"log-probabilities of the token after {positions[int(bad[0, 0])]} are not finite"
        return Failure(FailureKind.LOGITS_NOT_FINITE, message)


@dataclass(frozen=True)
class FullLogprobs(LogprobField):
    """The log-probabilities of the whole vocabulary at a temperature."""

    name: ClassVar[str] = "logprobs"
    tensor_names: ClassVar[tuple[str, ...]] = ("logprobs", "token_logprobs")

    temperature: float
    vocab_size: int

    @property
    def cells(self) -> Cells:
        return Cells(torch.int32, 1, self.vocab_size + 1)

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode what :meth:`TopLogprobs.encode` takes."""
        logits, next_token_ids = at_temperature(values[0], self.temperature), values[1]
        logprobs = logits.log_softmax(dim=1)
        following = logprobs.gather(1, next_token_ids.clamp(min=0)[:, None])
        following.masked_fill_((next_token_ids < 0)[:, None], math.nan)
        return torch.cat([logprobs, following], dim=1).view(torch.int32), None

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        return {
            "logprobs": TensorForm(torch.float32, (self.vocab_size,)),
            "token_logprobs": TensorForm(torch.float32, ()),
        }

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        logprobs = cells[:, 0].view(torch.float32)
        return {
            "logprobs": logprobs[:, :-1].contiguous(),
            "token_logprobs": logprobs[:, -1].contiguous(),
        }

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        """Find a row whose probabilities do not add up to 1."""
        is_whole = tensors["logprobs"].logsumexp(-1).abs() < _MOST_EXCESS
        bad = (~is_whole).nonzero()
        if not len(bad):
            return None
        message = f"probabilities of the token after {positions[int(bad[0, 0])]} are not finite"
        return Failure(FailureKind.LOGITS_NOT_FINITE, message)


def at_temperature(given: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits as float32, divided by the temperature."""
    logits = given.float()
    if temperature == 1.0:
        return logits
    # In place if float() made a copy.
    return torch.div(logits, temperature, out=None if logits is given else logits)


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the ``k`` largest of float32 [rows, vocabulary]: int64 [rows, k], falling;
    of equal logits the lower id is first.

    The k largest elements lie in the k groups of 128 with the largest maxima, so that a vocabulary
    is read once and only these groups are sorted.
    """
    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // _GROUP)
    if num_groups <= 2 * k:
        return _largest(logits, torch.arange(vocab_size).expand(num_rows, -1), k)
    whole = vocab_size // _GROUP
    maxima = logits[:, : whole * _GROUP].view(num_rows, whole, _GROUP).amax(-1)
    if whole < num_groups:
        maxima = torch.cat([maxima, logits[:, whole * _GROUP :].amax(-1, keepdim=True)], dim=1)
    numbers = torch.arange(num_groups, device=logits.device).expand(num_rows, -1)
    groups = _largest(maxima, numbers, k)
    ids = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=logits.device)
    ids = ids.flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    values = values.masked_fill(ids >= vocab_size, -math.inf)
    return _largest(values, ids, k)


def _largest(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k largest float32 values [rows, n], by (value falling, id rising)."""
    bits = values.contiguous().view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))  # rises with the value; -0 is 0
    ids = ids.to(values.device)
    keys = (ordered << 31) + (0x7FFFFFFF - ids)
    top = keys.topk(k).values
    return 0x7FFFFFFF - (top & 0x7FFFFFFF)

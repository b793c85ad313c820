"""Token embeddings and the LM head, cut over the tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Self

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import refuse_quantization
from vllm.model_executor.layers.low_rank import EMBEDDING
from vllm.model_executor.layers.quantization.at_load import quantise_table
from vllm.model_executor.layers.weight import Weight, find_weight, weight_of, weights_of
from vllm.model_executor.layers.weight_share import Run, Share, Stored
from vllm.model_executor.utils import is_all_ours, make_parameter
from vllm.ops.packed_linear import PackedWeight


class VocabParallelEmbedding(Layer):
    """An embedding, of which this rank has the rows of the vocabulary from ``start`` on.

    Ranks hold equally many rows; those past the vocabulary's end are zero.
    """

    keeps_codes: ClassVar[bool] = False
    """True if codes of a checkpoint stay codes."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        *,
        quant_config: object = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        refuse_quantization(quant_config, prefix)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tp_size = get_tensor_model_parallel_world_size()
        self.rows_per_rank = -(-num_embeddings // self.tp_size)
        self.start = get_tensor_model_parallel_rank() * self.rows_per_rank
        self._dtype = params_dtype or torch.get_default_dtype()
        self._make_table()

    def _make_table(self, device: torch.device | None = None) -> None:
        shape = (self.rows_per_rank, self.embedding_dim)
        rows = torch.empty(shape, dtype=self._dtype, device=device)
        self.weight = make_parameter(rows, self.weight_loader)
        # Look-ups read rows, and so do models of other packages.
        Weight(self.weight, keeps_codes=self.keeps_codes, stays_in_rows=True)

    @property
    def num_own_rows(self) -> int:
        """Rows of the vocabulary on this rank."""
        return max(0, min(self.rows_per_rank, self.num_embeddings - self.start))

    @property
    def share(self) -> Share:
        """This rank's share of a checkpoint's tensor."""
        runs = (Run(self.start, self.num_own_rows, 0),) if self.num_own_rows else ()
        return Share((self.num_embeddings, self.embedding_dim), runs)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Stored) -> None:
        """Keep this rank's rows (or entries of a bias)."""
        weight, num_rows = find_weight(param), self.num_own_rows
        if weight is None:
            assert isinstance(loaded_weight, torch.Tensor)
            self.share.copy_entries(loaded_weight, param.data)
            param.data[num_rows:].zero_()
            return
        weight.load([(loaded_weight, self.share)])
        if num_rows < self.rows_per_rank and not weight.is_finished:
            shape = (self.rows_per_rank - num_rows, self.embedding_dim)
            weight.put(param.data.new_zeros(shape), num_rows)

    def holds(self, table: Stored) -> bool:
        """Return whether this rank's rows of ``table`` are those that it has."""
        self.share.check(table)
        weight = weight_of(self.weight)
        rows = torch.arange(self.num_own_rows, device=self.weight.device)
        mine = weight.as_kept(table).narrow(0, self.start, self.num_own_rows)
        if isinstance(mine, PackedWeight):
            mine = mine.dequantise(self._dtype)
        held = weight.look_up(rows)
        return torch.equal(held, mine.to(held))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [tokens] -> [tokens, embedding_dim], a new tensor."""
        if self.tp_size == 1:
            return self._rows(input_ids)
        local = input_ids - self.start
        elsewhere = (local < 0) | (local >= self.rows_per_rank)
        rows = self._rows(local.masked_fill(elsewhere, 0))
        return tensor_model_parallel_all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Look up rows of this rank, with what adapters add."""
        weight = weight_of(self.weight)
        rows = weight.look_up(numbers)
        if weight.is_adapted:
            weight.adapt(numbers, rows, EMBEDDING)
        return rows


class ParallelLMHead(VocabParallelEmbedding):
    """The product with the vocabulary; ``LogitsProcessor`` applies it."""

    keeps_codes: ClassVar[bool] = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        quant_config: object = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, params_dtype, quant_config=quant_config, prefix=prefix
        )
        self.bias: nn.Parameter | None = None
        if bias:
            entries = torch.zeros(self.rows_per_rank, dtype=self.weight.dtype)
            self.bias = make_parameter(entries, self.weight_loader)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, embedding_dim] -> [rows, rows_per_rank], undefined past the vocabulary."""
        return weight_of(self.weight).multiply(x, self.bias)

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> Self:
        """Share the embedding's weight."""
        self.weight = embed_tokens.weight
        return self

    def untie(self, head: Stored) -> bool:
        """Take the rows of ``head``, [vocabulary, embedding_dim] as in a checkpoint, unless they
        equal the shared ones; return whether they differ."""
        shared = weight_of(self.weight)
        if self.holds(head):
            return False
        self._make_table(self.weight.device)
        own = weight_of(self.weight)
        own.quantise, own.stays_in_rows = shared.quantise, shared.stays_in_rows
        own.is_adapted, own.adapted_as = shared.is_adapted, shared
        own.begin()
        self.weight_loader(self.weight, head)
        if shared.is_finished:  # loaded into a running engine
            own.finish()
        return True

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise TypeError("ParallelLMHead embeds nothing: logits come from LogitsProcessor")


def prepare_heads(model: nn.Module, quantization: str | None = None) -> None:
    """Let weights of LM heads, and of embeddings tied to them, be finished in the form for
    products, from which embeddings are then looked up.

    A weight that a module of another kind holds too stays in rows, and so do all of them in a
    model with modules of other packages. quantization: a method of ``at_load`` that is applied to
    these weights first. ValueError: there are none, or they are not floats.
    """
    tables = _tables_of_heads(model) if is_all_ours(model) else []
    if quantization is not None and not tables:
        raise ValueError(
            f"head_quantization={quantization!r}: {type(model).__name__} has no LM head that is "
            "stored in floating point and belongs to this engine; leave the option out"
        )
    for table in tables:
        table.stays_in_rows = False
        if quantization is not None:
            table.quantise_rows(partial(quantise_table, method=quantization))


def _tables_of_heads(model: nn.Module) -> list[Weight]:
    """Weights of heads that are floats and that only heads and embeddings hold."""
    return [
        weight
        for weight, holders in weights_of(model).items()
        if any(isinstance(module, ParallelLMHead) for module in holders)
        and all(isinstance(module, VocabParallelEmbedding) for module in holders)
        and not weight.has_codes
    ]

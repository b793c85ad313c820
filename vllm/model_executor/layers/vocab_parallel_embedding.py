"""Token embeddings and the LM head, cut over the tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from collections import defaultdict
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import refuse_quantization
from vllm.model_executor.layers.quantization.at_load import quantise_table
from vllm.model_executor.layers.quantization.weight_parts import PackedPart
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.utils import is_all_ours, make_parameter, set_weight_attrs
from vllm.ops.linear import linear, make_panels, panel_embedding, prefers_panels
from vllm.ops.packed_linear import PackedWeight, unpacks_weights


class VocabParallelEmbedding(Layer):
    """Rows ``start .. end - 1`` of the vocabulary live on this rank.

    Ranks hold equally many rows; those past the vocabulary's end are zero.
    """

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
        dtype = params_dtype or torch.get_default_dtype()
        rows = torch.empty(self.rows_per_rank, embedding_dim, dtype=dtype)
        self.weight = make_parameter(rows, self.weight_loader)
        self.packed: PackedPart | None = None
        """The rows of this rank in place of ``weight``, which is empty then."""

    def hold_packed(self, packed: PackedPart) -> None:
        """Have these rows in the place of ``weight``."""
        self.packed = packed
        nothing = self.weight.data.new_empty((0, self.embedding_dim))
        self.weight = make_parameter(nothing)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows (or entries of a bias)."""
        check_shape(loaded_weight, (self.num_embeddings, *param.shape[1:]))
        mine = loaded_weight[self.start : self.start + self.rows_per_rank]
        param.data[: len(mine)].copy_(mine)
        param.data[len(mine) :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [tokens] -> [tokens, embedding_dim], a new tensor."""
        if self.tp_size == 1:
            return self._look_up(input_ids)
        local = input_ids - self.start
        elsewhere = (local < 0) | (local >= self.rows_per_rank)
        rows = self._look_up(local.masked_fill(elsewhere, 0))
        return tensor_model_parallel_all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def _look_up(self, local_ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.look_up(local_ids, self.weight.dtype)
        if self.weight.dim() == 2:
            return functional.embedding(local_ids, self.weight)
        rows = self.weight.new_empty((len(local_ids), self.embedding_dim))
        panel_embedding(local_ids.contiguous(), self.weight, self.rows_per_rank, rows)
        return rows


class ParallelLMHead(VocabParallelEmbedding):
    """The product with the vocabulary; ``LogitsProcessor`` applies it."""

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
        set_weight_attrs(self.weight, {"takes_packed": True})
        self.bias: nn.Parameter | None = None
        if bias:
            entries = torch.zeros(self.rows_per_rank, dtype=self.weight.dtype)
            self.bias = make_parameter(entries, self.weight_loader)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor | PackedWeight
    ) -> None:
        """Keep this rank's rows (or entries of a bias): in ``param``, or packed."""
        if isinstance(loaded_weight, torch.Tensor):
            super().weight_loader(param, loaded_weight)
            return
        check_shape(loaded_weight, (self.num_embeddings, self.embedding_dim))
        end = min(self.start + self.rows_per_rank, self.num_embeddings)
        mine = loaded_weight.select_rows(slice(self.start, end))
        self.hold_packed(PackedPart(0, mine))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, embedding_dim] -> [rows, rows_per_rank], undefined past the vocabulary."""
        out = x.new_empty((len(x), self.rows_per_rank))
        if self.packed is not None:
            self.packed.multiply(x, self.bias, out)
        else:
            linear(x, self.weight, self.bias, out)
        return out

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> Self:
        """Use the embeddings' rows as the head's."""
        self.weight = embed_tokens.weight
        return self

    def untie(self, head: torch.Tensor | PackedWeight) -> bool:
        """Take rows of its own, unless those of ``head``, [vocabulary, embedding_dim] as it lies
        in a checkpoint, are the ones that it shares; returns whether it did."""
        shared, own = self.weight, make_parameter(torch.empty_like(self.weight))
        packed = head if isinstance(head, PackedWeight) else None
        self.weight_loader(own, head if packed is None else packed.dequantise(shared.dtype))
        if torch.equal(own, shared):
            return False
        if packed is not None and unpacks_weights(shared.device) and packed.can_be_panels():
            self.weight_loader(own, packed)
            return True
        set_weight_attrs(own, {"weight_loader": self.weight_loader})
        self.weight = own
        return True

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise TypeError("ParallelLMHead embeds nothing: logits come from LogitsProcessor")


def pack_heads(model: nn.Module, quantization: str | None = None) -> None:
    """Reorder the LM heads of a loaded model for speed, and the embeddings they are tied to.

    Afterwards such a weight serves its layers alone. One that modules of another kind hold too
    stays as it is, and so does everything in a model of another package.

    quantization: a method of ``at_load``, by which these weights are quantised first. ValueError:
    there are none, or not as floats.
    """
    tables = _tables_of_heads(model) if is_all_ours(model) else []
    if quantization is not None and not tables:
        raise ValueError(
            f"head_quantization={quantization!r}: {type(model).__name__} has no LM head that is "
            "stored in floating point and belongs to this engine; leave the option out"
        )
    for table, sharing in tables:
        if quantization is not None:
            quantised = quantise_table(table.data, quantization)
            if unpacks_weights(table.device) and quantised.can_be_panels():
                packed = PackedPart(0, quantised)
                for module in sharing:
                    module.hold_packed(packed)
                continue
            table.data.copy_(quantised.dequantise(table.dtype))
        if prefers_panels(table.device):
            weight = make_parameter(make_panels(table.data))
            for module in sharing:
                module.weight = weight


def _tables_of_heads(
    model: nn.Module,
) -> list[tuple[nn.Parameter, list[VocabParallelEmbedding]]]:
    """Weights of heads that lie as floats and that nothing but heads and embeddings holds."""
    holders: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].append(module)
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    weights = {id(head.weight): head.weight for head in heads if head.packed is None}
    tables = []
    for number, table in weights.items():
        sharing = [each for each in holders[number] if isinstance(each, VocabParallelEmbedding)]
        if len(sharing) == len(holders[number]):
            tables.append((table, sharing))
    return tables

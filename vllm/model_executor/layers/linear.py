"""Linear layers, cut over the tensor-parallel ranks.

Every layer has a ``weight`` of [rows of this rank, columns of this rank], and some have a ``bias``.
``forward`` returns ``(output, bias)``. The bias is None unless the caller has to add it
(``skip_bias_add``). With ``return_bias=False`` the output is returned alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.quantization.at_load import quantise_of_current_config
from vllm.model_executor.layers.shared_tokens import sum_over_ranks
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.layers.weight_share import HeadSlice, Run, Share, Stored, joined
from vllm.model_executor.utils import check_shape, make_parameter

LinearOutput = torch.Tensor | tuple[torch.Tensor, nn.Parameter | None]
ShardId = int | str | tuple[int, ...] | None


def divide(total: int, parts: int, what: str) -> int:
    """Return ``total / parts``. ValueError: it is not a whole number."""
    if total % parts:
        raise ValueError(
            f"tensor_parallel_size={parts} does not divide {what} ({total}); "
            f"use a size that divides it"
        )
    return total // parts


def of_this_rank(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is cut evenly along its first dimension."""
    ranks = get_tensor_model_parallel_world_size()
    return whole.chunk(ranks)[get_tensor_model_parallel_rank()]


def load_part(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Load :func:`of_this_rank` of a tensor: a weight loader."""
    ranks = get_tensor_model_parallel_world_size()
    check_shape(loaded_weight, (len(param) * ranks, *param.shape[1:]))
    param.data.copy_(of_this_rank(loaded_weight))


def refuse_quantization(quant_config: object, prefix: str) -> None:
    """ValueError: a layer got a ``quant_config``; it loads weights of every format without one."""
    if quant_config is not None:
        raise ValueError(
            f"quant_config={quant_config!r} of layer {prefix!r}: layers need none; leave it out. "
            "The checkpoint's quantization_config says how weights are stored, and weight_loader "
            "takes them in that form (docs/quantization.md, also on adding a format)"
        )


class LinearBase(Layer):
    """Parameters and the product; a subclass tells how the ranks share them."""

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: object,
        prefix: str,
        return_bias: bool,
    ) -> None:
        super().__init__()
        refuse_quantization(quant_config, prefix)
        self.prefix = prefix
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.tp_rank = get_tensor_model_parallel_rank()
        self.tp_size = get_tensor_model_parallel_world_size()
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = make_parameter(torch.empty(rows, columns, dtype=dtype), self.weight_loader)
        Weight(self.weight, quantise=quantise_of_current_config(), keeps_codes=True)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = make_parameter(torch.zeros(rows, dtype=dtype), self.weight_loader)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: Stored,
        loaded_shard_id: ShardId = None,
    ) -> None:
        """Keep this rank's share of a checkpoint's tensor."""
        share = self.share_of(loaded_shard_id)
        if param is self.weight:
            weight_of(param).load([(loaded_weight, share)])
        else:
            assert isinstance(loaded_weight, torch.Tensor)
            share.copy_entries(loaded_weight, param.data)

    def share_of(self, shard_id: ShardId) -> Share:
        """This rank's share of a checkpoint's tensor, which has the whole weight or a part."""
        raise NotImplementedError

    def finish(self, output: torch.Tensor) -> LinearOutput:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: object = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
    ) -> None:
        super().__init__(
            output_size,
            input_size,
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=return_bias,
        )
        self.input_size = input_size
        self.output_size = output_size

    def share_of(self, shard_id: ShardId) -> Share:
        assert shard_id is None
        return Share.of_all(self.output_size, self.input_size)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """x: [tokens, input_size] -> [tokens, output_size]."""
        bias = None if self.skip_bias_add else self.bias
        return self.finish(weight_of(self.weight).multiply(x, bias))


class ColumnParallelLinear(LinearBase):
    """A layer whose output features are cut over the ranks: one projection, or several parts.

    ``output_sizes`` are the sizes of the parts on all ranks, ``output_partition_sizes`` on this
    rank. Each part is cut by itself, so a rank holds a slice of every part.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: object = None,
        output_sizes: Sequence[int] | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        output_partition_sizes: Sequence[int] | None = None,
    ) -> None:
        self.input_size = input_size
        self.output_size = output_size
        self.output_sizes = list(output_sizes or [output_size])
        tp_size = get_tensor_model_parallel_world_size()
        self.output_partition_sizes = list(
            output_partition_sizes
            or [divide(size, tp_size, f"the output of {prefix!r}") for size in self.output_sizes]
        )
        super().__init__(
            sum(self.output_partition_sizes),
            input_size,
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=return_bias,
        )
        self.gather_output = gather_output

    def part_slice_index(self, part: int) -> int:
        """Index of this rank's slice among the equal slices of a part."""
        return self.tp_rank

    def part_ids(self, shard_id: ShardId) -> tuple[int, ...]:
        """Parts that a checkpoint's tensor covers, in the order of its rows."""
        if shard_id is None:
            return tuple(range(len(self.output_sizes)))
        return shard_id if isinstance(shard_id, tuple) else (int(shard_id),)

    def share_of(self, shard_id: ShardId) -> Share:
        """This rank's rows of each part that the checkpoint's tensor covers."""
        parts, own = self.part_ids(shard_id), self.output_partition_sizes
        sizes = [self.output_sizes[part] for part in parts]
        runs = [
            Run(start + self.part_slice_index(part) * own[part], own[part], sum(own[:part]))
            for part, start in zip(parts, accumulate(sizes, initial=0), strict=False)
        ]
        return Share((sum(sizes), self.input_size), joined(runs))

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """x: [tokens, input_size] -> [tokens, features of this rank, or gathered of all]."""
        bias = None if self.skip_bias_add else self.bias
        output = weight_of(self.weight).multiply(x, bias)
        if self.gather_output:
            output = tensor_model_parallel_all_gather(output)
        return self.finish(output)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input in one product; their indices are the shard ids."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: object = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
    ) -> None:
        super().__init__(
            input_size,
            sum(output_sizes),
            bias=bias,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            output_sizes=output_sizes,
            prefix=prefix,
            return_bias=return_bias,
        )


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one product; shard ids are "q", "k", "v".

    Heads are cut over the ranks. If there are more ranks than key/value heads, several ranks hold
    the same key/value head. has_values: False if keys are the values as well.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: object = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        has_values: bool = True,
    ) -> None:
        kv_heads = total_num_kv_heads or total_num_heads
        tp_size = get_tensor_model_parallel_world_size()
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = kv_heads
        self.num_heads = divide(total_num_heads, tp_size, f"the query heads of {prefix!r}")
        self.num_kv_head_replicas = max(1, tp_size // kv_heads)
        self.num_kv_heads = max(1, kv_heads // tp_size)
        if self.num_kv_heads * tp_size != kv_heads * self.num_kv_head_replicas:
            raise ValueError(
                f"tensor_parallel_size={tp_size} and the {kv_heads} key/value heads of "
                f"{prefix!r}: one must divide the other"
            )
        heads = [total_num_heads, *([kv_heads] * (2 if has_values else 1))]
        own_heads = [self.num_heads, *([self.num_kv_heads] * (len(heads) - 1))]
        super().__init__(
            hidden_size,
            sum(heads) * head_size,
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            output_sizes=[n * head_size for n in heads],
            output_partition_sizes=[n * head_size for n in own_heads],
            prefix=prefix,
            return_bias=return_bias,
        )

    def part_slice_index(self, part: int) -> int:
        return self.tp_rank if part == 0 else self.tp_rank // self.num_kv_head_replicas

    def part_ids(self, shard_id: ShardId) -> tuple[int, ...]:
        if isinstance(shard_id, str):
            return ("qkv".index(shard_id),)
        return super().part_ids(shard_id)

    def heads_of(self, part: Literal["q", "k"], total: int) -> HeadSlice:
        """Return this rank's heads of a part, of which all ranks have ``total``."""
        index = "qkv".index(part)
        count = total * self.output_partition_sizes[index] // self.output_sizes[index]
        return HeadSlice(count, self.part_slice_index(index) * count, total)


class RowParallelLinear(LinearBase):
    """A layer whose input features are cut over the ranks, and whose outputs are summed."""

    ends_branch: bool = False
    """True if what follows computes every token alone until the sum with the stream: each rank
    gets its share if the ranks share tokens."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: object = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
    ) -> None:
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.input_size_per_partition = divide(
            input_size, get_tensor_model_parallel_world_size(), f"the input of {prefix!r}"
        )
        super().__init__(
            output_size,
            self.input_size_per_partition,
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=return_bias,
        )

    def share_of(self, shard_id: ShardId) -> Share:
        """This rank's columns, and the whole bias."""
        assert shard_id is None
        count = self.input_size_per_partition
        whole = Share.of_all(self.output_size, self.input_size)
        return replace(whole, columns=(self.tp_rank * count, count))

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """x: [tokens, features of this rank, or not parallel of all] -> [tokens, output_size]."""
        if not self.input_is_parallel:
            columns = self.input_size_per_partition
            x = x.narrow(-1, self.tp_rank * columns, columns)
        adds_bias = not self.skip_bias_add and self.tp_rank == 0
        output = weight_of(self.weight).multiply(x, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            output = sum_over_ranks(output, ends_branch=self.ends_branch)
        return self.finish(output)


# Layers as this engine's models use them: ``forward`` returns the output alone, and a bias is
# optional. [tokens, input_size] -> [tokens, this rank's outputs]; sizes are those of all ranks.


def replicated_linear(
    input_size: int,
    output_size: int,
    prefix: str,
    *,
    bias: bool = False,
    params_dtype: torch.dtype | None = None,
) -> ReplicatedLinear:
    """Make a layer whose whole weight is on every rank."""
    return ReplicatedLinear(
        input_size, output_size, bias, False, params_dtype, prefix=prefix, return_bias=False
    )


def column_linear(
    input_size: int, output_size: int, prefix: str, *, bias: bool = False
) -> ColumnParallelLinear:
    """Make a layer whose outputs are cut over the ranks."""
    return ColumnParallelLinear(input_size, output_size, bias, prefix=prefix, return_bias=False)


def merged_linear(
    input_size: int, output_sizes: Sequence[int], prefix: str, *, bias: bool = False
) -> MergedColumnParallelLinear:
    """Make a layer with several projections of one input, each cut over the ranks."""
    return MergedColumnParallelLinear(
        input_size, output_sizes, bias, prefix=prefix, return_bias=False
    )


def qkv_linear(
    input_size: int,
    head_size: int,
    heads: int,
    kv_heads: int,
    prefix: str,
    *,
    bias: bool = False,
    has_values: bool = True,
) -> QKVParallelLinear:
    """Make a layer for queries, keys and, unless keys serve as values, values: cut over the ranks
    by heads."""
    return QKVParallelLinear(
        input_size,
        head_size,
        heads,
        kv_heads,
        bias,
        prefix=prefix,
        return_bias=False,
        has_values=has_values,
    )


def row_linear(
    input_size: int, output_size: int, prefix: str, *, bias: bool = False
) -> RowParallelLinear:
    """Make a layer whose inputs are cut over the ranks: -> [tokens, output_size], summed."""
    return RowParallelLinear(input_size, output_size, bias, prefix=prefix, return_bias=False)

"""Qwen3-Next: Qwen3.5-MoE whose recurrent projections are stored by key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.models.qwen2_moe import QWEN_MOE_NAMES, make_qwen_mlp
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
from vllm.model_executor.models.utils import StackedParams
from vllm.model_executor.utils import check_shape


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3-Next-80B-A3B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES
    stacked_params: ClassVar[StackedParams] = {
        **Qwen3_5ForCausalLM.stacked_params,
        "in_proj_qkvzba": {"in_proj_qkvz": (0, 1, 2, 3), "in_proj_ba": (4, 5)},
    }

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        shared_width = config.shared_expert_intermediate_size
        return make_qwen_mlp(config, index, prefix, shared_width=shared_width)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder [q k v z] and [b a] of each key head to all q, all k, ... one below another."""
        config = self.config
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        group = config.linear_num_value_heads // config.linear_num_key_heads
        if name.endswith("in_proj_qkvz.weight"):
            sizes = [key, key, group * value, group * value]
        elif name.endswith("in_proj_ba.weight"):
            sizes = [group, group]
        else:
            return tensor
        num_heads = config.linear_num_key_heads
        check_shape(tensor, (num_heads * sum(sizes), config.hidden_size))
        by_head = tensor.view(num_heads, sum(sizes), -1)
        return torch.cat([part.flatten(0, 1) for part in torch.split(by_head, sizes, dim=1)])

"""What recurrent layers share: a place in the pool, and weights that are cut over the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.utils import set_weight_attrs
from vllm.ops.layout import StateTensor
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import RecurrentMetadata


class RecurrentLayer(Layer, AttentionLayerBase):
    """Keeps tensors of fixed size a request; ``kv_cache`` is a view [blocks, *shape] of each.

    :meth:`state_tensors` says which, and :meth:`pending_tensors` what kernels keep beside them.
    """

    kv_cache: tuple[torch.Tensor, ...]
    mamba_type: ClassVar[str]

    @abstractmethod
    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        """dtype: the model's."""

    def pending_tensors(self, device_type: str, dtype: torch.dtype) -> Sequence[StateTensor]:
        """Of tokens that the state does not know yet."""
        return ()

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        model_config = vllm_config.model_config
        return MambaSpec.of_tensors(
            vllm_config.cache_config.mamba_block_size or model_config.max_model_len,
            self.state_tensors(model_config.dtype),
            self.pending_tensors(vllm_config.device_config.device_type, model_config.dtype),
            self.mamba_type,
        )

    def step_metadata(self) -> RecurrentMetadata:
        """How the step's tokens divide into requests, and where their states lie."""
        metadata: RecurrentMetadata = get_forward_context().attn_metadata[self.layer_name]
        return metadata


def of_this_rank(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of what is cut evenly along its first dimension."""
    ranks = get_tensor_model_parallel_world_size()
    return whole.chunk(ranks)[get_tensor_model_parallel_rank()]


def load_part(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """A weight loader: keep :func:`of_this_rank`."""
    ranks = get_tensor_model_parallel_world_size()
    check_shape(loaded_weight, (len(param) * ranks, *param.shape[1:]))
    param.data.copy_(of_this_rank(loaded_weight))


def part_of_weight(values: torch.Tensor) -> nn.Parameter:
    """A parameter, with these values at first, that :func:`load_part` loads."""
    parameter = nn.Parameter(values, requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": load_part})
    return parameter

"""The base of recurrent layers: their tensors in the pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layer import Layer
from vllm.ops.layout import StateTensor
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import RecurrentMetadata


class RecurrentLayer(Layer, AttentionLayerBase):
    """Keeps tensors of fixed size per request; ``kv_cache`` has a view [blocks, *shape] of each.

    :meth:`state_tensors` lists them, and :meth:`pending_tensors` the kernels' additional ones.
    """

    kv_cache: tuple[torch.Tensor, ...]
    mamba_type: ClassVar[str]

    @abstractmethod
    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        """Return the tensors of a request's state; dtype: the model's."""

    def pending_tensors(self, device_type: str, dtype: torch.dtype) -> Sequence[StateTensor]:
        """Return the kernels' tensors for tokens that are not part of the state yet."""
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
        """Return how the step's tokens divide into requests, and where their states are."""
        metadata: RecurrentMetadata = get_forward_context().attn_metadata[self.layer_name]
        return metadata

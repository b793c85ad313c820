"""The interface of layers that keep something in the KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.utils.token_spread import WHOLE, TokenSpread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


class AttentionLayerBase(ABC):
    """A layer with a place in the pool.

    ``layer_name`` is its prefix in the model: the key of its spec, its cache and its
    metadata. The runner sets ``kv_cache`` to views of the pool before the first pass.
    """

    layer_name: str
    kv_cache: Any
    spread: TokenSpread = WHOLE
    """The ranks over which the tokens that it keeps are spread."""

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return what the layer keeps, by the present config.

        Block sizes may be decided after the layer is built, so a layer does not remember them.
        """


def register_layer(layer: AttentionLayerBase) -> VllmConfig:
    """Enter ``layer`` in the config with which the model is built, and return that config."""
    vllm_config = get_current_vllm_config()
    layers = vllm_config.compilation_config.static_forward_context
    if layer.layer_name in layers:
        raise ValueError(
            f"two layers have the prefix {layer.layer_name!r}; give every attention or "
            f"recurrent layer a prefix of its own"
        )
    layers[layer.layer_name] = layer
    return vllm_config

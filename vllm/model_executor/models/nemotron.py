"""Nemotron, dense: layer norms with weights stored minus one, squared ReLU, no gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.utils import check_shape, set_weight_attrs


class ZeroCentredLayerNorm(LayerNorm):
    """``LayerNorm`` with a weight that checkpoints store minus one."""

    def __init__(self, *shape: int, **options: Any) -> None:
        super().__init__(*shape, **options)
        set_weight_attrs(self.weight, {"weight_loader": _load_weight})


def _load_weight(param: nn.Parameter, loaded_weight: Tensor) -> None:
    # One is added in the model's dtype: the checkpoint's may have fewer digits.
    check_shape(loaded_weight, tuple(param.shape))
    param.data.copy_(loaded_weight).add_(1.0)


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 and Minitron, dense."""

    norm_class = ZeroCentredLayerNorm
    norm_epsilon = "norm_eps"
    mlp_class = PlainMLP
    mlp_bias = "mlp_bias"

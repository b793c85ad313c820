"""RWKV-4: a weighted mean of earlier values instead of attention, and shifted tokens.

The embeddings enter layer 0 as they are, and layer 0 norms them. The stream is halved every
``rescale_every`` layers, and so is what later layers add to it, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import replicated_linear
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.layers.mamba.token_shift import TokenShift
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.activations import sigmoid_gate
from vllm.ops.layout import StateTensor
from vllm.ops.wkv import wkv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import RecurrentMetadata

_LAST_NORM_EPS = 1e-5
"""Epsilon of the last norm; the config's value is for the norms inside the layers."""


class TimeMix(Layer):
    """``output(sigmoid(receptance) * weighted mean of values)``, over shifted tokens."""

    def __init__(self, hidden_size: int, width: int, prefix: str) -> None:
        super().__init__()
        self.shift = TokenShift(
            hidden_size, ("time_mix_key", "time_mix_value", "time_mix_receptance")
        )
        for name in ("key", "value", "receptance"):
            self.add_module(name, replicated_linear(hidden_size, width, f"{prefix}.{name}"))
        self.output = replicated_linear(width, hidden_size, f"{prefix}.output")
        # Spread decays like those of trained models; a checkpoint overwrites them.
        decays = -torch.exp(torch.linspace(-5.0, 3.0, width, dtype=torch.float32))
        self.log_decay = make_parameter(decays, _load_decay)
        self.time_first = make_parameter(torch.zeros(width, dtype=torch.float32))

    def forward(
        self,
        x: torch.Tensor,
        metadata: RecurrentMetadata,
        shift_cache: torch.Tensor,
        state_cache: torch.Tensor,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        mixed = self.shift(x, metadata, shift_cache)
        names = ("key", "value", "receptance")
        parts = (self.get_submodule(name)(y) for name, y in zip(names, mixed, strict=True))
        key, value, receptance = parts
        mean = torch.empty_like(key)
        weights = (self.log_decay, self.time_first)
        plan = (metadata.layout, metadata.states)
        wkv(key, value, receptance, *weights, *plan, state_cache, mean)
        output: torch.Tensor = self.output(mean)
        return output


def _load_decay(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Load ``time_decay``: it is the logarithm of the parameter's negated value."""
    check_shape(loaded_weight, tuple(param.shape))
    param.data.copy_(-torch.exp(loaded_weight.float()))


class ChannelMix(Layer):
    """``sigmoid(receptance) * value(relu(key)^2)``, over shifted tokens."""

    def __init__(self, hidden_size: int, intermediate_size: int, prefix: str) -> None:
        super().__init__()
        self.shift = TokenShift(hidden_size, ("time_mix_key", "time_mix_receptance"))
        self.key = replicated_linear(hidden_size, intermediate_size, f"{prefix}.key")
        self.receptance = replicated_linear(hidden_size, hidden_size, f"{prefix}.receptance")
        self.value = replicated_linear(intermediate_size, hidden_size, f"{prefix}.value")
        self.act_fn = get_act_fn("relu2")

    def forward(
        self, x: torch.Tensor, metadata: RecurrentMetadata, shift_cache: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        key, receptance = self.shift(x, metadata, shift_cache)
        value = self.value(self.act_fn(self.key(key))).unsqueeze(1)
        gated = torch.empty_like(value)
        sigmoid_gate(value, self.receptance(receptance).unsqueeze(1), gated)
        return gated.squeeze(1)


class RwkvBlock(DecoderBlock, RecurrentLayer):
    """Time mix and channel mix, each after its norm.

    ``kv_cache`` is ``(last token of the time mix, last token of the channel mix, state of the
    mean)``: views [blocks, 1, hidden] in the model's dtype twice, [blocks, 3, width] in float32.
    """

    mamba_type: ClassVar[str] = "rwkv"

    def __init__(self, config: Any, layout: BlockLayout, index: int, prefix: str) -> None:
        hidden_size, width = config.hidden_size, config.attention_hidden_size
        mixer = TimeMix(hidden_size, width, f"{prefix}.attention")
        mlp = ChannelMix(hidden_size, config.intermediate_size, f"{prefix}.feed_forward")
        super().__init__(hidden_size, None, mlp, layout, recurrent={"attention": mixer})
        self.hidden_size, self.width = hidden_size, width
        self.pre_ln = layout.norm(hidden_size) if index == 0 else None
        every = config.rescale_every
        self.halves = every > 0 and (index + 1) % every == 0
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        last_token = StateTensor((1, self.hidden_size), dtype)
        return last_token, last_token, StateTensor((3, self.width), torch.float32)

    def mix(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        metadata = self.step_metadata()
        shift_cache, _, state_cache = self.kv_cache
        time_mix = self.get_submodule("attention")
        mixed: torch.Tensor = time_mix(x, metadata, shift_cache, state_cache)
        return mixed

    def feed_forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        metadata = self.step_metadata()
        assert self.mlp is not None
        output: torch.Tensor = self.mlp(x, metadata, self.kv_cache[1])
        return output

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        if self.pre_ln is not None:
            assert residual is None
            hidden_states = self.pre_ln(hidden_states)
        branch, stream = super().forward(positions, hidden_states, residual)
        if not self.halves:
            return branch, stream
        assert stream is not None
        return stream.add_(branch).mul_(0.5), None


class RwkvForCausalLM(DecoderForCausalLM):
    """RWKV-4 169M to 14B, Raven: only recurrent layers."""

    has_inner_state: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "rwkv."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "model.embeddings",
        "model.layers": "model.blocks",
        "model.norm": "model.ln_out",
        "lm_head": "head",
        "input_layernorm": "ln1",
        "post_attention_layernorm": "ln2",
        "mlp": "feed_forward",
        "attention.log_decay": "attention.time_decay",
        "attention.shift": "attention",
        "mlp.shift": "feed_forward",
    }

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=_LAST_NORM_EPS)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(norm=lambda size: LayerNorm(size, eps=config.layer_norm_epsilon))
        return RwkvBlock(config, layout, index, prefix)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Halve a layer's output weights once for each time that the stream was halved before."""
        if not name.endswith((".attention.output.weight", ".feed_forward.value.weight")):
            return tensor
        every, index = self.config.rescale_every, int(name.split(".")[2])
        return tensor / 2 ** (index // every) if every > 0 else tensor

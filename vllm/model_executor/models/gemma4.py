"""Gemma 4, text: windows and wider global heads, shared caches, per-layer embeddings, experts.

Attention norms queries, keys and values, and does not scale the scores. The last layers may read
the keys and values of an earlier layer of their kind instead of their own. Each layer multiplies
its output, the whole stream, by its own factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.hook_points import BlockHook
from vllm.model_executor.layers.activation import get_act_and_mul_fn, get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.fused_moe import FusedMoE, RoutingRule
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    column_linear,
    qkv_linear,
    replicated_linear,
    row_linear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.decoder_block import DecoderBlock, make_rope
from vllm.model_executor.models.decoder_loop import DecoderLayer, Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, DecoderModel
from vllm.model_executor.models.gemma import Gemma2ForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.models.utils import CheckpointNames, StackedParams, require_option
from vllm.model_executor.utils import make_parameter
from vllm.ops.norms import rms_norm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PER_LAYER_SCALE = 2.0**-0.5


class Gemma4Attention(Layer):
    """Attention of one layer; a layer that shares a cache computes only queries."""

    def __init__(self, vllm_config: VllmConfig, index: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        own = config.per_layer_config[index]  # options that differ between kinds of layers
        head_size, kind = own.head_dim, config.layer_types[index]
        window = layer_sliding_window(config, index)
        target = layer_read_by(config, index)
        self.head_size = head_size
        self.has_keys = target is None
        self.has_values = self.has_keys and not (config.attention_k_eq_v and window is None)
        self.project = self._make_projection(config, own, prefix)
        self.o_proj = row_linear(
            config.num_attention_heads * head_size,
            config.hidden_size,
            f"{prefix}.o_proj",
            bias=config.attention_bias,
        )
        self.q_norm = RMSNorm(head_size, eps=config.rms_norm_eps)
        if self.has_keys:
            self.k_norm = RMSNorm(head_size, eps=config.rms_norm_eps)
            self.v_norm = RMSNorm(head_size, eps=config.rms_norm_eps, has_weight=False)
        self.rotary_emb = make_rope(vllm_config, head_size, config.rope_parameters[kind])
        layers = prefix.removesuffix(f"{index}.self_attn")
        self.attn = Attention(
            self.num_heads,
            head_size,
            1.0,
            num_kv_heads=self.num_kv_heads,
            total_num_kv_heads=own.num_key_value_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=window,
            prefix=f"{prefix}.attn",
            kv_sharing_target_layer_name=(
                None if target is None else f"{layers}{target}.self_attn.attn"
            ),
        )

    def _make_projection(self, config: Any, own: Any, prefix: str) -> str:
        """Make the projection of queries, and of keys and values if the layer has them; returns
        its name."""
        heads = (config.num_attention_heads, own.num_key_value_heads)
        name = "qkv_proj" if self.has_values else "qk_proj" if self.has_keys else "q_proj"
        hidden_size, prefix, bias = config.hidden_size, f"{prefix}.{name}", config.attention_bias
        layer: ColumnParallelLinear
        if self.has_keys:
            size, has_values = self.head_size, self.has_values
            layer = qkv_linear(hidden_size, size, *heads, prefix, bias=bias, has_values=has_values)
        else:
            layer = column_linear(hidden_size, heads[0] * self.head_size, prefix, bias=bias)
        setattr(self, name, layer)
        self.num_heads = layer.output_partition_sizes[0] // self.head_size
        self.num_kv_heads = max(1, heads[1] // get_tensor_model_parallel_world_size())
        return name

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        projected = getattr(self, self.project)(hidden_states).unflatten(-1, (-1, self.head_size))
        query = self.q_norm(projected[:, : self.num_heads])
        key, value = projected[:, self.num_heads :].tensor_split((self.num_kv_heads,), dim=1)
        if not self.has_keys:
            self.rotary_emb(positions, query, key)  # the keys have no heads
            attended = self.attn(query)
        else:
            value = self.v_norm(value if self.has_values else key)
            query, key = self.rotary_emb(positions, query, self.k_norm(key))
            attended = self.attn(query, key, value)
        output: torch.Tensor = self.o_proj(attended)
        return output


class Gemma4MLPWithExperts(FusedMoE):
    """``norm(dense(x)) + norm(experts(norm(stream)))``; the router reads the stream, normed."""

    def __init__(self, config: Any, dense: nn.Module, prefix: str) -> None:
        experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_activation, "hidden_activation"),
            prefix=f"{prefix}.experts",
        )
        rule = RoutingRule(
            top_k=config.top_k_experts,
            top_k_option="top_k_experts",
            renormalise=True,
            has_expert_factors=True,
        )
        super().__init__(config.hidden_size, experts, rule, prefix=prefix)
        self.dense = dense
        self.epsilon = config.rms_norm_eps
        size = config.hidden_size
        self.dense_output_norm = RMSNorm(size, eps=self.epsilon)
        self.experts_input_norm = RMSNorm(size, eps=self.epsilon)
        self.experts_output_norm = RMSNorm(size, eps=self.epsilon)
        self.routing_scale = make_parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: the normed stream, [tokens, hidden] -> the same shape."""
        output: torch.Tensor = self.dense_output_norm(self.dense(x))
        exact = stream.float()
        normed = torch.empty_like(exact)
        rms_norm(exact, None, self.epsilon, 0.0, normed)
        normed *= self.routing_scale.float() * len(self.routing_scale) ** -0.5
        routed = super().forward(self.experts_input_norm(stream), normed)
        return output.add_(self.experts_output_norm(routed))


class Gemma4Block(DecoderBlock):
    """A block with norms before and after attention and MLP, per-layer embeddings and a factor."""

    def add_per_layer_input(self, config: Any, prefix: str) -> None:
        """Add the factor, and the projections of the layer's embeddings if there are any."""
        self.layer_scalar = make_parameter(torch.ones(1))
        hidden, size = config.hidden_size, config.hidden_size_per_layer_input
        if size:
            self.act_fn = get_act_fn(config.hidden_activation, "hidden_activation")
            self.per_layer_input_gate = replicated_linear(
                hidden, size, f"{prefix}.per_layer_input_gate"
            )
            self.per_layer_projection = replicated_linear(
                size, hidden, f"{prefix}.per_layer_projection"
            )
            self.post_per_layer_input_norm = self.layout.norm(hidden)

    def hook_points(self) -> Iterator[BlockHook]:
        """Yield the points of a block; an MLP beside experts is one of its parts only."""
        for hook in super().hook_points():
            if hook.module is not self.mlp or not isinstance(self.mlp, Gemma4MLPWithExperts):
                yield hook
            elif hook.path_of is not None:
                dense = self.mlp.dense
                yield BlockHook(("mlp.hook_out",), dense, self.stream_size, path_of=dense)
            else:
                yield hook

    def feed_forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        assert self.mlp is not None
        has_experts = isinstance(self.mlp, Gemma4MLPWithExperts)
        output: torch.Tensor = self.mlp(x, stream) if has_experts else self.mlp(x)
        return output

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        per_layer_input: torch.Tensor | None = None,
    ) -> Stream:
        """per_layer_input: [tokens, n], the layer's own embeddings of the tokens."""
        branch, stream = super().forward(positions, hidden_states, residual)
        assert stream is not None
        stream += branch
        if per_layer_input is not None:
            gate = self.act_fn(self.per_layer_input_gate(stream))
            added = self.per_layer_projection(gate.mul_(per_layer_input))
            stream += self.post_per_layer_input_norm(added)
        stream *= self.layer_scalar
        return stream, None


class Gemma4Model(DecoderModel):
    """A model whose layers get their own embeddings, of the token and the first layer's input."""

    per_layer_size: int = 0

    def add_per_layer_embeddings(self, config: Any, dtype: torch.dtype, prefix: str) -> None:
        """Add embeddings with ``hidden_size_per_layer_input`` numbers per layer and token."""
        size, num_layers = config.hidden_size_per_layer_input, config.num_hidden_layers
        self.per_layer_size = size
        self.per_layer_embedding_scale = float(torch.tensor(size**0.5, dtype=dtype))
        self.per_layer_projection_scale = config.hidden_size**-0.5
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            config.vocab_size_per_layer_input,
            num_layers * size,
            prefix=f"{prefix}.embed_tokens_per_layer",
        )
        self.per_layer_model_projection = replicated_linear(
            config.hidden_size, num_layers * size, f"{prefix}.per_layer_model_projection"
        )
        self.per_layer_projection_norm = RMSNorm(size, eps=config.rms_norm_eps)

    def layer_calls(
        self, input_ids: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> Iterable[DecoderLayer]:
        if not self.per_layer_size:
            return self.layers
        if input_ids is None:
            raise ValueError("the layers' own embeddings need input_ids besides inputs_embeds")
        if get_forward_context().num_layers_to_run == 0:
            return self.layers
        shape = (len(self.layers), self.per_layer_size)
        of_tokens = self.embed_tokens_per_layer(input_ids) * self.per_layer_embedding_scale
        projected = self.per_layer_model_projection(hidden_states) * self.per_layer_projection_scale
        inputs = self.per_layer_projection_norm(projected.unflatten(1, shape))
        inputs = inputs.add_(of_tokens.unflatten(1, shape)).mul_(_PER_LAYER_SCALE)
        return [
            partial(layer, per_layer_input=inputs[:, index])
            for index, layer in enumerate(self.layers)
        ]


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """Gemma 4, a text-only checkpoint, dense or with experts."""

    supported_options: ClassVar[Mapping[str, Any]] = {}
    norm_class = RMSNorm
    block_class = Gemma4Block
    model_class: ClassVar[type[DecoderModel]] = Gemma4Model
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "qk_proj": {"q_proj": 0, "k_proj": 1},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **Gemma2ForCausalLM.checkpoint_names,
        "mlp.dense": "mlp",
        "mlp.dense_output_norm": "post_feedforward_layernorm_1",
        "mlp.experts_input_norm": "pre_feedforward_layernorm_2",
        "mlp.experts_output_norm": "post_feedforward_layernorm_2",
        "mlp.routing_scale": "router.scale",
        "mlp.router.gate": "router.proj",
        "mlp.router.expert_factors": "router.per_expert_scale",
        "mlp.experts": "experts",
    }

    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None
    ) -> nn.Module:
        config, dtype = vllm_config.model_config.hf_text_config, vllm_config.model_config.dtype
        if config.use_bidirectional_attention == "all":
            require_option(config, use_bidirectional_attention=None)
        model = super()._init_model(vllm_config, prefix, layer_type)
        if config.hidden_size_per_layer_input:
            assert isinstance(model, Gemma4Model)
            model.add_per_layer_embeddings(config, dtype, prefix)
            self.supports_prompt_embeds = False  # layers look up their own embeddings
        return model

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        layer = super().make_layer(vllm_config, index, prefix)
        assert isinstance(layer, Gemma4Block)
        layer.add_per_layer_input(vllm_config.model_config.hf_text_config, prefix)
        return layer

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return Gemma4Attention(vllm_config, index, prefix)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        shares_cache = layer_read_by(config, index) is not None
        is_wide = config.use_double_wide_mlp and shares_cache
        mlp = self.dense_mlp(config, prefix, config.intermediate_size * (2 if is_wide else 1))
        return Gemma4MLPWithExperts(config, mlp, prefix) if config.enable_moe_block else mlp

    def weights_to_skip(self) -> tuple[str, ...]:
        """Skip keys and values that checkpoints have for layers that read another layer's."""
        names = CheckpointNames({}, {}, self.checkpoint_prefixes)
        unused = tuple(
            names.spell(f"model.layers.{index}.self_attn.{part}.")
            for index in range(self.config.num_hidden_layers)
            if layer_read_by(self.config, index) is not None
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return (*self.skipped_weights, *unused)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 as published: the text model; the vision and audio towers are skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "model.language_model."}
    skipped_weights: ClassVar[tuple[str, ...]] = (
        "model.vision_tower.", "model.embed_vision.",
        "model.audio_tower.", "model.embed_audio.",
    )  # fmt: skip


def layer_read_by(config: Any, index: int) -> int | None:
    """Return the layer whose keys and values the layer at ``index`` reads; None: its own."""
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    if index < first_shared:
        return None
    kind = config.layer_types[index]
    earlier = [i for i in range(first_shared) if config.layer_types[i] == kind]
    if not earlier:
        raise ValueError(
            f"config.json: num_kv_shared_layers={config.num_kv_shared_layers} leaves no layer of "
            f"the kind {kind!r} that layer {index} could share keys and values with"
        )
    return earlier[-1]

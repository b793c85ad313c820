"""LongCat-Flash: two attentions and two MLPs per layer, and experts that bypass the second half."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.config.model_facts import LATENT_SIZE_NAMES, check_whole
from vllm.model_executor.hook_points import BlockHook
from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.decoder_block import GatedMLP
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.latent_attention import LatentOptions, LatentSelfAttention
from vllm.model_executor.models.mixture import make_moe
from vllm.model_executor.models.utils import STACKED_GATE_UP, StackedParams
from vllm.ops.packed_linear import PackedWeight

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LongcatFlashDecoderLayer(Layer):
    """Two halves of attention and an MLP; the experts' output is added after the second half.

    ``s += attention_0(norm(s)); x = norm(s); s += mlp_0(x); s += attention_1(norm(s));
    s += mlp_1(norm(s)) + experts(x)``
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        check_whole(config, LATENT_SIZE_NAMES)
        options = LatentOptions(
            query_multiplier=(config.hidden_size / config.q_lora_rank) ** 0.5,
            latent_multiplier=(config.hidden_size / config.kv_lora_rank) ** 0.5,
        )
        halves = range(2)
        self.self_attn = nn.ModuleList(
            LatentSelfAttention(vllm_config, options, f"{prefix}.self_attn.{i}") for i in halves
        )
        sizes = (config.hidden_size, config.ffn_hidden_size)
        self.mlps = nn.ModuleList(
            GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlps.{i}") for i in halves
        )
        rule = RoutingRule(
            top_k=config.moe_topk,
            top_k_option="moe_topk",
            scaling=config.routed_scaling_factor,
            has_correction=True,
        )
        self.mlp = make_moe(
            config,
            rule,
            config.n_routed_experts,
            config.expert_ffn_hidden_size,
            f"{prefix}.mlp",
            num_identity_experts=config.zero_expert_num or 0,
        )
        self.hidden_size = config.hidden_size
        norm = (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.ModuleList(RMSNorm(*norm) for _ in halves)
        self.post_attention_layernorm = nn.ModuleList(RMSNorm(*norm) for _ in halves)

    def hook_points(self) -> Iterator[BlockHook]:
        """Yield the outputs of both attentions and MLPs, and of the experts."""
        parts: dict[str, nn.Module] = {"mlp": self.mlp}
        for half in range(2):
            parts |= {f"attn.{half}": self.self_attn[half], f"mlps.{half}": self.mlps[half]}
        for name, part in parts.items():
            yield BlockHook((f"{name}.hook_out",), part, self.hidden_size, path_of=part)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """Return the stream ``hidden_states (+ residual)``, [tokens, hidden], after this layer."""
        norm = self.input_layernorm[0]
        if residual is None:
            x, stream = norm(hidden_states), hidden_states
        else:
            x, stream = norm(hidden_states, residual)
        x, stream = self.post_attention_layernorm[0](self.self_attn[0](positions, x), stream)
        bypass = self.mlp(x)
        x, stream = self.input_layernorm[1](self.mlps[0](x), stream)
        x, stream = self.post_attention_layernorm[1](self.self_attn[1](positions, x), stream)
        return self.mlps[1](x) + bypass, stream


class LongcatFlashForCausalLM(DecoderForCausalLM):
    """LongCat-Flash; one layer, also for layer ids, has two attentions."""

    supported_options: ClassVar[Mapping[str, Any]] = {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "router_bias": False,
    }
    stacked_params: ClassVar[StackedParams] = STACKED_GATE_UP
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "self_attn.0.q_proj": "self_attn.0.q_b_proj",
        "self_attn.1.q_proj": "self_attn.1.q_b_proj",
        "mlp.router.gate": "mlp.router.classifier",
        "mlp.router.correction": "mlp.router.e_score_correction_bias",
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return LongcatFlashDecoderLayer(vllm_config, prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]) -> set[str]:
        return super().load_weights(self._without_identity(weights))

    def _without_identity(
        self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]
    ) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
        """Cut the tables of identity experts, which transformers has behind the others'."""
        count = self.config.n_routed_experts
        for name, tensor in weights:
            if isinstance(tensor, torch.Tensor) and name.endswith("experts.gate_up_proj"):
                tensor = tensor[:count]
            yield name, tensor

    def make_skipper(self) -> Callable[[str], str | None]:
        """Skip tensors that transformers writes for identity experts, too."""
        skipped_part, count = super().make_skipper(), self.config.n_routed_experts

        def skipped(name: str) -> str | None:
            expert = re.search(r"\.mlp\.experts\.(\d+)\.", name)
            if expert is not None and int(expert[1]) >= count:
                return "of identity experts"
            return skipped_part(name)

        return skipped

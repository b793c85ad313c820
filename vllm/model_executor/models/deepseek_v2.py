"""DeepSeek-V2 and V3, and similar families: latent attention, experts after dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.attention.token_selection import TokenSelection
from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.glm4_moe import (
    GLM_MOE_NAMES,
    make_glm_moe,
    prefixes_of_extra_layers,
)
from vllm.model_executor.models.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_names,
)
from vllm.model_executor.models.mixture import bias_corrected_routing
from vllm.model_executor.models.utils import (
    STACKED_GATE_UP,
    StackedParams,
    layer_kind,
    require_option,
)
from vllm.model_executor.utils import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V3, V3.1, R1, Kimi-K2; layers for multi-token prediction are skipped."""

    supported_options: ClassVar[Mapping[str, Any]] = {"mlp_bias": False}
    stacked_params: ClassVar[StackedParams] = STACKED_GATE_UP

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return {**GLM_MOE_NAMES, **latent_names(self.config)}

    def weights_to_skip(self) -> tuple[str, ...]:
        return prefixes_of_extra_layers(self.config)

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return LatentSelfAttention(vllm_config, self.latent_options(vllm_config, index), prefix)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        if self.has_experts(config, index):
            return make_glm_moe(config, prefix, self.routing_rule(config))
        return self.dense_mlp(config, prefix)

    def latent_options(self, vllm_config: VllmConfig, index: int) -> LatentOptions:
        """Return the options of that layer's attention."""
        config = vllm_config.model_config.hf_text_config
        return LatentOptions(interleaved=config.rope_interleave)

    def has_experts(self, config: Any, index: int) -> bool:
        """Return whether that layer's MLP is a mixture."""
        require_option(config, moe_layer_freq=1)
        return bool(index >= config.first_k_dense_replace)

    def routing_rule(self, config: Any) -> RoutingRule:
        """Return the rule that chooses experts."""
        require_option(config, scoring_func="sigmoid", topk_method="noaux_tc")
        return bias_corrected_routing(config)


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2, V2.5, V2-Lite, Coder-V2: latent attention, and experts after dense layers."""

    def latent_options(self, vllm_config: VllmConfig, index: int) -> LatentOptions:
        return LatentOptions()

    def routing_rule(self, config: Any) -> RoutingRule:
        require_option(config, scoring_func="softmax", norm_topk_prob=False)
        if config.topk_method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedConfigError(
                f"config.json: topk_method={config.topk_method!r} is not supported; supported: "
                "'greedy', 'group_limited_greedy'",
                "topk_method",
            )
        is_limited = config.topk_method == "group_limited_greedy"
        return RoutingRule(
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            num_groups=config.n_group if is_limited else 1,
            num_groups_kept=config.topk_group if is_limited else 1,
            group_best=1,
        )


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash; layers for multi-token prediction are skipped."""

    def has_experts(self, config: Any, index: int) -> bool:
        return layer_kind(config, index, ("dense", "sparse"), "mlp_layer_types") == "sparse"


class DeepseekV32ForCausalLM(Glm4MoeLiteForCausalLM):
    """DeepSeek-V3.2: V3 whose queries read only the tokens that an indexer selects."""

    interleaves_indexer: ClassVar[bool] = False
    _selection: TokenSelection | None = None

    def latent_options(self, vllm_config: VllmConfig, index: int) -> LatentOptions:
        config = vllm_config.model_config.hf_text_config
        if self._selection is None:
            check_selection(vllm_config)
            self._selection = TokenSelection(config.index_topk)
        return LatentOptions(
            selection=self._selection,
            has_indexer=self.has_indexer(config, index),
            interleaves_indexer=self.interleaves_indexer,
        )

    def has_indexer(self, config: Any, index: int) -> bool:
        """Return whether that layer selects tokens; other layers use an earlier selection."""
        return True


def check_selection(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedConfigError if tokens have to be selected, which this device cannot do."""
    top_k = vllm_config.model_config.hf_text_config.index_topk
    max_model_len = vllm_config.model_config.max_model_len
    if vllm_config.device_config.device_type != "cpu" and max_model_len > top_k:
        raise UnsupportedConfigError(
            f"max_model_len={max_model_len}: beyond index_topk={top_k} tokens the indexer selects "
            "some, which this engine's class does only on a CPU; use "
            f"max_model_len<={top_k}, or model_impl='transformers'"
        )


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: DeepSeek-V3.2, with layers that use an earlier layer's selection."""

    interleaves_indexer: ClassVar[bool] = True

    def has_indexer(self, config: Any, index: int) -> bool:
        kinds = config.indexer_types
        if kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
            raise ValueError(
                f"config.json: indexer_types={kinds!r} is not supported; the first layer has to "
                "be 'full', and every other one 'full' or 'shared'"
            )
        return bool(kinds[index] == "full")

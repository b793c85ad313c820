"""One more kind of cache is one more module: here this one, with a layer and a model that use it.

Latent attention of its own making: a token keeps one vector of 576 elements, whose first 512 are
read as the value by every head. Nothing of the engine is told but what the spec answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.ops.attention import paged_attention, write_kv
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.cache_kinds.base import (
    PAGE_TOKENS,
    GroupPlan,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerSet,
    StepInputs,
    view_in_blocks,
)

Checkpoint = Callable[..., Path]
LATENT, VALUE, HEADS = 576, 512, 3


@dataclass(frozen=True, kw_only=True)
class LatentSpec(KVCacheSpec):
    """One vector a token; all tokens of a layer's block lie together."""

    leads: ClassVar[int] = 2

    size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def group_key(self) -> Hashable:
        return self

    def layer_set(self, layers: Mapping[str, LatentSpec]) -> LatentLayers:
        return LatentLayers(list(layers), self)

    def _tokens(self, tensor: KVCacheTensor) -> int:
        return tensor.layer_stride // self.token_bytes

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        return ((tensor.start_of(name), tensor.layer_stride),)

    def layer_views(self, pool: torch.Tensor, tensor: KVCacheTensor, name: str) -> torch.Tensor:
        """[blocks, pages, 16, 1, size], as kernels want it."""
        shape = (self._tokens(tensor) // PAGE_TOKENS, PAGE_TOKENS, 1, self.size)
        return view_in_blocks(pool, self.dtype, tensor.start_of(name), tensor.block_stride, shape)

    def make_metadata(self, inputs: StepInputs, group_id: int) -> AttentionMetadata:
        return AttentionMetadata(
            inputs.layout, inputs.block_table(group_id), inputs.slots(group_id)
        )

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return f"latent attention: {num_layers} layers, {self.block_size} tokens a block"


class LatentLayers(LayerSet):
    """One group, layer after layer in a block."""

    order = 0

    def __init__(self, names: list[str], spec: LatentSpec) -> None:
        self.names, self.spec, self.leads = names, spec, spec.leads
        self.page_bytes = PAGE_TOKENS * spec.token_bytes * len(names)

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        tokens = block_bytes // self.page_bytes * PAGE_TOKENS
        spec = replace(self.spec, block_size=tokens)
        group = KVCacheGroupSpec(layer_names=self.names, kv_cache_spec=spec)
        tensor = KVCacheTensor(
            size=block_bytes,
            layers=tuple(self.names),
            layer_stride=tokens * spec.token_bytes,
            block_stride=block_bytes,
        )
        return [GroupPlan(group, [tensor])]


class LatentAttention(nn.Module, AttentionLayerBase):
    """Queries of every head meet the tokens' latent vectors."""

    kv_cache: torch.Tensor

    def __init__(self, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self.q_proj = ReplicatedLinear(hidden_size, HEADS * LATENT, bias=False, return_bias=False)
        self.latent_proj = ReplicatedLinear(hidden_size, LATENT, bias=False, return_bias=False)
        self.o_proj = ReplicatedLinear(HEADS * VALUE, hidden_size, bias=False, return_bias=False)
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: Any) -> LatentSpec:
        dtype = vllm_config.model_config.dtype
        return LatentSpec(block_size=PAGE_TOKENS, size=LATENT, dtype=dtype)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata[self.layer_name]
        latent = self.latent_proj(hidden_states)[:, None]
        write_kv(latent, latent[..., :0], metadata.slot_mapping, self.kv_cache)
        query = self.q_proj(hidden_states).unflatten(1, (HEADS, LATENT))
        output = query.new_empty((len(query), HEADS, VALUE))
        table, layout = metadata.block_table, metadata.layout
        paged_attention(
            query, self.kv_cache, table, layout, LATENT**-0.5, 0, None, None, None, None, output
        )
        projected: torch.Tensor = self.o_proj(output.flatten(1))
        return projected


class LatentForCausalLM(LlamaForCausalLM):
    """Llama with that attention."""

    def make_layer(self, vllm_config: Any, index: int, prefix: str) -> nn.Module:
        layer = LlamaDecoderLayer(vllm_config, AttentionOptions(), prefix)
        static = vllm_config.compilation_config.static_forward_context
        del static[f"{prefix}.self_attn.attn"]
        hidden_size = vllm_config.model_config.get_hidden_size()
        layer.self_attn = LatentAttention(hidden_size, f"{prefix}.latent")
        return layer


def expected_stream(layer: nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """Compute naively what the layer makes of a whole prompt's stream."""
    attention = layer.self_attn
    normed = layer.input_layernorm(stream)
    latent = attention.latent_proj(normed)
    query = attention.q_proj(normed).unflatten(1, (HEADS, LATENT))
    scores = torch.einsum("qhd,kd->hqk", query.double(), latent.double()) * LATENT**-0.5
    scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
    mixed = torch.einsum("hqk,kv->qhv", scores.softmax(-1), latent[:, :VALUE].double())
    after = stream + attention.o_proj(mixed.float().flatten(1))
    result: torch.Tensor = after + layer.mlp(layer.post_attention_layernorm(after))
    return result


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}])
def test_a_kind_that_nobody_was_told_of(
    options: dict[str, Any],
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right values; the same bits in chunks, in company and on a prefix hit; rows in files."""
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("LatentForCausalLM", LatentForCausalLM)
    folder = checkpoint("llama")
    arguments: dict[str, Any] = {
        "hf_overrides": {"architectures": ["LatentForCausalLM"]},
        "load_format": "dummy",
        "dtype": "float32",
        "kv_cache_memory_bytes": 2**25,
    }
    prompts = random_prompts(3, [70, 5, 33, 131])
    with engine(folder, **arguments, enable_prefix_caching=False) as llm:
        whole = [
            sample.hidden_states for prompt in prompts for sample in llm.extract([prompt], ":")
        ]
        layers = core_of(llm).executor.worker.model_runner.model.model.layers
        with torch.inference_mode():
            for rows in whole:
                for index, layer in enumerate(layers):
                    expected = expected_stream(layer, rows[:, index].contiguous())
                    torch.testing.assert_close(rows[:, index + 1], expected, rtol=1e-4, atol=1e-4)
    with engine(folder, **arguments, **options) as llm:
        rows = [sample.hidden_states for sample in llm.extract(prompts, ":", ordered=True)]
        assert all(torch.equal(a, b) for a, b in zip(rows, whole, strict=True))
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(9))]
        again = llm.generate(prompts, greedy(9), use_tqdm=False)
        assert again[-1].num_cached_tokens == 128
        assert [output.outputs[0].token_ids for output in again] == tokens
        assert "latent attention: 4 layers" in "\n".join(describe_pool(llm))
    with engine(folder, **arguments, **options, **extraction_config([2, 0], tmp_path)) as llm:
        for output, rows_of_all in zip(llm.generate(prompts, greedy(2)), whole, strict=True):
            assert torch.equal(rows_of(output), rows_of_all[:, [2, 0]])


def describe_pool(llm: Any) -> list[str]:
    from vllm.v1.core.kv_cache_utils import describe

    return describe(core_of(llm).kv_cache_config)

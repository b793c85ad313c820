"""Stacks of any layers in one pool: states of several sizes, windows, both in one layer, neither.

Alone, a layer has memory of its own (``SingleRequest``), and the tests of its family compare it
with transformers. Here all of them share blocks, and no bit may differ. The rows of the whole stack
are those of the operations' plain bodies, too, in one pass over each prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch
from torch import nn

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.grids import at_night
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import relative_error
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import GatedDeltaNet
from vllm.model_executor.layers.mamba.kda import KimiDeltaAttention
from vllm.model_executor.layers.mamba.lightning import LightningAttention
from vllm.model_executor.layers.mamba.mamba1 import MambaMixer
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.mamba.mlstm import MLSTMLayer
from vllm.model_executor.layers.mamba.rg_lru import RecurrentBlock
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.ops.operation import Source, use_sources
from vllm.ops.sources import find_source
from vllm.v1.core.kv_cache_utils import blocks_per_request

Checkpoint = Callable[..., Path]
NAME = "MixedStackForCausalLM"
BY_DAY = (0, 5, 16)
SEEDS = [*BY_DAY, *(at_night(seed) for seed in range(30) if seed not in BY_DAY)]


def make_mamba2(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    groups = draw.choice([1, 2])
    sizes = Mamba2Sizes(
        num_heads=groups * draw.randint(1, 4),
        head_dim=draw.choice([4, 20, 32]),
        num_groups=groups,
        state_size=draw.choice([5, 16, 31]),
        conv_width=4,
        conv_option="conv_kernel",
    )
    return Mamba2Mixer(hidden, sizes, norm_eps=1e-5, prefix=prefix)


def make_mamba1(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    return MambaMixer(
        hidden_size=hidden,
        intermediate_size=draw.choice([24, 72]),
        num_heads=draw.choice([1, 3]),
        state_size=draw.choice([4, 16]),
        step_rank=5,
        conv_width=draw.choice([2, 4]),
        conv_option="conv_kernel",
        conv_bias=True,
        bias=False,
        prefix=prefix,
    )


def make_short_conv(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    return ShortConv(hidden, draw.choice([3, 4]), bias=False, option="conv_L_cache", prefix=prefix)


def make_delta_net(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    heads = draw.choice([1, 2])
    return GatedDeltaNet(
        hidden_size=hidden,
        num_k_heads=heads,
        num_v_heads=heads * draw.choice([1, 3]),
        head_k_dim=16,
        head_v_dim=draw.choice([16, 24]),
        conv_width=4,
        rms_norm_eps=1e-5,
        prefix=prefix,
    )


def make_kda(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    return KimiDeltaAttention(
        hidden_size=hidden,
        num_heads=draw.choice([1, 3]),
        head_size=16,
        conv_width=4,
        rms_norm_eps=1e-5,
        prefix=prefix,
    )


def make_lru(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    return RecurrentBlock(
        hidden_size=hidden,
        width=draw.choice([24, 72]),
        num_heads=4,
        conv_width=4,
        conv_option="conv1d_width",
        activation="gelu_pytorch_tanh",
        activation_option="hidden_activation",
        prefix=prefix,
    )


def make_lightning(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    return LightningAttention(hidden, draw.choice([1, 2, 4]), 16, 0.7, prefix)


def make_mlstm(hidden: int, draw: random.Random, prefix: str) -> nn.Module:
    heads = draw.choice([1, 3])
    return MLSTMLayer(
        hidden_size=hidden,
        num_heads=heads,
        key_width=heads * draw.choice([8, 15]),
        value_width=heads * draw.choice([16, 20]),
        gate_cap=15.0,
        epsilon=1e-6,
        norm_eps=1e-5,
        bias=True,
        prefix=prefix,
    )


RECURRENT = [
    make_mamba2,
    make_mamba1,
    make_short_conv,
    make_delta_net,
    make_kda,
    make_lru,
    make_lightning,
    make_mlstm,
]
KINDS = ["state", "state", "state", "keys", "both", "neither"]


class Drawn(NamedTuple):
    """A layer of a stack, and what draws its sizes."""

    kind: str
    make_mixer: Callable[[int, random.Random, str], nn.Module]
    draw: random.Random


def draw_layer(seed: int, index: int) -> Drawn:
    draw = random.Random(1000 * seed + index)
    kind, make_mixer = draw.choice(KINDS), draw.choice(RECURRENT)
    if index < 2:  # so that there are two sizes
        kind, make_mixer = ["state", "both"][index], [make_mamba2, make_short_conv][index]
    return Drawn(kind, make_mixer, draw)


class MixedStack(DecoderForCausalLM):
    """Every layer is drawn by its index and ``config.stack_seed``."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        kind, make_mixer, draw = draw_layer(config.stack_seed, index)
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        attention, recurrent = None, None
        if kind in ("keys", "both"):
            options = AttentionOptions(sliding_window=draw.choice([None, None, 24, 57]))
            attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        if kind in ("state", "both"):
            recurrent = {"mixer": make_mixer(config.hidden_size, draw, f"{prefix}.mixer")}
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, prefix=f"{prefix}.mlp")
        return DecoderBlock(config.hidden_size, attention, mlp, layout, recurrent=recurrent)


@pytest.fixture(autouse=True)
def mixed_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model(NAME, MixedStack)


def num_layers_of(seed: int) -> int:
    return random.Random(seed).randint(5, 9)


def stack_arguments(seed: int) -> dict[str, Any]:
    overrides = {"architectures": [NAME], "num_hidden_layers": num_layers_of(seed)}
    overrides["stack_seed"] = seed
    return {"hf_overrides": overrides, "load_format": "dummy", "max_model_len": 256}


def rows_alone(folder: Path, seed: int, prompts: list[Any], layers: list[int]) -> Any:
    """Rows of each prompt in one forward pass, every layer in memory of its own."""
    for prompt in prompts:
        ids = prompt["prompt_token_ids"]
        request = SingleRequest(make_config(folder, **stack_arguments(seed)), len(ids))
        sink = ListSink(frozenset(layers))
        request.run(ids, sink)
        yield torch.stack([sink.rows(layer) for layer in layers], dim=1)


@contextmanager
def plain_bodies() -> Iterator[None]:
    """Every operation is computed by its body, which is its reference."""
    plain = Source()
    use_sources(lambda device_type: plain)
    try:
        yield
    finally:
        use_sources(find_source)


def test_layers_of_all_kinds_are_drawn_by_day() -> None:
    layers = [draw_layer(seed, i) for seed in BY_DAY for i in range(num_layers_of(seed))]
    assert {layer.kind for layer in layers} == set(KINDS)
    mixers = {layer.make_mixer for layer in layers if layer.kind in ("state", "both")}
    assert mixers == set(RECURRENT)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_those_of_the_plain_bodies(seed: int, checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    prompts = random_prompts(seed, [70, 33, 130, 5])
    layers = list(range(num_layers_of(seed) + 1))
    with plain_bodies():
        expected = list(rows_alone(folder, seed, prompts, layers))
    with engine(folder, **stack_arguments(seed), max_num_batched_tokens=48) as llm:
        samples = llm.extract(prompts, layers=layers)
        for sample, rows in zip(samples, expected, strict=True):
            for layer in layers:
                error = relative_error(sample.hidden_states[:, layer], rows[:, layer])
                assert error <= 1e-4, f"layer {layer}: {error:.0e} of its rms"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_share_blocks_compute_what_they_do_alone(
    seed: int, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Chunks, company, prefix hits from snapshots in passing, and a pool that is too small."""
    folder = checkpoint("llama", dtype=dtype)
    layers = [0, 2, 5, 4]
    prompts = random_prompts(seed, [70, 33, 130, 5])
    prompts.append({"prompt_token_ids": [*prompts[2]["prompt_token_ids"][:100], 1, 2, 3]})
    expected = list(rows_alone(folder, seed, prompts, layers))
    arguments = stack_arguments(seed) | extraction_config(layers, tmp_path)
    with engine(folder, **arguments, max_num_batched_tokens=48) as llm:
        plan = core_of(llm).kv_cache_config
        needed = 1 + blocks_per_request(llm.llm_engine.vllm_config, plan.kv_cache_groups)
        assert any(
            len({plan.layer_specs[name] for name in plan.kv_cache_groups[group].layer_names}) > 1
            for group in plan.recurrent_group_ids
        ), "no states of two sizes share a block"
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(), use_tqdm=False)
            for output, rows in zip(outputs, expected, strict=True):
                assert torch.equal(rows_of(output), rows)
        assert outputs[2].num_cached_tokens
    arguments["num_gpu_blocks_override"] = needed + 2
    with engine(folder, **arguments, max_num_batched_tokens=48) as llm:
        outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
        for output, rows in zip(outputs, expected, strict=True):
            assert torch.equal(rows_of(output), rows)

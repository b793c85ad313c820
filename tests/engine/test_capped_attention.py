"""A soft cap, sinks and windows of attention: an author's model, through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tests.engine.harness import (
    engine,
    extraction_config,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models.checkpoints import FAMILIES, VOCAB_SIZE
from tests.models.oracle import relative_error
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.ops.operation import use_sources
from vllm.ops.sources import find_source

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 72, 6, 2, 16
SIZES = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
CAPS = [0.7, None, 3.0]
WINDOWS = [None, 24, 24]
HAS_SINKS = [False, True, True]


class Block(nn.Module):
    """``x + out(attention(qkv(norm(x))))``."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, eps=1e-6)
        self.qkv = ColumnParallelLinear(HIDDEN, sum(SIZES), bias=False, return_bias=False)
        self.out = RowParallelLinear(SIZES[0], HIDDEN, bias=False, return_bias=False)
        self.sinks = nn.Parameter(torch.empty(HEADS)) if HAS_SINKS[index] else None
        self.attn = Attention(
            HEADS,
            HEAD_SIZE,
            HEAD_SIZE**-0.5,
            num_kv_heads=KV_HEADS,
            logits_soft_cap=CAPS[index],
            per_layer_sliding_window=WINDOWS[index],
            prefix=f"blocks.{index}.attn",
            sinks=self.sinks,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attn(*self.qkv(self.norm(x)).split(SIZES, dim=-1))
        return x + self.out(attended)


class CappedModel(nn.Module):
    supports_eagle3: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN)
        self.blocks = nn.ModuleList(Block(index) for index in range(len(CAPS)))
        self.norm = RMSNorm(HIDDEN, eps=1e-6)
        self.lm_head = ParallelLMHead(VOCAB_SIZE, HIDDEN)
        self.logits_processor = LogitsProcessor(VOCAB_SIZE)
        self.aux_layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_layers = layers

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(input_ids)
        return embedded

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        streams = [self.embed_input_ids(input_ids)]
        for block in self.blocks:
            streams.append(block(streams[-1]))
        hidden = self.norm(streams[-1])
        return (hidden, [streams[i] for i in self.aux_layers]) if self.aux_layers else hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            getattr(params[name], "weight_loader", default_weight_loader)(params[name], weight)
            loaded.add(name)
        return loaded


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {"embed.weight": draw(VOCAB_SIZE, HIDDEN), "norm.weight": 1 + draw(HIDDEN, scale=0.2)}
    weights["lm_head.weight"] = draw(VOCAB_SIZE, HIDDEN, scale=HIDDEN**-0.5)
    for index, has_sinks in enumerate(HAS_SINKS):
        block = f"blocks.{index}."
        weights[block + "norm.weight"] = 1 + draw(HIDDEN, scale=0.2)
        weights[block + "qkv.weight"] = draw(sum(SIZES), HIDDEN, scale=2 * HIDDEN**-0.5)
        weights[block + "out.weight"] = draw(HIDDEN, SIZES[0], scale=2 * SIZES[0] ** -0.5)
        if has_sinks:
            weights[block + "sinks"] = draw(HEADS, scale=2.0)
    return weights


def naive_streams(weights: dict[str, torch.Tensor], token_ids: list[int]) -> list[torch.Tensor]:
    """The residual stream before each block and after the last one, [tokens, hidden], float64."""
    weights = {name: weight.double() for name, weight in weights.items()}
    tokens = len(token_ids)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    streams = [weights["embed.weight"][token_ids]]
    for index, (cap, window) in enumerate(zip(CAPS, WINDOWS, strict=True)):
        sinks = weights.get(f"blocks.{index}.sinks")
        x = functional.rms_norm(
            streams[-1], (HIDDEN,), weights[f"blocks.{index}.norm.weight"], 1e-6
        )
        parts = (x @ weights[f"blocks.{index}.qkv.weight"].T).unflatten(1, (-1, HEAD_SIZE))
        query, key, value = parts.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_SIZE**-0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        hidden = (distance < 0) | (distance >= (window or tokens))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, tokens, 1)), dim=-1)
        seen = scores.softmax(-1)[..., :tokens]
        attended = torch.einsum("hqk,khd->qhd", seen, value).flatten(1)
        streams.append(streams[-1] + attended @ weights[f"blocks.{index}.out.weight"].T)
    return streams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**FAMILIES["llama"].config, "num_hidden_layers": len(CAPS), "model_type": "llama"}
    config |= {"architectures": ["CappedForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(make_weights(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(params=["plain", "native"])
def kernels_of_choice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("VLLM_KERNELS", request.param)
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    find_source.cache_clear()
    try:
        chosen = find_source("cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    use_sources(lambda device_type: chosen)
    yield
    find_source.cache_clear()
    use_sources(find_source)


@pytest.mark.usefixtures("kernels_of_choice")
@pytest.mark.parametrize("budget", [16, 512])
def test_an_authors_capped_model(
    budget: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks and at once, several prompts, then decoding."""
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("CappedForCausalLM", CappedModel)
    layers = [0, 1, 2, 3]
    config = extraction_config(layers, tmp_path / "rows")
    prompts = random_prompts(1, [33, 5, 70])
    with engine(folder, max_num_batched_tokens=budget, **config) as llm:
        outputs = llm.generate(prompts, with_output_tokens(6), use_tqdm=False)
    weights = make_weights()
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        expected = naive_streams(weights, prompt["prompt_token_ids"] + generated[:-1])
        rows = rows_of(output)
        for layer in layers:
            assert relative_error(rows[:, layer], expected[layer]) <= 1e-4
        last = functional.rms_norm(expected[-1], (HIDDEN,), weights["norm.weight"].double(), 1e-6)
        logits = last @ weights["lm_head.weight"].double().T
        assert logits[len(prompt["prompt_token_ids"]) - 1 :].argmax(-1).tolist() == generated

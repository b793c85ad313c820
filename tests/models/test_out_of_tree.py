"""A model as its author writes it against the public layer classes, outside this package."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import (
    ModelRegistry,
    SupportsEagle3,
    VllmModelForTextGeneration,
    supports_eagle3,
    supports_row_capture,
)

STACKED = [
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", 0),
    (".gate_up_proj", ".up_proj", 1),
]


class Mixer(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden_size=config.hidden_size,
            head_size=self.head_dim,
            total_num_heads=config.num_attention_heads,
            total_num_kv_heads=config.num_key_value_heads,
            bias=False,
            quant_config=None,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            input_size=config.num_attention_heads * self.head_dim,
            output_size=config.hidden_size,
            bias=False,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            is_neox_style=True,
        )
        self.attn = Attention(
            config.num_attention_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=config.num_key_value_heads,
            prefix=f"{prefix}.attn",
        )
        self.sizes = [n * self.head_dim for n in (config.num_attention_heads, 2, 2)]

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output: torch.Tensor = self.o_proj(self.attn(q, k, v))[0]
        return output


class Layer(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.self_attn = Mixer(config, f"{prefix}.self_attn")
        self.mlp = nn.ModuleDict(
            {
                "gate_up_proj": MergedColumnParallelLinear(
                    config.hidden_size, [config.intermediate_size] * 2, bias=False
                ),
                "down_proj": RowParallelLinear(
                    config.intermediate_size, config.hidden_size, bias=False
                ),
            }
        )
        self.act = SiluAndMul()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        gate_up, _ = self.mlp["gate_up_proj"](hidden)
        return self.mlp["down_proj"](self.act(gate_up))[0], residual


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, f"model.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class AuthorsModel(nn.Module):
    supports_eagle3: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = Decoder(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.aux_layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_layers = layers

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        hidden, residual = self.embed_input_ids(input_ids), None
        aux = []
        for index, layer in enumerate(self.model.layers):
            if index in self.aux_layers:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.model.norm(hidden, residual)
        return (hidden, aux) if self.aux_layers else hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, weight in weights:
            for own, theirs, shard in STACKED:
                if theirs in name:
                    target = name.replace(theirs, own)
                    params[target].weight_loader(params[target], weight, shard)  # type: ignore[attr-defined]
                    break
            else:
                target = name
                loader = getattr(params[name], "weight_loader", default_weight_loader)
                loader(params[name], weight)
            loaded.add(target)
        return loaded


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("LlamaForCausalLM", f"{__name__}:AuthorsModel")


@pytest.mark.usefixtures("registered")
def test_an_authors_model_gives_transformers_values(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    ids = list(range(9, 60))
    expected = reference_run(folder, ids)
    request = SingleRequest(make_config(folder), len(ids))
    model: Any = request.model
    assert isinstance(model, AuthorsModel)
    assert isinstance(model, VllmModelForTextGeneration)
    assert isinstance(model, SupportsEagle3)
    assert supports_eagle3(model)
    assert not supports_row_capture(model)
    model.set_aux_hidden_state_layers((0, 2))
    hidden, aux = request.run(ids)
    for stream, layer_id in zip(aux, (0, 2), strict=True):
        assert relative_error(stream, expected.streams[layer_id]) <= 1e-4
    with torch.inference_mode():
        assert relative_error(model.compute_logits(hidden), expected.logits) <= 1e-4


@pytest.mark.usefixtures("registered")
def test_parameters_that_load_weights_forgot_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    load_all = AuthorsModel.load_weights

    def load_most(model: AuthorsModel, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_all(model, ((n, w) for n, w in weights if n != "model.norm.weight"))

    monkeypatch.setattr(AuthorsModel, "load_weights", load_most)
    with pytest.raises(ValueError, match=r"without values: model\.norm\.weight"):
        SingleRequest(make_config(folder), 4)


def test_linear_layers_return_their_bias_apart_when_asked() -> None:
    x = torch.randn(20, 6)
    for layer_class in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = layer_class(6, 4, skip_bias_add=True)
        layer.weight.data.normal_()
        assert layer.bias is not None
        layer.bias.data.normal_()
        output, bias = layer(x)
        added, none = layer_class.forward(_adding(layer), x)
        assert bias is layer.bias
        assert none is None
        torch.testing.assert_close(output + bias, added)
        torch.testing.assert_close(output, x @ layer.weight.T)


def _adding(layer: Any) -> Any:
    layer.skip_bias_add = False
    return layer


@pytest.mark.parametrize(
    ("layer_class", "names"),
    [
        (ReplicatedLinear, "input_size output_size bias skip_bias_add params_dtype quant_config"),
        (
            ColumnParallelLinear,
            "input_size output_size bias gather_output skip_bias_add params_dtype quant_config"
            " output_sizes",
        ),
        (
            MergedColumnParallelLinear,
            "input_size output_sizes bias gather_output skip_bias_add params_dtype quant_config",
        ),
        (
            QKVParallelLinear,
            "hidden_size head_size total_num_heads total_num_kv_heads bias skip_bias_add"
            " params_dtype quant_config",
        ),
        (
            RowParallelLinear,
            "input_size output_size bias input_is_parallel skip_bias_add params_dtype"
            " reduce_results quant_config",
        ),
    ],
)
def test_options_by_position_mean_what_they_mean_to_model_authors(
    layer_class: type, names: str
) -> None:
    """The order of vLLM's layers, by which models of other packages pass them."""
    parameters = inspect.signature(layer_class).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*names.split(), "prefix"]

"""Checkpoints as they are published: odd entries, spellings of names, tensors of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import engine, random_prompts
from tests.grids import at_night
from tests.models.harness import make_config
from tests.models.published import CONFIGS, OPTIONS, check_published, check_rows, make_published
from vllm.model_report.checkpoint_report import report_checkpoint

Weights = dict[str, torch.Tensor]
BY_DAY = {"ernie-4.5-0.3b", "phi-3.5-moe", "recurrentgemma-2b", "granite-vision", "voxtral"}
IMPLS = ["auto", "transformers"]


@pytest.mark.parametrize("name", [n if n in BY_DAY else at_night(n) for n in CONFIGS])
def test_rows_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_published(tmp_path, make_published(tmp_path, name))


@pytest.mark.parametrize("name", ["lfm2-vl", "phi-4-mini", "mistral-small-3.1"])
def test_transformers_module_runs_them_too(name: str, tmp_path: Path) -> None:
    """Code that a checkpoint names is not needed where transformers has the model."""
    check_published(tmp_path, make_published(tmp_path, name), "transformers")


def _respell(weights: Weights, **parts: str) -> Weights:
    """parts: beginning of a name -> what stands there instead, dots as two underscores."""
    spelled = {old.replace("__", "."): new for old, new in parts.items()}
    return {
        next((new + n[len(old) :] for old, new in spelled.items() if n.startswith(old)), n): w
        for n, w in weights.items()
    }


def _masks(place: str) -> Callable[[Weights], Weights]:
    names = [f"{place}.{mask}" for mask in ("bias", "masked_bias", "causal_mask")]
    kept = names if place.endswith(".attn") else names[:2]
    return lambda weights: weights | {name: torch.ones(1, 1, 8, 8) for name in kept}


def _further_layer(weights: Weights) -> Weights:
    names = ("eh_proj.weight", "shared_head.head.weight", "self_attn.o_proj.weight")
    return weights | {f"model.layers.4.{name}": torch.ones(5, 3) for name in names}


OTHER_FILES: list[tuple[str, str, Callable[[Weights], Weights]]] = [
    ("gpt-j-6b", "auto", _masks("transformer.h.1.attn")),
    ("gpt-neo-125m", "auto", _masks("transformer.h.1.attn.attention")),
    ("deepseek-v3", "transformers", _further_layer),
    ("glm-4.5-air", "transformers", _further_layer),
    *(
        (
            "gemma-3-4b",
            impl,
            lambda w: _respell(
                w,
                language_model__model__="model.language_model.",
                language_model__="",
                vision_tower__="model.vision_tower.",
                multi_modal_projector__="model.multi_modal_projector.",
            ),
        )
        for impl in IMPLS
    ),
    (
        "qwen2-vl-2b",
        "auto",
        lambda w: _respell(w, model__="model.language_model.", visual__="model.visual."),
    ),
]


@pytest.mark.parametrize(("name", "model_impl", "change"), OTHER_FILES)
def test_tensors_under_other_names_and_beside_the_models(
    name: str, model_impl: str, change: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    model, file = make_published(tmp_path, name), tmp_path / "model.safetensors"
    weights = load_file(file)
    changed = change(weights)
    assert changed.keys() != weights.keys()
    save_file(changed, file, metadata={"format": "pt"})
    prompt = random_prompts(1, [41])[0]["prompt_token_ids"]
    with engine(tmp_path, **OPTIONS, model_impl=model_impl) as llm:
        check_rows(llm, model, [prompt])


@pytest.mark.parametrize("model_impl", IMPLS)
def test_a_language_models_checkpoint_is_read_strictly(model_impl: str, tmp_path: Path) -> None:
    make_published(tmp_path, "llava-1.5")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    (name,) = (each for each in weights if each.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    for added in (name.replace("mlp.up_proj.weight", "own"), "surplus.weight"):
        weights[added] = torch.ones(3)
    save_file(weights, file, metadata={"format": "pt"})
    reason = r"missing 1 .*layers\.1\.mlp\.up_proj.*place for: .*layers\.1\.own, surplus\.weight"
    with (
        pytest.raises(ValueError, match=reason),
        engine(tmp_path, **OPTIONS, model_impl=model_impl),
    ):
        pass


@pytest.mark.parametrize("model_impl", IMPLS)
def test_the_report_says_which_class_runs(model_impl: str, tmp_path: Path) -> None:
    make_published(tmp_path, "llava-1.5")
    options: Any = {"model_impl": model_impl, "dtype": "float32", "max_model_len": 128}
    text = report_checkpoint(make_config(tmp_path, **options)).to_text()
    assert "LlavaForConditionalGeneration" in text
    assert "LlamaForCausalLM" in text


MODELING = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OwnConfig(PretrainedConfig):
    model_type = "own"


def eager_attention_forward(module, q, k, v, mask, scaling, **kwargs):
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.scaling, self.num_key_value_groups = 0.3, 2
        self.q = nn.Linear(32, 32)
        self.kv = nn.Linear(32, 32)
        self.o = nn.Linear(32, 32)

    def forward(self, x, mask, past_key_values):
        q = self.q(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(*x.shape[:2], 4, 8).transpose(1, 2).split(2, 1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        ATTEND
        return self.o(attend(self, q, k, v, mask, scaling=self.scaling)[0].flatten(2))


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(config, layer_idx)

    def forward(self, hidden_states, mask=None, past_key_values=None):
        x = self.norm(hidden_states)
        MIX
        return hidden_states + self.attention(x, mask, past_key_values)


class Base(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    _supports_attention_backend = True


class OwnModel(Base):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, 32)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(32)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, position_ids=None,
                past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask,
            past_key_values=past_key_values, position_ids=position_ids,
        )
        for layer in self.layers:
            x = layer(x, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class OwnForCausalLM(Base):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(32, config.vocab_size, bias=False)
        self.post_init()

    def get_decoder(self):
        return self.model

    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""


BY_INTERFACE = """attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )"""
BY_NAME = """attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]"""
"""As most code beside checkpoints has it."""


def _make_with_code(folder: Path, mix: str, attend: str = BY_INTERFACE) -> Any:
    import transformers

    (folder / "modeling_own.py").write_text(MODELING.replace("MIX", mix).replace("ATTEND", attend))
    content = {
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
        "model_type": "own",
        "vocab_size": 307,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, trust_remote_code=True, attn_implementation="eager"
    ).eval()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("attend", [BY_INTERFACE, BY_NAME], ids=["interface", "name"])
def test_code_of_the_checkpoint_runs_where_it_is_trusted(attend: str, tmp_path: Path) -> None:
    model = _make_with_code(tmp_path, "pass", attend)
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(3, [41, 9])]
    with engine(tmp_path, **OPTIONS, trust_remote_code=True, max_num_batched_tokens=13) as llm:
        runner = llm.llm_engine.engine_core.executor.worker.model_runner
        assert "as one sequence" in runner.model.way
        check_rows(llm, model, prompts)
    with pytest.raises(ValueError, match="trust_remote_code=True"), engine(tmp_path, **OPTIONS):
        pass


def test_code_that_reads_later_tokens_is_refused(tmp_path: Path) -> None:
    _make_with_code(tmp_path, "x = x + x.flip(1)")
    with (
        pytest.raises(ValueError, match=r"OwnForCausalLM of transformers cannot be served"),
        engine(tmp_path, **OPTIONS, trust_remote_code=True),
    ):
        pass

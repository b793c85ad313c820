"""If a class of ours does not do what the config asks, transformers' module runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import engine
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from tests.models.oracle import reference_run, relative_error
from vllm import LLM, ModelRegistry
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.transformers_modules.choice import choose_model_class
from vllm.model_executor.transformers_modules.model import TransformersForCausalLM
from vllm.model_executor.utils import UnsupportedConfigError
from vllm.model_report.checkpoint_report import report_checkpoint

TOKENS = [(7 * i * i + 3) % 300 for i in range(71)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 33,
    "kv_cache_memory_bytes": 2**25,
}


@pytest.mark.parametrize(
    ("family", "entry"),
    [
        ("ernie4_5_moe", {"use_bias": True}),
        ("falcon", {"alibi": True}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("olmo", {"clip_qkv": 1.0}),
        ("qwen3_5", {"hidden_act": "gelu"}),
        ("qwen3_5_vl", {"hidden_act": "gelu"}),
        ("llama", {"hidden_act": "quick_gelu"}),
        ("lfm2", {"conv_L_cache": 9}),
        ("longcat_flash", {"router_bias": True}),
    ],
)
def test_rows_are_those_of_transformers(
    family: str, entry: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False, **entry)
    expected = reference_run(folder, TOKENS).streams
    with engine(folder, **OPTIONS) as llm:
        (sample,) = llm.extract(
            [{"prompt_token_ids": TOKENS}], layers=list(range(len(expected))), positions="all"
        )
    errors = [relative_error(sample.hidden_states[:, i], s) for i, s in enumerate(expected)]
    assert max(errors) <= 1e-4
    assert f"{next(iter(entry))}=" in caplog.text
    assert "transformers' module runs it" in caplog.text
    assert "of transformers" in report_checkpoint(make_config(folder)).to_text()
    with pytest.raises(ValueError, match=f"{next(iter(entry))}=.* is not supported"):
        get_model(vllm_config=make_config(folder, model_impl="vllm"))


@pytest.mark.parametrize(
    ("family", "entry"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}),  # transformers does not read it
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("nemotron_h", {"attention_bias": True}),
        ("llama", {"hidden_act": "tanhexp"}),
        ("llama", {"rope_parameters": {"rope_type": "wavy"}}),
    ],
)
def test_what_transformers_does_not_do_either_is_refused(
    family: str, entry: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, tokenizer=False) / "config.json"
    content = json.loads(path.read_text())
    for name, value in entry.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not supported"):
        get_model(vllm_config=make_config(path.parent))


def test_an_option_with_a_longer_name_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' Gemma 2 reads its config's ``hidden_activation``, and no ``hidden_act``."""
    folder = make_checkpoint(tmp_path, "gemma2", tokenizer=False)
    ours, _ = ModelRegistry.resolve_model_cls(["Gemma2ForCausalLM"])

    def without(option: str) -> Callable[..., None]:
        def make_layer(*arguments: object) -> None:
            raise UnsupportedConfigError(f"{option} is not supported", option)

        return make_layer

    monkeypatch.setattr(ours, "make_layer", without("hidden_activation"))
    assert isinstance(get_model(vllm_config=make_config(folder)), TransformersForCausalLM)
    monkeypatch.setattr(ours, "make_layer", without("hidden_act"))
    with pytest.raises(UnsupportedConfigError, match=r"^hidden_act is not supported$"):
        get_model(vllm_config=make_config(folder))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_5"])
def test_attention_to_later_tokens_is_refused(family: str, tmp_path: Path) -> None:
    """transformers reads ``is_causal`` for every decoder; models for vectors state it."""
    folder = make_checkpoint(tmp_path, family, tokenizer=False, is_causal=False)
    with pytest.raises(ValueError, match=r"config.json: is_causal=False is not supported"):
        LLM(str(folder), **OPTIONS)


def test_attention_of_gemma_to_later_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3", tokenizer=False, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match=r"use_bidirectional_attention=True is not supported"):
        LLM(str(folder), **OPTIONS)


def test_layers_of_the_class_that_gave_up_are_gone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "jamba", tokenizer=False, hidden_act="gelu")
    config = make_config(folder)
    model = get_model(vllm_config=config)
    assert isinstance(model, TransformersForCausalLM)
    layers = config.compilation_config.static_forward_context
    assert set(layers) == set(model.sequences.layer_names)


def test_code_of_the_checkpoint_that_does_not_run_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A class of ours has its name; the code may compute something else."""
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(content))
    choose_model_class(make_config(folder).model_config)
    assert not caplog.text
    choose_model_class(make_config(folder, trust_remote_code=True).model_config)
    assert "does not run" in caplog.text and "model_impl='transformers'" in caplog.text

"""Entries of config.json that no model can have: refused by the name that the file has for them."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grids import at_night
from tests.models.checkpoints import FAMILIES, make_checkpoint, make_transformers_model
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from vllm.model_report.outline import outline_model

ENTRIES: list[tuple[str, str, Any, str]] = [
    ("bamba", "mamba_n_heads", 0, "mamba_n_heads=0 has to be a whole number above 0"),
    ("bamba", "mamba_d_head", 25, r"\(read there: .*mamba_d_head=25"),
    ("zamba2", "mamba_expand", "nonsense", "mamba_expand='nonsense' has to be"),
    ("jamba", "attn_layer_offset", 7, r"\(read there: attn_layer_offset=7, attn_layer_period"),
    ("kimi_linear", "num_shared_experts", -3, "num_shared_experts=-3 has to be .* at least 0"),
    ("minicpm3", "qk_rope_head_dim", 13, "qk_rope_head_dim=13 has to be even"),
    ("longcat_flash", "num_layers", -1, "num_layers=-1 has to be a whole number above 0"),
    ("gemma3_vl", "intermediate_size", -3, "intermediate_size=-3 has to be"),
    ("llama", "quantization_config", [{}], r"quantization_config=\[{}\] has to be an object"),
    ("llama", "architectures", 1, "architectures=1 has to be a list of class names"),
    ("qwen3_5", "architectures", [None], r"architectures=\[None\] has to be a list"),
    ("llama", "architectures", "LlamaForCausalLM", "has to be a list of class names"),
    ("llama", "model_type", ["llama"], r"model_type=\['llama'\] has to be a text"),
    ("qwen2_vl", "model_type", {}, "model_type={} has to be a text"),
    ("llama", "dtype", ["float32"], r"dtype=\['float32'\] has to be the name of a dtype"),
    ("llama", "torch_dtype", 32, "torch_dtype=32 has to be the name of a dtype"),
    ("qwen2_vl", "dtype", "", "dtype='' has to be the name of a dtype"),
    ("minicpm3", "dim_model_base", 0, "dim_model_base=0 has to be a whole number above 0"),
    ("gpt_oss", "swiglu_limit", math.nan, "swiglu_limit=nan is not a number"),
    ("bamba", "time_step_limit", [0.3, math.nan], "time_step_limit=nan is not a number"),
    ("jamba", "num_hidden_layers", 10**12, "num_hidden_layers=1000000000000 has to be at most"),
    ("gemma4_vl", "num_hidden_layers", 10**7, "num_hidden_layers=10000000 has to be at most"),
    ("qwen3_vl_moe", "sliding_window", "", "sliding_window='' has to be a number of tokens"),
    ("gemma4", "rope_parameters", {"sliding_attention": "1"},
     "rope_parameters: sliding_attention='1' has to be an object"),
    ("gemma3_vl", "rope_parameters", {"full_attention": {"rope_theta": {}}},
     r"rope_parameters\.full_attention: rope_theta={} has to be a number"),
    ("apertus", "rope_parameters", {"rope_type": "llama3", "high_freq_factor": [1]},
     r"rope_parameters: high_freq_factor=\[1\] has to be a number"),
    ("llama", "rope_scaling", {"rope_type": "yarn", "factor": {"a": 4}},
     "rope_scaling: factor={'a': 4} has to be a number"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["num_experts_per_token", "num_expert_group"])
def test_a_number_with_a_point_that_transformers_lets_pass(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_linear", tokenizer=False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, name: float(config[name])}))
    with pytest.raises(
        ValueError, match=rf"{name}={config[name]}\.0.*: each has to be a whole number"
    ):
        SingleRequest(make_config(folder), 5)


def test_a_number_of_further_layers_with_a_point(tmp_path: Path) -> None:
    """transformers reads such a checkpoint."""
    folder = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1.0}))
    for model_impl in ("vllm", "transformers"):
        SingleRequest(make_config(folder, model_impl=model_impl), 5)


@pytest.mark.parametrize(("family", "name", "value", "message"), ENTRIES)
def test_the_name_in_the_file_is_told(
    family: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    content = json.loads((folder / "config.json").read_text())
    content.get("text_config", content)[name] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        make_config(folder)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {**ROPE, "rope_theta": None}}, "rope_parameters.rope_theta=None"),
    (
        "llama",
        {"rope_parameters": {**ROPE, "rope_theta": "7"}},
        "rope_theta='7' has to be a number",
    ),
    (
        "llama",
        {"rope_parameters": {**ROPE, **LLAMA_3, "rope_type": "llama3", "factor": None}},
        "rope_parameters.factor=None",
    ),
    ("llama", {"architectures": ["Qwen3ForCausalLM"]}, "not there: layer_types"),
    ("phi3", {"architectures": ["LlamaForCausalLM"]}, "not there: attention_bias"),
    ("deepseek_v3", {"n_group": None}, "read there: n_group=None"),
    ("deepseek_v3", {"topk_group": None}, "read there: topk_group=None"),
    ("deepseek_v3", {"first_k_dense_replace": None}, "read there: first_k_dense_replace=None"),
    ("deepseek_v3", {"v_head_dim": None}, "read there: v_head_dim=None"),
]


def outline(folder: Path, content: dict[str, Any], **options: Any) -> None:
    (folder / "config.json").write_text(json.dumps(content))
    outline_model(make_config(folder, load_format="dummy", model_impl="vllm", **options))


def config_of(family: str) -> dict[str, Any]:
    text = make_transformers_model(family).config.to_json_string(use_diff=False)
    return {**json.loads(text), "architectures": [FAMILIES[family].model_class]}


@pytest.mark.parametrize(("family", "entries", "message"), UNREADABLE)
def test_what_building_raises_is_one_error_with_its_entry(
    family: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = {**config_of(family), **entries}
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        outline(tmp_path, content)
    if "has to be" not in message:
        assert content["architectures"][0] in str(raised.value)


def test_the_stack_of_a_library_is_no_part_of_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Overflow when unpacking") as raised:
        outline(tmp_path, {**config_of("jamba"), "num_key_value_heads": 10**30})
    assert "frame #" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "entry", "value"),
    [
        ("falcon", "layer_norm_epsilon", None),
        ("falcon_h1", "lm_head_multiplier", None),
        ("granite_moe", "residual_multiplier", None),
        ("ministral3", "llama_4_scaling_beta", [1, 2]),
    ],
)
def test_what_is_no_number_fails_before_the_first_step(
    family: str, entry: str, value: Any, tmp_path: Path
) -> None:
    content = config_of(family)
    (content["rope_parameters"] if entry.startswith("llama_4") else content)[entry] = value
    with pytest.raises(ValueError, match=r"cannot be made from config\.json: TypeError"):
        outline(tmp_path, content)


NOT_COMPUTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "glm",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.5}},
        "they rotate 24 elements of heads of 16",
    ),
    ("llama", {"rope_parameters": {**ROPE, "rope_theta": 0}}, "'rope_theta': 0}: not all"),
    ("llama", {"rope_parameters": {**ROPE, "rope_theta": -7.0}}, "'rope_theta': -7.0}: not all"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "beta_fast": -1}}, "'beta_fast': -1}: "),
    ("granite", {"attention_multiplier": 0}, "scale=0 is not a finite number"),
    ("gemma2", {"query_pre_attn_scalar": -3}, "j) is not a finite number"),
    ("falcon_h1", {"key_multiplier": -1.5}, "scale=-0.375 is not a finite"),
    (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": ROPE,
                "sliding_attention": {"rope_type": "default"},
            }
        },
        "rope_parameters has no rope_theta in {'rope_type': 'default'}",
    ),
    ("ministral3", {"rope_parameters": YARN}, "rope_parameters has no llama_4_scaling_beta"),
]


@pytest.mark.parametrize(("family", "entries", "message"), NOT_COMPUTED)
def test_numbers_that_nothing_can_be_computed_with(
    family: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """They fail when the model is made, not in a step of its requests."""
    with pytest.raises(ValueError, match=re.escape(message)):
        outline(tmp_path, {**config_of(family), **entries})


@pytest.mark.parametrize("theta", [None, "10000"])
def test_overrides_are_named_like_entries(theta: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"rope_theta={theta!r}"):
        outline(tmp_path, config_of("llama"), hf_overrides={"rope_theta": theta})


def odd_values(value: Any) -> Iterator[Any]:
    """Yield values of another type, or out of bounds."""
    yield None
    if not isinstance(value, str):
        yield "x"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (0, -1, str(value))
    if isinstance(value, list):
        yield from ([], value[:1])


def odd_entries(content: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in content.items():
        yield from (((name,), odd) for odd in odd_values(value))
        if isinstance(value, dict):
            yield from (((name, *path), odd) for path, odd in odd_entries(value))


BY_DAY = ("deepseek_v3", "gemma3_vl")


@pytest.mark.parametrize("family", [f if f in BY_DAY else at_night(f) for f in FAMILIES])
def test_odd_entries_end_in_one_error_or_none(family: str, tmp_path: Path) -> None:
    """Nothing raw comes out, whatever an entry is."""
    whole = config_of(family)
    cases = [(path, odd) for path, odd in odd_entries(whole) if path[0] != "architectures"]
    random.Random(family).shuffle(cases)
    num_refused = 0
    for path, odd in cases[:40]:
        content = part = copy.deepcopy(whole)
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = odd
        try:
            outline(tmp_path, content)
        except ValueError:
            num_refused += 1
    assert num_refused


@pytest.mark.parametrize("name", ["mistral", None])
def test_the_text_model_of_a_wrapper_is_the_named_one(name: str | None, tmp_path: Path) -> None:
    """Mistral reads no growth of queries, which Ministral 3 has; it is what no name means."""
    folder = make_checkpoint(tmp_path, "mistral3", tokenizer=False)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["model_type"] = name
    if name is None:
        del content["text_config"]["model_type"]
    path.write_text(json.dumps(content))
    tokens = [5, 7, 11, 200, 13, 44, 3, 250, 9] * 5
    expected = reference_run(folder, tokens)
    request = SingleRequest(make_config(folder, model_impl="vllm", max_model_len=64), 64)
    sink = ListSink(frozenset([1, request.num_layers]))
    request.run_chunks(tokens, [30], sink)
    for layer in (1, request.num_layers):
        assert relative_error(sink.rows(layer), expected.streams[layer]) <= 1e-4


def test_another_text_model_of_a_wrapper_is_named(tmp_path: Path) -> None:
    content = make_transformers_model("mistral3", model_type="ministral").config.to_dict()
    content["architectures"] = [FAMILIES["mistral3"].model_class]
    with pytest.raises(ValueError, match="model_type='ministral' is not supported"):
        outline(tmp_path, json.loads(json.dumps(content, default=str)))

"""ModelConfig: what it derives from a checkpoint's files."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from config_checkpoints import HYBRID, LLAMA, MakeCheckpoint
from safetensors.torch import save_file

from vllm.config import ModelConfig, ParallelConfig
from vllm.model_executor.layers.rotary_embedding.frequencies import rope_type_of
from vllm.transformers_utils.config import load_json_file
from vllm.transformers_utils.tokenizer import load_tokenizer


def test_shapes_of_a_dense_model(llama: str) -> None:
    config = ModelConfig(model=llama)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.tokenizer == llama
    assert config.dtype == torch.bfloat16
    assert config.max_model_len == 1000
    assert (config.get_hidden_size(), config.get_vocab_size(), config.get_head_size()) == (
        48,
        301,
        8,
    )
    assert config.get_total_num_hidden_layers() == 5
    three_ranks = ParallelConfig(tensor_parallel_size=6)
    assert config.get_num_attention_heads(three_ranks) == 1
    assert config.get_num_kv_heads(ParallelConfig()) == 3
    assert config.get_num_kv_heads(three_ranks) == 1
    assert not config.is_hybrid
    assert not config.has_mixed_attention


def test_a_folder_in_the_home_folder(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells expand no ``~`` in ``--model=~/folder``."""
    folder = Path(llama)
    monkeypatch.setenv("HOME", str(folder.parent))
    config = ModelConfig(model=f"~/{folder.name}", tokenizer=f"~/{folder.name}/")
    assert (config.model, config.tokenizer) == (llama, f"{llama}/")
    assert config.get_hidden_size() == 48


def test_layers_of_pipeline_stages_add_up(llama: str) -> None:
    config = ModelConfig(model=llama)
    per_rank = [
        config.get_num_layers(
            ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3, rank=rank)
        )
        for rank in range(6)
    ]
    assert per_rank == [2, 2, 2, 2, 1, 1]


def test_shapes_come_from_the_text_config(hybrid: str) -> None:
    config = ModelConfig(model=hybrid)
    assert config.is_hybrid
    assert config.dtype == torch.bfloat16
    assert config.max_model_len == 4096
    assert (config.get_hidden_size(), config.get_head_size()) == (64, 32)
    assert config.get_eos_token_ids() == (3,)
    assert config.hf_text_config.layer_types[3] == "full_attention"


def test_sliding_window_beside_full_attention(mixed: str) -> None:
    config = ModelConfig(model=mixed)
    assert config.has_mixed_attention
    assert config.get_sliding_window() == 64
    narrow = ModelConfig(model=mixed, disable_sliding_window=True)
    assert not narrow.has_mixed_attention
    assert narrow.max_model_len == 64


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_dtype_auto_is_exactly_the_checkpoints(
    make_checkpoint: MakeCheckpoint, stated: str, expected: torch.dtype
) -> None:
    assert ModelConfig(model=make_checkpoint(LLAMA, dtype=stated)).dtype == expected


def test_dtype_auto_looks_into_the_weights(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(LLAMA, dtype=None)
    weights = {"a": torch.zeros(2), "b": torch.zeros(30, dtype=torch.float16)}
    save_file(weights, Path(folder) / "model.safetensors")
    assert ModelConfig(model=folder).dtype == torch.float16


@pytest.mark.parametrize("given", ["half", "float16", "torch.float16", torch.float16])
def test_dtype_by_name(llama: str, given: Any) -> None:
    assert ModelConfig(model=llama, dtype=given).dtype == torch.float16


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 500}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 1000),
        ({"rope_type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "dynamic", "factor": 3.0}, 1000),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 500,
            },
            1000,
        ),
    ],
)
def test_length_limit_with_rope_scaling(
    make_checkpoint: MakeCheckpoint, rope: dict[str, Any], limit: int
) -> None:
    folder = make_checkpoint(LLAMA, rope_scaling=rope)
    assert ModelConfig(model=folder).max_model_len == limit
    with pytest.raises(ValueError, match=rf"max_model_len={limit + 1} .* use at most {limit} "):
        ModelConfig(model=folder, max_model_len=limit + 1)


def test_auto_fit_is_remembered(llama: str) -> None:
    config = ModelConfig(model=llama, max_model_len=-1)
    assert (config.max_model_len, config.auto_fit_max_model_len) == (1000, True)
    assert not ModelConfig(model=llama, max_model_len=999).auto_fit_max_model_len


def test_generation_config_gives_sampling_defaults_and_eos(llama: str) -> None:
    content = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": [7, 5]}
    (Path(llama) / "generation_config.json").write_text(json.dumps({**content, "top_p": None}))
    config = ModelConfig(model=llama)
    assert config.get_diff_sampling_param() == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert config.get_eos_token_ids() == (7, 5)
    assert config.try_get_generation_config() == content
    off = ModelConfig(model=llama, generation_config="vllm")
    assert off.get_diff_sampling_param() == {}
    assert off.get_eos_token_ids() == (7,)


def test_entries_of_the_generation_config_can_be_overridden(llama: str) -> None:
    content = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": 5}
    (Path(llama) / "generation_config.json").write_text(json.dumps(content))
    override = {"temperature": 0.25, "top_k": None, "min_p": 0.5, "eos_token_id": [9]}
    config = ModelConfig(model=llama, override_generation_config=override)
    assert config.get_diff_sampling_param() == {"temperature": 0.25, "min_p": 0.5, "max_tokens": 9}
    assert config.get_eos_token_ids() == (7, 9)
    alone = ModelConfig(
        model=llama, generation_config="vllm", override_generation_config={"top_p": 0.5}
    )
    assert alone.get_diff_sampling_param() == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"temprature": 1.0}, "'temprature', on which nothing depends .did you mean 'temperature'"),
        ({"temperature": "hot"}, "override_generation_config={'temperature': 'hot'}: .*temperat"),
        ({"top_p": 2}, "override_generation_config={'top_p': 2}: .*top_p"),
        ({"max_new_tokens": -1}, "override_generation_config={'max_new_tokens': -1}: "),
        ({"eos_token_id": "end"}, "override_generation_config={'eos_token_id': 'end'}: "),
        ({"eos_token_id": [1, "end"]}, "override_generation_config="),
        ([0.5], "override_generation_config"),
    ],
)
def test_overrides_that_cannot_be_are_named(llama: str, override: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(model=llama, override_generation_config=override)


def test_a_function_in_hf_overrides_has_done_its_work_in_other_processes(llama: str) -> None:
    def change(config: Any) -> Any:
        config.rms_norm_eps = 0.25
        return config

    config = ModelConfig(model=llama, hf_overrides=change)
    assert pickle.loads(pickle.dumps(config)).hf_config.rms_norm_eps == 0.25


def test_hf_overrides_of_entries_that_are_not_there_are_warned_of(
    llama: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        config = ModelConfig(model=llama, hf_overrides={"num_hiden_layers": 2, "own": 3})
        assert (config.hf_config.num_hiden_layers, config.hf_config.own) == (2, 3)
        known = {"num_hidden_layers": 2, "rope_theta": 9.0, "rope_scaling": None}
        ModelConfig(model=llama, hf_overrides=known)
    assert [record.getMessage() for record in caplog.records if "hf_overrides" in record.msg] == [
        "hf_overrides sets 'num_hiden_layers', which LlamaConfig does not have: is "
        "'num_hidden_layers' meant?",
        "hf_overrides sets 'own', which LlamaConfig does not have",
    ]


def test_hf_overrides_reach_nested_configs(hybrid: str) -> None:
    given = {"architectures": ["Other"], "vocab_size": 99, "text_config": {"eos_token_id": 11}}
    config = ModelConfig(model=hybrid, hf_overrides=given)
    assert config.architectures == ["Other"]
    assert config.get_vocab_size() == 99
    assert config.get_eos_token_ids() == (11,)

    def double(hf_config: Any) -> Any:
        hf_config.text_config.max_position_embeddings *= 2
        return hf_config

    assert ModelConfig(model=hybrid, hf_overrides=double).max_model_len == 8192
    with pytest.raises(ValueError, match=r"hf_overrides=.*'many'"):
        ModelConfig(model=hybrid, hf_overrides={"text_config": {"num_hidden_layers": "many"}})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_theta": 7.0}, ("linear", 9.0, 7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 2.0, 5.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ("linear", 2.0, 5.0)),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0}, ("default", None, 7.0)),
        ({"rope_scaling": None}, ("default", None, 5.0)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_overrides_of_the_rotation_reach_what_is_read(
    nested: bool,
    overrides: dict[str, Any],
    expected: tuple[str, float | None, float],
    make_checkpoint: MakeCheckpoint,
) -> None:
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 9.0, "rope_theta": 5.0}}
    text = {"text_config": {**HYBRID["text_config"], **rope}}
    folder = make_checkpoint(HYBRID, **text) if nested else make_checkpoint(LLAMA, **rope)
    given = copy.deepcopy(overrides)
    found = ModelConfig(model=folder, hf_overrides=given).hf_text_config.rope_parameters
    assert rope_type_of(found) == expected[0]
    assert (found.get("factor"), found["rope_theta"]) == expected[1:]
    assert given == overrides


def test_overrides_that_leave_no_config(llama: str, make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"hf_overrides returned None: .* has to return"):
        ModelConfig(model=llama, hf_overrides=lambda config: None)
    with pytest.raises(ValueError, match=r"hf_overrides=.* no config of a text model"):
        ModelConfig(model=llama, hf_overrides={"text_config": {"rms_norm_eps": 1.0}})
    several = make_checkpoint(LLAMA, model_type="gemma3_text")
    with pytest.raises(ValueError, match=r"rotations of several kinds, rope_parameters="):
        ModelConfig(model=several, hf_overrides={"rope_theta": 1.0})


def test_bad_checkpoints_are_named(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=rf"model='{tmp_path}': the folder has no config.json"):
        ModelConfig(model=str(tmp_path))
    with pytest.raises(ValueError, match="model='/no/such/place' is not a folder"):
        ModelConfig(model="/no/such/place")
    folder = make_checkpoint(HYBRID, model_type="wibble")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*wibble"):
        ModelConfig(model=folder)
    folder = make_checkpoint(LLAMA, num_hidden_layers="many")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*num_hidden_layers='many'"):
        ModelConfig(model=folder)
    lacking = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    folder = make_checkpoint(LLAMA, model_type="phi3", rope_scaling=lacking)
    with pytest.raises(ValueError, match=r"loaded: Missing required keys .*embeddings'\}$"):
        ModelConfig(model=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, r"dtype='bf16' is not supported \(did you mean 'bfloat16'\?\)"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not supported"),
        ({"max_model_len": 0}, "max_model_len=0 is not valid; use at least 1, or -1"),
        ({"tokeniser": "x"}, r"unknown key 'tokeniser' \(did you mean 'tokenizer'\?\)"),
        ({"seed": "x"}, "seed='x' is not valid: it should be a valid integer"),
        ({"served_model_name": ["a", ""]}, r"served_model_name=\['a', ''\] .* no empty name"),
        ({"generation_config": "/nowhere"}, None),
    ],
)
def test_bad_options_are_named(llama: str, options: dict[str, Any], message: str | None) -> None:
    if message is None:
        with pytest.raises(ValueError, match="generation_config='/nowhere' has no"):
            ModelConfig(model=llama, **options).get_eos_token_ids()
        return
    with pytest.raises(ValueError, match=message):
        ModelConfig(model=llama, **options)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors.index.json", "model.safetensors", "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_file_does_not_count_as_absent(
    make_checkpoint: MakeCheckpoint, name: str, is_link: bool
) -> None:
    folder = Path(make_checkpoint(LLAMA))
    (folder / name).unlink(missing_ok=True)
    if is_link:
        (folder / name).symlink_to(folder / "nothing")
    else:
        (folder / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name} is (not a file|a link to nothing)"):
        ModelConfig(model=str(folder))


def test_other_folders_for_defaults_and_tokenizers(llama: str, tmp_path: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"generation_config.json is not a file"):
        ModelConfig(model=llama, generation_config=str(tmp_path))
    with pytest.raises(ValueError, match=r"no tokenizer could .* is not a file"):
        load_tokenizer(ModelConfig(model=llama, tokenizer=str(tmp_path)))


def test_a_revision_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"model='me/tiny', revision='v9': its config\.json"):
        ModelConfig(model="me/tiny", revision="v9")


def test_a_file_that_the_hub_lacks_is_not_that_of_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.utils.cached_file", lambda *_, **__: None)
    assert load_json_file("owner/name", "generation_config.json") is None

"""Checkpoints through LLM: every layout gives the right rows, a bad one says what is wrong."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run, relative_error
from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.model_executor.model_loader import tensor_limit

Change = Callable[[Path], None]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def check_rows(folder: Path, storage: Path, **arguments: Any) -> None:
    """Rows of all layers of one prompt equal those of transformers."""
    (prompt,) = random_prompts(1, [45])
    with engine(folder, dtype="float32", **arguments, **extraction_config([4, 0, 1], storage)) as m:
        (output,) = m.generate([prompt], greedy(), use_tqdm=False)
    reference = reference_run(folder, prompt["prompt_token_ids"], torch.float32)
    for column, layer in enumerate([4, 0, 1]):
        assert relative_error(rows_of(output)[:, column], reference.streams[layer]) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_vl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_shards_of_every_dtype(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family, dtype=dtype, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    check_rows(folder, tmp_path / "storage")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rope_scaling_biases_and_tied_embeddings(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "model",
        "llama",
        rope_parameters={"rope_theta": 10000.0, **rope},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    check_rows(folder, tmp_path / "storage", max_model_len=128)


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
def test_the_unscaled_length_may_stand_beside_the_scaling(kind: str, tmp_path: Path) -> None:
    """As Phi-3 has it, for a class whose config has no such field."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    factors = {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 5.0] * 4}
    scaling = {"rope_type": kind} | ({"factor": 4.0} if kind == "yarn" else factors)
    edit_config(
        folder,
        rope_parameters=None,
        rope_scaling=scaling,
        rope_theta=10000.0,
        original_max_position_embeddings=24,
        max_position_embeddings=96,
    )
    check_rows(folder, tmp_path / "storage", max_model_len=96)


def test_an_index_of_an_earlier_time_is_not_used(tmp_path: Path) -> None:
    """A model that was saved in one file into the folder of its shards."""
    folder = make_checkpoint(tmp_path / "model", "llama", max_shard_size="150KB")
    shards = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    changed = {name: tensor * 1.25 for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    check_rows(folder, tmp_path / "storage")
    for shard in shards:
        shard.unlink()
    check_rows(folder, tmp_path / "storage")


def test_vision_and_mtp_weights_are_skipped_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_vl")
    edit_weights(folder, lambda weights: weights.update({"mtp.fc.weight": torch.ones(3)}))
    with caplog.at_level(logging.INFO, logger="vllm"):
        check_rows(folder, tmp_path / "storage")
    assert "Skipped 1 weights named mtp.*" in caplog.text
    assert "weights named model.visual.*" in caplog.text


# ---- what is wrong with it


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(num_bytes: int) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return change


def overwrite(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def weights_change(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    return lambda folder: edit_weights(folder, change)


DAMAGES: dict[str, tuple[Change, str]] = {
    "empty file": (truncate(0), r"model\.safetensors is not a whole safetensors file"),
    "half a header": (truncate(100), r"model\.safetensors is not a whole safetensors file"),
    "half the data": (truncate(30_000), r"model\.safetensors is not a whole safetensors file"),
    "no safetensors": (
        overwrite("model.safetensors", b"<html>404</html>" * 99),
        r"model\.safetensors is not a whole safetensors file",
    ),
    "missing weight": (
        weights_change(lambda weights: weights.pop(K_PROJ)),
        rf"is missing 1 weight\(s\): {K_PROJ}",
    ),
    "left-over weight": (
        weights_change(lambda weights: weights.update({"model.layers.4.x": torch.ones(2)})),
        r"no place for: model\.layers\.4\.x",
    ),
    "wrong shape": (
        weights_change(lambda weights: weights.update({K_PROJ: torch.ones(31, 72)})),
        rf"{K_PROJ}.*\(31, 72\).*\(32, 72\)",
    ),
    "quantised": (
        weights_change(lambda weights: weights.update({K_PROJ: weights[K_PROJ].to(torch.int8)})),
        rf"{K_PROJ}.*int8.*only float32, bfloat16 and float16",
    ),
    "more layers in the config": (
        lambda folder: edit_config(folder, num_hidden_layers=5),
        r"is missing 9 weight\(s\): model\.layers\.4\.",
    ),
    "another width in the config": (
        lambda folder: edit_config(folder, hidden_size=78),
        r"has shape .* expected .* config\.json disagree",
    ),
    "ten thousand layers": (
        lambda folder: edit_config(folder, num_hidden_layers=10**4, layer_types=None),
        r"num_hidden_layers=10000, but the checkpoint has only \d+ tensors",
    ),
    "a million layers": (
        lambda folder: edit_config(folder, num_hidden_layers=10**6, layer_types=None),
        r"num_hidden_layers=1000000 has to be at most 10,000",
    ),
    "a vocabulary of 10^9": (
        lambda folder: edit_config(folder, vocab_size=10**9),
        r"vocab_size=1000000000 and hidden_size=72, but the checkpoint holds only \d+ values",
    ),
    "a negative length": (
        lambda folder: edit_config(folder, max_position_embeddings=-5),
        r"config\.json: max_position_embeddings=-5 has to be a whole number above 0",
    ),
    "weights elsewhere": (
        lambda folder: (
            (folder / "model.safetensors")
            .rename(folder / "model.safetensors.index.json")
            .write_bytes(b'{"weight_map": {"a": "../../other/model.safetensors"}}')
        ),
        r"names a file outside of the checkpoint's folder, '\.\./\.\./other",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"no \.safetensors or \.bin files in the checkpoint folder",
    ),
    "a pipe instead of weights": (
        lambda folder: os.mkfifo(
            (folder / "model.safetensors").rename(folder / "moved").with_name("model.safetensors")
        ),
        r"model\.safetensors is not a file; put the file there",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"the folder has no config\.json",
    ),
    "half a config": (
        overwrite("config.json", b'{"architectures": ["Llama'),
        r"its config\.json cannot be loaded",
    ),
    "unsupported architecture": (
        lambda folder: edit_config(folder, architectures=["GPT9LMHeadModel"]),
        r"GPT9LMHeadModel.*not supported \(of LlamaConfig it is LlamaForCausalLM\); the nearest "
        r"that are: (\w+, ){,4}GPT2LMHeadModel(, \w+){,4}; `vllm models` lists all",
    ),
    "no architecture": (
        lambda folder: edit_config(folder, architectures=None),
        r"architectures=\[\].*not supported \(which one it is, config.json has to say\); `vllm",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages(damage: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    change, message = DAMAGES[damage]
    change(folder)
    check_refused(folder, message)


def test_dummy_weights_of_a_model_that_cannot_fit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    edit_config(folder, vocab_size=10**12)
    with pytest.raises(ValueError, match=r"takes .* or more; this machine has"):
        LLM(str(folder), load_format="dummy")


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "intermediate_size", 10**13),
        ("llama", "head_dim", 10**12),
        ("llama", "num_key_value_heads", 10**11),
        ("llama", "max_position_embeddings", 10**13),
        ("mixtral", "num_local_experts", 10**10),
        ("qwen3_5", "linear_num_value_heads", 10**11),
        ("qwen3_5", "linear_conv_kernel_dim", 10**11),
        ("mamba2", "state_size", 10**11),
    ],
)
def test_a_tensor_that_cannot_fit(
    family: str, name: str, value: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused before it is allocated, in a module of transformers too."""
    folder = make_checkpoint(tmp_path / "model", family, tokenizer=False)
    edit_config(folder, **{name: value})
    message = rf"{name}={value} makes a tensor of shape \[.*\], .* TiB; this machine has .* GiB"
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), load_format="dummy", skip_tokenizer_init=True)
    assert main(["models", str(folder)]) != 0
    assert re.search(message, capfd.readouterr().err)


def test_memory_that_the_allocator_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    edit_config(folder, intermediate_size=10**13)
    monkeypatch.setattr(tensor_limit, "total_memory_bytes", lambda: 2**62)
    with pytest.raises(ValueError, match=r"intermediate_size=\d+ makes a tensor of shape"):
        LLM(str(folder), load_format="dummy", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("bounds", "options"),
    [
        ((7,), {}),
        ((7.5,), {}),
        ((2, 9), {}),
        ((9, 2), {"step": -3}),
        ((0, 9, 2), {"dtype": torch.float32}),
        ((0, 1.0, 0.3), {}),
        ((3,), {"end": 11, "dtype": torch.int32}),
        ((), {"start": 3, "end": 10, "step": 4}),
        ((torch.tensor(7),), {}),
    ],
)
def test_outline_of_a_range(bounds: tuple[Any, ...], options: dict[str, Any]) -> None:
    expected = torch.arange(*bounds, **options)
    outline = tensor_limit.make_outline(torch.arange, bounds, {**options, "device": "meta"})
    assert (outline.shape, outline.nbytes) == (expected.shape, expected.nbytes)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", max_shard_size="100KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    check_refused(folder, f"names files that are not there: {gone.name}")


def test_a_truncated_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5", max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    check_refused(folder, f"{shard.name} is not a whole safetensors file")


def test_no_such_checkpoint(tmp_path: Path) -> None:
    check_refused(tmp_path / "nowhere", "is not a folder; give a checkpoint folder or a hub id")


def check_refused(folder: Path, message: str) -> None:
    """A ValueError that says why; no thread, no file, no model stays behind."""
    descriptors = psutil.Process().num_fds()
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), kv_cache_memory_bytes=2**22)
    gc.collect()
    assert psutil.Process().num_fds() == descriptors
    assert torch.get_default_dtype() == torch.float32

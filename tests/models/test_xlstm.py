"""xLSTM: checkpoints whose projections are fused, and what a layer keeps."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.test_models import prompt
from vllm.model_executor.layers.mamba.mlstm import MLSTMLayer
from vllm.transformers_utils.tokenizer import get_tokenizer

FUSED = {
    "mlstm_layer.qkv_opreact": tuple(f"mlstm_layer.{p}" for p in ("q", "k", "v", "ogate_preact")),
    "mlstm_layer.ifgate_preact": ("mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"),
    "ffn.proj_up_gate_z": ("ffn.proj_up_gate", "ffn.proj_up"),
}


def fuse(folder: Path) -> None:
    """Write a checkpoint anew with ``weight_mode="fused"``; transformers cannot make one."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for block in {name.rpartition(".mlstm_layer.")[0] for name in weights if "mlstm" in name}:
        for fused, parts in FUSED.items():
            for leaf in ("weight", "bias"):
                names = [f"{block}.{part}.{leaf}" for part in parts]
                if names[0] in weights:
                    joined = torch.cat([weights.pop(name) for name in names])
                    weights[f"{block}.{fused}.{leaf}"] = joined
    save_file(weights, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "weight_mode": "fused"}))


def rows_of(folder: Path) -> list[torch.Tensor]:
    request = SingleRequest(make_config(folder), 20)
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    return [request.run_chunks(prompt(20), [], sink), *map(sink.rows, sorted(sink.layer_ids))]


def test_fused_projections_are_the_same_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "xlstm", tokenizer=False)
    apart = rows_of(folder)
    fuse(folder)
    assert all(torch.equal(a, b) for a, b in zip(apart, rows_of(folder), strict=True))


def test_what_a_layer_keeps_is_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "xlstm", dtype=torch.bfloat16, tokenizer=False)
    request = SingleRequest(make_config(folder), 20)
    layers = request.layers.values()
    assert all(isinstance(layer, MLSTMLayer) for layer in layers)
    (spec,) = {layer.get_kv_cache_spec(request.config) for layer in layers}
    assert spec.shapes == ((3, 18, 30), (3, 18), (3,))
    assert spec.dtypes == (torch.float32,) * 3


def test_the_configs_own_number_of_blocks_counts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "xlstm", tokenizer=False, num_hidden_layers=9)
    assert SingleRequest(make_config(folder), 20).num_layers == 4


def test_names_of_kernels_of_the_xlstm_package_are_no_matter(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "xlstm")
    expected, config = rows_of(folder), folder / "config.json"
    kernels = {
        "chunkwise_kernel": "chunkwise--triton_xl_chunk",
        "sequence_kernel": "native_sequence__triton",
        "step_kernel": "triton",
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), **kernels}))
    assert all(torch.equal(a, b) for a, b in zip(expected, rows_of(folder), strict=True))
    assert get_tokenizer(str(folder)).encode("ab", add_special_tokens=False, verbose=False)

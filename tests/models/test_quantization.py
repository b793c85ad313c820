"""Quantised checkpoints against the dequantised ones in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import (
    FORMATS,
    MULTIPLES,
    Checkpoints,
    fp8_tensor,
    int8_channel,
    quantise_checkpoint,
)
from tests.models.test_models import NUM_TOKENS, prompt

FAMILIES = ("llama", "qwen3_5")


def sizes(format_name: str) -> dict[str, Any]:
    """Entries of the config: odd sizes, or those that the format can have."""
    multiple = MULTIPLES.get(format_name)
    if multiple is None:
        return {}
    return {"hidden_size": 96, "intermediate_size": 160, "linear_value_head_dim": 16}


def make(
    folder: Path, family: str, name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Checkpoints:
    settings = sizes(name)
    if family == "llama":
        settings.pop("linear_value_head_dim", None)
    plain = make_checkpoint(folder / "plain", family, dtype=dtype, tokenizer=False, **settings)
    return quantise_checkpoint(plain, FORMATS[name], **options)


def run(folder: Path, chunks: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Streams of all layers, and the logits."""
    request = SingleRequest(make_config(folder, max_model_len=NUM_TOKENS), NUM_TOKENS)
    layers = range(request.num_layers + 1)
    sink = ListSink(frozenset(layers))
    logits = request.run_chunks(prompt(), chunks, sink)
    return [sink.rows(layer) for layer in layers], logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_streams_are_those_of_the_dequantised_weights(
    name: str, family: str, tmp_path: Path
) -> None:
    stored, dequantised = make(tmp_path, family, name)
    expected = reference_run(dequantised, prompt())
    streams, logits = run(stored, [])
    errors = [relative_error(s, e) for s, e in zip(streams, expected.streams, strict=True)]
    assert max(errors) <= 1e-4, errors
    assert relative_error(logits, expected.logits) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_fused_layer_may_differ(family: str, tmp_path: Path) -> None:
    """Keys in another format than queries and values, gates as they are."""
    others = {"k_proj": int8_channel, "up_proj": fp8_tensor, "in_proj_z": int8_channel}
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False)
    stored, dequantised = quantise_checkpoint(plain, MIXED, others)
    expected = reference_run(dequantised, prompt())
    streams, _ = run(stored, [5, 64])
    assert max(map(relative_error, streams, expected.streams)) <= 1e-4


def _group(targets: list[str], name: str, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": name, "weights": weights}


MIXED = FORMATS["int4-groups"]._replace(
    config={
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "config_groups": {
            "some": _group(["re:.*(k_proj|in_proj_z)$"], "int-quantized", num_bits=8, type="int"),
            "up": _group(["re:.*up_proj$"], "float-quantized", num_bits=8, type="float"),
            "rest": _group(["Linear"], "pack-quantized", num_bits=4, type="int", group_size=8),
        },
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8-block", "int8-asymmetric", "gptq-order", "nvfp4-modelopt"])
def test_chunks_change_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = make(tmp_path, "qwen3_5" if name == "fp8-block" else "llama", name, dtype).stored
    whole = run(stored, [])
    for chunks in ([64], [1, 37, 16, 2], [33] + [1] * 20):
        other = run(stored, chunks)
        assert all(map(torch.equal, whole[0], other[0]))
        assert torch.equal(whole[1], other[1])

"""Latent attention: what is kept of a token, checkpoints as they are published, bits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from tests.models.test_models import NUM_TOKENS, prompt
from vllm.model_executor.layers.attention import (
    LatentExpansion,
    mla_attention,
    token_selection,
)
from vllm.model_executor.models.deepseek_v2 import check_selection
from vllm.v1.kv_cache_interface import FullAttentionSpec

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "longcat_flash")


def run(folder: Path, chunks: tuple[int, ...] = ()) -> tuple[SingleRequest, list[torch.Tensor]]:
    """A model, and the streams of all its layers."""
    request = SingleRequest(make_config(folder, max_model_len=NUM_TOKENS), NUM_TOKENS)
    layers = range(request.num_layers + 1)
    sink = ListSink(frozenset(layers))
    request.run_chunks(prompt(), chunks, sink)
    return request, [sink.rows(layer) for layer in layers]


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_one_vector_a_token_is_kept(family: str, tmp_path: Path) -> None:
    request, _ = run(make_checkpoint(tmp_path, family, tokenizer=False))
    assert len(request.layers) == 4 * (1 + (family == "longcat_flash"))
    for layer in request.layers.values():
        spec = layer.get_kv_cache_spec(request.config)
        assert isinstance(spec, FullAttentionSpec)
        assert spec.token_bytes == (40 + 12) * 4  # kv_lora_rank and qk_rope_head_dim
        assert layer.kv_cache.shape[3:] == (1, 52)


def test_factors_take_the_place_of_the_weight(tmp_path: Path) -> None:
    request, _ = run(make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False))
    found = [m for m in request.model.modules() if isinstance(m, LatentExpansion)]
    assert len(found) == 4
    for expansion in found:
        assert expansion.weight.numel() == 0 and expansion.factors.keys.numel() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_at_a_time_change_no_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "minicpm3", dtype=dtype, tokenizer=False)
    _, whole = run(folder)
    monkeypatch.setattr(mla_attention, "_MOST_QUERY_BYTES", 1)
    _, one_by_one = run(folder, (1, 50, 7))
    assert all(map(torch.equal, whole, one_by_one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_rows_at_a_time_change_no_bit(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose tokens are chosen; chunks end before, at and behind the first of them."""
    folder = make_checkpoint(tmp_path, family, dtype=dtype, tokenizer=False)
    _, whole = run(folder)
    monkeypatch.setattr(token_selection, "_MOST_SCRATCH_BYTES", 1)
    for chunks in ((22, 1, 1, 1, 40), (23, 50), (24, 3)):
        assert all(map(torch.equal, whole, run(folder, chunks)[1]))


def test_what_is_kept_for_an_indexer(tmp_path: Path) -> None:
    """Its keys, by the layers that have one, in the blocks of the latents."""
    request, _ = run(make_checkpoint(tmp_path, "glm_moe_dsa", tokenizer=False))
    kept = {
        name.removeprefix("model.layers."): layer.get_kv_cache_spec(request.config)
        for name, layer in request.layers.items()
    }
    indexers = {name: spec for name, spec in kept.items() if "indexer" in name}
    assert set(indexers) == {f"{i}.self_attn.indexer.k_cache" for i in (0, 2)}
    assert {spec.token_bytes for spec in indexers.values()} == {20 * 4}
    assert len({spec.group_key for spec in kept.values()}) == 1


def test_layers_that_nobody_chooses_for_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", tokenizer=False)
    edit(folder / "config.json", indexer_types=["shared", "full", "full", "full"])
    with pytest.raises(ValueError, match=r"indexer_types=.*the first layer has to be 'full'"):
        run(folder)


def test_choosing_on_a_card_is_refused() -> None:
    def options(max_model_len: int) -> Any:
        config = SimpleNamespace(index_topk=2048)
        model = SimpleNamespace(hf_text_config=config, max_model_len=max_model_len)
        return SimpleNamespace(
            model_config=model, device_config=SimpleNamespace(device_type="cuda")
        )

    check_selection(options(2048))
    with pytest.raises(ValueError, match=r"max_model_len=2049: .*max_model_len<=2048, or model_"):
        check_selection(options(2049))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_blocks_of_fp8_as_deepseek_publishes_them(family: str, tmp_path: Path) -> None:
    """With kv_b_proj, kv_a_proj_with_mqa (of rows that fill no block) and every expert."""
    sizes: dict[str, Any] = {"kv_lora_rank": 136, "q_lora_rank": 130, "qk_nope_head_dim": 30}
    folder = make_checkpoint(tmp_path / "plain", family, tokenizer=False, **sizes)
    stored, dequantised = quantise_checkpoint(folder, FORMATS["fp8-block"])
    scales = [name for name in load_file(stored / "model.safetensors") if "scale_inv" in name]
    for part in ("kv_b_proj", "kv_a_proj_with_mqa", "q_b_proj", "experts.5.up_proj"):
        assert any(f".{part}." in name for name in scales), part
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored)[1], expected)) <= 1e-4


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_layers_for_further_tokens_are_skipped(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    edit(folder / "config.json", num_nextn_predict_layers=1)
    weights = load_file(folder / "model.safetensors")
    extra = {
        name.replace("layers.3.", "layers.4."): weight.clone()
        for name, weight in weights.items()
        if "layers.3." in name
    }
    extra |= {f"model.layers.4.{name}.weight": torch.ones(3) for name in ("eh_proj", "enorm")}
    save_file(weights | extra, folder / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="vllm"):
        _, streams = run(folder)
    assert f"Skipped {len(extra)} weights named model.layers.4." in caplog.text
    assert len(streams) == 5


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its model_type is known to code in the checkpoint only, which is not needed."""
    folder = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)
    expected = run(folder)[1]
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    edit(folder / "config.json", model_type="kimi_k2", auto_map=code)
    assert all(map(torch.equal, run(folder)[1], expected))


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

"""Connectors that know one block table: attention layers and hidden states share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, random_prompts
from tests.kv_connector import slot_connector
from tests.kv_connector.loading import OFFLOADING, ask, beside_extraction, forget, num_cached, same
from vllm.v1.cache_kinds.rows import HiddenStateCacheSpec

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(83, [60, 131, 48, 49, 20])]
SLOTS = {
    "kv_connector": "SlotConnector",
    "kv_connector_module_path": slot_connector.__name__,
}


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    slot_connector.store.clear()
    slot_connector.calls.clear()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [None, 48])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "deepseek_v2"])
def test_rows_beside_attention_are_those_of_a_group_of_their_own(
    family: str, block_size: int | None, layout: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Chunks, prefix hits and preemptions in a poisoned pool."""
    if family == "deepseek_v2" and layout == "HND":
        pytest.skip("latents have one head")
    folder = checkpoint(family, dtype=torch.bfloat16)
    layers = [2, 0, 3]
    with engine(folder, **extraction_config(layers, tmp_path / "groups")) as llm:
        expected = ask(llm, PROMPTS, 40)
    with engine(
        folder,
        disable_hybrid_kv_cache_manager=True,
        max_num_batched_tokens=64,
        max_model_len=192,
        num_gpu_blocks_override=8 if block_size else 20,
        block_size=block_size,
        kv_cache_layout=layout,
        **extraction_config(layers, tmp_path / "table"),
    ) as llm:
        core = core_of(llm)
        (group,) = core.kv_cache_config.kv_cache_groups
        assert group.kv_cache_spec.block_size == (block_size or 16)
        assert group.layer_names[-1].startswith("cache_only_layers.")
        rows = core.kv_cache_config.spec_of(group.layer_names[-1])
        assert isinstance(rows, HiddenStateCacheSpec)
        same(ask(llm, PROMPTS, 40), expected)
        assert core.scheduler.stats().num_preemptions
        for _ in range(2):
            outputs = ask(llm, PROMPTS[1:2], 40)
            same(outputs, expected[1:2])
        assert num_cached(outputs) == [128]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_beside_a_connector_that_knows_one_table(
    family: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(family)
    with engine(folder, **beside_extraction(tmp_path / "groups")) as llm:
        expected = ask(llm, PROMPTS)
    arguments = beside_extraction(tmp_path / "table", SLOTS, OFFLOADING)
    with engine(folder, block_size=16, **arguments) as llm:
        assert len(core_of(llm).kv_cache_config.kv_cache_groups) == 1
        same(ask(llm, PROMPTS), expected)
        forget(llm)
        same(ask(llm, PROMPTS), expected)
    assert "MultiConnector (SlotConnector in it) does not subclass SupportsHMA" in caplog.text


def test_recurrent_layers_need_tables_of_their_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    message = r"'MultiConnector \(SlotConnector in it\)' .* recurrent layers"
    arguments = beside_extraction(tmp_path, SLOTS, OFFLOADING)
    with pytest.raises(ValueError, match=message), engine(checkpoint("qwen3_5"), **arguments):
        pass

"""The layers' views of the pool: right places, no copies, no neighbours disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from vllm import LLM
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.rows.capture import RowCapture

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("pack", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_group_do_not_overlap(
    checkpoint: Checkpoint, dtype: torch.dtype, pack: int | None, tmp_path: Path
) -> None:
    """Write every layer of a group its own value; each must read back its own alone."""
    folder = checkpoint("qwen3_5", dtype=dtype)
    with engine(folder, attn_pack_size=pack, **extraction_config([1, 2], tmp_path)) as llm:
        runner = core_of(llm).executor.worker.model_runner
        for group in runner.kv_cache_config.kv_cache_groups:
            views = []
            for name in group.layer_names:
                cache = runner._cache_layers[name].kv_cache
                views += list(cache) if isinstance(cache, tuple) else [cache]
            runner.pool.zero_()
            for value, view in enumerate(views, 1):
                assert view.untyped_storage().data_ptr() == runner.pool.data_ptr()
                view.fill_(value)
            for value, view in enumerate(views, 1):
                assert (view == value).all()


def test_connectors_get_rows_by_layer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with engine(checkpoint("qwen3_5"), **extraction_config([0, 3, 1], tmp_path)) as llm:
        core = core_of(llm)
        runner = core.executor.worker.model_runner
        proposer = runner.proposer
        group = core.kv_cache_config.kv_cache_groups[proposer.kv_cache_gid]
        assert isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
        assert group.layer_names == [proposer.cache_layer.layer_name]
        assert proposer.kv_cache_gid == len(core.kv_cache_config.kv_cache_groups) - 1
        rows = proposer.cache_layer.kv_cache
        assert rows.shape[1:] == (group.kv_cache_spec.block_size, 3, 72)
        assert not rows.is_contiguous()  # blocks have room that rows do not fill


def test_a_boundary_that_was_not_seen_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that loses a boundary fails its requests; stale rows are never served."""
    with engine(checkpoint("llama"), **extraction_config([1, 2], tmp_path)) as llm:
        put = RowCapture.put

        def lose(self: RowCapture, source: str, index: int, *values: Any) -> None:
            if index != 2:
                put(self, source, index, *values)

        monkeypatch.setattr(RowCapture, "put", lose)
        (output,) = llm.generate(random_prompts(1, [9]), greedy(), use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "layers [2]" in str(output.outputs[0].stop_reason)
    assert not list(tmp_path.glob(".*"))


def test_auto_fit_counts_hidden_states(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """max_model_len=-1: the longest request that fits, rows of the step included."""
    folder = checkpoint("llama", max_position_embeddings=8192)
    arguments = {"max_model_len": -1, "kv_cache_memory_bytes": 2**20}
    with engine(folder, **arguments) as llm:
        plain = llm.llm_engine.model_config.max_model_len
    config = extraction_config([0, 1, 2, 3, 4], tmp_path)
    with engine(folder, max_num_batched_tokens=64, **arguments, **config) as llm:
        extracting: LLM = llm
        length = extracting.llm_engine.model_config.max_model_len
        (output,) = llm.generate(random_prompts(1, [length - 1]), greedy(), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
    assert 0 < length < plain


def test_prompt_logprobs_once_after_preemption(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(3, [50, 50])
    params = greedy(40, prompt_logprobs=1)
    folder = checkpoint("llama")
    with engine(folder, max_model_len=96, num_gpu_blocks_override=9) as llm:
        small = llm.generate(prompts, params, use_tqdm=False)
    with engine(folder, max_model_len=96) as llm:
        large = llm.generate(prompts, params, use_tqdm=False)
    for ours, expected in zip(small, large, strict=True):
        assert ours.prompt_logprobs == expected.prompt_logprobs
        assert len(ours.prompt_logprobs or []) == 50

"""A connector of another package that stores tokens and states in the checkpoint's terms, with what
the base class hands it: late answers, late loads, chunks, preemption and prefix hits at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import core_of, engine, random_prompts
from tests.grids import grid
from tests.kv_connector.checkpoint_connector import CheckpointConnector, checkpoint_connector
from tests.kv_connector.loading import (
    OFFLOADING,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from vllm import LLM

Checkpoint = Callable[..., Path]
SHARED = random_prompts(23, [130])[0]["prompt_token_ids"]
PROMPTS = [SHARED + [tail] * (3 * tail) for tail in range(2, 8)]


def blocks_of_one(llm: LLM) -> int:
    """Blocks that the longest request takes."""
    core = core_of(llm)
    specs = [group.kv_cache_spec for group in core.kv_cache_config.kv_cache_groups]
    return sum(spec.max_blocks_per_request(core.vllm_config) for spec in specs)


BACKGROUND = {"background": 2, "undecided": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    grid(
        ["llama", "qwen2", "gemma3", "deepseek_v2", "qwen3_5", "nemotron_h", "falcon_h1"],
        [{}, BACKGROUND],
        by_day=[
            ("llama", BACKGROUND),
            ("gemma3", {}),
            ("deepseek_v2", BACKGROUND),
            ("qwen3_5", BACKGROUND),
            ("nemotron_h", {}),
            ("falcon_h1", BACKGROUND),
        ],
    ),
    ids=str,
)
def test_rows_and_tokens_are_those_computed(
    family: str, options: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    alone = beside_extraction(tmp_path / "alone")
    with engine(folder, max_model_len=192, enable_prefix_caching=False, **alone) as llm:
        expected = ask(llm, PROMPTS, 24)
        is_hybrid = bool(core_of(llm).kv_cache_config.recurrent_group_ids)
        room = blocks_of_one(llm) * (12 if is_hybrid else 7) // 4
        sizes = {"max_model_len": 192, "num_gpu_blocks_override": room}
    own = checkpoint_connector(tmp_path / "stored", **options)
    arguments = beside_extraction(tmp_path / "rows", own)
    for is_there in (False, True):
        with engine(folder, max_num_batched_tokens=64, **sizes, **arguments) as llm:
            same(ask(llm, PROMPTS, 24), expected)
            core_of(llm).scheduler.check_integrity()
            forget(llm)
            outputs = ask(llm, PROMPTS, 24)
            core_of(llm).scheduler.check_integrity()
            assert core_of(llm).scheduler.stats().num_preemptions or is_hybrid
        same(outputs, expected)
        if is_there:
            assert min(num_cached(outputs)) >= 64


class LosingConnector(CheckpointConnector):
    """Brings something else, and says so or raises; the option ``raises``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._raises = self._kv_transfer_config.get_from_extra_config("raises", False)
        self._lost: set[int] = set()

    def _load(self, prefix: Any) -> None:
        for group_id, group in enumerate(self._plan.kv_cache_groups):
            table = prefix.tables[group_id]
            for layer in group.layer_names:
                for token in range(prefix.start, prefix.end):
                    block = table[token // self._plan.spec_of(layer).block_size]
                    self._cell(layer, block, token).fill_(0.5)
                    self._lost.add(block)
        if self._raises:
            self._lost.clear()
            raise RuntimeError("out of order")

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost


@pytest.mark.parametrize(
    ("policy", "raises"), [("recompute", False), ("fail", False), ("fail", True)]
)
def test_nobody_keeps_what_was_computed_from_a_load_that_failed(
    policy: str, raises: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Neither a file of rows, nor the connectors beside the one that could not load."""
    folder, own = checkpoint("llama"), checkpoint_connector(tmp_path / "stored", raises=raises)
    with engine(folder, **beside_extraction(tmp_path / "rows", own)) as llm:
        expected = ask(llm, PROMPTS)
    shared = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "blocks")},
    }
    losing = own | {"kv_connector": "LosingConnector", "kv_connector_module_path": __name__}
    both = beside_extraction(
        tmp_path / "rows", losing, OFFLOADING, shared, kv_load_failure_policy=policy
    )
    with engine(folder, **both) as llm:
        outputs = ask(llm, PROMPTS)
        if policy == "recompute":
            same(outputs, expected)
        for output in outputs if policy == "fail" else ():
            assert re.search("did not come|start_load_kv", str(output.outputs[0].stop_reason))
        for path in (tmp_path / "stored").iterdir():
            path.unlink()
        forget(llm)
        same(ask(llm, PROMPTS), expected)
    with engine(folder, **beside_extraction(tmp_path / "rows", shared)) as llm:
        same(ask(llm, PROMPTS), expected)


class QuietConnector(CheckpointConnector):
    """Has nothing to tell its worker side in every other step, and reports ids of nobody."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        return metadata if metadata.loads or metadata.saves else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        if self.has_connector_metadata():
            super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        return {"nobody", *(sent or ())}, {"nobody else", *(received or ())}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_steps_without_metadata_and_reports_of_nobody(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    own = checkpoint_connector(tmp_path / "stored")
    own |= {"kv_connector": "QuietConnector", "kv_connector_module_path": __name__}
    with engine(checkpoint(family), max_model_len=192, **only(own)) as llm:
        expected = [one.outputs[0].token_ids for one in ask(llm, PROMPTS)]
        forget(llm)
        outputs = ask(llm, PROMPTS)
        core_of(llm).scheduler.check_integrity()
    assert [one.outputs[0].token_ids for one in outputs] == expected
    assert min(num_cached(outputs)) >= 64

"""Engines whose connectors load: what they give has to be what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import core_of, extraction_config, greedy, rows_of, with_output_tokens
from vllm import LLM
from vllm.outputs import RequestOutput

FAMILIES = ("llama", "qwen2", "qwen3_5", "qwen3_moe")
"""Full attention; sliding windows beside it; recurrent layers beside it; experts."""
LAYERS = [1, 2, 4, 0]
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**26},
}


def beside_extraction(folder: Path, *connectors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Arguments of an engine that writes rows, and moves blocks with the other connectors."""
    arguments = extraction_config(LAYERS, folder)
    rows = arguments["kv_transfer_config"]
    arguments["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [rows, *connectors]},
        **fields,
    }
    return arguments


def only(connector: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Arguments of an engine with one connector."""
    return {"kv_transfer_config": {"kv_role": "kv_both", **connector, **fields}}


def ask(llm: LLM, prompts: Iterable[Sequence[int]], max_tokens: int = 4) -> list[RequestOutput]:
    params = with_output_tokens(max_tokens) if max_tokens else greedy(0)
    return llm.generate([list(p) for p in prompts], params, use_tqdm=False)


def forget(llm: LLM) -> None:
    """The pool holds nothing that can be found; what connectors hold stays."""
    llm.reset_prefix_cache()
    pool = core_of(llm).scheduler.kv_cache_manager.pool
    assert pool.num_free_blocks == pool.num_blocks - 1


def same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens are equal, and every bit of the rows."""
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert torch.equal(rows_of(one), rows_of(other))


def num_cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens or 0 for output in outputs]

"""Compute a long prefix once, and find it again after the pool and the process have gone.

    python examples/keep_prefixes.py --storage /data/blocks

Three connectors act as one (MultiConnector): hidden states go to files, and blocks of the pool go
to host memory (OffloadingConnector) and to a folder that other engines read
(SharedStorageConnector). The first engine computes the prefix. When its pool has lost the prefix,
host memory still has it. A second engine, as after a restart, finds it in the folder. Rows are the
same, bit by bit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo_checkpoint import DEFAULT_CACHE, demo_checkpoint

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

DOCUMENT = "The harbour pilots keep a log of every ship. " * 10
QUESTIONS = ["Who keeps it?", "What is in it?", "How long is it kept?"]


def make_engine(model: str, rows: Path, blocks: Path) -> LLM:
    """Make an engine: hidden states go to ``rows``, blocks to host memory and to ``blocks``."""
    connectors: list[dict[str, Any]] = [
        {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(rows)},
        },
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2**28},
        },
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(blocks), "max_bytes": 2**30},
        },
    ]
    return LLM(
        model=model,
        max_model_len=1024,
        speculative_config={
            "method": "extract_hidden_states",
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [4, 8]}},
        },
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    )


def extract(llm: LLM, question: str) -> tuple[int, torch.Tensor]:
    """Return the number of tokens that were found, and the rows of the whole prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (output,) = llm.generate([DOCUMENT + question], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    rows = load_hidden_states(output.kv_transfer_params["hidden_states_path"])["hidden_states"]
    return output.num_cached_tokens or 0, rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the demo's checkpoint)")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="default: a temporary folder")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    options = parser.parse_args(arguments)
    model = options.model or str(demo_checkpoint(options.cache_dir))
    with tempfile.TemporaryDirectory() as name:
        rows, blocks = Path(name) / "rows", options.storage or Path(name) / "blocks"
        llm = make_engine(model, rows, blocks)
        _, first = extract(llm, QUESTIONS[0])
        print(f"computed: {len(first)} rows")
        llm.reset_prefix_cache()  # as if other requests had overwritten it
        found, again = extract(llm, QUESTIONS[0])
        print(f"from host memory: {found} tokens, the same rows: {torch.equal(first, again)}")
        llm.shutdown()

        llm = make_engine(model, rows, blocks)
        found, again = extract(llm, QUESTIONS[0])
        print(f"from the folder: {found} tokens, the same rows: {torch.equal(first, again)}")
        for question in QUESTIONS[1:]:
            found, other = extract(llm, question)
            same = torch.equal(first[:found], other[:found])
            print(f"another question: {found} tokens, the same rows: {same}")
        llm.shutdown()


if __name__ == "__main__":
    main()

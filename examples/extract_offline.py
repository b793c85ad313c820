"""Extract hidden states of a few prompts to files, and look at the files.

    python examples/extract_offline.py --model Qwen/Qwen3.5-0.8B --layers 2 12 21 24

Without --model it uses the demo's small checkpoint, which it builds on the first run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from demo_checkpoint import DEFAULT_CACHE, demo_checkpoint

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

PROMPTS = [
    "The tide tables are wrong again.",
    "Der Zug hält heute nicht in Ulm.",
    "def area(width, height):\n    return width * height\n",
]


def make_engine(model: str, layer_ids: list[int], storage: Path) -> LLM:
    """Make an engine that writes the hidden states of every prompt into ``storage``."""
    return LLM(
        model=model,
        max_model_len=4096,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the demo's checkpoint)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 4, 8], help="layer ids")
    parser.add_argument("--storage", type=Path, default=Path("hidden_states"), metavar="DIR")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    options = parser.parse_args(arguments)

    model = options.model or str(demo_checkpoint(options.cache_dir))
    llm = make_engine(model, options.layers, options.storage)

    # The HTTP API needs at least one output token. Here max_tokens=0 would do, and would skip the
    # layers above the deepest one asked for, the final norm and the logits.
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0.0))

    # A request may also ask for the rows of what it generates (all but the last token).
    with_output = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    outputs += llm.generate(PROMPTS[:1], with_output)

    for output in outputs:
        assert output.kv_transfer_params is not None
        path = output.kv_transfer_params["hidden_states_path"]
        tensors = load_hidden_states(path)
        rows = tensors["hidden_states"]
        print(f"{path}: hidden_states {tuple(rows.shape)} {rows.dtype}, prompt {output.prompt!r}")


if __name__ == "__main__":
    main()

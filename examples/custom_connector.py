"""Store something other than the rows, with your own connector.

``_write_tensors`` gets the complete tensors of a request, on a writer thread. This connector
keeps the mean over the tokens for each layer. Many probes and embeddings need no more, and it
takes a fraction of the bytes.

    python examples/custom_connector.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo_checkpoint import DEFAULT_CACHE, demo_checkpoint
from safetensors.torch import load_file, save_file

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class MeanConnector(ExampleHiddenStatesConnector):
    """Files hold ``mean`` [layers, hidden] float32 and ``token_ids`` [tokens]."""

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        event.synchronize()  # the rows are on the host from here on
        try:
            mean = tensors["hidden_states"].float().mean(dim=0)
            save_file({"mean": mean, "token_ids": tensors["token_ids"]}, filename)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # now waiting readers may read


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory(prefix="means-") as storage:
        llm = LLM(
            model=str(demo_checkpoint(options.cache_dir)),
            max_model_len=4096,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [4, 8]}},
            },
            kv_transfer_config={
                "kv_connector": "MeanConnector",
                "kv_connector_module_path": "custom_connector",  # this file, as a module
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": storage},
            },
        )
        prompts = ["A warm day in March.", "Ein warmer Tag im März.", "SELECT 1;"]
        means = []
        for output in llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0)):
            assert output.kv_transfer_params is not None
            means.append(load_file(output.kv_transfer_params["hidden_states_path"])["mean"][-1])
        similarity = torch.nn.functional.cosine_similarity(means[0], torch.stack(means[1:]))
        for prompt, value in zip(prompts[1:], similarity.tolist(), strict=True):
            print(f"{prompts[0]!r} and {prompt!r}: cosine {value:.3f}")


if __name__ == "__main__":
    main()

"""What is measured against each other: the engine, transformers, and the bound."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

Kind = Literal["extraction", "plain", "transformers", "bound"]
Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """What every contender is given."""

    checkpoint: Path
    layer_ids: tuple[int, ...]
    num_prompts: int
    prompt_len: int
    max_num_batched_tokens: int
    storage_root: Path | None
    """Where the hidden-state files go; None: the system's temporary folder."""


class Round(NamedTuple):
    """One timed run."""

    seconds: float
    bytes_written: int


class Contender(Protocol):
    """Loaded and warmed up by its constructor."""

    note: str

    def run(self, prompts: Prompts) -> Round:
        """Process all prompts once; what is not part of the work is not timed."""
        ...

    def close(self) -> None:
        """Remove what was left on disk."""
        ...


class EngineContender:
    """``LLM.generate`` with one output token, with or without extraction."""

    def __init__(self, workload: Workload, extract: bool) -> None:
        from vllm import LLM, SamplingParams

        self._storage = Path(tempfile.mkdtemp(prefix="benchmark-", dir=workload.storage_root))
        self._workload = workload
        self._extract = extract
        self._sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._llm = LLM(
            model=str(workload.checkpoint),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=workload.prompt_len + 16,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_num_seqs=max(workload.num_prompts, 1),
            **(self._extraction_options() if extract else {}),
        )
        self.note = f"chunks of {workload.max_num_batched_tokens} tokens"

    def _extraction_options(self) -> dict[str, Any]:
        hf_config = {"eagle_aux_hidden_state_layer_ids": list(self._workload.layer_ids)}
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": hf_config},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self._storage)},
            },
        }

    def run(self, prompts: Prompts) -> Round:
        from vllm import TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        start = time.perf_counter()
        self._llm.generate(requests, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        files = list(self._storage.glob("*.safetensors"))
        expected_files = len(prompts) if self._extract else 0
        if len(files) != expected_files:
            raise RuntimeError(f"{len(files)} files written instead of {expected_files}")
        bytes_written = sum(file.stat().st_size for file in files)
        for file in self._storage.iterdir():
            file.unlink()
        return Round(seconds, bytes_written)

    def close(self) -> None:
        shutil.rmtree(self._storage, ignore_errors=True)


class TransformersContender:
    """transformers with ``output_hidden_states`` and logits of the last position only.

    Tries several batch sizes first and keeps the fastest. All prompts have one length, so
    that a batch needs no padding. Nothing is written to disk.
    """

    def __init__(self, workload: Workload) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._layer_ids = workload.layer_ids
        self._model = AutoModelForCausalLM.from_pretrained(
            workload.checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        trial = [[17] * workload.prompt_len] * min(workload.num_prompts, 4)
        self._batch_size = 1
        self.run(trial[:1])
        sizes = [size for size in (1, 2, 4) if size <= len(trial)]
        self._batch_size = min(sizes, key=lambda size: self._seconds_with(size, trial))
        self.note = f"batches of {self._batch_size}"

    def _seconds_with(self, batch_size: int, prompts: Prompts) -> float:
        self._batch_size = batch_size
        return self.run(prompts).seconds

    @torch.inference_mode()
    def run(self, prompts: Prompts) -> Round:
        start = time.perf_counter()
        for first in range(0, len(prompts), self._batch_size):
            batch = torch.tensor(prompts[first : first + self._batch_size])
            output = self._model(
                input_ids=batch, use_cache=False, output_hidden_states=True, logits_to_keep=1
            )
            rows = torch.stack([output.hidden_states[i] for i in self._layer_ids], dim=2)
            del output, rows
        return Round(time.perf_counter() - start, 0)

    def close(self) -> None:
        """Nothing is left on disk."""


class BoundContender:
    """Nothing but the model's matrix products: what no engine with these products can beat.

    Projections that read the same input are joined, as an engine would; every layer has
    its own weights, so that they come from memory as they do in the model. The LM head
    sees one row a prompt.
    """

    def __init__(self, workload: Workload) -> None:
        self._chunk_tokens = workload.max_num_batched_tokens
        self._weights, self._lm_head = _joined_weights(workload.checkpoint)
        widths = {weight.shape[1] for weight in self._weights}
        self._inputs = {
            width: torch.randn(self._chunk_tokens, width).to(torch.bfloat16) for width in widths
        }
        count = sum(weight.numel() for weight in self._weights)
        self.note = f"{len(self._weights)} products, {count / 1e6:,.0f} M weights"
        self.run([[0] * self._chunk_tokens])

    @torch.inference_mode()
    def run(self, prompts: Prompts) -> Round:
        linear = torch.nn.functional.linear
        remaining = sum(len(prompt) for prompt in prompts)
        start = time.perf_counter()
        while remaining > 0:
            tokens = min(self._chunk_tokens, remaining)
            for weight in self._weights:
                linear(self._inputs[weight.shape[1]][:tokens], weight)
            remaining -= tokens
        last_rows = self._inputs[self._lm_head.shape[1]][: len(prompts)]
        linear(last_rows, self._lm_head)
        return Round(time.perf_counter() - start, 0)

    def close(self) -> None:
        """Nothing is left on disk."""


_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    ),
    ("linear_attn.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def _joined_weights(checkpoint: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights of the layers' products in order of execution, and the LM head's (tied)."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors.update(load_file(file))
    joined = []
    num_layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    for layer in range(num_layers):
        for group in _JOINED:
            names = [f"model.layers.{layer}.{part}.weight" for part in group]
            if names[0] in tensors:
                joined.append(torch.cat([tensors.pop(name) for name in names]))
    return joined, tensors["model.embed_tokens.weight"]


def make_contender(kind: Kind, workload: Workload) -> Contender:
    """Load one contender in this process."""
    if kind == "transformers":
        return TransformersContender(workload)
    if kind == "bound":
        return BoundContender(workload)
    return EngineContender(workload, extract=kind == "extraction")

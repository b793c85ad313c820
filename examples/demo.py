"""Extract hidden states from a few dozen texts and compare every row with transformers.

Builds a small Qwen3.5-type checkpoint with random weights first (see demo_checkpoint.py).
Needs no network. The exit status is 1 if one value is further off than the limit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from demo_checkpoint import DEFAULT_CACHE, demo_checkpoint, load_texts
from safetensors.torch import load_file

from vllm import LLM, SamplingParams

LAYERS = (0, 2, 4, 6, 8)
"""Layer ids: 0 is the embedding output, 8 the stream that enters the final norm."""
LIMIT = 1e-4
"""Largest error allowed, in units of the layer's root mean square."""


@dataclass(frozen=True)
class Extraction:
    """The engine's result: one file per text, in the order of the texts."""

    files: list[Path]
    num_tokens: int
    seconds: float

    @property
    def bytes_written(self) -> int:
        return sum(file.stat().st_size for file in self.files)


class Reference(NamedTuple):
    """The result of transformers for one text: ids, rows [tokens, layers, hidden], seconds."""

    token_ids: torch.Tensor
    rows: torch.Tensor
    seconds: float


@dataclass
class LayerCheck:
    """Errors of one layer over all texts."""

    worst_error: float = 0.0
    square_sum: float = 0.0
    num_values: int = 0

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_sum / max(self.num_values, 1))

    @property
    def relative_error(self) -> float:
        return self.worst_error / self.rms if self.rms > 0 else math.inf

    def add(self, rows: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two sets of rows of this layer, [tokens, hidden] each."""
        error = (rows.double() - expected.double()).abs().max().item()
        self.worst_error = max(self.worst_error, math.inf if math.isnan(error) else error)
        self.square_sum += expected.double().square().sum().item()
        self.num_values += expected.numel()


def extract(checkpoint: Path, texts: list[str], storage: Path) -> Extraction:
    """Run the engine over all texts at once and return the files it wrote."""
    llm = LLM(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=256,  # small, so that longer texts are cut into chunks
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate(["warm up"], sampling, use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(texts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    files = [Path((output.kv_transfer_params or {})["hidden_states_path"]) for output in outputs]
    return Extraction(files, sum(len(output.prompt_token_ids or []) for output in outputs), seconds)


class TransformersReference:
    """The same checkpoint in transformers, with a hook at every layer of ``LAYERS``."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._streams: dict[int, torch.Tensor] = {}
        # Hooks, since the last entry of the tuple it returns has been through the final norm.
        layers = self.model.model.layers
        self.model.model.embed_tokens.register_forward_hook(self._keep(0))
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_hook(self._keep(number))

    def _keep(self, layer_id: int) -> Callable[[object, object, Any], None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            self._streams[layer_id] = stream[0].clone()

        return hook

    @torch.inference_mode()
    def run(self, text: str) -> Reference:
        """Tokenise one text and run it through the model."""
        start = time.perf_counter()
        token_ids = torch.tensor(self.tokenizer(text)["input_ids"])
        self.model(input_ids=token_ids[None], use_cache=False, logits_to_keep=1)
        seconds = time.perf_counter() - start
        rows = torch.stack([self._streams[layer_id] for layer_id in LAYERS], dim=1)
        return Reference(token_ids, rows, seconds)


def compare(
    reference: TransformersReference, texts: list[str], files: list[Path]
) -> tuple[list[LayerCheck], float]:
    """Check every row of every file. Return the errors by layer, and transformers' seconds."""
    reference.run("warm up")
    checks = [LayerCheck() for _ in LAYERS]
    seconds = 0.0
    for text, file in zip(texts, files, strict=True):
        expected = reference.run(text)
        seconds += expected.seconds
        tensors = load_file(file)
        if not torch.equal(tensors["token_ids"], expected.token_ids):
            raise SystemExit(f"MISMATCH: the token ids in {file} are not those of {text[:60]!r}")
        rows = tensors["hidden_states"]
        if rows.shape != expected.rows.shape:
            raise SystemExit(
                f"MISMATCH: rows {tuple(rows.shape)} instead of {tuple(expected.rows.shape)} for "
                f"{text[:60]!r}"
            )
        for column, check in enumerate(checks):
            check.add(rows[:, column], expected.rows[:, column])
    return checks, seconds


def report(
    num_texts: int, result: Extraction, checks: list[LayerCheck], reference_seconds: float
) -> bool:
    """Print the tables; return whether every layer is within the limit."""
    tokens, seconds = result.num_tokens, result.seconds
    rows = [
        ("prompts", f"{num_texts:,}", f"{num_texts:,}"),
        ("tokens", f"{tokens:,}", f"{tokens:,}"),
        ("seconds", f"{seconds:.2f}", f"{reference_seconds:.2f}"),
        ("tokens/s", f"{tokens / seconds:,.0f}", f"{tokens / reference_seconds:,.0f}"),
        ("files", f"{len(result.files):,}", "-"),
        ("file size, MB", f"{result.bytes_written / 1e6:.1f}", "-"),
    ]
    print(f"\n{'':16}{'this engine':>16}{'transformers':>16}")
    for label, ours, theirs in rows:
        print(f"{label:16}{ours:>16}{theirs:>16}")

    print(f"\n{'after layer':16}{'rows':>10}{'rms':>10}{'worst error':>14}{'error/rms':>12}")
    for layer_id, check in zip(LAYERS, checks, strict=True):
        name = "0 (embedding)" if layer_id == 0 else str(layer_id)
        mark = "" if check.relative_error <= LIMIT else "  <- too far"
        print(
            f"{name:16}{tokens:>10,}{check.rms:>10.4f}{check.worst_error:>14.2e}"
            f"{check.relative_error:>12.2e}{mark}"
        )

    agree = all(check.relative_error <= LIMIT for check in checks)
    verdict = "every row agrees with transformers" if agree else "MISMATCH with transformers"
    print(f"\nverdict: {verdict} (limit {LIMIT:.0e} of the layer's rms)\n")
    return agree


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-texts", type=int, help="number of texts (default: all)")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files in this folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    texts = load_texts()
    if options.num_texts is not None:
        # Spread over the list, which is ordered by length, so that short and long texts are in it.
        count = min(max(options.num_texts, 1), len(texts))
        texts = [texts[(i + 1) * len(texts) // count - 1] for i in range(count)]
    checkpoint = demo_checkpoint(options.cache_dir)
    print(f"checkpoint: {checkpoint} (Qwen3.5 type, 8 layers, hidden size 256, random weights)")

    with tempfile.TemporaryDirectory(prefix="hidden-states-") as scratch:
        storage = options.keep or Path(scratch)
        storage.mkdir(parents=True, exist_ok=True)
        result = extract(checkpoint, texts, storage)
        checks, seconds = compare(TransformersReference(checkpoint), texts, result.files)
        agree = report(len(texts), result, checks, seconds)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

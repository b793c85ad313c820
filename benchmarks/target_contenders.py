"""Contenders of single targets: ways to extract, decoding alone, and their bounds."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, TokensPrompt
from vllm.bench.contenders import (
    BoundContender,
    Contender,
    PlainContender,
    Prompts,
    Round,
    Workload,
)
from vllm.bench.linear_weights import load_linear_weights

COPY_BYTES = 256 * 2**20
COPIES = 99
"""One or two seconds: the speed of a shared machine's memory changes from second to second."""
INT4_GROUP = 128
"""Weights with one 16-bit scale, quantised at load."""
QUERY_ROWS = 512
KEY_BLOCKS = (512, 2048, 8192)
"""Sizes of the blocks of attention's products; the fastest number of keys is taken."""


class ExtractContender(Contender):
    """``LLM.extract``: samples are given to the caller, nothing is written."""

    def __init__(self, workload: Workload) -> None:
        self._layer_ids = list(workload.layer_ids)
        self.llm = LLM(
            model=str(workload.checkpoint),
            skip_tokenizer_init=True,
            max_model_len=workload.max_model_len,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            **workload.engine_options,
        )
        self.note = f"chunks of {workload.max_num_batched_tokens} tokens"

    def run(self, prompts: Prompts) -> Round:
        start = time.perf_counter()
        num_rows = 0
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for sample in self.llm.extract(requests, layers=self._layer_ids):
            num_rows += len(sample.hidden_states)
        seconds = time.perf_counter() - start
        if num_rows != sum(map(len, prompts)):
            raise RuntimeError(f"{num_rows} rows came of {sum(map(len, prompts))} tokens")
        return Round(seconds)

    def close(self) -> None:
        self.llm.shutdown()


class CommandContender(Contender):
    """The whole command ``vllm extract``: it starts, loads the model, and writes a dataset."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=workload.storage_root))
        self.note = "with start and loading"

    def run(self, prompts: Prompts) -> Round:
        records, output = self._folder / "records.jsonl", self._folder / "dataset"
        records.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in prompts))
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "extract"),
            *(str(self._workload.checkpoint), "--input", str(records), "--output", str(output)),
            *("--layers", ",".join(map(str, self._workload.layer_ids))),
            *("--max-model-len", str(self._workload.max_model_len)),
        ]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"vllm extract ended with {done.returncode}:\n{done.stderr[-2000:]}")
        written = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
        shutil.rmtree(output)
        return Round(seconds, written)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class DecodeContender(PlainContender):
    """Decoding alone: the time of the steps after the one that computes the prompts."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        assert workload.num_prompts * workload.prompt_len <= workload.max_num_batched_tokens
        self.note = f"{workload.num_decode_steps} steps of {workload.num_prompts} tokens"

    def run(self, prompts: Prompts) -> Round:
        engine = self.llm.llm_engine
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), self._sampling)
        engine.step()
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return Round(time.perf_counter() - start)


class WeightReadContender(Contender):
    """Time to read all weights once per decoding step, at copy bandwidth.

    The weights are those of the layers' products and of the LM head. Copy bandwidth is
    measured in every round, in this process, on all of torch's threads: 256 MiB are copied
    from one buffer to another 99 times. It is the bytes read plus the bytes written, divided
    by the median time of a copy. Reads that a cache makes in order to write are not counted.
    """

    def __init__(self, workload: Workload) -> None:
        weights = load_linear_weights(workload.checkpoint)
        of_element: float = weights.head.dtype.itemsize
        head_bytes = weights.head.numel() * of_element
        if workload.engine_options.get("quantization") == "int4":
            of_element = 1 / 2 + of_element / INT4_GROUP
        layer_elements = weights.num_elements - weights.head.numel()
        self._weight_bytes = layer_elements * of_element + head_bytes
        self._num_steps = workload.num_decode_steps
        self._source = torch.ones(COPY_BYTES // 8, dtype=torch.int64)
        self._target = torch.zeros_like(self._source)
        self.note = f"{self._weight_bytes / 1e6:,.0f} MB of weights"

    def run(self, prompts: Prompts) -> Round:
        times = []
        for _ in range(COPIES):
            start = time.perf_counter()
            self._target.copy_(self._source)
            times.append(time.perf_counter() - start)
        bytes_per_second = 2 * COPY_BYTES / statistics.median(times)
        return Round(self._num_steps * self._weight_bytes / bytes_per_second)


class AttentionBoundContender(BoundContender):
    """The bound with the products of attention: queries by keys, and weights by values.

    They are torch's, on blocks that lie below the diagonal or on it, over all heads at once.
    There is no softmax. Recurrent layers count only with their projections.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(workload.checkpoint).get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        num_layers = config.num_hidden_layers
        self._num_layers = num_layers // len(kinds) * kinds.count("full_attention")
        num_groups = config.num_key_value_heads
        group = config.num_attention_heads // num_groups
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        dtype = next(iter(self._inputs.values())).dtype
        self._group = group
        self._queries = torch.randn(num_groups, QUERY_ROWS * group, size).to(dtype)
        self._keys = torch.randn(num_groups, max(KEY_BLOCKS), size).to(dtype)
        trials = {keys: self._seconds(workload.prompt_len, keys) for keys in KEY_BLOCKS}
        self._block = min(KEY_BLOCKS, key=trials.__getitem__)
        self.note += f", attention of {self._num_layers} layers by {self._block} keys"

    @torch.inference_mode()
    def run(self, prompts: Prompts) -> Round:
        seconds = super().run(prompts).seconds
        start = self._workload.now()
        for prompt in prompts:
            for _ in range(self._num_layers):
                self._multiply(len(prompt), self._block)
        return Round(seconds + self._workload.now() - start)

    @torch.inference_mode()
    def _seconds(self, num_tokens: int, block: int) -> float:
        start = time.perf_counter()
        self._multiply(min(num_tokens, max(KEY_BLOCKS)), block)
        return time.perf_counter() - start

    def _multiply(self, num_tokens: int, block: int) -> None:
        for rows, num_keys in self._pieces(num_tokens, block):
            keys = self._keys[:, :num_keys]
            scores = torch.bmm(self._queries[:, : rows * self._group], keys.transpose(1, 2))
            torch.bmm(scores, keys)

    @staticmethod
    def _pieces(num_tokens: int, block: int) -> Iterator[tuple[int, int]]:
        """Yield the rows and keys of each pair of products over one causal sequence."""
        for first in range(0, num_tokens, QUERY_ROWS):
            rows = min(QUERY_ROWS, num_tokens - first)
            for key in range(0, first + rows, block):
                yield rows, min(block, first + rows - key)


def package_environment() -> dict[str, str]:
    """Return the environment of a new interpreter that finds this package."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}

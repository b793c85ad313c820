"""What keeping blocks on the host gives: prompts with long prefixes, more than the pool holds.

    python benchmarks/offloading.py                # 64 prefixes of 2,048 tokens, a pool for 8
    python benchmarks/offloading.py --prompts 8 --pool 2    # minutes less

Every prefix is asked for twice, with another end; rows of four layers go to files. The first time
nothing hits, which shows what saving costs beside an engine without the connector; the second time
the pool has overwritten all of them, and the connector loads what the other engine computes again.
Times are CPU seconds of the process (its threads together), which other work on the machine
changes little; exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.benchmarks.models import BenchmarkModel, find_model

CACHE = Path(__file__).resolve().parent.parent / ".cache"
TAIL = 16
MIN_SPEEDUP, MAX_SLOWDOWN, MIN_COPY_SHARE = 3.0, 1.02, 0.6


class Copies:
    """Bytes and CPU time, of the thread that asks, of what a connector copies each way."""

    def __init__(self, connector: Any) -> None:
        self.bytes = {"start_load_kv": 0, "wait_for_save": 0}
        self.seconds = dict.fromkeys(self.bytes, 0.0)
        self._connector = connector
        for name, entries in (("start_load_kv", "loads"), ("wait_for_save", "saves")):
            setattr(connector, name, self._timed(name, entries, getattr(connector, name)))

    def _timed(self, name: str, entries: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            count = len(getattr(self._connector._get_connector_metadata(), entries))
            start = time.thread_time()
            call(*args, **kwargs)
            if count:
                self.seconds[name] += time.thread_time() - start
                self.bytes[name] += count * self._connector._memory.shape[1]

        return timed

    def speed(self, name: str) -> float:
        """Bytes a second."""
        return self.bytes[name] / max(self.seconds[name], 1e-9)


def memcpy_speed(block_bytes: int) -> float:
    """Bytes a second of torch's copies of such blocks, between memories of 256 MiB."""
    count = max(2, 2**28 // block_bytes)
    source, target = (torch.ones(count, block_bytes, dtype=torch.int8) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.thread_time()
        for row in range(count):
            target[row].copy_(source[row])
        best = max(best, count * block_bytes / (time.thread_time() - start))
    return best


def prefixes(model: BenchmarkModel, count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(model.vocabulary) for _ in range(length)] for _ in range(count)]


def make_engine(model: BenchmarkModel, folder: Path, pool_bytes: int, host_bytes: int) -> LLM:
    """host_bytes: 0 for an engine that recomputes."""
    rows = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder),
            "use_synchronization_lock": False,
        },
    }
    connectors = [rows]
    if host_bytes:
        options = {"cpu_bytes_to_use": host_bytes}
        connectors.append(
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}
        )
    layer_ids = {"eagle_aux_hidden_state_layer_ids": list(model.default_layer_ids)}
    return LLM(
        str(model.checkpoint),
        skip_tokenizer_init=True,
        max_model_len=4096,
        kv_cache_memory_bytes=pool_bytes,
        speculative_config={
            "method": "extract_hidden_states",
            "draft_model_config": {"hf_config": layer_ids},
        },
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    )


def cpu_seconds(llm: LLM, prompts: Sequence[list[int]], folder: Path) -> float:
    """Of one pass over all prompts, their files written."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    start = time.process_time()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.process_time() - start
    assert all(output.kv_transfer_params for output in outputs)
    for file in folder.iterdir():
        file.unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3.5-0.5b", help="built-in name, or a checkpoint")
    parser.add_argument("--prompts", type=int, default=64, help="prefixes")
    parser.add_argument("--pool", type=int, default=8, help="prefixes that the pool holds")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prefix")
    parser.add_argument("--cache-dir", type=Path, default=CACHE, help="where built-in models are")
    options = parser.parse_args()
    model = find_model(options.model, options.cache_dir)
    shared = prefixes(model, options.prompts, options.length)
    again = [prefix + [7] * TAIL for prefix in shared]
    per_prefix = bytes_of_prefix(model, options.length)
    pool_bytes, host_bytes = options.pool * per_prefix, (options.prompts + 2) * per_prefix
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = make_engine(model, folder, pool_bytes, 0)
        offloading = make_engine(model, folder, pool_bytes, host_bytes)
        runner: Any = offloading.llm_engine.engine_core
        connector = runner.executor.worker.model_runner.connector.connector._connectors[1]
        copies = Copies(connector)
        for llm in (plain, offloading):  # kernels, threads, pages of memory
            cpu_seconds(llm, prefixes(model, 1, 256), folder)
        first = {"plain": 0.0, "offloading": 0.0}
        second = dict(first)
        engines = {"plain": plain, "offloading": offloading}
        for batch in range(0, options.prompts, options.pool):  # in turns
            part = slice(batch, batch + options.pool)
            for kind, llm in engines.items():
                first[kind] += cpu_seconds(llm, shared[part], folder)
        for batch in range(0, options.prompts, options.pool):
            part = slice(batch, batch + options.pool)
            for kind, llm in engines.items():
                second[kind] += cpu_seconds(llm, again[part], folder)
        memcpy = memcpy_speed(connector._memory.shape[1])
        plain.shutdown()
        offloading.shutdown()
    speedup = second["plain"] / second["offloading"]
    slowdown = first["offloading"] / first["plain"]
    share = copies.speed("start_load_kv") / memcpy
    print(f"{options.prompts} prefixes of {options.length} tokens, a pool for {options.pool}")
    print(
        f"hits:    {second['plain']:.1f} s computed, {second['offloading']:.1f} s loaded: ", end=""
    )
    print(f"{speedup:.2f} times as fast (at least {MIN_SPEEDUP})")
    print(f"no hit:  {first['plain']:.1f} s without, {first['offloading']:.1f} s with: ", end="")
    print(f"{slowdown:.3f} (at most {MAX_SLOWDOWN})")
    print(
        f"copies:  {copies.speed('start_load_kv') / 1e9:.1f} GB/s in, "
        f"{copies.speed('wait_for_save') / 1e9:.1f} GB/s out, memcpy {memcpy / 1e9:.1f}: "
        f"{share:.2f} (at least {MIN_COPY_SHARE})"
    )
    met = speedup >= MIN_SPEEDUP and slowdown <= MAX_SLOWDOWN and share >= MIN_COPY_SHARE
    return 0 if met else 1


def bytes_of_prefix(model: BenchmarkModel, length: int) -> int:
    """About what a prefix holds in the pool: keys, values, states, rows; a tenth more."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.checkpoint).get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = kinds.count("full_attention")
    token = full * config.num_key_value_heads * config.head_dim * 4
    token += len(model.default_layer_ids) * config.hidden_size * 2
    states = 0
    if full < len(kinds):
        heads = config.linear_num_value_heads
        cells = heads * config.linear_key_head_dim * config.linear_value_head_dim
        states = 3 * (len(kinds) - full) * cells * 5  # running, kept, and on the way
    return int(1.1 * (length * token + states))


if __name__ == "__main__":
    sys.exit(main())

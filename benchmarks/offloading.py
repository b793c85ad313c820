"""Gain of keeping blocks on the host: prompts with long prefixes, more than the pool holds.

    python benchmarks/offloading.py                # 64 prefixes of 2,048 tokens, a pool for 8
    python benchmarks/offloading.py --prompts 8 --pool 2    # minutes less

Every prefix is asked for twice, with another end; rows of four layers go to files. The first time
nothing hits, which shows what saving costs beside an engine without the connector; the second time
the pool has overwritten all of them, and the connector loads what the other engine computes again.
Times are CPU seconds of the process (its threads together), which other work on the machine
changes little. The exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.bench.models import BenchmarkModel, find_model
from vllm.utils.host_memory import allocate_host_bytes

CACHE = Path(__file__).resolve().parent.parent / ".cache"
TAIL, WARM_UP = 16, 256
"""Tokens after a prefix; of the prompt before anything is timed."""
MIN_SPEEDUP, MAX_SLOWDOWN, MIN_COPY_SHARE = 3.0, 1.02, 0.6


class Copies:
    """CPU time, of the thread that asks, of what a connector copies each way, beside memcpy.

    With all that it copies in a step as many bytes are copied in one piece between two other
    memories of the same kind, in turns before and after it, and on from where the last one ended:
    memory that nobody used for a while costs more, above all in a virtual machine, and that for
    both. On a card this is the time to queue them.
    """

    def __init__(self, connector: Any) -> None:
        self.seconds = {"start_load_kv": 0.0, "wait_for_save": 0.0}
        self.memcpy_seconds = dict.fromkeys(self.seconds, 0.0)
        self.bytes = dict.fromkeys(self.seconds, 0)
        self._connector = connector
        memory = connector._copies.memory
        self._from, self._to = (like(memory, 2**31) for _ in range(2))
        self._next = 0
        for name, entries in (("start_load_kv", "loads"), ("wait_for_save", "saves")):
            setattr(connector, name, self._timed(name, entries, getattr(connector, name)))

    def _timed(self, name: str, entries: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            count = len(getattr(self._connector._get_connector_metadata(), entries))
            if not count:
                return call(*args, **kwargs)
            if is_first := next(turns):
                self.memcpy_seconds[name] += self._memcpy(count)
            start = time.thread_time()
            call(*args, **kwargs)
            self.seconds[name] += time.thread_time() - start
            if not is_first:
                self.memcpy_seconds[name] += self._memcpy(count)
            self.bytes[name] += count * self._from.shape[1]
            return None

        turns = itertools.cycle((True, False))
        return timed

    def _memcpy(self, count: int) -> float:
        assert count <= len(self._from), "more blocks at once than are copied beside them"
        if self._next + count > len(self._from):
            self._next = 0
        rows = slice(self._next, self._next + count)
        self._next += count
        start = time.thread_time()
        self._to[rows].copy_(self._from[rows])
        return time.thread_time() - start

    def speeds(self, name: str) -> tuple[float, float]:
        """Bytes a second: of the connector, of memcpy."""
        num_bytes = self.bytes[name]
        return num_bytes / self.seconds[name], num_bytes / self.memcpy_seconds[name]

    def spent(self) -> float:
        """Seconds that are not the engine's."""
        return sum(self.memcpy_seconds.values())


def like(memory: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """As many rows of the same kind, but not more bytes than that."""
    count = min(len(memory), max(1, most_bytes // memory.shape[1]))
    new = allocate_host_bytes(count * memory.shape[1], "memory to compare with", "", touched=True)
    return new.view(count, memory.shape[1])


def prefixes(model: BenchmarkModel, count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(model.vocabulary) for _ in range(length)] for _ in range(count)]


def make_engine(
    model: BenchmarkModel, folder: Path, max_model_len: int, pool_bytes: int, host_bytes: int
) -> LLM:
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
        max_model_len=max_model_len,
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


def runner_of(llm: LLM) -> Any:
    engine: Any = llm.llm_engine.engine_core
    return engine.executor.worker.model_runner


def pool_of(llm: LLM) -> torch.Tensor:
    pool: torch.Tensor = runner_of(llm).pool
    return pool


def cpu_seconds(llm: LLM, prompts: Sequence[list[int]], folder: Path) -> float:
    """CPU seconds of one pass over all prompts, including writing their files."""
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
        longest = max(options.length, WARM_UP) + 2 * TAIL
        plain = make_engine(model, folder, longest, pool_bytes, 0)
        offloading = make_engine(model, folder, longest, pool_bytes, host_bytes)
        connector = runner_of(offloading).connector.connector._connectors[1]
        for llm in (plain, offloading):  # kernels, threads
            pool_of(llm).zero_()  # what is touched for the first time costs more than a copy
            cpu_seconds(llm, prefixes(model, 1, WARM_UP), folder)
        copies = Copies(connector)
        first = {"plain": 0.0, "offloading": 0.0}
        second = dict(first)
        engines = {"plain": plain, "offloading": offloading}
        for batch in range(0, options.prompts, options.pool):  # in turns
            part = slice(batch, batch + options.pool)
            for kind, llm in engines.items():
                first[kind] += cpu_seconds(llm, shared[part], folder)
        spent = copies.spent()
        first["offloading"] -= spent
        for batch in range(0, options.prompts, options.pool):
            part = slice(batch, batch + options.pool)
            for kind, llm in engines.items():
                second[kind] += cpu_seconds(llm, again[part], folder)
        second["offloading"] -= copies.spent() - spent
        plain.shutdown()
        offloading.shutdown()
    speedup = second["plain"] / second["offloading"]
    slowdown = first["offloading"] / first["plain"]
    print(f"{options.prompts} prefixes of {options.length} tokens, a pool for {options.pool}")
    print(
        f"hits:    {second['plain']:.1f} s computed, {second['offloading']:.1f} s loaded: ", end=""
    )
    print(f"{speedup:.2f} times as fast (at least {MIN_SPEEDUP})")
    print(f"no hit:  {first['plain']:.1f} s without, {first['offloading']:.1f} s with: ", end="")
    print(f"{slowdown:.3f} (at most {MAX_SLOWDOWN})")
    shares = []
    for name, way in (("start_load_kv", "in"), ("wait_for_save", "out")):
        own, memcpy = (speed / 1e9 for speed in copies.speeds(name))
        shares.append(own / memcpy)
        size = copies.bytes[name] / 1e9
        print(f"copies:  {size:.2f} GB {way}, {own:.1f} GB/s, memcpy {memcpy:.1f}: ", end="")
        print(f"{shares[-1]:.2f} (at least {MIN_COPY_SHARE})")
    met = speedup >= MIN_SPEEDUP and slowdown <= MAX_SLOWDOWN and min(shares) >= MIN_COPY_SHARE
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

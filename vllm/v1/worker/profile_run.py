"""A step as large as steps get, before the pool exists: what it takes, and kernels compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import ExtractionSpec
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

EXTRACTED_LAYERS = 8
"""Layers whose rows the large step hands out: what an ``extract()`` may ask for later."""
_MOST_SAMPLING = SamplingParams(
    max_tokens=1, seed=0, top_p=0.9, presence_penalty=1.0, logprobs=1, prompt_logprobs=1
)
_NO_SAMPLING = SamplingParams(max_tokens=0, temperature=0.0)


def profile_run(runner: GPUModelRunner, vllm_config: VllmConfig) -> None:
    """Run the largest prefill and the largest decode batch in a pool of their own.

    Tokens are sampled in the way that takes most memory.
    """
    scheduler = vllm_config.scheduler_config
    longest = _longest_prefill(vllm_config)
    num_long = max(1, min(scheduler.max_num_batched_tokens // longest, scheduler.max_num_seqs))
    num_short = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    steps = [[longest] * num_long, [1] * num_short]
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    layers = tuple(range(min(EXTRACTED_LAYERS, num_layers + 1)))
    rows = ExtractionSpec(layers, storage_dtype="float32")  # which takes most memory
    with small_pool(runner, vllm_config) as groups:
        for lengths in steps:
            runner.execute_model(_make_step(groups, lengths, None)).result()
        if runner.proposer is None:  # else rows leave through the pool
            runner.execute_model(_make_step(groups, steps[0], rows)).result()


@contextmanager
def small_pool(
    runner: GPUModelRunner, vllm_config: VllmConfig
) -> Iterator[tuple[KVCacheGroupSpec, ...]]:
    """Its groups; inside the block the runner has a pool that holds one long prefill.

    All requests share its blocks: nobody looks at what is computed.
    """
    layout = plan_layout(runner.get_kv_cache_spec(), vllm_config.cache_config)
    longest = _longest_prefill(vllm_config)
    num_blocks = 1 + sum(_blocks_of(group, longest) for group in layout.groups)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[replace(t, size=num_blocks * layout.block_bytes) for t in layout.tensors],
        kv_cache_groups=list(layout.groups),
        block_bytes=layout.block_bytes,
    )
    runner.bind_pool(config)
    try:
        yield layout.groups
    finally:
        runner.release_pool()


def _longest_prefill(vllm_config: VllmConfig) -> int:
    """Most tokens of one request in one step."""
    return min(
        vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
    )


def _blocks_of(group: KVCacheGroupSpec, num_tokens: int) -> int:
    spec = group.kv_cache_spec
    return 1 if isinstance(spec, MambaSpec) else cdiv(num_tokens, spec.block_size)


def _make_step(
    groups: tuple[KVCacheGroupSpec, ...], lengths: list[int], extraction: ExtractionSpec | None
) -> SchedulerOutput:
    """Requests of these lengths, all new, that sample a token unless they hand out rows."""
    params = _NO_SAMPLING if extraction else _MOST_SAMPLING
    requests = []
    for number, length in enumerate(lengths):
        ends = list(accumulate((_blocks_of(group, length) for group in groups), initial=1))
        tables = tuple(list(range(start, end)) for start, end in pairwise(ends))
        requests.append(
            NewRequestData(f"profile-{number}", [0] * length, params, tables, 0, extraction)
        )
    counts = {request.req_id: length for request, length in zip(requests, lengths, strict=True)}
    total = sum(lengths)
    return SchedulerOutput(requests, CachedRequestData(), counts, total, set())

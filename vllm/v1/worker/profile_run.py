"""A step as large as steps get, before the pool exists: what it takes, and kernels compiled."""

from __future__ import annotations

from dataclasses import replace
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


def profile_run(runner: GPUModelRunner, vllm_config: VllmConfig) -> None:
    """Run the largest prefill and the largest decode batch in a pool of their own."""
    layout = plan_layout(runner.get_kv_cache_spec(), vllm_config.cache_config)
    scheduler = vllm_config.scheduler_config
    longest = min(vllm_config.model_config.max_model_len, scheduler.max_num_batched_tokens)
    num_long = max(1, min(scheduler.max_num_batched_tokens // longest, scheduler.max_num_seqs))
    num_short = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    steps = [[longest] * num_long, [1] * num_short]
    num_blocks = 1 + max(_num_blocks(layout.groups, lengths) for lengths in steps)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[replace(t, size=num_blocks * layout.block_bytes) for t in layout.tensors],
        kv_cache_groups=list(layout.groups),
        block_bytes=layout.block_bytes,
    )
    runner.bind_pool(config)
    try:
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        rows = ExtractionSpec(tuple(range(min(EXTRACTED_LAYERS, num_layers + 1))))
        for lengths, extraction in ((steps[0], None), (steps[0], rows), (steps[1], None)):
            runner.execute_model(_make_step(layout.groups, lengths, extraction)).result()
    finally:
        runner.release_pool()


def _num_blocks(groups: tuple[KVCacheGroupSpec, ...], lengths: list[int]) -> int:
    return sum(_blocks_of(group, length) for group in groups for length in lengths)


def _blocks_of(group: KVCacheGroupSpec, num_tokens: int) -> int:
    spec = group.kv_cache_spec
    return 1 if isinstance(spec, MambaSpec) else cdiv(num_tokens, spec.block_size)


def _make_step(
    groups: tuple[KVCacheGroupSpec, ...], lengths: list[int], extraction: ExtractionSpec | None
) -> SchedulerOutput:
    """Requests of these lengths, all new, that sample a token unless they hand out rows."""
    params = SamplingParams(max_tokens=0 if extraction else 1, temperature=0.0)
    next_block, requests = 1, []
    for number, length in enumerate(lengths):
        block_ids = []
        for group in groups:
            count = _blocks_of(group, length)
            block_ids.append(list(range(next_block, next_block + count)))
            next_block += count
        tables = tuple(block_ids)
        requests.append(
            NewRequestData(f"profile-{number}", [0] * length, params, tables, 0, extraction)
        )
    counts = {request.req_id: length for request, length in zip(requests, lengths, strict=True)}
    total = sum(lengths)
    return SchedulerOutput(requests, CachedRequestData(), counts, total, set())

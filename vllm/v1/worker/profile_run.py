"""Runs the largest possible step before the pool exists: memory is measured, kernels compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.utils import cdiv
from vllm.v1.cache_kinds.base import KVCacheGroupSpec
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.output import BlockCopy, NewRequestData, SchedulerOutput
from vllm.v1.engine import ExtractionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_MOST_SAMPLING = SamplingParams(
    max_tokens=1, seed=0, top_p=0.9, presence_penalty=1.0, logprobs=1, prompt_logprobs=1
)
_LARGEST_CAST = "fp8"
"""The dtype of rows that takes most memory to make."""


def profile_run(runner: GPUModelRunner, groups: tuple[KVCacheGroupSpec, ...]) -> None:
    """Run the largest steps in a :func:`small_pool`: the most tokens in the most requests, and
    the largest decode batch.

    Tokens are sampled in the way that takes most memory. The most rows go to their callers, from
    the most steps under way.
    """
    vllm_config = runner.vllm_config
    scheduler = vllm_config.scheduler_config
    for new_tokens, context in warm_up_steps(vllm_config):
        _run(runner, [_make_step(groups, [new_tokens], [None], context)])
    for lengths in (_fullest_step(vllm_config), [1] * _most_requests(vllm_config)):
        extractions: list[ExtractionSpec] | list[None] = [None] * len(lengths)
        if runner.proposer is None:  # otherwise rows leave through the pool
            num_layers = vllm_config.model_config.get_total_num_hidden_layers() + 1
            extractions = most_rows(lengths, num_layers, vllm_config.max_step_cells)
        _run(runner, [_make_step(groups, lengths, extractions)] * scheduler.max_steps_under_way)


WARM_UP_TOKENS = (1, 2, 40, 300)
WARM_UP_CONTEXT = 2 * 4096
"""Tokens beyond which kernels do nothing differently."""


def warm_up_steps(vllm_config: VllmConfig) -> list[tuple[int, int]]:
    """(new tokens, tokens before them) of one request, so that kernels are compiled in all forms.

    Kernels choose by the number of rows, and by whether there are many keys for few rows.
    """
    longest = _longest_prefill(vllm_config)
    context = min(vllm_config.model_config.max_model_len - longest, WARM_UP_CONTEXT)
    tokens = sorted({min(count, longest) for count in (*WARM_UP_TOKENS, longest)})
    return [(count, before) for before in sorted({0, context}) for count in tokens]


def _run(runner: GPUModelRunner, steps: list[SchedulerOutput]) -> None:
    """Run steps, all of them under way at once."""
    for started in [runner.execute_model(step) for step in steps]:
        started.result()


def most_rows(lengths: list[int], num_layers: int, num_cells: int) -> list[ExtractionSpec]:
    """Choose what requests of these lengths extract so that together they take most memory.

    Together they ask for at least ``num_cells`` rows of one layer, and for all layers of some
    token. Each has a different list of layers, and the worker keeps the places of all tokens for
    each list.
    """
    num_columns = max(num_layers, cdiv(num_cells, sum(lengths)))
    all_layers = tuple(column % num_layers for column in range(num_columns))
    rows_left = cdiv(num_cells, num_columns)
    specs = []
    for number, length in enumerate(lengths):
        layers, num_rows = all_layers, min(length, rows_left)
        if number > 0:
            layers = (*all_layers, *_digits(number, num_layers))
        if not num_rows:
            layers, num_rows = _digits(number, num_layers), 1
        rows_left = max(0, rows_left - num_rows)
        specs.append(ExtractionSpec(layers, list(range(num_rows)), _LARGEST_CAST))
    return specs


def _digits(number: int, base: int) -> tuple[int, ...]:
    """Digits of a number, different for different numbers."""
    digits = [number % base]
    while number := number // base:
        digits.append(number % base)
    return tuple(digits)


def _fullest_step(vllm_config: VllmConfig) -> list[int]:
    """Lengths of the most requests with the most tokens, the longest first."""
    num_requests = _most_requests(vllm_config)
    tokens_left = vllm_config.scheduler_config.max_num_batched_tokens - num_requests
    lengths = []
    for _ in range(num_requests):
        length = min(_longest_prefill(vllm_config), 1 + tokens_left)
        tokens_left -= length - 1
        lengths.append(length)
    return lengths


def _most_requests(vllm_config: VllmConfig) -> int:
    scheduler = vllm_config.scheduler_config
    return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


@contextmanager
def small_pool(runner: GPUModelRunner) -> Iterator[tuple[KVCacheGroupSpec, ...]]:
    """Give the runner a pool that holds one long prefill inside the block; yields its groups.

    All requests share its blocks, because the results are not used.
    """
    layout = plan_layout(runner.get_kv_cache_spec(), runner.vllm_config.cache_config)
    longest = _longest_prefill(runner.vllm_config)
    num_blocks = 1 + sum(g.kv_cache_spec.num_blocks(longest) for g in layout.groups)
    config = layout.with_blocks(num_blocks)
    runner.bind_pool(config)
    try:
        yield layout.groups
    finally:
        runner.release_pool()


def _longest_prefill(vllm_config: VllmConfig) -> int:
    """The most tokens of one request in one step."""
    return min(
        vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
    )


def _make_step(
    groups: tuple[KVCacheGroupSpec, ...],
    lengths: list[int],
    extractions: Sequence[ExtractionSpec | None],
    context: int = 0,
) -> SchedulerOutput:
    """Make a step of requests with these numbers of new tokens, which sample one and hand out
    rows; a block is copied.

    With a context, the same few blocks are used over and over.
    """
    requests = []
    for number, (length, extraction) in enumerate(zip(lengths, extractions, strict=True)):
        counts = [group.kv_cache_spec.num_blocks(length) for group in groups]
        table_sizes = [group.kv_cache_spec.num_blocks(context + length) for group in groups]
        ends = list(accumulate(counts, initial=1))
        tables = tuple(
            [start + index % (end - start) for index in range(count)]
            for (start, end), count in zip(pairwise(ends), table_sizes, strict=True)
        )
        prompt = [0] * (context + length)
        requests.append(
            NewRequestData(f"profile-{number}", prompt, _MOST_SAMPLING, tables, context, extraction)
        )
    tokens = {request.req_id: length for request, length in zip(requests, lengths, strict=True)}
    return SchedulerOutput(
        scheduled_new_reqs=requests,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(lengths),
        block_copies=[BlockCopy(0, 1)],
    )

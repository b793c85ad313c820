"""Compares a model that knows a reference of itself with that reference, once it is loaded.

Two prompts, one of them in chunks, run side by side through a small pool whose memory is poisoned;
rows at every boundary and the logits have to agree with the reference's. So a module that is not
what it seemed to be is refused before it serves a request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm.distributed.communicators import GroupClosedError
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.transformers_modules.references import KeptRows, reference_prompts
from vllm.sampling_params import SamplingParams
from vllm.sequence import IntermediateTensors
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.kv_cache_utils import PoolLayout, plan_layout
from vllm.v1.worker.input_batch import EagerInputs, RequestState, layer_metadata, make_batch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

_STEPS = ((12, 9), (4, 0), *((1, 0),) * 5)
"""Tokens of each reference prompt in each step."""
_MOST_ERROR = 1e-3
"""Largest error of a row in float32, as a share of its layer's root mean square."""
_MOST_ERROR_16_BIT = 0.02
_MORE_EACH_LAYER = 0.01
_MOST_AFTER_ALL_LAYERS = 0.125
"""Largest errors of a chunk's middle row in 16 bits: roundings add up from layer to layer.

Of 404 ways to run 89 families in bfloat16, the right ones are at most 0.56 of them away and the
wrong ones at least 1.9.
"""
_FEWEST_ROWS = 4
"""Rows of the smallest chunk whose middle row is meaningful."""


def check_against_reference(runner: GPUModelRunner) -> None:
    """Make sure that the model computes what its reference does.

    A model that does not falls back to another way of computing; ValueError: it has none.
    """
    while True:
        problem = _difference(runner)
        if problem is None:
            return
        runner.model.fall_back(problem)


@torch.inference_mode()
def _difference(runner: GPUModelRunner) -> str | None:
    """Describe a difference between the model and its reference; None: there is none."""
    model_config = runner.vllm_config.model_config
    num_layers = model_config.get_total_num_hidden_layers()
    prompts = reference_prompts(model_config.get_vocab_size(), model_config.max_model_len)
    expected = []
    for prompt in prompts:
        sink = KeptRows(num_layers)
        try:
            logits = runner.model.reference(prompt, sink)
        except Exception as failure:
            return f"transformers' own pass over a few tokens fails with {failure!r}"
        expected.append(_columns(sink, logits))
    try:
        actual = _computed(runner, prompts, num_layers)
    except GroupClosedError:  # another rank has the reason
        raise
    except Exception as failure:  # any other error is a reason to compute in another way
        return f"a pass over a few tokens fails with {failure!r}"
    first = runner.pipeline.stage.first_layer
    for place in range(len(expected[0])):
        layer_id = first + place
        if layer_id > num_layers and runner.no_head_reason is not None:
            continue  # each rank has made up the values of a head of its own
        pairs = zip(actual, expected, strict=True)
        error = max(_error(a[place], e[place], model_config.dtype) for a, e in pairs)
        most = _most_error(layer_id, model_config.dtype)
        if not error <= most:
            part = "the logits" if layer_id > num_layers else f"the rows of layer {layer_id}"
            return f"{part} differ from transformers' own by {error:.2g} of their root mean square"
    return None


def _most_error(layer_id: int, dtype: torch.dtype) -> float:
    if dtype is torch.float32:
        return _MOST_ERROR
    return min(_MOST_ERROR_16_BIT + _MORE_EACH_LAYER * layer_id, _MOST_AFTER_ALL_LAYERS)


def _error(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Error of the worst row, as a share of the layer's root mean square. In 16 bits it is that of
    the middle row of the worst chunk: a rounding may choose other experts for a few rows. It is
    infinite if a value is not finite, since a ``max`` over several errors would lose a NaN."""
    if not (actual - expected).isfinite().all():
        return math.inf
    rows = (actual - expected).square().mean(-1).sqrt() / expected.square().mean().sqrt()
    if dtype is torch.float32:
        return float(rows.max())
    # Modules compute a lone token by other code: such rows are kept apart.
    by_step = rows.tensor_split((_STEPS[0][0], _STEPS[0][0] + _STEPS[1][0]))
    chunks = [chunk for chunk in by_step if len(chunk) >= _FEWEST_ROWS]
    return max((float(chunk.median()) for chunk in chunks), default=0.0)


def _computed(
    runner: GPUModelRunner, prompts: list[list[int]], num_layers: int
) -> list[list[torch.Tensor]]:
    """Compute for each prompt the rows [tokens, hidden] of every boundary, then the logits."""
    layout = plan_layout(runner.get_kv_cache_spec(), runner.vllm_config.cache_config)
    states, config = _requests(layout, prompts)
    runner.bind_pool(config)
    runner.pool.fill_(-1)  # NaN in every float type
    stage = runner.pipeline.stage
    num_columns = stage.end_layer - stage.first_layer + 2 * stage.is_last
    parts: list[list[list[torch.Tensor]]] = [[[] for _ in range(num_columns)] for _ in prompts]
    done = [0] * len(prompts)
    try:
        for counts in _STEPS:
            lengths = [
                min(count, len(p) - d) for count, p, d in zip(counts, prompts, done, strict=True)
            ]
            running = [r for r, length in enumerate(lengths) if length]
            if not running:
                continue
            streams = [
                runner.model.reference_stream(prompts[r], done[r], done[r] + lengths[r])
                for r in running
            ]
            rows = _step(runner, config, states, running, done, lengths, num_layers, streams)
            for r, own in zip(running, rows, strict=True):
                done[r] += lengths[r]
                for column, part in zip(parts[r], own, strict=True):
                    column.append(part)
    finally:
        runner.release_pool()
    return [[torch.cat(column) for column in columns] for columns in parts]


def _columns(sink: KeptRows, logits: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the rows of every boundary that there is, then the logits."""
    rows = [torch.cat(parts) for parts in sink.rows.values() if parts]
    return rows if logits is None else [*rows, logits.float()]


def _requests(
    layout: PoolLayout, prompts: list[list[int]]
) -> tuple[list[RequestState], KVCacheConfig]:
    """Make requests that share no blocks, and the pool for them."""
    states, next_block = [], 1
    for number, prompt in enumerate(prompts):
        tables = []
        for group in layout.groups:
            count = group.kv_cache_spec.num_blocks(len(prompt))
            tables.append(list(range(next_block, next_block + count)))
            next_block += count
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        states.append(RequestState(f"check-{number}", prompt, sampling, None, tables))
    return states, layout.with_blocks(next_block)


def _step(
    runner: GPUModelRunner,
    config: KVCacheConfig,
    states: list[RequestState],
    running: list[int],
    done: list[int],
    lengths: list[int],
    num_layers: int,
    streams: list[torch.Tensor | None],
) -> list[list[torch.Tensor]]:
    """Run a step; return rows and logits of the running requests' next tokens.

    streams: what enters this pipeline stage, of each running request.
    """
    limit, offsets = runner.vllm_config.model_config.longrope_limit, None
    if limit is not None:
        offsets = [limit * (states[r].num_prompt_tokens > limit) for r in running]
    counts = [done[r] for r in running], [lengths[r] for r in running]
    batch = make_batch([states[r] for r in running], *counts, offsets)
    device = runner.device
    inputs = EagerInputs(batch, config, device, snapshots={}, ending=())
    sink = KeptRows(num_layers)
    token_ids = torch.from_numpy(batch.token_ids).to(device)
    positions = torch.from_numpy(batch.positions).to(device)
    rotary = batch.rotary_positions
    context = ForwardContext(
        layer_metadata(config, inputs),
        sink,
        rotary_positions=None if rotary is None else torch.from_numpy(rotary).to(device),
    )
    with set_forward_context(context):
        entering = [stream for stream in streams if stream is not None]
        options = [IntermediateTensors({"hidden_states": torch.cat(entering)})] if entering else []
        hidden = runner.model(token_ids, positions, *options)
    is_last = runner.pipeline.stage.is_last
    columns = _columns(sink, runner.model.compute_logits(hidden) if is_last else None)
    sizes = [lengths[r] for r in running]
    return [list(own) for own in zip(*(torch.split(x, sizes) for x in columns), strict=True)]

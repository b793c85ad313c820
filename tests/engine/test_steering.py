"""Steering: vectors added to the stream, against hooks that do the same in transformers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.grids import at_night
from tests.models import zoo
from tests.models.families import SLICE
from tests.models.oracle import relative_error, steered_run
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, SteeringVector
from vllm.hidden_states import ExtractRequest, FailedSample

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(81, [5, 33, 17])
WIDTH = 72


def vectors(layers: Sequence[int], width: int = WIDTH, **options: Any) -> SteeringVector:
    drawn = torch.randn(len(layers), width, generator=torch.Generator().manual_seed(sum(layers)))
    return SteeringVector(drawn, list(layers), **options)


def test_numbers_of_numpy_and_torch() -> None:
    drawn = torch.randn(2, 3, 4)
    expected = SteeringVector(drawn, [3, 1], 0.5, [7, 2, 5]).specs()
    for make in (np.array, torch.tensor, lambda values: list(np.array(values))):
        layers, scale, positions = make([3, 1]), np.float32(0.5), make([7, 2, 5])
        assert SteeringVector(drawn, layers, scale, positions).specs() == expected
    (one,) = SteeringVector(drawn[0, 0], np.int64(3), torch.tensor(0.5)).specs()
    assert [one] == SteeringVector(drawn[0, 0], 3, 0.5).specs()


@pytest.mark.parametrize("family", SLICE)
def test_rows_are_those_of_steered_transformers(family: str, checkpoint: Checkpoint) -> None:
    """Several layers and kinds of positions at once, beside requests without, in chunks."""
    check_rows(checkpoint(family))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        at_night("mamba2", "one request after another"),
        ("bamba", "one request after another"),
        ("rwkv", "again in each step"),
    ],
)
def test_modules_that_run_one_request_after_another(
    family: str, way: str, checkpoint: Checkpoint
) -> None:
    """Modules of transformers; some compute earlier tokens again, which are steered again, too."""
    folder = checkpoint(family)
    check_rows(folder, way, model_impl="transformers")
    with engine(folder, model_impl="transformers", max_num_batched_tokens=16) as llm:
        for positions in ("all", "generated", [2, 7, 19]):
            width = llm.llm_engine.model_config.get_row_size()
            check_generation(llm, folder, [vectors([2], width, scale=4.0, positions=positions)])


def check_rows(folder: Path, way: str = "", **options: Any) -> None:
    """``way``: how a module of transformers runs; its last bits depend on chunks."""
    with engine(folder, max_num_batched_tokens=16, **options) as llm:
        model = core_of(llm).executor.worker.model_runner.model
        assert way in getattr(model, "way", "")
        width = llm.llm_engine.model_config.get_row_size()
        by_position = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(5))
        steering = [
            vectors([1, 3], width, scale=0.7),
            vectors([2], width, scale=0.5, norm_match=True, positions=[0, 4, 20]),
            vectors([0], width, positions="prompt"),
            vectors([2], width, positions="generated", scale=9.0),
            SteeringVector(by_position, [1, 2], positions=[19, 3, 4], norm_match=True),
        ]
        num_layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        layers = list(range(num_layers + 1))
        requests = [ExtractRequest(prompt, steering=steering) for prompt in PROMPTS]
        mixed = [x for pair in zip(requests, PROMPTS, strict=True) for x in pair]
        samples = list(llm.extract(mixed, layers=layers))
        plain = list(llm.extract(PROMPTS, layers=layers))
    for prompt, steered, beside, other in zip(
        PROMPTS, samples[::2], samples[1::2], plain, strict=True
    ):
        if way:
            assert relative_error(beside.hidden_states, other.hidden_states) <= 1e-4
        else:
            assert torch.equal(beside.hidden_states, other.hidden_states)
        token_ids = prompt["prompt_token_ids"]
        streams = steered_run(folder, token_ids, steering, len(token_ids))
        for layer in layers:
            rows = steered.hidden_states[:, layer]
            assert relative_error(rows, streams[layer]) <= 1e-4, layer
            assert relative_error(rows, other.hidden_states[:, layer]) > 1e-2


def check_generation(llm: LLM, folder: Path, steering: list[SteeringVector]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, steering=steering, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    samples = list(llm.extract(PROMPTS, layers=[2, 3], sampling_params=params))
    for prompt, output, sample in zip(PROMPTS, outputs, samples, strict=True):
        count = len(prompt["prompt_token_ids"])
        text = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        assert sample.token_ids.tolist() == text
        *streams, logits = steered_run(folder, text, steering, count)
        best = logits[count - 1 : -1].argmax(-1).tolist()
        assert best == list(output.outputs[0].token_ids)
        assert relative_error(sample.hidden_states[:, 1], streams[3]) <= 1e-4


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_generated_text(impl: str, checkpoint: Checkpoint) -> None:
    """Vectors on generated tokens only, on prompts only, and on both; greedy tokens and rows."""
    folder = checkpoint("llama")
    with engine(folder, model_impl=impl, max_num_batched_tokens=16) as llm:
        plain = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, greedy(8))]
        for positions in ("all", "prompt", "generated"):
            check_generation(llm, folder, [vectors([2], scale=4.0, positions=positions)])
            again = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, greedy(8))]
            assert again == plain  # no prefix of a steered request serves others


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_bits_do_not_depend_on_what_runs_beside(family: str, checkpoint: Checkpoint) -> None:
    """Chunks, prefix hits of the same vectors, a tiny pool, requests with other vectors."""
    folder = checkpoint(family)
    first, second = vectors([1], scale=2.0), vectors([2], norm_match=True)
    with engine(folder, enable_prefix_caching=False) as llm:
        alone = [
            next(iter(llm.extract([prompt], layers=[3], steering=one))).hidden_states
            for one in (first, second)
            for prompt in PROMPTS
        ]
    with engine(folder, max_num_batched_tokens=16, num_gpu_blocks_override=34) as llm:
        requests = [
            ExtractRequest(prompt, steering=one, positions=positions)
            for positions in ("all", "last")
            for one in (first, second)
            for prompt in PROMPTS
        ]
        for _ in range(2):
            samples = list(llm.extract(requests, layers=[3]))
            for whole, every, last in zip(alone, samples[:6], samples[6:], strict=True):
                assert torch.equal(every.hidden_states, whole)
                assert torch.equal(last.hidden_states, whole[-1:])


def test_prefixes_are_kept_apart(checkpoint: Checkpoint) -> None:
    """Another vector, scale or place is another prefix; the same ones share it."""
    prompt = random_prompts(9, [64])[0]
    with engine(checkpoint("llama")) as llm:

        def cached(*steering: SteeringVector) -> int | None:
            params = SamplingParams(max_tokens=1, temperature=0, steering=list(steering) or None)
            (output,) = llm.generate([prompt], params)
            count: int | None = output.num_cached_tokens
            return count

        assert not cached()
        assert cached()
        for one in (
            vectors([1]),
            vectors([2]),
            vectors([1], scale=2.0),
            vectors([1], positions=[3]),
        ):
            assert not cached(one)
            assert cached(one)
        process = llm.llm_engine.input_processor.process
        salts = [  # connectors of others may know tokens and salt alone
            process("id", prompt, SamplingParams(steering=steering)).request.cache_salt
            for steering in (None, [vectors([1])], [vectors([1])], [vectors([2])])
        ]
        assert salts[0] is None and salts[1] == salts[2] and len(set(salts)) == 3


@pytest.mark.parametrize("positions", ["prompt", "generated"])
def test_a_prompt_with_tokens_that_were_generated(positions: Any, checkpoint: Checkpoint) -> None:
    """It shares the prefixes of prompts, not those of tokens that were steered in another way."""
    prompt = random_prompts(9, [40])[0]["prompt_token_ids"]
    params = greedy(40, steering=[vectors([1], positions=positions)])
    with engine(checkpoint("qwen3_5"), mamba_block_size=16) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        text = [*prompt, *output.outputs[0].token_ids]
        other = SamplingParams(max_tokens=1, temperature=0, logprobs=1, steering=params.steering)
        hit, cold = llm.generate(
            [{"prompt_token_ids": text}, {"prompt_token_ids": text, "cache_salt": "other"}], other
        )
        assert hit.num_cached_tokens == 32
        assert hit.outputs[0].logprobs == cold.outputs[0].logprobs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SteeringVector(torch.ones(WIDTH), -1), r"steering layers=-1: has to be"),
        (lambda: SteeringVector(torch.ones(3, WIDTH), [1, 2]), r"vectors=.*each of the 2 layers"),
        (lambda: SteeringVector(torch.ones(WIDTH) * math.nan, 1), r"vectors=.*has to be finite"),
        (lambda: SteeringVector(torch.zeros(WIDTH), 1, norm_match=True), r"not zero with norm_mat"),
        (lambda: SteeringVector(torch.ones(WIDTH).int(), 1), r"has to be a tensor of floats"),
        (lambda: SteeringVector([1.0], 1), r"has to be a tensor of floats"),  # type: ignore[arg-type]
        (lambda: SteeringVector(torch.ones(1, 2, WIDTH), 1), r"positions='all': has to be 2 diff"),
        (lambda: SteeringVector(torch.ones(1, 2, WIDTH), 1, positions=[3, 3]), r"2 different posi"),
        (lambda: SteeringVector(torch.ones(1, 0, WIDTH), 1, positions=[]), r"vectors=\(1, 0, 72\)"),
        (lambda: SteeringVector(torch.ones(WIDTH), 1, scale=math.inf), r"scale=inf: has to be"),
        (lambda: SteeringVector(torch.ones(WIDTH), 1, positions="some"),  # type: ignore[arg-type]
         r"positions='some': has to be all, prompt, generated"),
        (lambda: SteeringVector(torch.ones(WIDTH), 2**70), r"layers=1180.*: has to be a layer id"),
        (lambda: SteeringVector(torch.ones(WIDTH, device="meta"), 1), r"has to be a tensor of flo"),
        (lambda: SteeringVector(torch.ones(WIDTH), 1, norm_match="no"),  # type: ignore[arg-type]
         r"norm_match='no': has to be true or false"),
        (lambda: SamplingParams(steering=["x"]), r"steering='x': has to be a SteeringVector"),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_values_that_cannot_be_used(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_the_model_fails_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with engine(checkpoint("llama")) as llm:
        for steering, message in (
            (SteeringVector(torch.ones(WIDTH), 99), "layers=99: has to be a layer id from 0 to 4"),
            (SteeringVector(torch.ones(8), 1), "has to be 72 elements, as the stream has"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(PROMPTS[0], SamplingParams(steering=[steering]))  # type: ignore[list-item]
            bad, good = llm.extract(
                [ExtractRequest(PROMPTS[0], steering=steering), PROMPTS[1]],
                layers=[1],
                on_error="yield",
            )
            assert isinstance(bad, FailedSample) and message in bad.reason
            assert not isinstance(good, FailedSample)
    zoo.make_checkpoint(tmp_path, "deepseek_v4")
    with (
        engine(tmp_path, model_impl="transformers", max_model_len=128) as llm,
        pytest.raises(ValueError, match="cannot be steered: it has several residual streams"),
    ):
        list(llm.extract(PROMPTS, layers=[1], steering=vectors([1])))


def test_the_server_engine(checkpoint: Checkpoint) -> None:
    """Through the messages between processes."""
    folder, steering = checkpoint("llama"), vectors([1, 2], norm_match=True)
    with engine(folder) as llm:
        wanted = [s.hidden_states for s in llm.extract(PROMPTS, layers=[3], steering=steering)]

    async def run() -> list[Any]:
        async_llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_model_len=256))
        try:
            return [s async for s in async_llm.extract(PROMPTS, layers=[3], steering=steering)]
        finally:
            await async_llm.shutdown()

    for sample, rows in zip(asyncio.run(run()), wanted, strict=True):
        assert torch.equal(sample.hidden_states, rows)

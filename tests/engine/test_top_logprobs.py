"""The teacher's log-probabilities beside the rows of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import engine, random_prompts
from tests.models.families import SLICE
from tests.models.oracle import reference_run
from vllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.hidden_states import ExtractRequest, FailedSample
from vllm.v1.rows.fields.logprobs import top_ids

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(93, [1, 17, 40, 97])


def expected_top(logprobs: torch.Tensor, k: int) -> torch.Tensor:
    """Ids by falling log-probability, of equal ones the lower first."""
    return logprobs.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab", [5, 307, 1000, 40_001])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_the_largest_are_found_by_groups(rows: int, vocab: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocab + k)
    for scale in (1.0, 1000.0):  # many equal values, and hardly any
        logits = (torch.randn(rows, vocab, generator=generator) * scale).round() / scale
        logits[:, vocab // 2] = -torch.inf
        k = min(k, vocab)
        assert torch.equal(top_ids(logits, k), expected_top(logits, k))
    equal = torch.zeros(rows, vocab)
    equal[:, ::2] = -0.0
    assert torch.equal(top_ids(equal, k), torch.arange(k).expand(rows, -1))


@pytest.mark.parametrize("family", SLICE)
def test_they_are_those_of_transformers(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    with engine(folder, max_num_batched_tokens=64) as llm:
        requests = [
            ExtractRequest(prompt, layers=[1], top_logprobs=7, logprob_temperature=temperature)
            for prompt in PROMPTS
            for temperature in (1.0, 2.5)
        ]
        samples = list(llm.extract(requests, ordered=True))
    for prompt, one, two in zip(PROMPTS, samples[::2], samples[1::2], strict=True):
        ids = torch.tensor(prompt["prompt_token_ids"])
        logits = reference_run(folder, ids.tolist()).logits.float()
        check(one, logits.log_softmax(-1), ids)
        check(two, (logits / 2.5).log_softmax(-1), ids)


def check(sample: Any, logprobs: torch.Tensor, ids: torch.Tensor) -> None:
    assert sample.top_token_ids.dtype is torch.int32 and sample.top_logprobs.dtype is torch.float32
    top = logprobs.gather(1, expected_top(logprobs, 7))
    torch.testing.assert_close(sample.top_logprobs, top, rtol=1e-5, atol=1e-4)
    own = logprobs.gather(1, sample.top_token_ids.long())  # equal up to rounding at near ties
    torch.testing.assert_close(own, top, rtol=1e-5, atol=1e-4)
    following = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(sample.token_logprobs[:-1], following, rtol=1e-5, atol=1e-4)
    assert sample.token_logprobs[-1].isnan()


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(impl: str, dtype: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_5")
    asked = {"layers": [0], "top_logprobs": 9}

    def requests(positions: Any) -> list[ExtractRequest]:
        return [ExtractRequest(prompt, positions=positions, **asked) for prompt in PROMPTS]

    options: dict[str, Any] = {"model_impl": impl, "dtype": dtype}
    with engine(folder, enable_prefix_caching=False, **options) as llm:
        alone = [next(iter(llm.extract(one))) for one in requests("all")]
    with engine(folder, max_num_batched_tokens=64, **options) as llm:
        for _ in range(2):
            together = list(llm.extract(requests("all"), ordered=True))
            some = list(llm.extract(requests("every:3"), ordered=True))
            for whole, same, part in zip(alone, together, some, strict=True):
                for name in ("top_token_ids", "top_logprobs", "token_logprobs"):
                    every = whole.tensors[name]
                    if impl == "auto":
                        assert torch.equal(same.tensors[name].nan_to_num(9), every.nan_to_num(9))
                        kept = every[part.positions].nan_to_num(9)
                        assert torch.equal(part.tensors[name].nan_to_num(9), kept)


def test_beside_norms_in_fp8_and_other_requests(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    with engine(folder) as llm:
        numbers: Any = {"top_logprobs": np.int64(3), "logprob_temperature": np.float32(1)}
        (own,) = llm.extract(PROMPTS[2:3], layers=2, positions="last", **numbers)
        plain = list(llm.extract(PROMPTS, layers=[2, "norm"], dtype="fp8", ordered=True))
        requests = [
            ExtractRequest(prompt, top_logprobs=count) for prompt in PROMPTS for count in (0, 3, 12)
        ]
        samples = list(llm.extract(requests, layers=[2, "norm"], dtype="fp8", ordered=True))
    assert torch.equal(own.top_logprobs, samples[7].top_logprobs[-1:])
    for index, whole in enumerate(plain):
        none, three, twelve = samples[3 * index : 3 * index + 3]
        assert none.top_logprobs is None
        assert torch.equal(three.top_token_ids, twelve.top_token_ids[:, :3])
        assert torch.equal(three.top_logprobs, twelve.top_logprobs[:, :3])
        for one in (none, three, twelve):
            assert torch.equal(one.rows(), whole.rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": -2}, "top_logprobs=-2: has to be a whole number from 0 to 1024"),
        ({"top_logprobs": 2000}, "from 0 to 1024"),
        ({"top_logprobs": 400}, "top_logprobs=400: the vocabulary has 307 tokens"),
        ({"top_logprobs": 3, "logprob_temperature": 0.0}, "logprob_temperature=0.0"),
        ({"top_logprobs": 3, "logprob_temperature": float("nan")}, "logprob_temperature=nan"),
        ({"logprob_temperature": 2.0}, "=2.0: it has no effect without top_logprobs"),
    ],
)
def test_bad_requests_fail_alone(
    options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with engine(checkpoint("llama")) as llm:
        requests = [ExtractRequest(PROMPTS[1], layers=1, **options), ExtractRequest(PROMPTS[0], 1)]
        bad, good = llm.extract(requests, on_error="yield")
        assert isinstance(bad, FailedSample)
        assert message in bad.reason
        assert not isinstance(good, FailedSample)


def test_another_process_hands_them_over(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    asked: dict[str, Any] = {"layers": ["norm", 1], "top_logprobs": 5, "logprob_temperature": 1.5}
    with engine(folder) as llm:
        expected = list(llm.extract(PROMPTS, positions="every:2", **asked))

    async def extract() -> list[Any]:
        args = AsyncEngineArgs(str(folder), max_model_len=256)
        other = AsyncLLM.from_engine_args(args)
        try:
            return [s async for s in other.extract(PROMPTS, positions="every:2", **asked)]
        finally:
            await other.shutdown()

    for sample, right in zip(asyncio.run(extract()), expected, strict=True):
        assert sample.layer_ids == ("norm", 1)
        assert sample.tensors.keys() == right.tensors.keys()
        for name, tensor in right.tensors.items():
            assert torch.equal(sample.tensors[name].nan_to_num(9), tensor.nan_to_num(9))


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_of_the_whole_vocabulary(impl: str, checkpoint: Checkpoint) -> None:
    """Against transformers, beside other requests, and with generated tokens."""
    folder = checkpoint("gemma2")  # it caps its logits
    requests = [
        ExtractRequest(prompt, layers=[1], top_logprobs=count, logprob_temperature=1.5)
        for prompt in PROMPTS
        for count in (-1, 3)
    ]
    with engine(folder, model_impl=impl, max_num_batched_tokens=48) as llm:
        samples = list(llm.extract(requests))
        (alone,) = llm.extract(requests[4], positions=[3, 0])
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        (text,) = llm.extract(requests[2], sampling_params=params)
        (whole,) = llm.extract(
            [text.token_ids.tolist()], 1, top_logprobs=-1, logprob_temperature=1.5
        )
    for prompt, full, top in zip(PROMPTS, samples[::2], samples[1::2], strict=True):
        ids = torch.tensor(prompt["prompt_token_ids"])
        logits = reference_run(folder, ids.tolist()).logits.float() / 1.5
        assert full.logprobs is not None and full.logprobs.dtype is torch.float32
        assert full.top_token_ids is None and top.logprobs is None
        torch.testing.assert_close(full.logprobs, logits.log_softmax(-1), rtol=1e-5, atol=1e-4)
        following = full.logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        assert torch.equal(full.token_logprobs[:-1], following)
        assert full.token_logprobs[-1].isnan()
        torch.testing.assert_close(
            full.logprobs.gather(1, top.top_token_ids.long()), top.top_logprobs
        )
    assert samples[4].logprobs is not None
    if impl == "auto":
        assert torch.equal(alone.logprobs, samples[4].logprobs[[3, 0]])
        assert torch.equal(text.logprobs, whole.logprobs)

"""Every field of a row in every kind of run, over all families, against plain transformers.

    python -m tests.models.kinds_of_fields [FAMILY ...]     # all without; prints a table

Requests ask for everything at once: the state after the final norm, every hook point of the
model, log-probabilities. Every second one is steered too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from tests.engine.harness import core_of, failing_allocations, greedy
from tests.models.kinds_of_run import MOST_ERROR, NEW_TOKENS, SHARED, Family, main
from tests.models.oracle import ModuleOracle, place_of, relative_error, steered_run
from vllm import LLM, SteeringVector
from vllm.hidden_states import ExtractRequest, HiddenStatesSample
from vllm.v1.core.kv_cache_utils import blocks_per_request
from vllm.v1.rows.fields import LOSS_MASK

JOINED = "all requests of a step as one sequence"
"""The way in which modules of transformers keep bits."""
WITHOUT_NORM = {"openai_gpt"}
TOP = 5
MOST_FAILURES = 20
"""Allocations to fail at most: with one in each step for ever, no request would end."""


class Fields:
    """Requests of one family for everything, and the samples that they got first."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.layers: list[Any] = [2] if family.name in WITHOUT_NORM else ["norm", 2]
        with family.engine() as llm:
            runner = core_of(llm).executor.worker.model_runner
            self.width = llm.llm_engine.model_config.get_row_size()
            self.points = runner.hook_points.points
            self.hooks = [point.names[0] for point in self.points]
            is_module = family.model_impl == "transformers"
            self.has_bits = not is_module or runner.model.way == JOINED
            self.samples = self.extract(llm)
        self.chunk = 13 if len(self.hooks) < 50 else 29
        """Tokens of a short step: an odd number that has room for all columns of a row."""

    @cached_property
    def steering(self) -> list[SteeringVector]:
        drawn = torch.randn(3, self.width, generator=torch.Generator().manual_seed(5))
        everywhere = SteeringVector(drawn[:2], [0, 2], scale=0.7)
        return [everywhere, SteeringVector(drawn[2:], [1], positions=[0, 4, 20], norm_match=True)]

    def spread(self, prompt: list[int], place: tuple[int, str], expected: torch.Tensor) -> float:
        """Twice the error of transformers' own float32 at a module, and at least the usual limit.

        A norm that divides by little leaves float32 itself further from float64 than the limit.
        """
        exact = ModuleOracle(self.family.checkpoint)
        exact.model.double()
        true = exact.run(prompt, [place])[place][1]
        return max(MOST_ERROR, 2 * relative_error(expected, true))

    def requests(self, prompts: Sequence[list[int]]) -> list[ExtractRequest]:
        """Each prompt plain and steered."""
        asked: dict[str, Any] = {"layers": self.layers, "hooks": self.hooks, "top_logprobs": TOP}
        return [
            ExtractRequest({"prompt_token_ids": prompt}, steering=steering, **asked)
            for prompt in prompts
            for steering in (None, self.steering)
        ]

    def extract(self, llm: LLM, **options: Any) -> list[HiddenStatesSample]:
        return list(llm.extract(self.requests(self.family.prompts), **options))

    def check_bits(self, samples: list[HiddenStatesSample]) -> None:
        """Everything that requests asked for is what they got first."""
        for sample, first in zip(samples, self.samples, strict=True):
            self.check_same(sample, first)

    def check_same(self, sample: HiddenStatesSample, first: HiddenStatesSample) -> None:
        """All tensors have the same bits; where these are not promised, values are near.

        In float32 every value is. A rounding to bfloat16 may choose another expert for a token,
        whose row is another one from there on: then the middle row is near.
        """
        if self.has_bits:
            check_same(sample, first)
            return
        assert sample.tensors.keys() - {LOSS_MASK} == first.tensors.keys()
        is_rounded = first.hidden_states.dtype is not torch.float32
        for name, tensor in first.tensors.items():
            if tensor.dtype.is_floating_point:
                own, other = (t.float().nan_to_num(0) for t in (sample.tensors[name], tensor))
                error = middle_error(own, other) if is_rounded else relative_error(own, other)
                most = 0.1 if is_rounded else MOST_ERROR
                assert error <= most, f"{name}: {error:.0e} of the rms away"


def middle_error(own: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of the middle row over the rms of what is expected, of [rows, ...]."""
    assert own.shape == expected.shape, f"{tuple(own.shape)}, not {tuple(expected.shape)}"
    assert own.isfinite().all(), "a value is not finite"
    apart = (
        (own - expected).square().flatten(1) if own.dim() > 1 else (own - expected)[:, None] ** 2
    )
    return float(apart.mean(1).sqrt().median() / expected.square().mean().sqrt())


def check_same(sample: HiddenStatesSample, first: HiddenStatesSample) -> None:
    assert sample.tensors.keys() - {LOSS_MASK} == first.tensors.keys()
    for name, tensor in first.tensors.items():
        same = torch.equal(sample.tensors[name].nan_to_num(9), tensor.nan_to_num(9))
        assert same, f"{name}: other bits"


def plain(fields: Fields) -> None:
    oracle = ModuleOracle(fields.family.checkpoint)
    paths = [p for point in fields.points for p in point.names if place_of(p) in oracle.modules]
    modules = {path: place for path in paths if (place := place_of(path))}
    assert len(modules) >= 4, f"{len(modules)} hook points have a module"
    prompts, references = fields.family.prompts, fields.family.expected
    for prompt, reference, sample in zip(prompts, references, fields.samples[::2], strict=True):
        if "norm" in fields.layers:
            error = relative_error(sample.hidden_states[:, 0], reference.head_input)
            assert error <= MOST_ERROR, f"norm: {error:.0e} of the rms away"
        check_logprobs(sample, reference.logits.float(), torch.tensor(prompt))
        seen = oracle.run(prompt, modules.values())
        for point in fields.points:
            values = sample.activations[point.names[0]]
            for path in modules.keys() & set(point.names):
                expected = seen[modules[path]][1]
                error = relative_error(values, expected)
                if error > MOST_ERROR:
                    error /= fields.spread(prompt, modules[path], expected) / MOST_ERROR
                assert error <= MOST_ERROR, f"{path}: {error:.0e} of the rms away"


def check_logprobs(sample: HiddenStatesSample, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Log-probabilities are right to 1e-4, and of logits above 1 to 1e-4 of their rms."""
    logprobs = logits.log_softmax(-1)
    atol = MOST_ERROR * max(1.0, float(logits.square().mean().sqrt()))
    ours, own_ids, following = sample.top_logprobs, sample.top_token_ids, sample.token_logprobs
    assert ours is not None and own_ids is not None and following is not None
    top = logprobs.topk(TOP).values
    torch.testing.assert_close(ours, top, rtol=1e-5, atol=atol)
    own = logprobs.gather(1, own_ids.long())
    torch.testing.assert_close(own, top, rtol=1e-5, atol=atol)
    expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(following[:-1], expected, rtol=1e-5, atol=atol)
    assert following[-1].isnan()


def steered(fields: Fields) -> None:
    folder = fields.family.checkpoint
    for prompt, sample in zip(fields.family.prompts, fields.samples[1::2], strict=True):
        *streams, logits = steered_run(folder, prompt, fields.steering, len(prompt))
        error = relative_error(sample.hidden_states[:, -1], streams[2])
        assert error <= MOST_ERROR, f"layer 2: {error:.0e} of the rms away"
        check_logprobs(sample, logits.float(), torch.tensor(prompt))


def alone(fields: Fields) -> None:
    with fields.family.engine(enable_prefix_caching=False) as llm:
        requests = fields.requests(fields.family.prompts)
        fields.check_bits([next(iter(llm.extract(request))) for request in requests])


def chunking(fields: Fields) -> None:
    with fields.family.engine(max_num_batched_tokens=fields.chunk, max_num_seqs=3) as llm:
        fields.check_bits(fields.extract(llm))


def prefix(fields: Fields) -> None:
    """A prompt finds what generation, and extraction of another one, left."""
    with fields.family.engine() as llm:
        llm.generate(fields.family.asked(0), greedy(), use_tqdm=False)
        (hit,) = llm.generate(fields.family.asked(3), greedy(), use_tqdm=False)
        is_module = fields.family.model_impl == "transformers"  # some keep nothing
        assert is_module or hit.num_cached_tokens == SHARED, (
            f"{hit.num_cached_tokens} tokens were found"
        )
        for _ in range(2):
            fields.check_bits(fields.extract(llm))


def preemption(fields: Fields) -> None:
    with fields.family.engine(max_num_batched_tokens=48) as llm:
        with failing_allocations(llm, MOST_FAILURES):
            check_generated(fields, llm)
        assert core_of(llm).scheduler._totals.num_preemptions, "nobody was preempted"


def generation(fields: Fields) -> None:
    with fields.family.engine() as llm:
        check_generated(fields, llm)


def check_generated(fields: Fields, llm: LLM) -> None:
    """Rows of prompt and output are those of one prefill of the whole text."""
    samples = fields.extract(llm, sampling_params=greedy(NEW_TOKENS))
    texts = [sample.token_ids.tolist() for sample in samples]
    for i, (text, sample) in enumerate(zip(texts, samples, strict=True)):
        prompt = fields.family.prompts[i // 2]
        assert len(text) == len(prompt) + NEW_TOKENS and text[: len(prompt)] == prompt
        (whole,) = llm.extract(fields.requests([text])[i % 2])
        fields.check_same(sample, whole)


def tiny_pool(fields: Fields) -> None:
    with fields.family.engine() as llm:
        core = core_of(llm)
        fewest = 1 + blocks_per_request(core.vllm_config, core.kv_cache_config.kv_cache_groups)
    with fields.family.engine(num_gpu_blocks_override=fewest) as llm:
        check_generated(fields, llm)
        fields.check_bits(fields.extract(llm))


def bfloat16(fields: Fields) -> None:
    """The middle row is near the float32 one: a rounding may choose another expert for a few."""
    with fields.family.engine(dtype="bfloat16") as llm:
        rounded = fields.extract(llm)
    with fields.family.engine(dtype="bfloat16", max_num_batched_tokens=fields.chunk) as llm:
        chunks = fields.extract(llm)
    for sample, again, first in zip(rounded, chunks, fields.samples, strict=True):
        fields.check_same(sample, again)
        distance = (sample.hidden_states.float() - first.hidden_states).square().mean(-1).sqrt()
        rms = first.hidden_states.square().mean((0, 2)).sqrt()
        worst = float((distance.median(0).values / rms).max())
        assert worst < 0.3, f"the middle row is {worst:.2g} of the rms away"


def fp8(fields: Fields) -> None:
    """Rows in FP8 are near; what is not a hidden state keeps its bits."""
    with fields.family.engine() as llm:
        samples = fields.extract(llm, dtype="fp8")
    for sample, first in zip(samples, fields.samples, strict=True):
        largest = first.hidden_states.abs().amax(-1, keepdim=True)
        apart = (sample.rows() - first.hidden_states).abs()
        assert bool((apart <= largest / 16).all()), "FP8 is more than a rounding away"
        for name in first.other_tensors if fields.has_bits else ():
            expected = first.tensors[name].nan_to_num(9)
            assert torch.equal(sample.tensors[name].nan_to_num(9), expected), f"{name}: other bits"


FIELD_KINDS: dict[str, Callable[[Fields], None]] = {
    "plain": plain,
    "steered": steered,
    "alone": alone,
    "chunking": chunking,
    "prefix": prefix,
    "preemption": preemption,
    "generation": generation,
    "tiny pool": tiny_pool,
    "bfloat16": bfloat16,
    "fp8": fp8,
}


if __name__ == "__main__":
    main(FIELD_KINDS, Fields)

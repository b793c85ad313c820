"""``extract(sampling_params=...)``: rows of prompt and output are those of the whole text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import (
    check_nothing_is_left,
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
)
from tests.engine.test_longrope import LIMIT, model_and_engine
from tests.grids import at_night
from tests.models.oracle import reference_run, relative_error
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.exceptions import FailureKind
from vllm.hidden_states import ExtractRequest, FailedSample, HiddenStatesError, HiddenStatesSample
from vllm.v1.engine import GenerationSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.row_extractor import RowsOfStep

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(41, [1, 17, 40, 97, 16])
SAMPLED = SamplingParams(max_tokens=19, temperature=0.9, top_p=0.95, seed=5, n=2, ignore_eos=True)
LAYERS: list[Any] = ["norm", 0, 2]
FAMILIES = [
    *("llama", "gemma3", "qwen3_moe", "qwen3_5", "mamba2", "deepseek_v3"),
    *(at_night(name) for name in ("mistral", "gpt_oss", "qwen3_next", "minicpm3", "falcon_h1")),
]
WAYS = [*((family, "auto") for family in ("llama", "qwen3_5")), ("llama", "transformers")]


def extract(llm: LLM, *arguments: Any, **options: Any) -> list[HiddenStatesSample]:
    found = list(llm.extract(*arguments, **options))
    assert all(isinstance(sample, HiddenStatesSample) for sample in found)
    return found


def assert_as_prefill(llm: LLM, samples: list[HiddenStatesSample], **options: Any) -> None:
    """Every tensor of each sample has the bits that its whole text as a prompt gives."""
    texts = [sample.token_ids.tolist() for sample in samples]
    for sample, whole in zip(samples, extract(llm, texts, **options), strict=True):
        assert sample.output is not None
        assert sample.num_generated_tokens == len(sample.output.token_ids) > 0
        places = sample.positions
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == (places >= sample.num_prompt_tokens).tolist()
        assert sample.tensors.keys() == {*whole.tensors, "loss_mask"}
        for name, tensor in whole.tensors.items():
            same = torch.equal(sample.tensors[name].nan_to_num(9), tensor[places].nan_to_num(9))
            assert same, (name, sample)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_sampled_texts(family: str, checkpoint: Checkpoint) -> None:
    """Against transformers, and with the bits of a prefill."""
    folder = checkpoint(family)
    options: dict[str, Any] = {"layers": LAYERS, "top_logprobs": 5}
    with engine(folder, max_num_batched_tokens=64) as llm:
        greedy_ones = extract(llm, PROMPTS, sampling_params=greedy(11), **options)
        assert_as_prefill(llm, greedy_ones, **options)
        samples = extract(llm, PROMPTS, sampling_params=SAMPLED, **options)
        assert [(s.index, s.output and s.output.index) for s in samples] == [
            (prompt, choice) for prompt in range(len(PROMPTS)) for choice in range(2)
        ]
        assert_as_prefill(llm, samples, **options)
        outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    texts = [list(one.token_ids) for output in outputs for one in output.outputs]
    assert [s.token_ids[s.num_prompt_tokens :].tolist() for s in samples] == texts
    for sample in greedy_ones:
        reference = reference_run(folder, sample.token_ids.tolist())
        assert sample.positions.tolist() == list(range(len(sample.token_ids)))
        rows = sample.hidden_states
        assert relative_error(rows[:, 0], reference.head_input) <= 1e-4
        assert relative_error(rows[:, 2], reference.streams[2]) <= 1e-4
        logits = reference.logits[sample.num_prompt_tokens - 1 : -1]
        chosen = logits.gather(1, sample.token_ids[sample.num_prompt_tokens :, None])[:, 0]
        assert (chosen >= logits.amax(-1) - 1e-4).all()
        logprobs = reference.logits.float().log_softmax(-1)[:-1]
        following = logprobs.gather(1, sample.token_ids[1:, None])[:, 0]
        assert sample.token_logprobs is not None
        torch.testing.assert_close(sample.token_logprobs[:-1], following, rtol=1e-4, atol=1e-4)
        assert sample.token_logprobs[-1].isnan()


@pytest.mark.parametrize(("family", "impl"), WAYS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_chunks_preemption_and_steps_ahead(
    family: str, impl: str, async_scheduling: bool, checkpoint: Checkpoint
) -> None:
    """With a tiny pool, and every choice of positions, the rows are those of one prefill."""
    folder = checkpoint(family)
    asked: dict[str, Any] = {"layers": LAYERS, "top_logprobs": 3}
    prompts = random_prompts(42, [20, 33, 5, 61, 2, 47, 18, 30])
    choices: list[Any] = ["all", "last", "every:3", "generated", "mask", [24, 0, 19, 0], [-2, 1]]
    requests = [
        ExtractRequest(prompt, positions=choice, mask=mask_of(prompt), **asked)
        for prompt in prompts
        for choice in choices
    ]
    params = SamplingParams(max_tokens=25, temperature=0.7, seed=11, stop_token_ids=[3, 77, 150])
    blocks = {"llama": 26, "qwen3_5": 34}[family]
    options: dict[str, Any] = {"async_scheduling": async_scheduling, "model_impl": impl}
    options |= {"max_num_batched_tokens": 48, "max_model_len": 96, "max_num_seqs": 8}
    with engine(folder, num_gpu_blocks_override=blocks, **options) as llm:
        samples = extract(llm, requests, sampling_params=params)
        assert core_of(llm).stats().num_preemptions > 0
    with engine(folder, **options) as llm:
        texts = [sample.token_ids.tolist() for sample in samples]
        wholes = extract(llm, texts, **asked)
    ends = set()
    for sample, request, whole in zip(samples, requests, wholes, strict=True):
        num_tokens, num_prompt = len(sample.token_ids), sample.num_prompt_tokens
        assert sample.output is not None
        ends.add(sample.output.finish_reason)
        mask = [*mask_of(request.prompt), *[1] * (num_tokens - num_prompt)]
        expected = {
            "all": range(num_tokens),
            "last": [num_tokens - 1],
            "every:3": range(0, num_tokens, 3),
            "generated": range(num_prompt, num_tokens),
            "mask": [place for place in range(num_tokens) if mask[place]],
            "[24, 0, 19, 0]": [place for place in (24, 0, 19, 0) if place < num_tokens],
            "[-2, 1]": [num_tokens - 2, 1],
        }[str(request.positions)]
        assert sample.positions.tolist() == list(expected)
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == [bool(mask[place]) for place in expected]
        for name, tensor in whole.tensors.items():
            own, right = sample.tensors[name], tensor[sample.positions]
            assert torch.equal(own.nan_to_num(9), right.nan_to_num(9)), (name, request.positions)
    assert ends == {"length", "stop"}


def mask_of(prompt: Any) -> list[int]:
    return [int(token % 3 == 0) for token in prompt["prompt_token_ids"]]


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint("llama"), max_num_batched_tokens=48) as llm:
        yield llm


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_and_stop_tokens(include: bool, llama: LLM) -> None:
    """The text, the reason and the tokens are those of ``generate``; rows end with them."""
    first = [
        one.outputs[0].token_ids for one in llama.generate(PROMPTS, greedy(20), use_tqdm=False)
    ]
    tokenizer: Any = llama.get_tokenizer()
    letters = [tokenizer.decode([token]) for ids in first for token in ids[6:12]]
    stops = sorted({text for text in letters if len(text) == 1 and text != "\ufffd"})
    for own in ({"stop": stops}, {"stop_token_ids": [ids[7] for ids in first]}, {}):
        params = greedy(20, logprobs=2, include_stop_str_in_output=include, **own)
        outputs = llama.generate(PROMPTS, params, use_tqdm=False)
        samples = extract(llama, PROMPTS, LAYERS, sampling_params=params)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert ("stop" in reasons) == bool(own)
        for output, sample in zip(outputs, samples, strict=True):
            assert sample.output == output.outputs[0]
            assert len(sample.hidden_states) == len(sample.token_ids)
        assert_as_prefill(llama, samples, layers=LAYERS)


def test_prefixes_pooling_and_stored_dtypes(llama: LLM) -> None:
    shared = random_prompts(43, [64])[0]["prompt_token_ids"]
    prompts = [shared + tail["prompt_token_ids"] for tail in random_prompts(44, [3, 20, 9])]
    llama.generate(prompts[:1], greedy(1), use_tqdm=False)
    hits = core_of(llama).stats().prefix_cache_hits
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
    some: dict[str, Any] = {"layers": LAYERS, "sampling_params": params}
    own = extract(llama, prompts, positions="generated", **some)
    assert core_of(llama).stats().prefix_cache_hits >= hits + 3 * 64
    assert_as_prefill(llama, own, layers=LAYERS)
    for sample, whole in zip(own, extract(llama, prompts, **some), strict=True):
        assert torch.equal(sample.token_ids, whole.token_ids)
        assert torch.equal(sample.hidden_states, whole.hidden_states[-9:])
    for sample, mean in zip(
        own, extract(llama, prompts, positions="generated", pooling="mean", **some), strict=True
    ):
        assert mean.loss_mask is None and mean.positions.tolist() == [len(mean.token_ids) - 1]
        expected = sample.hidden_states.mean(0, keepdim=True)
        torch.testing.assert_close(mean.hidden_states, expected)
    for sample, last in zip(own, extract(llama, prompts, pooling="last", **some), strict=True):
        assert torch.equal(last.hidden_states, sample.hidden_states[-1:])
    for narrow in extract(llama, prompts, dtype="fp8", **some):
        (whole,) = extract(llama, narrow.token_ids.tolist(), layers=LAYERS, dtype="fp8")
        assert narrow.scales is not None and whole.scales is not None
        assert torch.equal(narrow.rows(), whole.rows())
        assert torch.equal(narrow.scales, whole.scales)
    (none,) = extract(llama, prompts[0], positions=[], **some)
    assert none.hidden_states.shape == (0, 3, 72) and none.num_generated_tokens == 9
    (late,) = extract(llama, prompts[0], positions=[70, 75, 71], pooling="mean", **some)
    at_once = greedy(12, stop_token_ids=list(range(300)))
    (beyond,) = extract(llama, ExtractRequest([5], positions=[9], sampling_params=at_once), 1)
    assert late.positions.tolist() == [71] or late.positions.tolist() == [75]
    assert len(beyond.hidden_states) == 0 and beyond.num_generated_tokens == 1
    slices = extract(llama, [[5, 6]], positions=slice(1, None, 2), layers=1, sampling_params=params)
    assert slices[0].positions.tolist() == [1, 3, 5, 7, 9]


def test_requests_of_all_kinds_together(llama: LLM) -> None:
    """Some generate, some do not; samples come in the order of the prompts."""
    rng = random.Random(6)
    requests, expected = [], []
    for number, prompt in enumerate(random_prompts(45, [rng.randrange(1, 90) for _ in range(30)])):
        n = rng.choice([0, 1, 3])
        params = SamplingParams(n=n, max_tokens=rng.randrange(1, 30), seed=number) if n else None
        layers: Any = rng.choice([[1], [3, 0], "norm"])
        requests.append(ExtractRequest(prompt, layers=layers, sampling_params=params))
        expected += [number] * max(n, 1)
    samples = extract(llama, requests, max_in_flight=7)
    assert [sample.index for sample in samples] == expected
    unordered = extract(llama, requests, ordered=False)
    assert sorted(sample.index for sample in unordered) == expected
    for sample in samples:
        (whole,) = extract(llama, sample.token_ids.tolist(), sample.layer_ids)
        assert torch.equal(sample.hidden_states, whole.hidden_states)
        assert (sample.output is None) == (requests[sample.index].sampling_params is None)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_expert_traces_go_on_over_the_output(family: str, checkpoint: Checkpoint) -> None:
    with engine(checkpoint(family), expert_trace=True, max_num_batched_tokens=32) as llm:
        samples = extract(llm, PROMPTS, [2], sampling_params=SAMPLED)
        assert all(sample.expert_ids is not None for sample in samples)
        assert_as_prefill(llm, samples, layers=[2])


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("positions", ["all", "every:2"])
def test_a_text_that_becomes_long_has_rows_of_long_ones(
    positions: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """Also one that exceeds the limit with its last token."""
    prompts = random_prompts(4, [LIMIT - 4, 60, 7, LIMIT, LIMIT - 11])
    options = {"max_num_batched_tokens": 40, "async_scheduling": async_scheduling}
    with model_and_engine("vllm", tmp_path, **options) as (_, llm):
        samples = extract(llm, prompts, [3, 0], positions, sampling_params=greedy(12))
        assert_as_prefill(llm, samples, layers=[3, 0])


def test_conversations_are_answered(llama: LLM, checkpoint: Checkpoint) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    messages = [{"role": "user", "content": "Three?"}]
    with engine(checkpoint("llama"), chat_template=template) as llm:
        (answered,) = extract(llm, [messages], 1, sampling_params=greedy(8))
        (output,) = llm.chat([messages], greedy(8), use_tqdm=False)
    prompt = answered.token_ids[: answered.num_prompt_tokens].tolist()
    assert prompt == output.prompt_token_ids
    assert answered.output is not None and answered.output.text == output.outputs[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": [400]}, "positions holds 400, but prompt and output have at most 18 tokens"),
        ({"positions": "odd"}, "positions='odd': use all, last, mask, generated, or every:K"),
        ({"positions": [0.5]}, "whole numbers"),
        ({"mask": [1, 0]}, "mask: has to have a value for each of 17 tokens"),
        ({"layers": [9]}, "'9' does not exist"),
        ({"sampling_params": SamplingParams(max_tokens=0)}, "max_tokens=0: generates nothing"),
        ({"sampling_params": SamplingParams(prompt_logprobs=2)}, "prompt_logprobs=2: extract()"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params of type dict"),
        ({"sampling_params": SamplingParams(stop_token_ids=[400])}, "stop_token_ids: token id 400"),
    ],
)
def test_bad_requests_fail_alone(options: dict[str, Any], message: str, llama: LLM) -> None:
    options = {"layers": 1, "sampling_params": greedy(1), **options}
    bad = ExtractRequest(PROMPTS[1], **options)
    failed, good = llama.extract([bad, ExtractRequest(PROMPTS[0], 1)], on_error="yield")
    assert isinstance(failed, FailedSample)
    assert message in failed.reason
    assert isinstance(good, HiddenStatesSample)
    with pytest.raises(ValueError, match="generated: nothing is generated; give sampling_params"):
        list(llama.extract(PROMPTS[:1], 1, "generated"))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_bad_rows_fail_their_text_alone(
    async_scheduling: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The embedding of a token is not finite: texts fail whose prompt or output has it."""
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].nan_to_num(0.1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts: list[Any] = [[1, 2, 3], [4, 7, 9], [5, 6, 8], [11, 12]]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "async_scheduling": async_scheduling}
    with engine(tmp_path, **options) as llm:
        params = [greedy(6), greedy(6), greedy(6, allowed_token_ids=[7]), greedy(6)]
        requests = [
            ExtractRequest(prompt, [0, 2], sampling_params=one)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        items = list(llm.extract(requests, on_error="yield"))
        failed = [isinstance(item, FailedSample) for item in items]
        assert failed == [False, True, True, False]
        kinds = [item.failure.kind for item in items if isinstance(item, FailedSample)]
        assert kinds == [FailureKind.ROWS_NOT_FINITE] * 2
        with pytest.raises(HiddenStatesError, match="prompt 1: "):
            list(llm.extract(requests))
        assert_as_prefill(llm, [items[0], items[3]], layers=[0, 2])  # type: ignore[list-item]
        (text,) = llm.extract(prompts[0], 1, sampling_params=greedy(2), positions=[])
        assert text.num_generated_tokens == 2


def test_a_failed_step_keeps_the_rows_of_others(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that have ended wait for a step to bring their rows: it may fail in any place."""
    params = [greedy(count) for count in (3, 4, 5, 20, 6)]
    requests = [
        ExtractRequest(prompt, 1, sampling_params=one)
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    expected = extract(llama, requests)
    where: list[tuple[type, str]] = [(GPUModelRunner, "forward"), (RowsOfStep, "read")]
    where.append((GPUModelRunner, "execute_model"))
    for owner, name in where:
        for number in range(2, 9):
            calls = iter(range(100))
            original = getattr(owner, name)

            def broken(
                *args: Any, own: Any = original, at: int = number, count: Any = calls
            ) -> Any:
                if next(count) == at:
                    raise RuntimeError("broken")
                return own(*args)

            with monkeypatch.context() as patched:
                patched.setattr(owner, name, broken)
                items = list(llama.extract(requests, on_error="yield"))
            assert any(isinstance(item, FailedSample) for item in items)
            for item, right in zip(items, expected, strict=True):
                if isinstance(item, HiddenStatesSample):
                    assert torch.equal(item.hidden_states, right.hidden_states)
            check_nothing_is_left(llama)
    again = extract(llama, requests)
    assert all(torch.equal(a.hidden_states, b.hidden_states) for a, b in zip(again, expected))


def test_dropped_calls_and_interrupts_leave_nothing(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = extract(llama, PROMPTS, 1, sampling_params=SAMPLED)
    for taken in (0, 1, 3):
        samples = llama.extract(PROMPTS, 1, sampling_params=SAMPLED)
        assert len([next(samples) for _ in range(taken)]) == taken
        samples.close()  # type: ignore[attr-defined]
        check_nothing_is_left(llama)
    for number in (1, 5, 15, 20):
        calls = iter(range(100))
        forward = GPUModelRunner.forward

        def interrupted(
            *args: Any, at: int = number, count: Any = calls, own: Any = forward
        ) -> Any:
            if next(count) == at:
                raise KeyboardInterrupt
            return own(*args)

        with monkeypatch.context() as patched:
            patched.setattr(GPUModelRunner, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(llama.extract(PROMPTS, 1, sampling_params=SAMPLED))
        check_nothing_is_left(llama)
    again = extract(llama, PROMPTS, 1, sampling_params=SAMPLED)
    for one, right in zip(again, expected, strict=True):
        assert torch.equal(one.hidden_states, right.hidden_states)


@pytest.mark.parametrize("async_scheduling", [at_night(False), True])
def test_another_process_hands_them_over(async_scheduling: bool, checkpoint: Checkpoint) -> None:
    """With stop strings, which are found beside the engine; an abort in the middle is harmless."""
    folder = checkpoint("qwen3_5")
    asked: dict[str, Any] = {"layers": ["norm", 1], "top_logprobs": 3}
    with engine(folder) as llm:
        texts = [one.outputs[0].text for one in llm.generate(PROMPTS, greedy(20), use_tqdm=False)]
        stops = [c for text in texts for c in text[8:11] if c != "\ufffd"]
        sets = [SAMPLED, greedy(24, stop=stops), greedy(5)]
        expected = [extract(llm, PROMPTS, sampling_params=params, **asked) for params in sets]
    assert {s.output.finish_reason for s in expected[1] if s.output} >= {"stop"}

    async def check() -> None:
        args = AsyncEngineArgs(str(folder), max_model_len=512, async_scheduling=async_scheduling)
        other = AsyncLLM.from_engine_args(args)
        try:
            dropped = other.extract(PROMPTS * 20, sampling_params=SAMPLED, **asked)
            await anext(dropped)
            await dropped.aclose()
            for params, right in zip(sets, expected, strict=True):
                samples = [s async for s in other.extract(PROMPTS, sampling_params=params, **asked)]
                for sample, one in zip(samples, right, strict=True):
                    assert isinstance(sample, HiddenStatesSample)
                    assert torch.equal(sample.token_ids, one.token_ids)
                    assert sample.output == one.output
                    assert sample.tensors.keys() == one.tensors.keys()
                    for name, tensor in one.tensors.items():
                        own = sample.tensors[name]
                        assert torch.equal(own.nan_to_num(9), tensor.nan_to_num(9))
        finally:
            await other.shutdown()

    asyncio.run(asyncio.wait_for(check(), 120))


def test_an_engine_that_writes_files_refuses(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with engine(checkpoint("llama"), **extraction_config([1], tmp_path)) as llm:
        (failed,) = llm.extract([[1]], 1, sampling_params=greedy(2), on_error="yield")
    assert isinstance(failed, FailedSample) and "speculative_config" in failed.reason


@pytest.mark.parametrize("every", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("num_prompt", [1, 6, 7])
def test_ranks_of_positions(every: int, num_prompt: int) -> None:
    listed = [0, 3, 5] if every else [0, 3, 5, 8, 30]
    listed = [place for place in listed if place < num_prompt or not every]
    spec = GenerationSpec((0,), listed, num_prompt_tokens=num_prompt, output_every=every)
    wanted = [p for p in range(40) if p in listed or (every and p >= num_prompt and p % every == 0)]
    for place in range(40):
        below = sum(p < place for p in wanted)
        assert spec.rank(place) == below
        if below < len(wanted):
            assert spec.position_at(below) == wanted[below]
            assert spec.next_position(place) == wanted[below]
            last = spec.end_of_rows(place, 2)
            assert sum(place <= p < last for p in wanted) == 2 or last >= 40
    assert every or spec.next_position(31) is None


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_hooks_go_on_over_the_output(family: str, checkpoint: Checkpoint) -> None:
    hooks = ["blocks.1.hook_attn_out" if family == "llama" else "blocks.1.hook_mlp_out"]
    with engine(checkpoint(family), max_num_batched_tokens=32) as llm:
        for layers in (None, [1]):
            options: dict[str, Any] = {"layers": layers, "hooks": hooks}
            samples = extract(llm, PROMPTS, sampling_params=SAMPLED, **options)
            assert_as_prefill(llm, samples, **options)
            assert len(samples[0].activations[hooks[0]]) == len(samples[0].token_ids)

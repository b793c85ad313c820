"""LLM.extract and AsyncLLM.extract: values, what is not computed, order, bounds, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.models import test_out_of_tree
from tests.models.oracle import reference_run, relative_error
from vllm import LLM, AsyncEngineArgs, ModelRegistry
from vllm.hidden_states import (
    ExtractRequest,
    FailedSample,
    HiddenStatesError,
    HiddenStatesSample,
)
from vllm.ops.operation import source_of
from vllm.v1.engine import ExtractionSpec, extraction
from vllm.v1.engine.async_llm import AsyncLLM

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16, 17]
FAMILIES = ["llama", "mistral", "qwen3", "qwen3_5"]
CHATS = [
    [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}],
    {"messages": [{"role": "user", "content": "Three?"}]},
]


def extract(llm: LLM, *arguments: Any, **options: Any) -> Iterator[HiddenStatesSample]:
    """LLM.extract where nothing may fail."""
    for item in llm.extract(*arguments, **options):
        assert isinstance(item, HiddenStatesSample)
        yield item


def token_ids(prompts: list[Any]) -> list[list[int]]:
    return [prompt["prompt_token_ids"] for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [17, 512])
def test_rows_are_those_of_transformers_and_of_the_files(
    family: str, budget: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(3, LENGTHS)
    layers = [2, 0, 4, 2]
    arguments = {"max_num_batched_tokens": budget}
    with engine(folder, **arguments, **extraction_config(layers, tmp_path)) as llm:
        files = [rows_of(output) for output in llm.generate(prompts, greedy(), use_tqdm=False)]
    with engine(folder, **arguments) as llm:
        samples = list(extract(llm, prompts, layers, ordered=True))
    assert [sample.index for sample in samples] == list(range(len(prompts)))
    probe = torch.nn.Linear(samples[0].hidden_states.shape[-1], 1)
    probe(samples[0].hidden_states).sum().backward()  # what a probe or a draft model does
    for sample, ids, rows in zip(samples, token_ids(prompts), files, strict=True):
        assert sample.token_ids.tolist() == ids
        assert sample.positions.tolist() == list(range(len(ids)))
        assert sample.layer_ids == tuple(layers)
        assert torch.equal(sample.hidden_states, rows)
        streams = reference_run(folder, ids).streams
        for column, layer in enumerate(layers):
            assert relative_error(sample.hidden_states[:, column], streams[layer]) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("pool", ["large", "small"])
def test_every_request_has_its_own_layers_positions_and_dtype(
    family: str, pool: str, checkpoint: Checkpoint
) -> None:
    """Also in a pool so small that requests are preempted."""
    folder = checkpoint(family, dtype=torch.bfloat16)
    prompts = token_ids(random_prompts(4, LENGTHS * 6))
    choices: list[dict[str, Any]] = [
        {"layers": [1, 3], "positions": "last"},
        {"layers": "3,1", "positions": [-1, 0, -1]},
        {"layers": [2], "positions": "every:7", "dtype": "float32"},
        {"layers": "0:4", "positions": "mask", "dtype": torch.float16},
        {"layers": "last", "positions": "all", "dtype": "fp8"},
    ]
    requests = []
    for number, ids in enumerate(prompts):
        chosen = choices[number % len(choices)]
        requests.append(ExtractRequest(ids, mask=[token % 3 == 0 for token in ids], **chosen))
    with engine(folder, max_num_batched_tokens=96) as llm:
        every_layer = [sample.hidden_states for sample in extract(llm, prompts, ":", ordered=True)]
    hybrid = 225_000 if source_of("cpu").keeps_pending else 170_000
    small = {"llama": 220_000, "qwen3_5": hybrid}[family]
    memory = 2**24 if pool == "large" else small
    arguments = {"kv_cache_memory_bytes": memory, "max_model_len": 160}
    with engine(folder, long_prefill_token_threshold=16, **arguments) as llm:
        samples = {sample.index: sample for sample in extract(llm, requests)}
        preemptions = core_of(llm).stats().num_preemptions
    assert len(samples) == len(prompts)
    assert (preemptions > 0) == (pool == "small")
    for number, request in enumerate(requests):
        sample = samples[number]
        n = len(prompts[number])
        expected_positions = {
            "last": [n - 1],
            "every:7": list(range(0, n, 7)),
            "mask": [p for p in range(n) if prompts[number][p] % 3 == 0],
            "all": list(range(n)),
        }.get(str(request.positions), [n - 1, 0, n - 1])
        assert sample.positions.tolist() == expected_positions
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == [prompts[number][p] % 3 == 0 for p in sample.positions]
        wanted = every_layer[number][expected_positions][:, list(sample.layer_ids)]
        if request.dtype == "fp8":
            scale = wanted.float().norm(dim=-1)
            errors = (sample.rows(torch.float32) - wanted.float()).norm(dim=-1) / scale
            assert (errors <= 0.04).all()
            assert torch.allclose(errors, torch.as_tensor(sample.fp8_errors), rtol=1e-3)
        else:
            dtypes: dict[Any, torch.dtype] = {
                "float32": torch.float32,
                torch.float16: torch.float16,
            }
            assert sample.hidden_states.dtype == dtypes.get(request.dtype, torch.bfloat16)
            assert torch.equal(sample.hidden_states, wanted.to(sample.hidden_states.dtype))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_shared_prefix_whose_rows_nobody_wants_is_computed_once(
    family: str, checkpoint: Checkpoint
) -> None:
    shared = random_prompts(5, [200])[0]["prompt_token_ids"]
    tails = token_ids(random_prompts(6, [40, 3, 90]))
    requests = [
        ExtractRequest(shared + tail, mask=[0] * 200 + [1] * len(tail), positions="mask")
        for tail in tails
    ]
    folder = checkpoint(family)
    with engine(folder, enable_prefix_caching=False) as llm:
        alone = [next(iter(extract(llm, request, [0, 2]))) for request in requests]
    with engine(folder) as llm:
        for request, expected in zip(requests, alone, strict=True):
            (sample,) = extract(llm, request, [0, 2])
            assert torch.equal(sample.hidden_states, expected.hidden_states)
        assert core_of(llm).stats().prefix_cache_hits >= 192
        before = core_of(llm).stats().prefix_cache_hits
        (sample,) = extract(llm, requests[0].prompt, [0, 2])  # all rows: none may be skipped
        assert core_of(llm).stats().prefix_cache_hits == before
        assert torch.equal(sample.hidden_states[200:], alone[0].hidden_states)


def test_nothing_is_computed_above_the_deepest_layer_or_after_the_last_position(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_prompts(7, [90])[0]["prompt_token_ids"]
    with engine(checkpoint("qwen3_5")) as llm:
        runner = core_of(llm).executor.worker.model_runner
        runs: list[tuple[int, int]] = []
        for index, layer in enumerate(runner.model.model.layers):
            forward = layer.forward

            def watch(*args: Any, _index: int = index, _forward: Any = forward, **kw: Any) -> Any:
                runs.append((_index, len(args[0])))
                return _forward(*args, **kw)

            monkeypatch.setattr(layer, "forward", watch)
        (sample,) = extract(llm, ids, [1, 2], [3, 10])
        assert runs == [(0, 11), (1, 11)]
        runs.clear()
        (embeddings,) = extract(llm, ids, "embed")
        assert runs == []
        (nothing,) = extract(llm, [ids], [1, 2], [])
        assert runs == []
    assert sample.token_ids.tolist() == ids
    assert len(embeddings.hidden_states) == 90
    assert nothing.hidden_states.shape == (0, 2, sample.hidden_states.shape[-1])
    assert nothing.positions.tolist() == []


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_listed_positions_keep_their_order_and_duplicates(
    dtype: str, checkpoint: Checkpoint
) -> None:
    """As layers do; the mean counts a position as often as it stands there."""
    ids = random_prompts(13, [65])[0]["prompt_token_ids"]
    asked = [64, 0, 5, 5, -2]
    with engine(checkpoint("llama")) as llm:
        (whole,) = extract(llm, ids, [2, 1, 2], dtype=dtype)
        (sample,) = extract(llm, ids, [2, 1, 2], asked, dtype=dtype)
        (last,) = extract(llm, ids, [2], asked, dtype=dtype, pooling="last")
        (mean,) = extract(llm, ids, [2], [0, 5, 5], pooling="mean")
    assert sample.positions.tolist() == [64, 0, 5, 5, 63]
    assert torch.equal(sample.rows(), whole.rows()[asked])
    if dtype == "fp8":
        assert torch.equal(sample.scales, whole.scales[asked])
        assert torch.equal(sample.fp8_errors, whole.fp8_errors[asked])
    else:
        torch.testing.assert_close(mean.hidden_states[0], whole.rows()[[0, 5, 5]][:, :1].mean(0))
    assert last.positions.tolist() == [63]
    assert torch.equal(last.rows(), whole.rows()[63:64, :1])


def test_a_bounded_number_of_prompts_is_on_its_way(checkpoint: Checkpoint) -> None:
    """The engine stands still while nobody takes samples, and prompts are read lazily."""
    ids = random_prompts(8, [20])[0]["prompt_token_ids"]
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield ids

    with engine(checkpoint("llama"), max_num_batched_tokens=64) as llm:
        for ordered in (False, True):
            taken = 0
            samples = extract(llm, endless(), [1], ordered=ordered)
            for _ in range(40):
                next(samples)
            assert 40 <= taken <= 40 + 4 * 64 // 20 + 1
            del samples
            assert not core_of(llm).has_unfinished_requests()
        taken = 0
        samples = extract(llm, endless(), [1], max_in_flight=1)
        for expected in (1, 2, 3):
            next(samples)
            assert taken == expected
        del samples


def test_the_progress_bar_counts_prompts(checkpoint: Checkpoint) -> None:
    bars: list[Any] = []

    def make_bar(**options: Any) -> Any:
        bars.append(tqdm(**options, disable=True))
        return bars[-1]

    one, two = [5, 6, 7], [[5, 6], [7]]
    with engine(checkpoint("llama")) as llm:
        for prompts, total in (("ab", 1), (one, 1), ({"prompt": "a"}, 1), (two, 2)):
            assert len(list(extract(llm, prompts, [0], use_tqdm=make_bar))) == total
            assert bars[-1].total == total
        assert len(list(extract(llm, (ids for ids in two), [0], use_tqdm=make_bar))) == 2
        assert bars[-1].total is None


def test_calls_may_be_interleaved(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(9, LENGTHS)
    with engine(checkpoint("qwen3_5"), max_num_batched_tokens=32) as llm:
        generated = llm.generate(prompts, greedy(4), use_tqdm=False)
        first = extract(llm, prompts, [1], ordered=True)
        second = extract(llm, prompts, [3], "last", ordered=True)
        pairs = []
        for one in first:
            pairs.append((one, next(second)))
            again = llm.generate(prompts, greedy(4), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in again] == [
                o.outputs[0].token_ids for o in generated
            ]
        assert next(second, None) is None
    for number, (one, two) in enumerate(pairs):
        assert (one.index, two.index) == (number, number)
        assert (len(one.positions), len(two.positions)) == (LENGTHS[number], 1)


@pytest.fixture
def broken_token(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint in which the embedding of token 7 is not finite."""
    source = checkpoint("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_rows_that_are_not_finite_fail_their_prompt_alone(dtype: str, broken_token: Path) -> None:
    prompts: list[Any] = [[1, 2, 3], [1, 2, 7, 3], [9, 8], [], [1, 400], "text"]
    with engine(broken_token, skip_tokenizer_init=True) as llm:
        items = list(llm.extract(prompts, [0, 2], dtype=dtype, ordered=True, on_error="yield"))
        assert [type(item) for item in items] == [
            *(HiddenStatesSample, FailedSample, HiddenStatesSample),
            *(FailedSample, FailedSample, FailedSample),
        ]
        reasons = [item.reason for item in items if isinstance(item, FailedSample)]
        assert "token 2, layer 0 are not finite" in reasons[0]
        assert "empty" in reasons[1]
        assert "out of vocabulary" in reasons[2]
        assert "no tokenizer" in reasons[3]
        with pytest.raises(HiddenStatesError, match=r"prompt 1: .*not finite"):
            list(llm.extract(prompts[:3], [0, 2], ordered=True))
        with pytest.raises(ValueError, match="prompt 3: the prompt is empty"):
            list(llm.extract(prompts, [0, 2], "last"))
        assert not core_of(llm).has_unfinished_requests()


def test_rows_that_nobody_computes_do_not_leave(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask or positions of a wrong form fail their prompt; past the front end, their request."""
    ids = random_prompts(13, [59])[0]["prompt_token_ids"]
    wrong: list[dict[str, Any]] = [
        {"positions": "mask", "mask": [[1]] * 59},
        {"positions": "mask", "mask": torch.ones(59, 2, dtype=torch.bool)},
        {"positions": "mask", "mask": torch.ones(59)},
        {"positions": "mask", "mask": [None] * 59},
        {"positions": torch.ones(59, 1, dtype=torch.int64)},
    ]
    with engine(checkpoint("llama")) as llm:
        prompts = [ExtractRequest(ids), *(ExtractRequest(ids, **kinds) for kinds in wrong)]
        good, *failed = llm.extract(prompts, [1, 2], ordered=True, on_error="yield")
        assert isinstance(good, HiddenStatesSample)
        for item in failed:
            assert isinstance(item, FailedSample)
            assert item.reason.startswith(("mask=", "positions="))
        for forged in ([0] * 59, [5, 4], [58, 59], [-1, 3], [0, 1, 1]):
            with monkeypatch.context() as patched:
                patched.setattr(
                    extraction,
                    "ExtractionSpec",
                    lambda *, positions, p=forged, **named: ExtractionSpec(
                        positions=positions and p, **named
                    ),
                )
                prompts = [ExtractRequest(ids), ExtractRequest(ids, positions=[1, 2, 3])]
                again, bad = llm.extract(prompts, [1, 2], ordered=True, on_error="yield")
                assert isinstance(bad, FailedSample)
                assert "positions of rows have to ascend in [0, " in bad.reason
                assert torch.equal(again.hidden_states, good.hidden_states)
                patched.setattr(ExtractionSpec, "checked_positions", lambda spec, _: spec.positions)
                (bad,) = llm.extract(prompts[1:], [1, 2], on_error="yield")
                assert isinstance(bad, FailedSample), forged
        (again,) = extract(llm, ids, [1, 2])
        assert torch.equal(again.hidden_states, good.hidden_states)


def test_a_step_that_fails_after_its_forward_pass_leaves_no_rows_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_prompts(12, [20])[0]["prompt_token_ids"]
    with engine(checkpoint("llama")) as llm:
        (expected,) = extract(llm, ids, [2])
        runner = core_of(llm).executor.worker.model_runner
        end_step = runner.extractor.end_step
        with monkeypatch.context() as patched:
            patched.setattr(runner.extractor, "end_step", lambda: (end_step(), 1 / 0))
            (failed,) = llm.extract([ids], [2], on_error="yield")
        assert isinstance(failed, FailedSample)
        assert "ZeroDivisionError" in failed.reason
        llm.generate([ids], greedy(2), use_tqdm=False)
        assert runner.extractor.end_step() is None
        (sample,) = extract(llm, ids, [2])
    assert torch.equal(sample.hidden_states, expected.hidden_states)


def test_rows_too_large_for_float16_are_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][5] *= 1e6
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with engine(tmp_path) as llm:
        (wide,) = extract(llm, [1, 5, 2], [0], dtype="bfloat16")
        assert wide.hidden_states.abs().max() > 65_504
        (failed,) = llm.extract([[1, 5, 2]], [0], dtype="float16", on_error="yield")
    assert isinstance(failed, FailedSample)
    assert "token 1, layer 0 are not finite (as float16" in failed.reason


def test_wrong_arguments_are_named_before_anything_runs(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with engine(checkpoint("llama")) as llm:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"layers": [9]}, "layers: '9' does not exist in a model of 4 layers"),
            ({"layers": [1], "dtype": "int8"}, "dtype='int8': use auto, float32"),
            ({"layers": [1], "on_error": "skip"}, 'on_error=\'skip\': use "raise" or "yield"'),
            ({"layers": [1], "max_in_flight": 0}, "max_in_flight=0"),
            ({"prompts": 5, "layers": [1]}, "prompts of type int"),
        ]
        for arguments, message in bad:
            with pytest.raises(ValueError) as caught:
                llm.extract(**{"prompts": [[1]], **arguments})
            assert message in str(caught.value)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, "no layers are named"),
            ({"layers": [1], "positions": "odd"}, "positions='odd'"),
            ({"layers": [1], "positions": [3]}, "positions holds 3, but the prompt has 3 tokens"),
            ({"layers": [1], "positions": [0.5]}, "whole numbers"),
            ({"layers": [1], "positions": None}, "whole numbers"),
            ({"layers": [1], "positions": "mask"}, "needs a mask"),
        ]
        for arguments, message in wrong:
            with pytest.raises(ValueError, match="prompt 0: ") as caught:
                list(llm.extract([[1, 2, 3]], **arguments))
            assert message in str(caught.value)
    with (
        engine(checkpoint("llama"), **extraction_config([1], tmp_path)) as llm,
        pytest.raises(ValueError, match="speculative_config"),
    ):
        list(llm.extract([[1, 2, 3]], [1]))


def test_a_model_that_collects_its_streams_itself(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("AuthorsForCausalLM", test_out_of_tree.AuthorsModel)
    folder = checkpoint("llama")
    prompts = token_ids(random_prompts(10, [12, 40]))
    overrides = {"hf_overrides": {"architectures": ["AuthorsForCausalLM"]}}
    with engine(folder, max_num_batched_tokens=16, **overrides) as llm:
        for layers in ([2, 0], [3]):
            for sample in extract(llm, prompts, layers):
                streams = reference_run(folder, sample.token_ids.tolist()).streams
                for column, layer in enumerate(layers):
                    rows = sample.hidden_states[:, column]
                    assert relative_error(rows, streams[layer]) <= 1e-4
        (output,) = llm.generate([prompts[0]], greedy(2), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


def test_async_extract(checkpoint: Checkpoint) -> None:
    """The same samples from another process; leaving early leaves nothing behind."""
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    prompts = token_ids(random_prompts(11, LENGTHS * 2))
    arguments: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48}
    with engine(folder, **arguments) as llm:
        expected = list(extract(llm, prompts, "1,last", "every:3", "fp8", ordered=True))
        expected_of_chats = list(llm.extract(CHATS, [1]))

    async def source() -> AsyncIterator[list[int]]:
        for ids in [*prompts, []]:
            yield ids

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))
        try:
            items = [
                item
                async for item in llm.extract(
                    source(), "1,last", "every:3", "fp8", ordered=True, on_error="yield"
                )
            ]
            for item, sample in zip(items, expected, strict=False):
                assert isinstance(item, HiddenStatesSample) and item.scales is not None
                assert sample.scales is not None and torch.equal(item.scales, sample.scales)
                assert torch.equal(item.rows(), sample.rows())
                assert torch.equal(item.positions, sample.positions)
            assert isinstance(items[-1], FailedSample) and len(items) == len(expected) + 1
            with pytest.raises(ValueError, match=f"prompt {len(prompts)}: the prompt is empty"):
                _ = [item async for item in llm.extract(source(), [1])]
            answered = asyncio.Event()

            async def one_after_the_other() -> AsyncIterator[list[int]]:
                yield prompts[0]
                await answered.wait()  # the next prompt depends on the first answer
                yield prompts[1]

            indices = []
            async for item in llm.extract(one_after_the_other(), [1]):
                indices.append(item.index)
                answered.set()
            assert indices == [0, 1]
            chats = [item async for item in llm.extract(CHATS, [1])]
            for item, sample in zip(chats, expected_of_chats, strict=True):
                assert torch.equal(item.token_ids, sample.token_ids)
                assert torch.equal(item.rows(), sample.rows())
            masked = ExtractRequest(prompts[0], mask=[0] * (len(prompts[0]) - 1) + [1])
            (item,) = [item async for item in llm.extract(masked, [1], "every:1")]
            assert item.loss_mask is not None and item.loss_mask.tolist() == masked.mask
            samples = llm.extract(prompts * 50, [1])
            await anext(samples)
            await samples.aclose()
            while llm.stats.num_running or llm.stats.num_waiting:
                await asyncio.sleep(0.01)
            assert llm.output_processor.get_num_unfinished_requests() == 0
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(run(), 120))

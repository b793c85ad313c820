"""Requests that are kept over a pause: their tokens and rows are those of an undisturbed one, and
no request has states of two weights unless the caller asks for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import engine, extraction_config, random_prompts
from tests.grids import at_night
from tests.models.adapters import write_adapter
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.hidden_states import HiddenStatesSample
from vllm.lora.request import LoRARequest

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(47, [5, 70, 33])
OPTIONS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
LAYERS = [0, 2, 3]
LENGTH = 240


@pytest.fixture(scope="module")
def other(checkpoint: Checkpoint) -> Callable[[str], Path]:
    """The folder of a checkpoint of the same sizes and other values."""
    return partial(checkpoint, seed=77)


def long(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **options)


RANDOM = {"temperature": 0.9, "seed": 3, "top_p": 0.9, "logprobs": 2}
GREEDY = {"temperature": 0.0}


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **OPTIONS, **options))
    try:
        yield llm
    finally:
        await llm.shutdown()


class Stream:
    """A request under way, and how far it is."""

    def __init__(self, llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> None:
        self.token_ids: list[int] = []
        self.reason: str | None = None
        self.completion: Any = None
        self._task = asyncio.create_task(self._run(llm, prompt, params, name))

    async def _run(self, llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> None:
        async for output in llm.generate(prompt, params, name):
            self.completion = output.outputs[0]
            self.token_ids = list(self.completion.token_ids)
            self.reason = self.completion.finish_reason

    async def reach(self, count: int) -> None:
        while len(self.token_ids) < count:
            await asyncio.sleep(0.001)

    async def end(self) -> list[int]:
        await self._task
        return self.token_ids


async def is_still(*streams: Stream) -> bool:
    """Return whether nothing comes for a while."""
    before = [len(one.token_ids) for one in streams]
    await asyncio.sleep(0.1)
    return before == [len(one.token_ids) for one in streams] and max(before) < LENGTH


async def extract(llm: AsyncLLM) -> HiddenStatesSample:
    """Rows of a prompt and of what is generated after it."""
    settings: Any = {"sampling_params": long(**GREEDY)}
    (sample,) = [one async for one in llm.extract(PROMPTS[1], LAYERS, **settings)]
    assert isinstance(sample, HiddenStatesSample)
    return sample


@pytest.mark.parametrize("family", ["qwen3_5", at_night("llama"), at_night("deepseek_v3")])
def test_kept_requests(family: str, checkpoint: Checkpoint, other: Callable[[str], Path]) -> None:
    """With the same weights, with new ones, and over a sleep; all in one process of a core."""
    first, second = checkpoint(family), other(family)

    async def run() -> list[Any]:
        async with started(first, max_num_batched_tokens=64) as llm:
            right = await undisturbed(llm)
            for clear_cache in (True, False):
                await check_same_weights(llm, right, clear_cache)
            assert not llm.stats.num_preemptions
            found = []
            for way in ("pause", "update", "states"):
                found.append((way, *(await with_new_weights(llm, second, way))))
                await llm.update_weights(first)
            again = await undisturbed(llm)
            assert again[:2] == right[:2]
            await check_sleep(llm, first)
            return [right, found]

    (begun, _, _), found = asyncio.run(run())
    with engine(second) as llm:
        for way, counts, tokens, sample in found:
            check_new_weights(llm, way, begun, counts, tokens)
            (fresh,) = llm.extract({"prompt_token_ids": sample.token_ids.tolist()}, LAYERS)
            is_new = torch.equal(fresh.hidden_states, sample.hidden_states)
            assert is_new == (way != "states"), way


PARAMS = [long(**GREEDY), long(**RANDOM), long(**GREEDY, prompt_logprobs=1)]


def start_all(llm: AsyncLLM, params: list[SamplingParams]) -> list[Stream]:
    pairs = enumerate(zip(PROMPTS, params, strict=True))
    return [Stream(llm, prompt, one, f"{i}") for i, (prompt, one) in pairs]


async def ends_of(streams: list[Stream]) -> tuple[Any, Any]:
    """Their tokens and log-probabilities."""
    tokens = [await stream.end() for stream in streams]
    steps = [stream.completion.logprobs or () for stream in streams]
    return tokens, [[{k: v.logprob for k, v in one.items()} for one in each] for each in steps]


async def undisturbed(llm: AsyncLLM) -> tuple[Any, Any, HiddenStatesSample]:
    streams, rows = start_all(llm, PARAMS), asyncio.create_task(extract(llm))
    return *(await ends_of(streams)), await rows


async def check_same_weights(llm: AsyncLLM, right: Any, clear_cache: bool) -> None:
    """Nothing comes meanwhile, new requests wait, and kept ones can be aborted."""
    streams, rows = start_all(llm, PARAMS), asyncio.create_task(extract(llm))
    await streams[0].reach(4)
    await llm.pause_generation("keep", clear_cache=clear_cache)
    assert await llm.is_paused()
    new = Stream(llm, PROMPTS[0], long(**GREEDY), "new")
    assert await is_still(*streams) and not new.token_ids
    await llm.pause_generation("keep", clear_cache=clear_cache)
    assert await is_still(*streams) and not rows.done()
    await llm.resume_generation()
    await new.reach(5)
    await llm.pause_generation("keep")
    await llm.abort("new")
    await new.end()
    assert new.reason == "abort"
    assert not await llm.is_sleeping()
    await llm.resume_generation()
    tokens, logprobs = await ends_of(streams)
    assert (tokens, logprobs) == right[:2]
    assert torch.equal((await rows).token_ids, right[2].token_ids)
    assert torch.equal((await rows).hidden_states, right[2].hidden_states)


async def with_new_weights(llm: AsyncLLM, folder: Path, way: str) -> tuple[Any, ...]:
    """Return how many tokens were there, all tokens, and rows."""
    streams = start_all(llm, [long(**GREEDY)] * 3)
    rows = asyncio.create_task(extract(llm))
    for stream in streams:
        await stream.reach(4)
    counts = []
    if way == "update":
        await llm.update_weights(folder, mode="keep")
    else:
        await llm.pause_generation("keep", clear_cache=way == "pause")
        counts = [len(stream.token_ids) for stream in streams]
        await llm.update_weights(folder)
        assert await is_still(*streams)
        await llm.resume_generation()
    return counts, (await ends_of(streams))[0], await rows


def check_new_weights(llm: LLM, way: str, begun: Any, counts: Any, tokens: Any) -> None:
    """The new weights make the rest, from the prompt and from the tokens that were there."""
    for number, count in enumerate(counts):
        kept, ids = tokens[number][:count], PROMPTS[number]["prompt_token_ids"]
        params = SamplingParams(max_tokens=LENGTH - count, ignore_eos=True, temperature=0)
        text = {"prompt_token_ids": [*ids, *kept]}
        (output,) = llm.generate(text, params)
        is_new = tokens[number][count:] == list(output.outputs[0].token_ids)
        assert 0 < count < LENGTH == len(tokens[number])
        if number != 1:  # the one that was drawn at random
            assert kept == begun[number][:count]
        assert is_new or way == "states"


async def load_in_turn(llm: AsyncLLM, *parts: dict[str, torch.Tensor]) -> None:
    async with llm.weight_update() as load:
        for part in parts:
            await load(part)


async def check_sleep(llm: AsyncLLM, folder: Path) -> None:
    """Kept requests outlive a sleep, in which what they have computed is lost; they fail if they
    are resumed too early, and while the weights are those of two models."""
    right = await Stream(llm, PROMPTS[1], long(**GREEDY), "right").end()
    kept = Stream(llm, PROMPTS[1], long(**GREEDY), "kept")
    await kept.reach(4)
    with pytest.raises(ValueError, match="mode='keep': pause_generation"):
        await llm.sleep(1, mode="keep")
    await llm.pause_generation("keep", clear_cache=False)
    await llm.sleep(1)
    assert await llm.is_sleeping()
    await llm.wake_up()
    await llm.resume_generation()
    assert await kept.end() == right
    for is_broken in (False, True):
        lost = Stream(llm, PROMPTS[1], long(**GREEDY), f"lost {is_broken}")
        await lost.reach(4)
        await llm.pause_generation("keep")
        if is_broken:
            with pytest.raises(ValueError, match="place for: no"):
                await load_in_turn(
                    llm, {"model.norm.weight": torch.ones(72)}, {"no": torch.ones(2)}
                )
        else:
            await llm.sleep(1, mode="keep")
        await llm.resume_generation()
        await lost.end()
        assert lost.reason == "error"
        if is_broken:
            await llm.update_weights(folder)
        else:
            await llm.wake_up()
    assert await Stream(llm, PROMPTS[1], long(**GREEDY), "last").end() == right


def test_values_that_were_sent(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows of a file are written as they come: the request ends with an error if the weights
    change, and goes on if they do not."""
    first, second = checkpoint("llama"), other("llama")

    async def run() -> list[Any]:
        config = extraction_config([2], tmp_path)
        async with started(first, **config) as llm:
            paths = []
            for name in ("undisturbed", "kept", "changed"):
                stream = Stream(llm, PROMPTS[1], long(**GREEDY), name)
                await stream.reach(4)
                if name != "undisturbed":
                    await llm.pause_generation("keep")
                    if name == "changed":
                        await llm.update_weights(second)
                    assert await is_still(stream)
                    await llm.resume_generation()
                await stream.end()
                paths.append((stream.reason, stream.token_ids))
            return paths

    undisturbed, kept, changed = asyncio.run(run())
    assert undisturbed == kept and kept[0] == "length"
    assert changed[0] == "error"


def test_adapters_of_kept_requests(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    """A request whose adapter has tables of replaced weights ends, as new ones are refused; others
    go on. One has begun, the others wait for it."""
    first, second = checkpoint("llama"), other("llama")
    folders = [tmp_path / "tables", tmp_path / "plain"]
    for folder in folders:
        write_adapter(folder, first, with_ends=True)
    parts = load_file(folders[1] / "adapter_model.safetensors")
    without = {name: one for name, one in parts.items() if "base_layer" not in name}
    save_file(without, folders[1] / "adapter_model.safetensors")
    tables, plain = (LoRARequest(one.name, 1, str(one)) for one in folders)
    adapters = [tables, tables, plain, None]

    async def run() -> None:
        async with started(first, enable_lora=True, max_num_seqs=1) as llm:
            has_begun = asyncio.Event()

            async def ask(adapter: LoRARequest | None, name: str) -> tuple[str | None, list[int]]:
                answer = None
                async for output in llm.generate(
                    PROMPTS[1], long(**GREEDY), name, lora_request=adapter
                ):
                    answer = output.outputs[0]
                    has_begun.set()
                assert answer is not None
                return answer.finish_reason, list(answer.token_ids)

            right = [await ask(one, f"right {i}") for i, one in enumerate(adapters)]
            for way in ("nothing", "sleep", "update"):
                has_begun.clear()
                kept = [
                    asyncio.create_task(ask(one, f"{way} {i}")) for i, one in enumerate(adapters)
                ]
                await has_begun.wait()
                await llm.pause_generation("keep")
                if way == "sleep":
                    await llm.sleep(1, mode="keep")
                    await llm.wake_up()
                if way == "update":
                    await llm.update_weights(second)
                await llm.resume_generation()
                found = await asyncio.gather(*kept)
                if way != "update":
                    assert found == right, way
            assert [reason for reason, _ in found] == ["error", "error", "length", "length"]
            assert all(len(tokens) < LENGTH for _, tokens in found[:2])
            new = [await ask(one, f"new {i}") for i, one in enumerate(adapters[2:])]
            assert found[2:] == new and new != right[2:]
            with pytest.raises(ValueError, match="has other values in adapter_model"):
                await ask(tables, "refused")

    asyncio.run(run())

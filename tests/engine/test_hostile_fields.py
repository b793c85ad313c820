"""Hostile values in every field of a request, while another thread compares its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from tests.engine.harness import check_nothing_is_left, engine, extraction_config, rows_of
from vllm import LLM, SamplingParams
from vllm.hidden_states import ExtractRequest

Checkpoint = Callable[..., Path]
IDS = [5, 6, 7, 8, 9]
SECONDS = 60
DEEP: list[Any] = []
for _ in range(3000):
    DEEP = [DEEP]

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**40, 2**63, 2**64, -(2**63) - 1, 10**30, 10**5000),
    *(0.0, -0.0, 1e-300, 1e-4, 1e300, float("nan"), float("inf"), -float("inf"), np.float64(0.5)),
    *("", "a", "\ud800", "a\0b", "../a", "x" * 100_000, b"a", bytearray(b"a"), object(), len),
    *([], [None], [[]], ["\ud800"], [""], ["a"] * 5000, ["x" * 300_000], [0], [2**40], [-1], [1.5]),
    *(np.int64(3), np.array([1, 2]), torch.ones(2), torch.ones(2, device="meta"), {1, 2}, DEEP),
    *({}, {"a": 1}, {"\ud800": 1}, {0: "x"}, {0: float("nan")}, {0: 1e300}, {2**40: 1.0}),
    *({"kv_transfer_params": {"hidden_states_path": "\udc80"}}, {"kv_transfer_params": object()}),
    *({"kv_transfer_params": {"a": {"b": DEEP}}}, {"x": {"\ud800": 1}}, {"x": 2**70}),
    *({"kv_transfer_params": {"include_output_tokens": float("nan")}}, {"x": torch.ones(1)}),
]
"""Values for any field; many are right for one field and wrong for all others."""
SETTINGS = [name for name in get_type_hints(SamplingParams) if not name.startswith("_")]


def prompts() -> Iterator[Any]:
    for value in VALUES:
        yield value
        yield {"prompt": value}
        yield {"prompt_token_ids": value}
        yield {"prompt_token_ids": [value]}
        yield {"prompt_embeds": value}
        yield {"prompt_token_ids": IDS, "cache_salt": value}
        yield {"prompt_token_ids": IDS, "prompt": value}


def attempts(llm: LLM) -> Iterator[Callable[[], object]]:
    """Yield calls that may fail: each setting when constructed and when assigned, each prompt, and
    each option of an extraction."""

    def run(prompt: Any, params: Any, **options: Any) -> object:
        return llm.generate([prompt], params, use_tqdm=False, **options)

    def assign(name: str, value: Any) -> object:
        params = SamplingParams(max_tokens=2)
        setattr(params, name, value)
        return run(IDS, params)

    for value in VALUES:
        for name in SETTINGS:
            some = {"max_tokens": 2, name: value}
            yield lambda some=some: run(IDS, SamplingParams(**some))  # type: ignore[misc]
            yield lambda name=name, value=value: assign(name, value)  # type: ignore[misc]
        yield lambda value=value: run(IDS, value)  # type: ignore[misc]
        yield lambda value=value: run(IDS, None, priority=[value])  # type: ignore[misc]
    for prompt in prompts():
        yield lambda prompt=prompt: run(prompt, SamplingParams(max_tokens=2))  # type: ignore[misc]


def extractions(llm: LLM) -> Iterator[Callable[[], object]]:
    def extract(prompt: Any) -> object:
        return list(llm.extract([prompt], [1, -1]))

    for prompt in prompts():
        yield lambda prompt=prompt: extract(ExtractRequest(prompt))  # type: ignore[misc]
    for value in [*VALUES, [1] * 100_000, range(10**9), "0:10000000000:1", slice(None, None, 0)]:
        for name in ("layers", "positions", "mask", "dtype"):
            some = {name: value, **({"positions": "mask"} if name == "mask" else {})}
            yield lambda some=some: extract(ExtractRequest(IDS, **some))  # type: ignore[misc]
        message = {"role": "user", "content": value}
        yield lambda message=message: extract({"messages": [message]})  # type: ignore[misc]
        yield lambda value=value: extract({"messages": value})  # type: ignore[misc]
        told = {"role": "user", "content": "a"}
        for name in ("tools", "cache_salt"):
            record = {"messages": [told], name: value}
            yield lambda record=record: extract(record)  # type: ignore[misc]


def poolings(llm: LLM) -> Iterator[Callable[[], object]]:
    def embed(prompt: Any, **options: Any) -> object:
        return llm.embed([prompt], **options)

    names = ("pooling", "normalize", "dimensions", "truncate_prompt_tokens", "truncation_side")
    for value in VALUES:
        for name in (*names, "add_special_tokens"):
            yield lambda some={name: value}: embed(IDS, **some)  # type: ignore[misc]
        yield lambda value=value: llm.encode([IDS], value)  # type: ignore[misc]
        yield lambda value=value: embed(value, truncate_prompt_tokens=3)  # type: ignore[misc]


def rows_while(
    attack: Iterator[Callable[[], object]], work: Callable[[], list[torch.Tensor]]
) -> list[str]:
    """Repeat ``work`` on another thread until the attack has ended; its results stay the same."""
    expected, done, problems = work(), threading.Event(), list[str]()

    def repeat() -> None:
        while not done.is_set():
            try:
                found = work()
            except Exception as error:
                problems.append(repr(error))
                return
            if not all(map(torch.equal, found, expected)):
                problems.append("other rows")

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        for call in attack:
            try:
                call()
            except ValueError:
                pass
            except Exception as error:  # the caller's mistake is to be a ValueError
                problems.append(repr(error))
    finally:
        done.set()
        thread.join(SECONDS)
    return problems


def test_generation(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = extraction_config([1, 4], tmp_path, allow_custom_save_path="inside")
    with engine(checkpoint("llama"), max_model_len=96, enable_prompt_embeds=True, **config) as llm:

        def work() -> list[torch.Tensor]:
            params = SamplingParams(max_tokens=3, temperature=1.0, seed=7)
            outputs = llm.generate([IDS, IDS[::-1]], params, use_tqdm=False)
            tokens = [torch.tensor(one.outputs[0].token_ids) for one in outputs]
            return [*map(rows_of, outputs), *tokens]

        assert rows_while(attempts(llm), work) == []
        check_nothing_is_left(llm)


def test_extraction(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), max_model_len=96, enable_prompt_embeds=True) as llm:

        def work() -> list[torch.Tensor]:
            return [one.rows() for one in llm.extract([IDS, IDS[::-1]], [1, -1])]

        assert rows_while(extractions(llm), work) == []
        check_nothing_is_left(llm)


def test_pooling(checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "hf_overrides": {"is_matryoshka": True}}
    with engine(checkpoint("llama"), enable_prompt_embeds=True, **options) as llm:

        def work() -> list[torch.Tensor]:
            return [llm.embed([IDS, IDS[::-1]], as_tensor=True)]

        assert rows_while(poolings(llm), work) == []
        check_nothing_is_left(llm)

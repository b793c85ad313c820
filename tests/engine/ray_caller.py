"""Engines whose ranks are Ray actors, as tests and actors of theirs start them."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from tests.engine import rank_functions
from tests.engine.test_ranks import OPTIONS, PROMPTS
from vllm import LLM, AsyncEngineArgs, AsyncLLM

RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}
PAIR: dict[str, Any] = {**OPTIONS, **RAY, "tensor_parallel_size": 2}


def rows(llm: LLM) -> torch.Tensor:
    return torch.cat([one.hidden_states for one in llm.extract(PROMPTS, layers=[4])])


async def served_rows(folder: str) -> torch.Tensor:
    """Return the rows of an engine in a process of its own."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **PAIR))
    samples = [one async for one in llm.extract(PROMPTS, layers=[4], ordered=True)]
    await llm.shutdown()
    return torch.cat([one.hidden_states for one in samples])


class Caller:
    """An actor of a caller, in a placement group."""

    def rows_of_engine(self, folder: str) -> Any:
        with LLM(folder, **PAIR) as llm:
            return rows(llm), llm.collective_rpc(rank_functions.pid)

    def rows_of_engine_in_a_process(self, folder: str) -> Any:
        return asyncio.run(served_rows(folder))

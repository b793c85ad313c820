"""An engine that says what it is told to, and remembers what became of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engine.harness import extraction_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import Failure
from vllm.outputs import RequestOutput
from vllm.transformers_utils.tokenizer import TokenizerLike, load_tokenizer
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.input_processor import InputProcessor, ProcessedInput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.renderer_threads import RendererThreads

Script = Callable[[str], Sequence[EngineCoreOutput]]
"""Request id of the core -> its outputs."""


def say(request_id: str, steps: Sequence[Sequence[int]], **last: Any) -> list[EngineCoreOutput]:
    """Outputs that give the tokens of ``steps``; the last one ends the request."""
    outputs = [EngineCoreOutput(request_id=request_id, new_token_ids=list(step)) for step in steps]
    outputs[-1].finish_reason = last.pop("finish_reason", FinishReason.STOP)
    for name, value in last.items():
        setattr(outputs[-1], name, value)
    return outputs


def fail(
    request_id: str, steps: Sequence[Sequence[int]], failure: Failure
) -> list[EngineCoreOutput]:
    """As :func:`say`, for a request that fails."""
    outputs = say(request_id, steps)
    outputs[-1].end(FinishReason.ERROR, None, failure)
    return outputs


class StubEngine:
    """In place of AsyncLLM. ``gate``: outputs after the first wait for it to be set."""

    def __init__(self, checkpoint: Path, folder: Path, script: Script) -> None:
        arguments = AsyncEngineArgs(
            model=str(checkpoint), max_model_len=512, **extraction_config([0], folder)
        )
        self.vllm_config = arguments.create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.tokenizer, reason = load_tokenizer(self.model_config)
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, reason)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.renderer = RendererThreads(1)
        self.script = script
        self.errored = self.is_stopped = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[ProcessedInput] = []
        self.running: set[str] = set()
        self.abandoned: list[str] = []

    def get_tokenizer(self) -> TokenizerLike:
        assert self.tokenizer is not None
        return self.tokenizer

    async def run(self, processed: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        request = processed.request
        self.seen.append(processed)
        self.running.add(request.request_id)
        children = self.output_processor.add_request(processed)
        is_finished = False
        try:
            rounds = [self.script(child.request_id) for child in children]
            for step in range(max(map(len, rounds))):
                if step:
                    await self.gate.wait()
                await asyncio.sleep(0)
                news = [outputs[step] for outputs in rounds if step < len(outputs)]
                for output in self.output_processor.process_outputs(news).request_outputs:
                    is_finished = output.finished
                    yield output
        finally:
            self.running.discard(request.request_id)
            if not is_finished:
                self.abandoned.append(request.request_id)
                self.output_processor.abort_requests([request.request_id])

    async def shutdown(self) -> None:
        self.renderer.shutdown()

"""Extraction for asyncio: prompts in, samples, vectors or rows step by step out."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.layer_ids import Layers
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import FailedSample, HiddenStatesError, HiddenStatesSample
from vllm.lora.request import LoRARequest
from vllm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringType
from vllm.transformers_utils.pooling_config import VectorPooling
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine.core_messages import CoreStarted
from vllm.v1.engine.extraction import ExtractionFeed, Item, Prepared
from vllm.v1.engine.extraction_settings import ExtractionSettings, OnError
from vllm.v1.engine.front_end import EngineFrontEnd
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.pooling import Pooled, PoolingOptions, PoolingTask, PromptOptions
from vllm.v1.engine.renderer_threads import RendererThreads
from vllm.v1.outputs import ExtractedRows

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


class Parts(NamedTuple):
    """Rows of one prompt that come step by step."""

    sample: HiddenStatesSample
    """Tokens, positions and loss mask; no rows."""
    rows: AsyncGenerator[ExtractedRows, None]
    """Closing it aborts the request."""


class _ExtractCall:
    """State that the tasks of one call of :meth:`AsyncExtraction.extract` share."""

    def __init__(self, feed: ExtractionFeed, source: AsyncIterator[Any] | None) -> None:
        self.feed = feed
        self.source = source
        self.room = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when there may be samples, an error, or an end."""
        self.error: Exception | None = None
        self.tasks: set[asyncio.Task[None]] = set()


def joined(before: CompletionOutput | None, new: CompletionOutput) -> CompletionOutput:
    """Return a completion with the text and tokens of earlier outputs before the new ones."""
    if before is None:
        return new
    logprobs = None if new.logprobs is None else [*(before.logprobs or ()), *new.logprobs]
    return dataclasses.replace(
        new,
        text=before.text + new.text,
        token_ids=[*before.token_ids, *new.token_ids],
        logprobs=logprobs,
    )


class AsyncExtraction(EngineFrontEnd, ABC):
    """The methods of an engine for asyncio that return rows, or what is made of them."""

    def __init__(self, vllm_config: VllmConfig, num_renderer_threads: int) -> None:
        super().__init__(vllm_config)
        self.renderer = RendererThreads(num_renderer_threads)
        """Threads for everything that tokenises or renders templates."""
        self._extraction_numbers = count()

    @abstractmethod
    async def start(self) -> CoreStarted:
        """Wait until the core is ready."""

    @abstractmethod
    def run(self, processed: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that was processed already."""

    def extract(
        self,
        prompts: Any,
        layers: Layers | None = None,
        positions: str | Sequence[int] = "all",
        dtype: str | torch.dtype | None = None,
        *,
        ordered: bool = True,
        on_error: OnError = "raise",
        max_in_flight: int | None = None,
        pooling: Pooling = "none",
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        logprob_temperature: float = 1.0,
        sampling_params: SamplingParams | None = None,
        hooks: Sequence[str] | str | None = None,
        mask: str | None = None,
        steering: SteeringType | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[HiddenStatesSample | FailedSample, None]:
        """Do what :meth:`vllm.LLM.extract` does, asynchronously; ``prompts`` may be async, too."""
        settings = ExtractionSettings(
            *(layers, positions, dtype, ordered, on_error, max_in_flight, pooling),
            *(add_special_tokens, top_logprobs, logprob_temperature, sampling_params, hooks),
            *(mask, steering, lora_request),
        )
        return self.extract_with(prompts, settings)

    async def pool(
        self, prompts: Any, options: PoolingOptions, *, is_one_request: bool = False
    ) -> AsyncGenerator[Pooled, None]:
        """Yield the result of each prompt of :meth:`vllm.LLM.encode`, in their order.

        is_one_request: they begin together, so that all are of the same weights.
        """
        await self.start()
        # It may read files of the checkpoint.
        call = await self.renderer.run(0, lambda: self.pooler.call(options))
        settings = dataclasses.replace(call.settings, is_one_request=is_one_request)
        async with aclosing(self.extract_with(prompts, settings)) as samples:
            async for sample in samples:
                if isinstance(sample, HiddenStatesSample) and len(sample.positions) > 1:
                    yield await self.renderer.run(sample.nbytes, call.output, sample)
                else:
                    yield call.output(sample)

    async def encode(
        self,
        prompts: Any,
        pooling_task: PoolingTask = "embed",
        *,
        pooling: VectorPooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Pooled]:
        """Do what :meth:`vllm.LLM.encode` does, asynchronously."""
        task = (pooling_task, pooling, normalize, dimensions, use_activation)
        return [one async for one in self.pool(prompts, PoolingOptions(*task, **options))]

    async def embed(
        self,
        prompts: Any,
        pooling: VectorPooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Do what :meth:`vllm.LLM.embed` does, asynchronously."""
        settings = PoolingOptions("embed", pooling, normalize, dimensions, **options)
        return [EmbeddingRequestOutput.of(one) async for one in self.pool(prompts, settings)]

    async def classify(
        self,
        prompts: Any,
        *,
        use_activation: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[ClassificationRequestOutput]:
        """Do what :meth:`vllm.LLM.classify` does, asynchronously."""
        settings = PoolingOptions("classify", use_activation=use_activation, **options)
        results = [one async for one in self.pool(prompts, settings)]
        labels = self.pooler.head.labels
        return [ClassificationRequestOutput.of(one, labels) for one in results]

    async def extract_with(
        self, prompts: Any, settings: ExtractionSettings
    ) -> AsyncGenerator[HiddenStatesSample | FailedSample, None]:
        """Do what :meth:`extract` does, with its options as one object."""
        await self.start()
        is_async = isinstance(prompts, AsyncIterable)
        feed = ExtractionFeed(
            self.vllm_config, self.input_processor, () if is_async else prompts, settings
        )
        call = _ExtractCall(feed, aiter(prompts) if is_async else None)
        submitter = asyncio.create_task(self._submit_extractions(call))
        try:
            while True:
                while (sample := feed.pop()) is not None:
                    yield sample
                if call.error is not None:
                    raise call.error
                if feed.is_done:
                    return
                call.room.set()
                await call.changed.wait()
                call.changed.clear()
        finally:
            for task in (submitter, *call.tasks):
                task.cancel()
            await asyncio.gather(submitter, *call.tasks, return_exceptions=True)

    async def generate_with_rows(
        self,
        prompts: Sequence[Any],
        settings: ExtractionSettings,
        kind: RequestOutputKind,
        admit: Callable[[int], Awaitable[None]],
    ) -> AsyncGenerator[tuple[int, RequestOutput, Item | None], None]:
        """Yield (number of the prompt, new output of one of its completions, its rows or failure
        once it has ended). ValueError: a prompt cannot be served.

        kind: DELTA or FINAL_ONLY. admit: awaited with the bytes of all rows before anything runs.
        """
        await self.start()
        feed = ExtractionFeed(self.vllm_config, self.input_processor, prompts, settings)
        runs = []
        for _ in prompts:
            request_id = f"extract-{next(self._extraction_numbers)}"
            prepared = await self.renderer.run(sys.maxsize, feed.prepare_next, request_id)
            assert prepared is not None
            processed = feed.accept(prepared)
            if processed is not None:
                processed.request.sampling_params.output_kind = kind
            runs.append(self._run_with_rows(feed, prepared.item, processed))
        await admit(feed.num_bytes)
        async with aclosing(merge_async_iterators(runs)) as outputs:
            async for index, (output, item) in outputs:
                yield index, output, item

    async def _run_with_rows(
        self, feed: ExtractionFeed, ready: Any, processed: ProcessedInput | None
    ) -> AsyncGenerator[tuple[RequestOutput, Item | None], None]:
        """Run a prepared request; ``ready``: its result if there is nothing to run."""
        if processed is None:
            nothing = CompletionOutput(0, "", [], None, None, "length")
            ids = ready.token_ids.tolist()
            yield RequestOutput(ready.request_id, None, ids, None, [nothing], True), ready
            return
        so_far: dict[int, CompletionOutput] = {}
        async with aclosing(self.run(processed)) as outputs:
            async for output in outputs:
                for new in output.outputs:
                    whole = so_far[new.index] = joined(so_far.get(new.index), new)
                    is_ended = new.finish_reason is not None
                    item = feed.item_of(output.request_id, whole) if is_ended else None
                    yield dataclasses.replace(output, outputs=[new]), item

    async def extract_in_parts(
        self, prompt: Any, settings: ExtractionSettings, admit: Callable[[int], Awaitable[None]]
    ) -> Parts | None:
        """Start to extract the rows of one prompt, to be handed over step by step; ``admit`` is
        awaited before, with their bytes.

        None: they cannot come in parts (generated text, pooling, positions in another order).
        ValueError: the request cannot be served.
        """
        await self.start()
        feed = ExtractionFeed(self.vllm_config, self.input_processor, [prompt], settings)
        request_id = f"extract-{next(self._extraction_numbers)}"
        prepared = await self.renderer.run(sys.maxsize, feed.prepare_next, request_id)
        request = None if prepared is None else feed.in_parts(prepared)
        if request is None:
            return None
        await admit(feed.num_bytes)
        return Parts(request.sample, self._parts(request.processed))

    async def _parts(self, processed: ProcessedInput) -> AsyncGenerator[ExtractedRows, None]:
        """Yield new rows as they come. HiddenStatesError: the request failed."""
        num_rows = 0
        async with aclosing(self.run(processed)) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                rows = completion.extracted
                if rows is None:
                    reason = completion.stop_reason or "the engine ended it"
                    message = f"{completion.finish_reason}: {reason}"
                    failure = completion.failure or Failure(FailureKind.ABORTED, message)
                    raise HiddenStatesError(0, failure)
                # A request that was computed again brings some of them twice.
                rows = rows.part(slice(num_rows - rows.first, None))
                num_rows += len(rows)
                if len(rows):
                    yield rows

    async def _submit_extractions(self, call: _ExtractCall) -> None:
        """Hand prompts to the core while there is room for them."""
        feed, accepted = call.feed, list[ProcessedInput]()
        try:
            while not feed.is_exhausted:
                if not (feed.has_room or feed.begins_together):
                    call.room.clear()
                    await call.room.wait()
                    continue
                prepared = await self._prepare_extraction(call)
                processed = feed.accept(prepared) if prepared is not None else None
                if processed is not None:
                    accepted.append(processed)
                if feed.is_exhausted or not feed.begins_together:
                    # Nothing comes between those that begin here: a pause is before or after them.
                    while accepted:
                        task = asyncio.create_task(self._run_extraction(accepted.pop(0), call))
                        call.tasks.add(task)
                        task.add_done_callback(call.tasks.discard)
                call.changed.set()
        except Exception as error:
            call.error = error
            call.changed.set()

    async def _prepare_extraction(self, call: _ExtractCall) -> Prepared | None:
        request_id = f"extract-{next(self._extraction_numbers)}"
        run = partial(self.renderer.run, sys.maxsize)  # the prompts are of any size
        if call.source is None:
            return await run(call.feed.prepare_next, request_id)
        try:
            prompt = await anext(call.source)
        except StopAsyncIteration:
            call.feed.is_exhausted = True
            return None
        return await run(call.feed.prepare, request_id, prompt)

    async def _run_extraction(self, processed: ProcessedInput, call: _ExtractCall) -> None:
        try:
            try:
                (output,) = [output async for output in self.run(processed)]
            except ValueError as error:
                call.feed.refuse(processed.external_id, error)
            else:
                call.feed.take(output)
        except Exception as error:
            call.error = error
        call.changed.set()

"""The engine for asyncio: text is handled here, the engine core runs in another process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, get_args

from vllm.distributed.kv_events import events_from_message
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
)
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.layer_ids import Layers
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import FailedSample, HiddenStatesError, HiddenStatesSample
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest, check_lora_request
from vllm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringVector
from vllm.transformers_utils.pooling_config import VectorPooling
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_client import AsyncCoreClient, CoreHandle
from vllm.v1.engine.core_messages import (
    AbortRequests,
    AddRequest,
    CallAnswer,
    CallWorkers,
    CoreReport,
    CoreStarted,
    EngineStats,
    FinishRequests,
    ResetPrefixCache,
    WorkerCall,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.extraction import (
    ExtractionFeed,
    ExtractionSettings,
    Item,
    OnError,
    Prepared,
)
from vllm.v1.engine.front_end import EngineFrontEnd
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.pooling import (
    Pooled,
    PoolingOptions,
    PoolingTask,
    PromptOptions,
)
from vllm.v1.engine.renderer_threads import RendererThreads
from vllm.v1.engine.worker_calls import PauseMode, Weights, call_with_model
from vllm.v1.outputs import ExtractedRows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

logger = init_logger(__name__)

_PAUSE_POLL_SECONDS = 0.002


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


class UndeliveredFiles:
    """Hidden-state files whose paths are not delivered yet; false when there are none."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """Add the file of a request that has ended, if it has one."""
        path = (kv_transfer_params or {}).get("hidden_states_path")
        if isinstance(path, str):
            self._paths.append(path)

    def discard(self) -> None:
        """Remove the files and their locks: their paths will not be delivered."""
        paths, self._paths = self._paths, []
        for path in paths:
            cleanup_hidden_states(path)


class RequestStream:
    """Outputs of one request on their way to its caller.

    A caller that is slower than the engine gets the cumulative outputs of several steps
    merged into one, and so always the newest ones.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._outputs: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        self._completions: dict[int, CompletionOutput] = {}
        """The last output of each continuation, if they are cumulative and so contain all."""
        self.files = UndeliveredFiles()
        """Files of continuations that have ended; they are the caller's once all have ended."""

    def put(self, item: RequestOutput | BaseException) -> None:
        self._outputs.put_nowait(item)

    async def get(self) -> RequestOutput:
        """Return the next output, or raise the error that ended the request."""
        while True:
            item = await self._outputs.get()
            if isinstance(item, BaseException):
                raise item
            if self._kind is not RequestOutputKind.CUMULATIVE:
                return item
            self._completions |= {one.index: one for one in item.outputs}
            if self._outputs.empty():
                item.outputs = [self._completions[index] for index in sorted(self._completions)]
                return item


class Parts(NamedTuple):
    """Rows of one prompt that come step by step."""

    sample: HiddenStatesSample
    """Tokens, positions and loss mask; no rows."""
    rows: AsyncGenerator[ExtractedRows, None]
    """Closing it aborts the request."""


class _ExtractCall:
    """State that the tasks of one call of :meth:`AsyncLLM.extract` share."""

    def __init__(self, feed: ExtractionFeed, source: AsyncIterator[Any] | None) -> None:
        self.feed = feed
        self.source = source
        self.room = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when there may be samples, an error, or an end."""
        self.error: Exception | None = None
        self.tasks: set[asyncio.Task[None]] = set()


class AsyncLLM(EngineFrontEnd):
    """The one client of an engine core process, for the server and for Python users.

    It is created by :meth:`from_engine_args` or :meth:`from_vllm_config`, started by
    ``await start()`` (or by the first request) and ended by ``await shutdown()``. It belongs
    to the event loop in which it was started; tokenising happens on other threads. Other
    threads hand their coroutines to that loop (``asyncio.run_coroutine_threadsafe``). In
    another loop every method raises RuntimeError, except ``shutdown()`` once the engine's
    own loop has ended.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        handle: CoreHandle | None = None,
        num_renderer_threads: int = 2,
    ) -> None:
        self._handle = handle or CoreHandle()
        self._handle.configure(vllm_config)
        super().__init__(vllm_config)
        self.renderer = RendererThreads(num_renderer_threads)
        """Threads for everything that tokenises or renders templates."""
        self.stats = EngineStats()
        self.started = CoreStarted()
        self.on_stats: list[Callable[[EngineStats], None]] = []
        """Called with the statistics of every step."""
        self._client: AsyncCoreClient | None = None
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._death: str | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._extraction_numbers = count()
        self._pausing = asyncio.Lock()
        self._may_begin = asyncio.Event()
        """Set unless the engine is paused."""
        self._may_begin.set()
        self._calls: dict[int, asyncio.Future[list[Any]]] = {}
        """Calls of the workers without an answer."""
        self._call_numbers = count()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Make an engine for these arguments. ValueError: they cannot be served."""
        handle = CoreHandle()  # loads its modules while the config is made
        try:
            return cls(engine_args.create_engine_config(), handle=handle)
        except BaseException:
            handle.end()
            raise

    async def start(self) -> CoreStarted:
        """Wait until the core is ready; returns its first message.

        ValueError: the core refused the configuration. EngineDeadError: it could not start.
        """
        self._check_loop()
        async with self._starting:
            await self.check_health()
            if self._client is None:
                client = AsyncCoreClient(self._handle, self._take_report, self._die)
                try:
                    self.started = await client.start()
                except BaseException:
                    await client.close()
                    raise
                if self.model_config.auto_fit_max_model_len:
                    self.vllm_config.set_max_model_len(self.started.max_model_len)
                self.input_processor = self._make_input_processor()
                self._client = client
        return self.started

    def _check_loop(self) -> None:
        """Raise RuntimeError if the engine was started in another event loop."""
        loop = asyncio.get_running_loop()
        with self._loop_lock:  # two loops may start it at the same time
            if self._loop is None:
                self._loop = loop
        if self._loop is not loop:
            ended = ", and that one has ended" if self._loop.is_closed() else ""
            raise RuntimeError(
                f"this AsyncLLM belongs to the event loop in which it was started{ended}: make "
                "one engine per loop, or hand coroutines to its loop with "
                "asyncio.run_coroutine_threadsafe()"
            )

    async def shutdown(self) -> None:
        """End the core; requests under way end with EngineDeadError. May be called again."""
        is_orphan = self._loop is not None and self._loop.is_closed()
        if not is_orphan:
            self._check_loop()
            self._end_streams("the engine was shut down")
        self._death = self._death or "the engine was shut down"
        client, self._client = self._client, None
        if client is None:
            await asyncio.to_thread(self._handle.end)
        elif is_orphan:
            client.abandon()
        else:
            await client.close()
        self.renderer.shutdown()

    def _end_streams(self, reason: str) -> None:
        self._may_begin.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        for stream in self._streams.values():
            stream.put(EngineDeadError(reason))
        self._streams.clear()

    @property
    def errored(self) -> bool:
        """True if the core is gone."""
        return self._death is not None

    @property
    def is_stopped(self) -> bool:
        """True if the core's process has been stopped by a signal for a while; it may go on."""
        return self._client is not None and self._client.is_stopped

    @property
    def is_running(self) -> bool:
        """True if requests are accepted."""
        return self._client is not None and not self.errored

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._handle.pid

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core is gone."""
        if self._death is not None:
            raise EngineDeadError(self._death)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request as they come; the last has ``finished`` set.

        Leaving the iteration early, or cancelling the task, aborts the request and removes its
        file. ValueError: the request cannot be served. EngineDeadError: the core ended.
        """
        await self.start()
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        processed = await self.renderer.run(
            len(text) if isinstance(text, str) else 0,
            lambda: self.input_processor.process(
                request_id, prompt, sampling_params, priority=priority, lora_request=lora_request
            ),
        )
        async with aclosing(self.run(processed)) as outputs:
            async for output in outputs:
                yield output

    async def extract(
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
        steering: SteeringVector | Sequence[SteeringVector] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[HiddenStatesSample | FailedSample, None]:
        """Do what :meth:`vllm.LLM.extract` does, asynchronously; ``prompts`` may be async, too."""
        settings = ExtractionSettings(
            *(layers, positions, dtype, ordered, on_error, max_in_flight, pooling),
            *(add_special_tokens, top_logprobs, logprob_temperature, sampling_params, hooks),
            *(mask, steering, lora_request),
        )
        async with aclosing(self.extract_with(prompts, settings)) as samples:
            async for sample in samples:
                yield sample

    async def pool(self, prompts: Any, options: PoolingOptions) -> AsyncGenerator[Pooled, None]:
        """Yield the result of each prompt of :meth:`vllm.LLM.encode`, in their order."""
        await self.start()
        # It may read files of the checkpoint.
        call = await self.renderer.run(0, lambda: self.pooler.call(options))
        async with aclosing(self.extract_with(prompts, call.settings)) as samples:
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
                    message = f"{completion.finish_reason}: {completion.stop_reason}"
                    failure = completion.failure or Failure(FailureKind.ABORTED, message)
                    raise HiddenStatesError(0, failure)
                # A request that was computed again brings some of them twice.
                rows = rows.part(slice(num_rows - rows.first, None))
                num_rows += len(rows)
                if len(rows):
                    yield rows

    async def _submit_extractions(self, call: _ExtractCall) -> None:
        """Hand prompts to the core while there is room for them."""
        try:
            while not call.feed.is_exhausted:
                if not call.feed.has_room:
                    call.room.clear()
                    await call.room.wait()
                    continue
                prepared = await self._prepare_extraction(call)
                processed = call.feed.accept(prepared) if prepared is not None else None
                if processed is not None:
                    task = asyncio.create_task(self._run_extraction(processed, call))
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

    async def run(self, processed: ProcessedInput) -> AsyncGenerator[RequestOutput, None]:
        """Do what :meth:`generate` does, for a request that was processed already."""
        stream = RequestStream(processed.request.sampling_params.output_kind)
        is_finished = False
        try:
            await self._submit(processed, stream)
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            self._streams.pop(processed.request.request_id, None)
            if not is_finished:
                self._abort(processed.request.request_id)
                stream.files.discard()

    async def _submit(self, processed: ProcessedInput, stream: RequestStream) -> None:
        self._check_loop()
        await self._may_begin.wait()
        client = self._client
        if client is None or self._death is not None:
            raise EngineDeadError(self._death or "the engine is not running")
        self._streams[processed.request.request_id] = stream
        for child in self.output_processor.add_request(processed):
            await client.send(AddRequest(child))

    async def abort(self, request_id: str) -> None:
        """Drop a request, by the caller's id or the engine's; unknown ids are ignored.

        A caller that iterates over its outputs gets a last one, with the finish reason "abort".
        """
        self._check_loop()
        core_ids = self.output_processor.find_core_ids([request_id])
        if core_ids:
            self._send_soon(AbortRequests(core_ids))
            ended = FinishReason.ABORT
            self._take_outputs(
                EngineCoreOutput(request_id=core_id, finish_reason=ended) for core_id in core_ids
            )

    def _abort(self, request_id: str) -> None:
        core_ids = self.output_processor.abort_requests([request_id])
        if core_ids:
            self._send_soon(AbortRequests(core_ids))

    def _send_soon(self, command: AbortRequests | FinishRequests) -> None:
        """Send without waiting; if the core has ended, the command is dropped."""
        client = self._client
        if client is None:
            return

        async def send() -> None:
            try:
                await client.send(command)
            except EngineDeadError:
                logger.debug("not sent, the engine core is gone: %s", command)

        task = asyncio.get_running_loop().create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do what :meth:`vllm.LLM.collective_rpc` does; a function is one of an importable module.

        TimeoutError: there was no answer in ``timeout`` seconds; the call goes on.
        """
        await self.start()
        call = pickle.dumps(WorkerCall(method, args, kwargs or {}))
        answer = asyncio.get_running_loop().create_future()
        number = next(self._call_numbers)
        self._calls[number] = answer
        try:
            assert self._client is not None
            await self._client.send(CallWorkers(number, call))
            async with asyncio.timeout(timeout):
                results: list[Any] = await answer
        finally:
            del self._calls[number]
        return results

    async def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Do what :meth:`vllm.LLM.apply_model` does, with a function of an importable module."""
        return await self.collective_rpc(call_with_model, args=(func,))

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "wait") -> AsyncGenerator[None, None]:
        """Let no request begin inside the block; those under way are completed, or aborted."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}: use {', '.join(get_args(PauseMode))}")
        await self.start()
        async with self._pausing:
            self._may_begin.clear()
            try:
                for request_id in list(self._streams) if mode == "abort" else ():
                    await self.abort(request_id)
                while self.output_processor.get_num_unfinished_requests():
                    await self.check_health()
                    await asyncio.sleep(_PAUSE_POLL_SECONDS)
                yield
            finally:
                self._may_begin.set()

    @asynccontextmanager
    async def weight_update(
        self, mode: PauseMode = "wait"
    ) -> AsyncGenerator[Callable[[Weights], Awaitable[list[Any]]], None]:
        """Do what :meth:`vllm.LLM.weight_update` does; the function that it yields is awaited.

        mode: ``"abort"`` ends requests under way instead of completing them.
        """
        async with self.paused(mode):
            try:
                yield lambda weights: self.collective_rpc("update_weights", args=(dict(weights),))
            finally:
                await self.reset_prefix_cache(reset_connector=True)

    async def update_weights(
        self, weights: str | os.PathLike[str] | Weights, mode: PauseMode = "wait"
    ) -> None:
        """Do what :meth:`vllm.LLM.update_weights` does."""
        async with self.weight_update(mode) as load:
            if isinstance(weights, str | os.PathLike):
                await self.collective_rpc("reload_weights", args=(os.fspath(weights),))
            else:
                await load(weights)

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        """Do what :meth:`vllm.LLM.sleep` does."""
        async with self.paused(mode):
            await self.collective_rpc("sleep", args=(level,))
            await self.reset_prefix_cache()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what :meth:`vllm.LLM.wake_up` does."""
        await self.collective_rpc("wake_up", args=(tags,))

    async def is_sleeping(self) -> bool:
        """Return whether memory is freed."""
        return any(await self.collective_rpc("is_sleeping"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now. ValueError: it cannot be used."""
        check_lora_request(lora_request, is_enabled=self.vllm_config.lora_config.enable_lora)
        return all(await self.collective_rpc("add_lora", args=(lora_request,)))

    async def remove_lora(self, lora_id: int) -> bool:
        """Free an adapter; requests that chose it keep it. Returns whether it was in memory."""
        return all(await self.collective_rpc("remove_lora", args=(lora_id,)))

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget every cached prefix; with ``reset_connector`` also what the KV connector keeps."""
        await self.start()
        assert self._client is not None
        await self._client.send(ResetPrefixCache(reset_connector))

    def _take_report(self, report: CoreReport) -> None:
        self.stats = report.stats
        for listener in self.on_stats:
            listener(report.stats)
        events = events_from_message(report.kv_cache_events) if self.on_kv_cache_events else []
        self._notify_listeners(report.kv_connector_stats, events)
        for core_id, failure in report.rejected.items():
            self._reject(core_id, failure)
        for answer in report.answers:
            self._take_answer(answer)
        for core_output in report.outputs:
            if core_output.kv_transfer_params is not None:
                self._take_file(core_output)
        self._take_outputs(report.outputs)

    def _take_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        processed = self.output_processor.process_outputs(outputs)
        if processed.reqs_to_finish:
            self._send_soon(FinishRequests(processed.reqs_to_finish))
        pairs = zip(processed.request_ids, processed.request_outputs, strict=True)
        for request_id, output in pairs:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(output)

    def _take_file(self, output: EngineCoreOutput) -> None:
        """Note a file that was written for a request, or remove it if the caller has gone."""
        request_id = self.output_processor.user_request_id(output.request_id)
        stream = self._streams.get(request_id) if request_id is not None else None
        files = stream.files if stream is not None else UndeliveredFiles()
        files.add(output.kv_transfer_params)
        if stream is None:
            files.discard()

    def _reject(self, core_id: str, failure: Failure) -> None:
        """Give the caller of a request that the core refused a ValueError."""
        request_id = self.output_processor.user_request_id(core_id)
        if request_id is None:
            return
        self._abort(request_id)
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(ValueError(failure.message))

    def _take_answer(self, answer: CallAnswer) -> None:
        future = self._calls.get(answer.number)
        if future is None or future.done():
            return
        if answer.failure is None:
            future.set_result(pickle.loads(answer.results))
        elif answer.failure.kind is FailureKind.BAD_REQUEST:
            future.set_exception(ValueError(answer.failure.message))
        else:
            future.set_exception(RuntimeError(answer.failure.message))

    def _die(self, reason: str) -> None:
        """Take in that the core ended: all streams end with an error."""
        logger.error("%s", reason)
        self._death = reason
        self._end_streams(reason)

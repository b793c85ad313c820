"""The engine for asyncio: text is handled here, the engine core runs in another process."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from vllm.distributed.engine_group import EngineFiles
from vllm.distributed.kv_events import events_from_message
from vllm.exceptions import Failure, FailureKind, NotReadyError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import call_in_thread
from vllm.utils.ray_cluster import place_here
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_extraction import AsyncExtraction
from vllm.v1.engine.core_client import AnyCoreHandle, AsyncCoreClient, CoreHandle
from vllm.v1.engine.core_group import CoreGroup
from vllm.v1.engine.core_messages import (
    AbortRequests,
    AddRequest,
    AnsweredCommand,
    CallWorkers,
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    FinishRequests,
    FreezeRequests,
    ResetPrefixCache,
    ThawRequests,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.guests import Guests
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.request_stream import RequestStream, UndeliveredFiles
from vllm.v1.engine.worker_calls import AsyncWorkerCalls, PauseMode, PendingCalls

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

logger = init_logger(__name__)

_PAUSE_POLL_SECONDS = 0.002
_BY_CALLER = "pause_generation"


class AsyncLLM(AsyncExtraction, AsyncWorkerCalls):
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
        handle: AnyCoreHandle | None = None,
        num_renderer_threads: int = 2,
    ) -> None:
        """handle: the first core, or what stands for all of them: see :mod:`.guests`."""
        parallel = vllm_config.parallel_config
        self._engine_files: EngineFiles | None = None
        if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
            self._engine_files = EngineFiles()
        handle = handle or CoreHandle()
        self._handles: Sequence[AnyCoreHandle] = [handle]
        if isinstance(handle, CoreHandle):
            self._handles = self._start_cores(vllm_config, handle, self._engine_files)
        try:
            super().__init__(vllm_config, num_renderer_threads)
        except BaseException:
            for started in self._handles:
                started.end()
            raise
        self.started = CoreStarted()
        self.on_stats: list[Callable[[EngineStats], None]] = []
        """Called with the statistics of every step."""
        self._client: AsyncCoreClient | CoreGroup | None = None
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._death: str | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._pausing = asyncio.Lock()
        self._pauses: set[object] = set()
        """One for each caller that lets no request begin."""
        self._may_begin = asyncio.Event()
        """Set unless the engine is paused."""
        self._may_begin.set()
        self._is_frozen = False
        self._calls = PendingCalls()
        self._guests: Guests | None = None
        self.on_guest_file: list[Callable[[str], object]] = []
        """Called with the path of each file that a guest's request has written."""

    @staticmethod
    def _start_cores(
        vllm_config: VllmConfig, first: CoreHandle, engine_files: EngineFiles | None
    ) -> Sequence[AnyCoreHandle]:
        """Start one core for each engine of this machine, the first of which has been, and listen
        for those of others."""
        parallel = vllm_config.parallel_config
        if parallel.is_external:
            raise ValueError(
                "distributed_executor_backend='external_launcher': the processes call LLM; a "
                "server and AsyncLLM start their ranks themselves ('mp')"
            )
        if parallel.is_offline_engine:
            raise ValueError(
                f"VLLM_DP_SIZE={parallel.data_parallel_size} is for programs that make an LLM in "
                "each process; unset it, and use data_parallel_size"
            )
        if parallel.uses_ray:
            if parallel.data_parallel_size > 1:
                raise ValueError(
                    f"data_parallel_size={parallel.data_parallel_size} with "
                    "distributed_executor_backend='ray' is not supported: start several servers"
                )
            parallel = vllm_config.parallel_config = replace(parallel, ray_place=place_here())
        if parallel.engines_here.start and parallel.engines_served.start == 0:
            raise ValueError(
                f"data_parallel_start_rank={parallel.data_parallel_start_rank}: engine 0 and the "
                "front end are on another machine; use headless, or data_parallel_hybrid_lb"
            )
        from vllm.v1.engine.core_nodes import remote_cores  # loads torch

        remote = remote_cores(vllm_config)
        here = [first, *(CoreHandle() for _ in parallel.engines_here[1:])]
        if not parallel.engines_here:
            first.end()
            return remote
        try:
            for number, handle in zip(parallel.engines_here, here, strict=True):
                config = copy.copy(vllm_config)
                paths = () if engine_files is None else engine_files.paths
                config.parallel_config = replace(
                    parallel, data_parallel_rank=number, engine_files=paths
                )
                handle.configure(config)
        except BaseException:
            for one in (*here, *remote):
                one.end()
            raise
        return [*here, *remote]

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
                client = self._make_client()
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

    def _make_client(self) -> AsyncCoreClient | CoreGroup:
        if len(self._handles) == 1:
            return AsyncCoreClient(self._handles[0], self._take_report, self._die)
        parallel = self.vllm_config.parallel_config
        size = parallel.data_parallel_size
        names = [f"engine {number} of {size}" for number in parallel.engines_served]
        balancing = parallel.data_parallel_balancing
        reports = (self._take_report, self._die)
        return CoreGroup(names, self._handles, *reports, balancing, self._engine_files)

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
        if self._guests is not None:
            self._guests.close()
        if client is None:
            for handle in self._handles:
                await call_in_thread(handle.end, 0.0)
        elif is_orphan:
            client.abandon()
        else:
            await client.close()
        self.renderer.shutdown()

    def _end_streams(self, reason: str) -> None:
        self._may_begin.set()
        self._calls.fail(EngineDeadError(reason))
        for stream in self._streams.values():
            stream.put(EngineDeadError(reason))
        self._streams.clear()

    @property
    def stats(self) -> EngineStats:
        """The state of the engine after its last steps; counts are since the start."""
        return EngineStats() if self._client is None else self._client.stats

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
        """Process id of the engine core, of several the first. ValueError: none is here."""
        for handle in self._handles:
            if isinstance(handle, CoreHandle):
                return handle.pid
        raise ValueError("data_parallel_size_local=0: no engine core is on this machine")

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

    @property
    def guests(self) -> Guests:
        """The front ends in other processes. The engine has started."""
        if self._guests is None:
            self._guests = Guests(self)
        return self._guests

    @property
    def may_begin(self) -> bool:
        """True unless requests wait for the end of a pause."""
        return self._may_begin.is_set()

    async def wait_until_may_begin(self) -> None:
        """Wait until there is no pause."""
        while not self._may_begin.is_set():  # it may be paused again before this task goes on
            await self._may_begin.wait()

    async def send(self, command: CoreCommand) -> None:
        """Send a command of a guest. EngineDeadError: the core is gone."""
        if self._client is None:
            raise EngineDeadError(self._death or "the engine is not running")
        await self._client.send(command)

    async def _submit(self, processed: ProcessedInput, stream: RequestStream) -> None:
        self._check_loop()
        await self.wait_until_may_begin()
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

    @property
    def _num_engines(self) -> int:
        return len(self._handles)

    async def _call_workers(self, call: bytes) -> list[Any]:
        return await self._call(lambda number: CallWorkers(number, call))

    async def _call(self, command: Callable[[int], AnsweredCommand]) -> list[Any]:
        """Send a command that has an answer, and wait for that."""
        await self.start()
        with self._calls.begin() as (number, answer):
            assert self._client is not None
            await self._client.send(command(number))
            return await answer

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "wait") -> AsyncGenerator[None, None]:
        """Let no request begin inside the block; those under way end first, or are kept."""
        _check_mode(mode)
        await self.start()
        async with self._pausing:
            pause = object()
            self._pause(pause)
            try:
                if mode != "keep":
                    await self._end_requests(mode)
                elif not self._is_frozen:
                    await self._freeze(keeps_states=False)
                yield
            finally:
                await self._resume(pause)

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True
    ) -> None:
        """Let no request begin until :meth:`resume_generation`.

        mode: ``"abort"`` ends requests under way, ``"wait"`` completes them, ``"keep"`` computes
        nothing of them until then. clear_cache: forget all prefixes, and compute kept requests
        again from their tokens if the weights change meanwhile.
        """
        _check_mode(mode)
        await self.start()
        self._pause(_BY_CALLER)
        if mode == "keep":
            await self._freeze(keeps_states=not clear_cache)
        else:
            await self._end_requests(mode)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Let requests begin again, and those go on that were kept."""
        await self._resume(_BY_CALLER)

    async def is_paused(self) -> bool:
        """Return whether requests wait to begin."""
        return not self._may_begin.is_set()

    def _pause(self, pause: object) -> None:
        self._pauses.add(pause)
        self._may_begin.clear()

    async def _resume(self, pause: object) -> None:
        self._pauses.discard(pause)
        if self._pauses:
            return
        was_frozen, self._is_frozen = self._is_frozen, False
        if was_frozen and not self.errored:
            await self._call(ThawRequests)
        if not self._pauses:  # another caller may have paused it meanwhile
            self._may_begin.set()

    async def _freeze(self, *, keeps_states: bool) -> None:
        self._is_frozen = True
        await self._call(lambda number: FreezeRequests(number, keeps_states))

    async def _end_requests(self, mode: PauseMode) -> None:
        """Abort or complete requests under way; frozen ones go on when they are resumed."""
        for request_id in list(self._streams) if mode == "abort" else ():
            await self.abort(request_id)
        if mode == "abort" and self._guests is not None:
            await self._guests.abort_all()
        while not self._is_frozen and self._num_unfinished_requests:
            await self.check_health()
            await asyncio.sleep(_PAUSE_POLL_SECONDS)
        await asyncio.gather(*self._background)  # the core hears of their ends before what follows

    @property
    def _num_unfinished_requests(self) -> int:
        num_of_guests = 0 if self._guests is None else self._guests.num_unfinished_requests
        return self.output_processor.get_num_unfinished_requests() + num_of_guests

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget every cached prefix; with ``reset_connector`` also what the KV connector keeps."""
        await self.start()
        assert self._client is not None
        await self._client.send(ResetPrefixCache(reset_connector))

    def _take_report(self, report: CoreReport) -> None:
        for listener in self.on_stats:
            listener(self.stats)
        events = events_from_message(report.kv_cache_events) if self.on_kv_cache_events else []
        self._notify_listeners(report.kv_connector_stats, events)
        if self._guests is not None:
            report = self._guests.take(report)
        for core_id, failure in report.rejected.items():
            self._reject(core_id, failure)
        for answer in report.answers:
            self._calls.take(answer)
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
            is_early = failure.kind is FailureKind.NOT_READY
            stream.put((NotReadyError if is_early else ValueError)(failure.message))

    def _die(self, reason: str) -> None:
        """Take in that the core ended: all streams end with an error."""
        logger.error("%s", reason)
        self._death = reason
        self._end_streams(reason)


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode={mode!r}: use {', '.join(get_args(PauseMode))}")

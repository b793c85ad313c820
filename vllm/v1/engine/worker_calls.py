"""Calls of the workers between two steps: of their methods, for new weights, for sleep.

WorkerCalls        methods of an engine in the caller's process (LLM)
AsyncWorkerCalls   the same for a core in another process (AsyncLLM)
"""

from __future__ import annotations

import asyncio
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from vllm.exceptions import FailureError, FailureKind
from vllm.lora.request import LoRARequest, check_lora_request
from vllm.utils import pickling
from vllm.v1.engine.core_messages import CallAnswer, WorkerCall
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.front_end import EngineFrontEnd

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.v1.engine.shared_engine import SharedEngine
    from vllm.v1.worker.gpu_worker import Worker

Result = TypeVar("Result")
Weights: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
PauseMode = Literal["wait", "abort", "keep"]
"""Requests under way are completed, aborted, or go on after the pause."""
_UPDATES = ("reload_weights", "update_weights", "sleep")
"""Methods of workers after which no state of a request is valid: they are called in an update."""


def call_with_model(worker: Worker, func: Callable[[nn.Module], Any]) -> Any:
    """Call a function with a worker's model."""
    return func(worker.model_runner.model)


def _begin_update() -> WorkerCall:
    return WorkerCall("transfer_weights", ("begin",), {})


def _interrupt_update(error: BaseException) -> WorkerCall:
    reason = f"an update of them ended: {str(error) or type(error).__name__}"
    return WorkerCall("transfer_weights", ("interrupt", reason), {})


class WorkerCalls:
    """The calls of the workers of an engine in this process."""

    _engine: SharedEngine
    _is_in_update = False

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; with ``reset_connector``, also those of the KV connector.

        Returns False if that was not possible.
        """
        return self._engine.reset_prefix_cache(reset_connector=reset_connector)

    def collective_rpc(
        self,
        method: str | Callable[..., Result],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Result]:
        """Call a method of every worker between two steps, and return their results.

        method: its name (see ``worker_extension_cls``), or a function that gets the worker first.
        Methods of workers that change weights are called in a :meth:`weight_update`; functions
        that do so have to be.
        timeout: without effect, because the worker runs in this thread.
        """
        call = WorkerCall(method, args, kwargs or {})
        if method in _UPDATES and not self._is_in_update:
            with self.weight_update():
                return self._engine.collective_rpc(call)
        return self._engine.collective_rpc(call)

    def apply_model(self, func: Callable[[nn.Module], Result]) -> list[Result]:
        """Call a function with the model of every worker, and return their results."""
        return self.collective_rpc(call_with_model, args=(func,))

    @contextmanager
    def weight_update(self) -> Iterator[Callable[[Weights], list[str]]]:
        """Let weights be replaced inside the block, by calls of what it yields.

        Requests under way are completed first, and none begins inside the block, so no request has
        rows of old and of new weights. At the end all prefixes are forgotten. If an exception
        leaves the block after some weights were replaced, requests are refused until all were.
        """
        with self._engine.paused():
            was_in_update, self._is_in_update = self._is_in_update, True
            if not was_in_update:
                self._engine.collective_rpc(_begin_update())
            try:
                yield lambda weights: self.collective_rpc("update_weights", args=(weights,))[0]
            except BaseException as error:
                if not was_in_update:
                    self._engine.collective_rpc(_interrupt_update(error))
                raise
            finally:
                self._is_in_update = was_in_update
                self.reset_prefix_cache(reset_connector=True)

    def update_weights(self, weights: str | os.PathLike[str] | Weights) -> None:
        """Replace weights by those of a folder, or by tensors named as in the checkpoint.

        A folder has to hold a whole checkpoint of the same sizes. ValueError: weights do not fit,
        or cannot be replaced; then nothing has changed. If a replacement fails in the middle for
        another reason, requests are refused until a whole checkpoint was loaded.
        """
        with self.weight_update() as load:
            if isinstance(weights, str | os.PathLike):
                self.collective_rpc("reload_weights", args=(os.fspath(weights),))
            else:
                load(weights)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the pool and, on a device, of the weights, after all requests ended.

        level: 1 keeps the weights in host memory; 2 discards them, so that after
        :meth:`wake_up` a whole checkpoint has to come by :meth:`update_weights`.
        """
        with self._engine.paused():
            self._engine.collective_rpc(WorkerCall("sleep", (level,), {}))
            self.reset_prefix_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what :meth:`sleep` freed. tags: only ``"weights"`` or ``"kv_cache"``."""
        self.collective_rpc("wake_up", args=(tags,))


class AsyncWorkerCalls(EngineFrontEnd, ABC):
    """The calls of the workers of an engine whose core runs in another process."""

    _is_in_update = False

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do what :meth:`vllm.LLM.collective_rpc` does; a function is one of an importable module.

        TimeoutError: there was no answer in ``timeout`` seconds; a call that began goes on.
        ValueError: the worker raised it, or the call cannot be sent to another process.
        """
        call = pickled(WorkerCall(method, args, kwargs or {}))
        is_update = method in _UPDATES and not self._is_in_update
        async with asyncio.timeout(timeout), self.weight_update() if is_update else nullcontext():
            if method == "reload_weights" and self._num_engines > 1:
                # One that some engines cannot read must not leave them with different ones.
                check = WorkerCall("check_weights", args, kwargs or {})
                await self._call_workers(pickled(check))
            return await self._call_workers(call)

    @property
    @abstractmethod
    def _num_engines(self) -> int:
        """Number of engines that are called."""

    @abstractmethod
    async def _call_workers(self, call: bytes) -> list[Any]:
        """Send a pickled call to the workers, and wait for their results."""

    @abstractmethod
    def paused(self, mode: PauseMode = "wait") -> AbstractAsyncContextManager[None]:
        """Let no request begin inside the block."""

    @abstractmethod
    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True
    ) -> None:
        """Let no request begin until :meth:`resume_generation`.

        mode: ``"abort"`` ends requests under way, ``"wait"`` completes them, ``"keep"`` computes
        nothing of them until then. clear_cache: forget all prefixes, and compute kept requests
        again from their tokens if the weights change meanwhile.
        """

    @abstractmethod
    async def resume_generation(self) -> None:
        """Let requests begin again, and those go on that were kept."""

    @abstractmethod
    async def is_paused(self) -> bool:
        """Return whether requests wait to begin."""

    @abstractmethod
    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget every cached prefix."""

    async def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Do what :meth:`vllm.LLM.apply_model` does, with a function of an importable module."""
        return await self.collective_rpc(call_with_model, args=(func,))

    @asynccontextmanager
    async def weight_update(
        self, mode: PauseMode = "wait"
    ) -> AsyncGenerator[Callable[[Weights], Awaitable[list[Any]]], None]:
        """Do what :meth:`vllm.LLM.weight_update` does; the function that it yields is awaited.

        mode: ``"abort"`` ends requests under way instead of completing them; ``"keep"`` computes
        them again from their tokens, afterwards.
        """
        async with self.paused(mode):
            self._is_in_update = True
            try:
                await self._call_workers(pickled(_begin_update()))
                yield lambda weights: self.collective_rpc("update_weights", args=(dict(weights),))
            except BaseException as error:
                await self._call_workers(pickled(_interrupt_update(error)))
                raise
            finally:
                self._is_in_update = False
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
        """Do what :meth:`vllm.LLM.sleep` does.

        mode: ``"keep"`` inside a pause only, which ends after :meth:`wake_up`.
        """
        if mode == "keep" and not await self.is_paused():
            raise ValueError("mode='keep': pause_generation(mode='keep') first, or use wait, abort")
        async with self.paused(mode):
            await self._call_workers(pickled(WorkerCall("sleep", (level,), {})))
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

    async def retire_lora(self, lora_id: int) -> bool:
        """Do what :meth:`remove_lora` does, for a number that no other adapter gets.

        Requests that come to the workers later, such as those that wait for the end of a pause,
        read its files once more. They fail if these have changed.
        """
        return all(await self.collective_rpc("retire_lora", args=(lora_id,)))


class PendingCalls:
    """Calls of the workers of another process that have no answer yet."""

    def __init__(self) -> None:
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}

    @contextmanager
    def begin(self) -> Iterator[tuple[int, asyncio.Future[list[Any]]]]:
        """Yield the number of a new call, and its results as a future."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, self._answers[number]
        finally:
            del self._answers[number]

    def take(self, answer: CallAnswer) -> None:
        """Take in an answer; nobody may wait for it any more."""
        future = self._answers.get(answer.number)
        if future is None or future.done():
            return
        if answer.failure is None:
            future.set_result(pickle.loads(answer.results))
        elif answer.failure.kind is FailureKind.BAD_REQUEST:
            future.set_exception(ValueError(answer.failure.message))
        elif answer.failure.kind is FailureKind.STEP_FAILED:
            future.set_exception(RuntimeError(answer.failure.message))
        else:
            future.set_exception(FailureError(answer.failure))

    def fail(self, error: EngineDeadError) -> None:
        """End all calls with an error."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)


def pickled(call: WorkerCall) -> bytes:
    """Return a call for another process. ValueError: it cannot be sent there."""
    try:
        return pickling.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"collective_rpc: the call cannot be sent to the engine's process ({error}); use a "
            "function of an importable module, and arguments that can be pickled"
        ) from error

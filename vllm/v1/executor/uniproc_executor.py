"""The executor in the engine core's own process, and all that the core sees of the worker."""

from __future__ import annotations

import logging
import pkgutil
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.engine_group import get_engine_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import PendingOutput
from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.hook_points import HookPoint


logger = init_logger(__name__)


def worker_class(vllm_config: VllmConfig) -> type[Worker]:
    """Return the class of workers, with the methods of ``worker_extension_cls``."""
    name = vllm_config.parallel_config.worker_extension_cls
    if not name:
        return Worker
    try:
        extension = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"worker_extension_cls={name!r} cannot be imported: {error}") from error
    if not isinstance(extension, type):
        raise ValueError(f"worker_extension_cls={name!r} is not a class")
    taken = [one for one in vars(extension) if not one.startswith("__") and hasattr(Worker, one)]
    if taken:
        raise ValueError(f"worker_extension_cls={name!r}: workers have {', '.join(taken)} already")
    return type("Worker", (Worker, extension), {})


def call_worker(worker: Worker, call: WorkerCall) -> Any:
    """Call a method of a worker, or a function with it. ValueError: it has no such method."""
    if not isinstance(call.method, str):
        return call.method(worker, *call.args, **call.kwargs)
    method = getattr(worker, call.method, None)
    if not callable(method):
        raise ValueError(f"collective_rpc: workers have no method {call.method!r}")
    return method(*call.args, **call.kwargs)


class UniProcExecutor:
    """Calls the worker directly."""

    dead_because: str | None = None
    """The reason why nothing can be computed any more; None: it can."""
    on_death: Callable[[], None] | None = None
    """Called, maybe from another thread, when ``dead_because`` was set."""
    is_closing = False
    """True if the engine is about to end in order."""
    has_stopped_rank = False
    """True if a signal has stopped another rank's process for a while; it may go on."""
    _death = threading.Lock()

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.worker = worker_class(vllm_config)(vllm_config)
        try:
            self._num_ways_given_up = self.worker.load_model()
        except BaseException:
            self._end_worker()
            raise

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.worker.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_from_config(kv_cache_config)

    def no_norm_reason(self) -> str | None:
        """Return why rows cannot have the state after the final norm; None: they can."""
        return self.worker.model_runner.no_norm_reason

    def no_steering_reason(self) -> str | None:
        """Return why nothing can be added to the model's stream; None: it can."""
        return self.worker.model_runner.no_steering_reason

    def no_head_reason(self) -> str | None:
        """Return why the model computes no logits; None: it does."""
        return self.worker.model_runner.no_head_reason

    def not_ready_reason(self) -> str | None:
        """Return why no step can run; None: one can."""
        return self.worker.not_ready_reason

    def choose_adapter(self, request_id: str, lora_request: LoRARequest) -> str:
        """Load a request's adapter before it begins; returns a digest. ValueError: it cannot be
        used."""
        adapters = self.worker.model_runner.adapters
        adapters.load(lora_request)
        return adapters.choose(request_id, lora_request)

    def drop_adapter(self, request_id: str) -> None:
        """Undo :meth:`choose_adapter`, for a request that was refused."""
        self.worker.model_runner.adapters.take(request_id)

    def outdated_requests(self) -> list[str]:
        """Return requests whose adapters fit the weights before an update, and may not fit now."""
        runner = self.worker.model_runner
        return runner.adapters.outdated(runner.requests)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Call a method or a function with every worker; returns their results."""
        return [call_worker(self.worker, call)]

    def find_hooks(self, names: Iterable[str]) -> list[HookPoint]:
        """Return the model's hook points of these names. ValueError: it has no such point, or
        its values are in parts on the ranks."""
        points = [self.worker.model_runner.hook_points.find(name) for name in names]
        for point in points:
            if point.is_scattered:
                ranks = self.worker.vllm_config.parallel_config.tensor_parallel_size
                raise ValueError(
                    f"hooks: {point.names[0]!r} is cut over the ranks of tensor_parallel_size="
                    f"{ranks}; leave it out, or use tensor_parallel_size=1"
                )
        return points

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        """Return the data by which others reach the connector's worker sides, by (pipeline,
        tensor-parallel) rank; those that have none are left out."""
        metadata = self.worker.model_runner.handshake_metadata()
        return {} if metadata is None else {(0, 0): metadata}

    def groups(self) -> AbstractContextManager[None]:
        """A block in which the driver's ranks are known, for the connector's scheduler side."""
        return nullcontext()

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        """Take the connector's scheduler side, which says how many ranks report. ValueError: its
        reports cannot be merged."""

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        return self.worker.model_runner.execute_model(scheduled)

    @property
    def shares_experts(self) -> bool:
        """True if each step is one of all engines."""
        return self.worker.model_runner.shared_steps.are_shared

    def take_part(self) -> None:
        """Compute nothing but what a step of other engines needs of this one."""
        self.worker.model_runner.take_part()

    def die(self, reason: str) -> None:
        """Take in that nothing can be computed any more."""
        with self._death:
            if self.dead_because is not None:
                return
            self.dead_because = reason
        level = logging.DEBUG if self.is_closing else logging.ERROR
        logger.log(level, "the engine cannot go on: %s", reason)
        if self.on_death is not None:
            self.on_death()

    def run_waiting_steps(self) -> None:
        """Run what :meth:`execute_model` put off until its result is asked for; here nothing."""

    def shutdown(self) -> None:
        """End all workers, which frees the weights and the pool."""
        if (engines := get_engine_group()) is not None:
            engines.end()
        self._end_worker()

    def _end_worker(self) -> None:
        self.worker.model_runner.shutdown()
        del self.worker

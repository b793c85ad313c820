"""A rank in its own process (:mod:`vllm.utils.child_process`).

It does what the engine's process does (:mod:`vllm.v1.executor.multiproc_executor`), at the same
time, but keeps no rows and reports no tokens.
"""

from __future__ import annotations

import faulthandler
import pickle
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from vllm.config.connectors import REGISTERED
from vllm.distributed.broadcast import BroadcastPlace, BroadcastReceiver
from vllm.distributed.communicators import GroupClosedError
from vllm.distributed.parallel_state import ALONE, use_groups, use_groups_everywhere
from vllm.distributed.pipeline_links import NO_LINKS
from vllm.exceptions import Failure, FailureKind
from vllm.logger import init_logger, set_log_format
from vllm.model_classes import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.utils import pickling
from vllm.utils.child_process import receive_settings
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.executor.rank_messages import (
    RankAnswer,
    RankCall,
    RankSettings,
    failed_answer,
)
from vllm.v1.executor.rank_terms import terms_of
from vllm.v1.executor.rank_wiring import join_engines
from vllm.v1.executor.uniproc_executor import call_worker, worker_class
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger(__name__)


class Rank:
    """The methods that the engine's process calls, with the worker of this one."""

    worker: Worker

    def __init__(self, settings: RankSettings) -> None:
        self._config = settings.vllm_config
        self._rank = self._config.parallel_config.rank
        self._connections = settings.wiring.open(self._config.parallel_config)
        join_engines(self._config.parallel_config)
        self._group, self._links = ALONE, NO_LINKS
        self._generation = 0
        self._has_left = False
        """True after a failure, until there is a new group."""
        self._reports: list[KVConnectorOutput] = []

    def answer(self, call: RankCall) -> RankAnswer:
        """Carry out a call. After a failure no rank waits for this one."""
        try:
            for note in call.notes:
                getattr(self, note.method)(*note.args)
            with use_groups(self._group, self._links):
                result = getattr(self, call.method)(*self._unpacked(call))
            return RankAnswer(call.number, result, self._take_reports())
        except Exception as error:
            self._leave()
            if not isinstance(error, (GroupClosedError, ValueError)):
                logger.exception("rank %d: %s failed", self._rank, call.method)
            return failed_answer(call.number, error)._replace(reports=self._take_reports())

    def _take_reports(self) -> list[KVConnectorOutput]:
        reports, self._reports = self._reports, []
        return reports

    def _unpacked(self, call: RankCall) -> tuple[Any, ...]:
        try:
            args: tuple[Any, ...] = pickle.loads(call.args)
        except (AttributeError, ImportError) as error:
            raise ValueError(
                f"{call.method}: rank {self._rank} cannot import what it was passed ({error}); use "
                "functions and classes of modules that every process can import"
            ) from error
        return args

    def join(self, generation: int) -> None:
        """Leave the group for a new one."""
        self._leave()
        self._generation = generation
        self._group, self._links = self._connections.join(generation)
        use_groups_everywhere(self._group, self._links)
        self._has_left = False

    def _leave(self) -> None:
        self._has_left = True
        if self._group.communicator is not None:
            self._group.communicator.close()
        self._links.close()

    def terms(self) -> dict[str, str]:
        return terms_of(self._config)

    def load_model(self) -> int:
        load_general_plugins()
        self.worker = worker_class(self._config)(self._config)
        return self.worker.load_model()

    def give_up_ways(self, number: int) -> int:
        return self.worker.give_up_ways(number)

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_from_config(kv_cache_config)

    def get_kv_connector_handshake_metadata(self) -> Any:
        return self.worker.model_runner.handshake_metadata()

    def execute_model(self, scheduled: SchedulerOutput, group: int) -> None:
        """group: number of the group for which the step was planned."""
        runner = self.worker.model_runner
        if self._has_left or group != self._generation:
            # A step before it failed, so tokens are not known; all ranks give this one up.
            self._note(runner.skip_step(scheduled))
            if self._has_left:
                raise GroupClosedError("the step before this one failed")
            return
        pending = runner.execute_model(scheduled)
        self._note(pending.output.kv_connector_output)
        pending.result()

    def take_part(self) -> None:
        self.worker.model_runner.take_part()

    def _note(self, report: KVConnectorOutput | None) -> None:
        if report is not None:
            self._reports.append(report)

    def load_adapter(self, lora_request: LoRARequest) -> None:
        self.worker.model_runner.adapters.load(lora_request)

    def choose_adapter(self, request_id: str, lora_request: LoRARequest) -> None:
        self.worker.model_runner.adapters.choose(request_id, lora_request)

    def drop_adapter(self, request_id: str) -> None:
        self.worker.model_runner.adapters.take(request_id)

    def collective_rpc(self, call: WorkerCall) -> Any:
        return call_worker(self.worker, call)


def _encoded(answer: RankAnswer) -> bytes:
    try:
        return pickling.dumps(answer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        text = f"the answer cannot be sent to the engine's process: {error}"
        failure = Failure(FailureKind.STEP_FAILED, text)
        return pickle.dumps(RankAnswer(answer.number, failure=failure))


def main(folder: str) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    settings: RankSettings = receive_settings(folder)
    set_log_format(settings.log_format)
    ModelRegistry.restore(settings.models)
    REGISTERED.update(settings.connectors)
    rank = Rank(settings)
    settle_garbage_collector()
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as socket:
        receive: Callable[[], bytes] = socket.recv
        if isinstance(settings.calls, BroadcastPlace):
            socket.connect(f"ipc://{folder}/answers")
            receive = BroadcastReceiver(settings.calls).receive
        else:
            settings.calls.connect(socket)
        while True:
            call: RankCall | None = pickle.loads(receive())
            if call is None:
                return 0
            socket.send(_encoded(rank.answer(call)))

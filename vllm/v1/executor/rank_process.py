"""A rank in its own process: ``python -m vllm.v1.executor.rank_process
FOLDER``.

It does what the engine's process does (:mod:`vllm.v1.executor.multiproc_executor`), at the same
time, but keeps no rows and reports no tokens.
"""

from __future__ import annotations

import faulthandler
import pickle
import signal
import sys
from typing import Any

import zmq

from vllm.config.connectors import REGISTERED
from vllm.distributed.communicators import GroupClosedError
from vllm.distributed.parallel_state import ALONE, use_groups, use_groups_everywhere
from vllm.distributed.pipeline_links import NO_LINKS
from vllm.exceptions import Failure, FailureError, FailureKind, kind_of
from vllm.logger import init_logger, set_log_format
from vllm.model_classes import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.utils.child_process import end_with_parent
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.executor.rank_messages import RankAnswer, RankCall, RankSettings
from vllm.v1.executor.rank_wiring import Connections
from vllm.v1.executor.uniproc_executor import call_worker, worker_class
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)


class Rank:
    """The methods that the engine's process calls, with the worker of this one."""

    worker: Worker

    def __init__(self, settings: RankSettings) -> None:
        self._config = settings.vllm_config
        self._rank = self._config.parallel_config.rank
        self._connections = Connections(self._config.parallel_config, settings.wiring)
        self._group, self._links = ALONE, NO_LINKS
        self._has_left = False
        """True after a failure, until there is a new group."""
        self._reports: list[KVConnectorOutput] = []

    def answer(self, call: RankCall) -> RankAnswer:
        """Carry out a call. After a failure no rank waits for this one."""
        try:
            with use_groups(self._group, self._links):
                result = getattr(self, call.method)(*call.args)
            return RankAnswer(call.number, result, self._take_reports())
        except Exception as error:
            self._leave()
            was_cut_off, is_refusal = (isinstance(error, c) for c in (GroupClosedError, ValueError))
            if not was_cut_off and not is_refusal:
                logger.exception("rank %d: %s failed", self._rank, call.method)
            kind = kind_of(error, FailureKind.STEP_FAILED)
            says_all = isinstance(error, ValueError | FailureError)
            text = str(error) if says_all else f"{type(error).__name__}: {error}"
            failure = Failure(FailureKind.BAD_REQUEST if is_refusal else kind, text)
            return RankAnswer(call.number, None, self._take_reports(), failure, was_cut_off)

    def _take_reports(self) -> list[KVConnectorOutput]:
        reports, self._reports = self._reports, []
        return reports

    def join(self, generation: int) -> None:
        """Leave the group for a new one."""
        self._leave()
        self._group, self._links = self._connections.join(generation)
        use_groups_everywhere(self._group, self._links)
        self._has_left = False

    def _leave(self) -> None:
        self._has_left = True
        if self._group.communicator is not None:
            self._group.communicator.close()
        self._links.close()

    def load_model(self) -> None:
        load_general_plugins()
        self.worker = worker_class(self._config)(self._config)
        self.worker.load_model()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_from_config(kv_cache_config)

    def get_kv_connector_handshake_metadata(self) -> Any:
        return self.worker.model_runner.handshake_metadata()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        runner = self.worker.model_runner
        if self._has_left:  # the step before failed here: its tokens are not known
            self._note(runner.skip_step(scheduled))
            raise GroupClosedError("the step before this one failed")
        pending = runner.execute_model(scheduled)
        self._note(pending.output.kv_connector_output)
        pending.result()

    def _note(self, report: KVConnectorOutput | None) -> None:
        if report is not None:
            self._reports.append(report)

    def collective_rpc(self, call: WorkerCall) -> Any:
        return call_worker(self.worker, call)


def _encoded(answer: RankAnswer) -> bytes:
    try:
        return pickle.dumps(answer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        text = f"the answer cannot be sent to the engine's process: {error}"
        failure = Failure(FailureKind.STEP_FAILED, text)
        return pickle.dumps(RankAnswer(answer.number, failure=failure))


def main() -> int:
    # Signals may reach the whole process group; the engine core decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = sys.argv[1]
    settings: RankSettings = pickle.load(sys.stdin.buffer)
    set_log_format(settings.log_format)
    end_with_parent(folder)
    ModelRegistry.restore(settings.models)
    REGISTERED.update(settings.connectors)
    rank = Rank(settings)
    settle_garbage_collector()
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as socket:
        socket.connect(f"ipc://{folder}/calls")
        while True:
            call: RankCall | None = pickle.loads(socket.recv())
            if call is None:
                return 0
            socket.send(_encoded(rank.answer(call)))


if __name__ == "__main__":
    sys.exit(main())

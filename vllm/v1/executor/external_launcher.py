"""The executor of ranks that somebody else started, such as torchrun.

Each process has a whole engine of the same options and makes the same calls with the same prompts.
So each engine plans the same steps, and runs its own rank's part of them. The rank that keeps rows
and samples (``ParallelConfig.driver_rank``) sends the results of each step to all others.

Before each call the ranks compare what they are about to do. A rank that fails in a call leaves the
group, which ends the call for all; then all meet in a new group and raise the first failure. If one
of them does not come, the engine is dead.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from vllm.distributed.communicators import GroupClosedError
from vllm.distributed.gloo_communicator import (
    GlooCommunicator,
    RankIsLateError,
    address_towards,
)
from vllm.distributed.parallel_state import ALONE, use_groups
from vllm.distributed.pipeline_links import NO_LINKS
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.logger import init_logger
from vllm.utils import pickling
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.executor.gloo_wiring import GlooConnections
from vllm.v1.executor.rank_messages import RankAnswer, failed_answer, raise_first_failure
from vllm.v1.executor.rank_terms import differences, options_of_engine, plan_of, terms_of
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput, PendingOutput
from vllm.v1.worker.pipeline import pool_share

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)

T = TypeVar("T")
BACKEND = "distributed_executor_backend='external_launcher'"


class ExternalLauncherExecutor(UniProcExecutor):
    """Calls this process's worker at the same time as the other processes call theirs."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """ValueError: the processes do not fit the options, or one does not come."""
        self._config = vllm_config
        self._parallel = parallel = vllm_config.parallel_config
        vllm_config.model_config.stage_of(parallel)  # raises before anything is connected
        self._group, self._links, self._num_groups = ALONE, NO_LINKS, 0
        self._everyone: GlooCommunicator | None = None
        try:
            self._connections = _connections_of(parallel)
            self._meet(None)
        except GroupClosedError as error:
            raise ValueError(
                f"{BACKEND}: not all of the {parallel.world_size} processes of this engine made "
                f"it: {error}"
            ) from error
        try:
            self._check_terms()
            self._load()
            runner = self.worker.model_runner
            reasons = (runner.no_norm_reason, runner.no_steering_reason, runner.no_head_reason)
            self._reasons = self._on_all("reasons", None, lambda: reasons)[parallel.driver_rank]
        except BaseException:
            self._leave()
            raise

    def _load(self) -> None:
        """Load the model, and let all stages run requests in the way that the last came to."""

        def load() -> int:
            UniProcExecutor.__init__(self, self._config)
            return self._num_ways_given_up

        given_up = self._on_all("load_model", None, load)
        while len(set(given_up)) > 1:
            most = max(given_up)
            give_up = partial(self.worker.give_up_ways, most)
            given_up = self._on_all("give_up_ways", most, give_up)

    def _check_terms(self) -> None:
        """Raise ValueError if the processes have other options, versions or checkpoints."""
        own = terms_of(self._config) | options_of_engine(self._config)
        terms = self._on_all("terms", None, lambda: own)
        if different := differences(terms, [f"rank {rank}" for rank in range(len(terms))]):
            raise ValueError(f"{BACKEND}: the processes of one engine differ: {different}")

    def no_norm_reason(self) -> str | None:
        return self._reasons[0]

    def no_steering_reason(self) -> str | None:
        return self._reasons[1]

    def no_head_reason(self) -> str | None:
        return self._reasons[2]

    def determine_available_memory(self) -> int:
        name = "determine_available_memory"
        least = min(self._on_all(name, None, super().determine_available_memory))
        if self._parallel.pipeline_parallel_size == 1:
            return least
        layout = plan_layout(self.get_kv_cache_spec(), self._config.cache_config)
        return int(least / pool_share(self._config, layout))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        run = partial(super().initialize_from_config, kv_cache_config)
        about = (kv_cache_config.num_blocks, kv_cache_config.block_bytes)
        self._on_all("initialize_from_config", about, run)

    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        if self.dead_because is not None and not scheduled.total_num_scheduled_tokens:
            return PendingOutput(ModelRunnerOutput(), [])
        execute = super().execute_model

        def run() -> ModelRunnerOutput | None:
            output = execute(scheduled).result()
            return output if self._parallel.is_driver else None

        outputs = self._on_all("execute_model", plan_of(scheduled), run)
        output = outputs[self._parallel.driver_rank]
        assert output is not None
        return PendingOutput(output, [])

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Call a method or a function with every worker; returns their results, by rank."""
        call_own = super().collective_rpc
        name = call.method if isinstance(call.method, str) else "a function"

        def run() -> Any:
            (result,) = call_own(call)
            try:
                pickling.dumps(result)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"collective_rpc: all ranks get the results of all, but this one cannot be "
                    f"sent: {error}"
                ) from error
            return result

        return self._on_all("collective_rpc", name, run)

    def shutdown(self) -> None:
        super().shutdown()
        self._leave()

    # ---- calls of all ranks

    def _on_all(self, name: str, about: object, run: Callable[[], T]) -> list[T]:
        """Let all ranks do something at the same time; returns their results, by rank.

        about: compared between the ranks, by its repr.
        """
        if self.dead_because is not None:
            raise FailureError(Failure(FailureKind.ENGINE_DEAD, self.dead_because))
        with self._regroups():
            self._compare(name, about)
            with use_groups(self._group, self._links):
                own = run()
            return self._all.gather_objects(own)

    def _compare(self, name: str, about: object) -> None:
        """End the engine on all ranks unless all are about to do the same."""
        digest = hashlib.sha256(repr((name, about)).encode()).digest()
        (digests,) = self._all.exchange(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        if all(torch.equal(one, digests.of_ranks[0]) for one in digests.of_ranks):
            return
        names = self._all.gather_objects(name)
        calls = ", ".join(f"rank {rank} {call}" for rank, call in enumerate(names))
        what = f"with other requests ({calls})" if len(set(names)) == 1 else f"({calls})"
        # Their schedulers and caches are no longer the same.
        self._die(
            f"{BACKEND}: the processes make different calls {what}; let all of them make the same "
            "calls with the same prompts in the same order"
        )

    def _die(self, reason: str) -> NoReturn:
        self.dead_because = reason
        self._leave()
        logger.error("the engine cannot go on: %s", reason)
        raise FailureError(Failure(FailureKind.ENGINE_DEAD, reason))

    @contextmanager
    def _regroups(self) -> Iterator[None]:
        """Bring all ranks together again when the block fails, and raise what failed first."""
        try:
            yield
        except BaseException as error:
            if self.dead_because is not None:
                raise
            own = failed_answer(0, error)
            try:
                if isinstance(error, RankIsLateError):
                    raise
                answers = self._meet(own)
            except GroupClosedError as late:
                self._die(f"{self._missing() or 'a process of the engine'}: {late}")
            if own.was_cut_off:  # the others have the reason
                raise_first_failure(enumerate(answers))
            raise

    def _meet(self, own: RankAnswer | None) -> list[RankAnswer]:
        """Form a new group; returns how the call before ended on each rank.

        GroupClosedError: one of them does not come.
        """
        self._leave()
        self._num_groups += 1
        self._connections.announce(self._num_groups)
        self._everyone = self._connections.join_all(self._num_groups)
        self._group, self._links = self._connections.join(self._num_groups)
        return self._everyone.gather_objects(own)

    def _missing(self) -> str:
        """Name the ranks that did not come to the last meeting."""
        missing = self._connections.missing(self._num_groups)
        return "" if not missing else "rank " + " and rank ".join(map(str, missing))

    @property
    def _all(self) -> GlooCommunicator:
        assert self._everyone is not None
        return self._everyone

    def _leave(self) -> None:
        if self._group.communicator is not None:
            self._group.communicator.close()
        self._links.close()
        if self._everyone is not None:
            self._everyone.close()


def place_ranks(parallel: ParallelConfig) -> ParallelConfig:
    """Return the options with this process's ranks, from torch.distributed or the environment.

    ValueError: the number of processes does not fit.
    """
    if distributed.is_initialized():
        rank, num_processes = distributed.get_rank(), distributed.get_world_size()
    else:
        alone = 1 if parallel.world_size == 1 else None
        num_processes = _number("WORLD_SIZE", alone)
        rank = _number("RANK", None if alone is None or num_processes > 1 else 0)
    size = parallel.world_size
    if not 0 <= rank < num_processes:
        raise ValueError(
            f"{BACKEND}: RANK={rank} with WORLD_SIZE={num_processes}: ranks count from 0 to "
            "WORLD_SIZE - 1"
        )
    if num_processes % size:
        raise ValueError(
            f"{BACKEND}: {parallel.sizes_in_words(' and ')} need {size} processes, or a multiple "
            f"of that, but there are {num_processes} (this one has the rank {rank})"
        )
    on_machine = _number("LOCAL_WORLD_SIZE", num_processes)
    return replace(
        parallel,
        rank=rank % size,
        data_parallel_rank=rank // size,
        machine_rank=_number("LOCAL_RANK", rank % on_machine),
        ranks_on_machine=on_machine,
    )


def _number(variable: str, otherwise: int | None) -> int:
    text = os.environ.get(variable, "")
    if not text and otherwise is not None:
        return otherwise
    if not text.isdecimal():
        raise ValueError(
            f"{BACKEND}: the environment variable {variable} is {text!r}; start the processes with "
            "torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each"
        )
    return int(text)


def _connections_of(parallel: ParallelConfig) -> GlooConnections:
    """Return how this process reaches the others of its engine.

    ValueError: the processes do not find each other.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not distributed.is_initialized():
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
            if not value:
                raise ValueError(f"{BACKEND}: the environment variable {name} is not set")
        seconds = timedelta(seconds=parallel.distributed_timeout_seconds)
        try:
            distributed.init_process_group("gloo", timeout=seconds)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{BACKEND}: the processes do not meet at MASTER_ADDR={host} MASTER_PORT={port}: "
                f"{str(error)[:300]}"
            ) from error
    store = distributed.distributed_c10d._get_default_store()
    engine = f"vllm/{parallel.data_parallel_rank}"
    # A process may have several engines; all processes make them in the same order.
    number = store.add(f"{engine}/engines_of_rank/{parallel.rank}", 1)
    address = address_towards(host, int(port)) if host and port.isdecimal() else get_ip()
    return GlooConnections(parallel, PrefixStore(f"{engine}/{number}", store), address)

"""The worker side of a connector: the calls of its hooks in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    call_handle_preemptions,
    check_sendable,
    checked_pair,
    hook_limit,
)
from vllm.distributed.kv_transfer.kv_transfer_state import announce, in_pass, retract
from vllm.distributed.parallel_state import any_rank
from vllm.exceptions import Failure, FailureError
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.logger import init_logger
from vllm.utils.text import brief
from vllm.v1.attention.backend import backend_of
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler_connector import hook_failure
from vllm.v1.outputs import KVConnectorOutput, SaveStats
from vllm.v1.worker.input_batch import RequestState

logger = init_logger(__name__)

T = TypeVar("T")


class WorkerConnector:
    """Calls one connector's hooks through the steps of one worker.

    An error while it loads fails the requests for which it loads; an error elsewhere fails
    the step. A call that takes longer than ``timeout_seconds`` raises.

    If the connector is on all ranks, each of them learns in a step whose loads failed on another:
    what it computed for these requests is wrong, too.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        timeout_seconds: float | None,
        is_on_all_ranks: bool = False,
    ) -> None:
        self.connector = connector
        self._is_on_all_ranks = is_on_all_ranks
        self._timeout_seconds = timeout_seconds
        self._load_error: str | None = None
        self._loading: set[str] = set()  # requests whose loads begin in this step
        self._void: set[str] = set()  # requests that the scheduler has yet to restart
        self._report = KVConnectorOutput()
        self._views: Mapping[str, Any] = {}
        self._context: ForwardContext | None = None
        self.modules: dict[str, nn.Module] = {}
        """Modules whose own hooks call the connector in their turn, by name."""

    def register(
        self,
        published: dict[str, Any],
        layers: Mapping[str, object],
        config: KVCacheConfig,
        pool: torch.Tensor,
    ) -> None:
        """Hand the new pool to the connector; ``published``: the views of its layers."""
        announce(self.connector)
        if self.connector.works_layer_by_layer:
            self._views = published
            own = ((name, layers[name]) for name in published)
            self.modules = {name: layer for name, layer in own if _is_called(layer)}
            for name, module in self.modules.items():
                module.register_forward_pre_hook(partial(self._before, name))
                module.register_forward_hook(partial(self._after, name))
        whole = None
        if self.connector.prefer_cross_layer_blocks:
            whole = config.cross_layers_view(pool)
            hook = type(self.connector).register_kv_caches
            if whole is None and hook is KVConnectorBase_V1.register_kv_caches:
                raise ValueError(
                    f"{type(self.connector).__name__} takes one view over all layers "
                    "(register_cross_layers_kv_cache) and has no register_kv_caches, but the "
                    "layers of this model are not all laid out alike in one group"
                )
        if whole is None:
            self.connector.register_kv_caches(published)
        else:
            self.connector.register_cross_layers_kv_cache(whole, backend_of(whole))
        self.connector.register_kv_cache_references(config.references(pool))
        self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Begin a step, before anything of it is written."""
        self._load_error = None
        self._loading = scheduled.loading_req_ids
        self._void -= scheduled.restarted_req_tokens.keys() | scheduled.finished_req_ids
        metadata = scheduled.kv_connector_metadata
        if metadata is None:
            return
        self._ask(self.connector.bind_connector_metadata, metadata)
        if scheduled.preempted_req_ids:
            with self._limit("handle_preemptions"):
                call_handle_preemptions(self.connector, metadata, scheduled.preempted_req_ids)

    @contextmanager
    def calls_of_pass(
        self, context: ForwardContext, states: Sequence[RequestState], *, is_recorded: bool
    ) -> Iterator[None]:
        """Make the calls around a forward pass of these requests.

        In a recorded pass no module's hooks run.
        """
        around = [name for name in self._views if is_recorded or name not in self.modules]
        with in_pass(self.connector):
            self.load(context)
            for name in around:
                self._try_to_load(self.connector.wait_for_layer_load, name)
            self._context = None if is_recorded else context
            try:
                yield
            finally:
                self._context = None
            lost = self._take_failed_loads(states)
            self._report.void_req_ids |= lost
            self._void |= lost
            if void := self._void.intersection(s.req_id for s in states):
                self._ask(self.connector.drop_computed, void)
            for name in around:
                self._save(name, context)
            with self._limit("wait_for_save"):
                self.connector.wait_for_save()

    def load(self, context: ForwardContext) -> None:
        """Begin to load; if no pass follows, in the background."""
        self._try_to_load(self.connector.start_load_kv, context)

    def _try_to_load(self, hook: Callable[..., object], argument: object) -> None:
        """Call a loading hook, unless loading has failed or there is nothing to load."""
        if self._load_error is None and self.connector.has_connector_metadata():
            try:
                self._ask(hook, argument)
            except Exception as error:
                logger.exception("%s could not load", type(self.connector).__name__)
                self._load_error = f"the connector could not load: {error}"

    def _take_failed_loads(self, states: Sequence[RequestState]) -> set[str]:
        """Return the requests of a step that began with a load which failed.

        Tables of other requests may still list blocks that were given back and are loaded now.
        """
        with self._limit("get_block_ids_with_load_errors"):
            failed = _set_of(self.connector.get_block_ids_with_load_errors(), int)
        self._report.invalid_block_ids |= failed
        loading = [state for state in states if state.req_id in self._loading]
        are_lost = [self._load_error is not None or s.holds_any(failed) for s in loading]
        if loading and self._is_on_all_ranks:
            are_lost = any_rank(torch.tensor(are_lost)).tolist()
        return {s.req_id for s, is_lost in zip(loading, are_lost, strict=True) if is_lost}

    def _before(self, name: str, *_: object) -> None:
        if self._context is not None:
            self._try_to_load(self.connector.wait_for_layer_load, name)

    def _after(self, name: str, *_: object) -> None:
        if self._context is not None:
            self._save(name, self._context)

    def _save(self, name: str, context: ForwardContext) -> None:
        with self._limit("save_kv_layer"), set_forward_context(context):
            self.connector.save_kv_layer(name, self._views[name], context.attn_metadata[name])

    @contextmanager
    def _limit(self, hook: str) -> Iterator[None]:
        """Limit the time of a hook. FailureError: it raised, or took too long."""
        try:
            with hook_limit(self.connector, hook, self._timeout_seconds):
                yield
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise FailureError(hook_failure(hook, error)) from error

    def end_step(
        self, scheduled: SchedulerOutput, states: Sequence[RequestState]
    ) -> KVConnectorOutput:
        """Return the connector's report; it includes what was said before a hook failed earlier.

        states: the requests of the step's forward pass.
        """
        connector, report = self.connector, self._report
        with self._limit("get_finished"):
            answer = connector.get_finished(scheduled.finished_req_ids)
            sent, received = checked_pair(answer, "two sets of request ids, or None")
            sent, received = _set_of(sent, str), _set_of(received, str)
        report.finished_sending |= sent
        report.finished_recving |= received
        with self._limit("take_failures"):
            report.failures |= _dict_of(connector.take_failures(), Failure)
        with self._limit("take_completed_params"):
            report.completed_params |= _dict_of(connector.take_completed_params(), dict)
        late = self._take_failed_loads(states) - report.void_req_ids
        report.late_req_ids |= late
        if late:
            self._void |= late
            self._ask(connector.drop_computed, late)
        report.load_error = self._load_error
        with self._limit("save_stats"):
            report.save_stats = _one_of(connector.save_stats(), SaveStats)
        report.kv_connector_stats = self._ask(connector.get_kv_connector_stats)
        report.kv_cache_events = self._ask(connector.get_kv_connector_kv_cache_events)
        report.kv_connector_worker_meta = self._ask(connector.build_connector_worker_meta)
        self._ask(connector.clear_connector_metadata)
        self._report = KVConnectorOutput()
        return report

    def _ask(self, hook: Callable[..., T], *args: object) -> T:
        with self._limit(hook.__name__):
            return hook(*args)

    def shutdown(self) -> None:
        """End the connector's threads; the worker ends even if that fails."""
        retract(self.connector)
        try:
            self._ask(self.connector.shutdown)
        except Exception:
            logger.exception("%s.shutdown failed", type(self.connector).__name__)


def _one_of(answer: object, kind: type[T]) -> T | None:
    """Return what a hook returned, or None. TypeError: it is something else."""
    if answer is not None and not isinstance(answer, kind):
        raise TypeError(f"the answer {brief(answer)} has to be a {kind.__name__}, or None")
    return answer


def _set_of(answer: object, kind: type[T]) -> set[T]:
    """Return the set that a hook returned, empty for None. TypeError: it is something else."""
    if answer is None:
        return set()
    if not isinstance(answer, set | frozenset) or not all(isinstance(one, kind) for one in answer):
        raise TypeError(f"the answer {brief(answer)} has to be a set of {kind.__name__}, or None")
    return set(answer)


def _dict_of(answer: object, kind: type[T]) -> dict[str, T]:
    """Return the dict that a hook returned, empty for None. TypeError: it is something else."""
    if answer is None:
        return {}
    if not isinstance(answer, dict) or not all(isinstance(one, kind) for one in answer.values()):
        raise TypeError(f"the answer {brief(answer)} has to be a dict of {kind.__name__}, or None")
    if answer:
        check_sendable(answer, dict[str, kind])  # type: ignore[valid-type]
    return answer


def _is_called(layer: object) -> TypeGuard[nn.Module]:
    """Return whether a layer is a module with its own ``forward``, and so fills its own cache."""
    return isinstance(layer, nn.Module) and type(layer).forward is not nn.Module.forward

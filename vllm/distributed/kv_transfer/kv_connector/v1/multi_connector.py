"""Several connectors that act as one: all of them save, and the first with a prefix loads it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.config.connectors import find_connector_class
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    ConnectorCapabilities,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    StillReadingError,
    SupportsHMA,
    call_handle_preemptions,
    call_request_finished,
    hook_limit,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_metrics import (
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
    data_of,
    part_names,
)
from vllm.distributed.kv_transfer.kv_connector.v1.rank_share import has_part
from vllm.exceptions import Failure
from vllm.logger import init_logger
from vllm.utils.text import error_text
from vllm.v1.outputs import SaveStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats, PromMetric
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


def sub_connector_configs(kv_transfer_config: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the configs in ``kv_connector_extra_config["connectors"]``.

    An entry without ``kv_role`` takes the MultiConnector's. Raises ValueError unless there
    is a list of entries.
    """
    entries = kv_transfer_config.get_from_extra_config("connectors", None)
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(
            f"MultiConnector: kv_connector_extra_config['connectors']={entries!r} must be a list "
            'of connector configs, such as [{"kv_connector": "ExampleHiddenStatesConnector"}]'
        )
    config_class = type(kv_transfer_config)
    configs = []
    for entry in entries:
        if isinstance(entry, config_class):
            configs.append(entry)
        elif isinstance(entry, dict):
            configs.append(config_class(**{"kv_role": kv_transfer_config.kv_role, **entry}))
        else:
            raise ValueError(f"MultiConnector: {entry!r} in 'connectors' is not a connector config")
    return configs


def _parts(vllm_config: VllmConfig) -> Iterator[tuple[type[KVConnectorBase_V1], VllmConfig]]:
    """Yield the class of each connector, and the configuration that it gets."""
    assert vllm_config.kv_transfer_config is not None
    for config in sub_connector_configs(vllm_config.kv_transfer_config):
        part_config = copy.copy(vllm_config)
        part_config.kv_transfer_config = config
        yield find_connector_class(config), part_config


@dataclass
class MultiConnectorMetadata(KVConnectorMetadata):
    """The metadata of each connector, and the connectors that each ended request waits for."""

    parts: list[KVConnectorMetadata]
    awaited: dict[str, set[int]]
    """Request id -> indices of the connectors that still work on it."""
    preempted: set[str] = field(default_factory=set)


@dataclass
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The handshake metadata of each connector, in their order."""

    parts: list[KVConnectorHandshakeMetadata | None]


@dataclass
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """The metadata of each connector's worker side, in their order."""

    parts: list[KVConnectorWorkerMetadata | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        assert isinstance(other, MultiWorkerMetadata)
        pairs = zip(self.parts, other.parts, strict=True)
        return MultiWorkerMetadata(
            [a.aggregate(b) if a is not None and b is not None else a or b for a, b in pairs]
        )


class _AbsentConnector(KVConnectorBase_V1):
    """Stands for a connector that this rank does not have."""

    rows_leave_each_step = True
    reads_metadata_later = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        raise NotImplementedError  # it has no scheduler side

    def update_state_after_alloc(self, *_: Any) -> None:
        raise NotImplementedError

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        raise NotImplementedError


def _call_all(hook: str) -> Any:
    """Make a method that calls the hook of every connector, in their order."""

    def call_all(self: MultiConnector, *arguments: Any, **named: Any) -> None:
        call = methodcaller(hook, *arguments, **named)
        for part in self._connectors:
            call(part)

    call_all.__name__ = hook  # failures name it
    return call_all


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Passes every call to all connectors of ``kv_connector_extra_config["connectors"]``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors: list[KVConnectorBase_V1] = []
        self._absent: set[int] = set()
        """Worker: indices of connectors that only another rank has."""
        try:
            for index, (part_class, part_config) in enumerate(_parts(vllm_config)):
                transfer = part_config.kv_transfer_config
                assert transfer is not None
                if role is KVConnectorRole.WORKER and not has_part(vllm_config, transfer):
                    self._absent.add(index)
                    part_class = _AbsentConnector
                self._connectors.append(part_class(part_config, role, kv_cache_config))
        except BaseException:
            self.shutdown()
            raise
        self.reply_when_saved = any(part.reply_when_saved for part in self._connectors)
        self.rows_leave_each_step = all(part.rows_leave_each_step for part in self._connectors)
        self.reads_all_layers = any(part.reads_all_layers for part in self._connectors)
        self.reads_metadata_later = any(part.reads_metadata_later for part in self._connectors)
        self.outlives_engine = any(part.outlives_engine for part in self._connectors)
        self.loads_rows = any(part.loads_rows for part in self._connectors)
        self._has_rows = (
            kv_cache_config is not None and kv_cache_config.hidden_state_group_id() is not None
        )
        self._loader: dict[str, int] = {}  # scheduler: request id -> connector that loads for it
        self._newly_awaited: dict[str, set[int]] = {}  # scheduler: for the next metadata
        self._ended: weakref.WeakSet[Request] = weakref.WeakSet()
        self._awaited: dict[str, set[int]] = {}  # worker: reports still to come
        # Worker: reports of connectors in a step in which another one failed; sent with the next.
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failures: dict[str, Failure] = {}
        self._completed: dict[str, dict[str, Any]] = {}

    def _each(
        self,
        hook: str,
        call: Callable[[int, KVConnectorBase_V1], object],
        last: int | None = None,
    ) -> None:
        """Call ``call(index, connector)`` for every connector, also after one has failed; the first
        error is raised at the end."""
        errors: list[Exception] = []
        seconds = self._kv_transfer_config.kv_timeout_seconds
        for index, part in sorted(enumerate(self._connectors), key=lambda one: one[0] == last):
            try:  # the limit of the whole call fires only once
                with hook_limit(part, hook, seconds if errors else None):
                    call(index, part)
            except Exception as error:
                logger.exception("%s.%s failed, in a MultiConnector", type(part).__name__, hook)
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def works_layer_by_layer(self) -> bool:
        return any(part.works_layer_by_layer for part in self._connectors)

    @property
    def sends_rows_on(self) -> bool:
        return any(part.sends_rows_on for part in self._connectors)

    @property
    def keeps_rows_back(self) -> bool:
        return all(part.keeps_rows_back for part in self._connectors if part.sends_rows_on)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return all(part.prefer_cross_layer_blocks for part in self._connectors)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        layouts: dict[str, str] = {}  # layout -> a connector that needs it
        for part_class, part_config in _parts(vllm_config):
            layout = part_class.get_required_kvcache_layout(part_config)
            if layout is not None:
                layouts[layout] = part_class.__name__
        if len(layouts) > 1:
            needs = ", ".join(f"{name} needs {layout}" for layout, name in layouts.items())
            raise ValueError(f"MultiConnector: these connectors cannot be combined: {needs}")
        return next(iter(layouts), None)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        for part_class, part_config in _parts(vllm_config):
            part_class.check_config(part_config)

    @classmethod
    def capabilities(cls, kv_transfer_config: KVTransferConfig) -> ConnectorCapabilities:
        """Combine the capabilities of all connectors."""
        parts = [
            find_connector_class(config).capabilities(config)
            for config in sub_connector_configs(kv_transfer_config)
        ]
        return ConnectorCapabilities(
            all(part.rows_leave_each_step for part in parts),
            tuple(name for part in parts for name in part.lacks_hma),
            tuple(hook for part in parts for hook in part.unsupported),
            frozenset[str]().union(*(part.keeps for part in parts)),
            any(part.needs_eager_steps for part in parts),
            any(part.keeps_prefixes for part in parts),
            all(part.takes_rows_only for part in parts),
        )

    register_kv_caches = _call_all("register_kv_caches")
    register_cross_layers_kv_cache = _call_all("register_cross_layers_kv_cache")
    register_kv_cache_references = _call_all("register_kv_cache_references")
    set_host_xfer_buffer_ops = _call_all("set_host_xfer_buffer_ops")
    start_load_kv = _call_all("start_load_kv")
    wait_for_layer_load = _call_all("wait_for_layer_load")
    drop_computed = _call_all("drop_computed")
    take_rows_back = _call_all("take_rows_back")
    save_kv_layer = _call_all("save_kv_layer")
    wait_for_save = _call_all("wait_for_save")
    check_request = _call_all("check_request")
    on_new_request = _call_all("on_new_request")

    def shutdown(self) -> None:
        self._each("shutdown", lambda _, part: part.shutdown())

    # Worker side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, MultiConnectorMetadata)
        super().bind_connector_metadata(connector_metadata)
        for request_id, indices in connector_metadata.awaited.items():
            if here := indices - self._absent:
                self._awaited[request_id] = here
            else:
                self._sent.add(request_id)
        parts = connector_metadata.parts
        self._each(
            "bind_connector_metadata",
            lambda index, part: part.bind_connector_metadata(parts[index]),
        )

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._each("clear_connector_metadata", lambda _, part: part.clear_connector_metadata())

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        parts = [part.get_handshake_metadata() for part in self._connectors]
        return MultiHandshakeMetadata(parts) if any(one is not None for one in parts) else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, MultiConnectorMetadata)
        metadata = kv_connector_metadata
        for part, own in zip(self._connectors, metadata.parts, strict=True):
            call_handle_preemptions(part, own, metadata.preempted)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return finished requests; sending is done when every connector concerned reports it."""

        def collect(index: int, part: KVConnectorBase_V1) -> None:
            sent, received = part.get_finished(finished_req_ids)
            self._received |= received or set()
            for request_id in sent or ():
                self._note_sent(request_id, index)

        self._each("get_finished", collect)
        all_sent, self._sent = self._sent, set()
        all_received, self._received = self._received, set()
        return all_sent or None, all_received or None

    def _note_sent(self, request_id: str, index: int) -> None:
        awaited = self._awaited.get(request_id)
        if awaited is None:  # the request does not wait for it
            return
        awaited.discard(index)
        if not awaited:
            del self._awaited[request_id]
            self._sent.add(request_id)

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._each(
            "get_block_ids_with_load_errors",
            lambda _, part: self._failed_blocks.update(part.get_block_ids_with_load_errors() or ()),
        )
        failed_blocks, self._failed_blocks = self._failed_blocks, set()
        return failed_blocks

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Return the stats of each connector that counts, by the name of its class; a second
        connector of one class is ``Class#1``, by its index among all."""
        names = part_names([type(part) for part in self._connectors])
        stats = [part.get_kv_connector_stats() for part in self._connectors]
        found = {name: one for name, one in zip(names, stats, strict=True) if one is not None}
        return MultiKVConnectorStats(found) if found else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> MultiKVConnectorStats | None:
        """Make the stats of registered connectors; :meth:`stats_of_config` knows all."""
        found: dict[str, KVConnectorStats] = {}
        for name, stats in (data or {}).items():
            part = KVTransferConfig(kv_connector=name.partition("#")[0], kv_role="kv_both")
            built = stats
            if isinstance(stats, dict):
                built = find_connector_class(part).build_kv_connector_stats(data_of(stats))
            if built is not None:
                found[name] = built
        return MultiKVConnectorStats(found)

    @classmethod
    def stats_of_config(
        cls, kv_transfer_config: KVTransferConfig, data: dict[str, Any]
    ) -> MultiKVConnectorStats | None:
        configs = sub_connector_configs(kv_transfer_config)
        classes = [find_connector_class(config) for config in configs]
        found = {
            name: built
            for name, part, config in zip(part_names(classes), classes, configs, strict=True)
            if name in data
            and (built := part.stats_of_config(config, data_of(data[name]))) is not None
        }
        return MultiKVConnectorStats(found) if found else None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiKVConnectorPromMetrics:
        parts = list(_parts(vllm_config))
        built = {
            name: part.build_prom_metrics(config, metric_types, labelnames, per_engine_labelvalues)
            for name, (part, config) in zip(part_names([p for p, _ in parts]), parts, strict=True)
            if "#" not in name  # metric names are unique, so each class makes its metrics once
        }
        common = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return MultiKVConnectorPromMetrics(*common, {n: m for n, m in built.items() if m})

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Return a list with the events of each connector, None for one that has none."""
        events = [part.get_kv_connector_kv_cache_events() for part in self._connectors]
        return events if any(one is not None for one in events) else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        parts = [part.build_connector_worker_meta() for part in self._connectors]
        return MultiWorkerMetadata(parts) if any(part is not None for part in parts) else None

    def take_failures(self) -> dict[str, Failure]:
        def take(_: int, part: KVConnectorBase_V1) -> None:
            for request_id, failure in part.take_failures().items():
                earlier = self._failures.get(request_id)
                if earlier is not None:
                    failure = Failure(earlier.kind, f"{earlier}; {failure}")
                self._failures[request_id] = failure

        self._each("take_failures", take)
        failures, self._failures = self._failures, {}
        return failures

    def take_completed_params(self) -> dict[str, dict[str, Any]]:
        def take(_: int, part: KVConnectorBase_V1) -> None:
            for request_id, params in part.take_completed_params().items():
                earlier = self._completed.get(request_id, {})
                self._completed[request_id] = _merge(request_id, earlier, params)

        self._each("take_completed_params", take)
        completed, self._completed = self._completed, {}
        return completed

    def save_stats(self) -> SaveStats | None:
        """Return the sums over all connectors that count."""
        parts = [stats for part in self._connectors if (stats := part.save_stats()) is not None]
        return sum(parts, SaveStats()) if parts else None

    def get_finished_count(self) -> int | None:
        """Return None: every rank reports a request when those of its connectors have. ValueError:
        of one connector other ranks do not."""
        for part in self._connectors:
            if (count := part.get_finished_count()) is not None:
                raise ValueError(
                    f"MultiConnector on several ranks: {type(part).__name__}.get_finished_count "
                    f"is {count}, but with other connectors every rank has to report; use it "
                    "alone, or one rank"
                )
        return None

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for index, part in enumerate(self._connectors):
            own = {}
            for rank, of_rank in metadata.items():
                assert isinstance(of_rank, MultiHandshakeMetadata)
                one = of_rank.parts[index]
                if one is not None:
                    own[rank] = one
            if own:
                part.set_xfer_handshake_metadata_pp_aware(own)

    def has_pending_push_work(self) -> bool:
        return any(part.has_pending_push_work() for part in self._connectors)

    def reset_cache(self) -> bool | None:
        results = [part.reset_cache() for part in self._connectors]
        known = [result for result in results if result is not None]
        return all(known) if known else None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offers = [
            part.get_num_new_matched_tokens(request, num_computed_tokens)
            for part in self._connectors
        ]
        self._loader.pop(request.request_id, None)
        if any(num_tokens is None for num_tokens, _ in offers):
            return None, False
        for index, (num_tokens, in_background) in enumerate(offers):
            part = self._connectors[index]
            if num_tokens and self._has_rows and not part.loads_rows:
                logger.warning_once(
                    "an offer of %s is not taken: the hidden states of loaded tokens would be "
                    "missing",
                    type(part).__name__,
                )
            elif num_tokens:
                self._loader[request.request_id] = index
                return num_tokens, in_background
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        loader = self._loader.pop(request.request_id, None)
        nothing = blocks.new_empty()
        told: list[int] = []

        def update(index: int, part: KVConnectorBase_V1) -> None:
            if index == loader and len(told) == len(self._connectors) - 1 and num_external_tokens:
                part.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                part.update_state_after_alloc(request, nothing, 0)
            told.append(index)

        # Who loads is told last. If another one fails, the request gives its blocks back, and
        # nobody may write them.
        self._each("update_state_after_alloc", update, last=loader)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        parts: list[KVConnectorMetadata] = []

        def build(_: int, part: KVConnectorBase_V1) -> None:
            parts.append(part.build_connector_meta(scheduler_output))

        # Also after a failure: what they plan later must not be for blocks that are given back now.
        self._each("build_connector_meta", build)
        awaited, self._newly_awaited = self._newly_awaited, {}
        return MultiConnectorMetadata(parts, awaited, scheduler_output.preempted_req_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta, events = connector_output.kv_connector_worker_meta, connector_output.kv_cache_events

        def update(index: int, part: KVConnectorBase_V1) -> None:
            own = meta.parts[index] if isinstance(meta, MultiWorkerMetadata) else None
            own_events = None if events is None else events[index]
            part.update_connector_output(
                replace(connector_output, kv_connector_worker_meta=own, kv_cache_events=own_events)
            )

        self._each("update_connector_output", update)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._end(request, lambda part: part.request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._end(request, lambda part: call_request_finished(part, request, block_ids))

    def _end(
        self,
        request: Request,
        end_part: Callable[[KVConnectorBase_V1], tuple[bool, dict[str, Any] | None]],
    ) -> tuple[bool, dict[str, Any] | None]:
        if request in self._ended:  # aborted before its reply, see base.request_finished
            self._each("request_finished", lambda _, part: part.reply_when_saved and end_part(part))
            return False, None
        self._ended.add(request)
        self._loader.pop(request.request_id, None)
        awaited: set[int] = set()
        merged: dict[str, Any] | None = None

        def end(index: int, part: KVConnectorBase_V1) -> None:
            nonlocal merged
            works_on, params = end_part(part)
            if works_on:
                awaited.add(index)
            if params is not None:
                merged = _merge(request.request_id, merged or {}, params)

        try:
            self._each("request_finished", end)
        except Exception as error:
            if not awaited:
                raise
            raise StillReadingError(error_text(error)) from error
        finally:
            if awaited:
                self._newly_awaited[request.request_id] = awaited
        return bool(awaited), merged

    def take_events(self) -> Iterable[Any]:
        return chain.from_iterable(part.take_events() for part in self._connectors)


def _merge(request_id: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge both dicts; the first one's value wins, because a reply has room for only one."""
    for key in first.keys() & second.keys():
        if first[key] != second[key]:
            logger.warning(
                "request %s: two connectors return different kv_transfer_params[%r]; "
                "the reply has the first one's (%r, not %r)",
                request_id,
                key,
                first[key],
                second[key],
            )
    return {**second, **first}

"""What the engine asks of a connector: the thing that takes cached data out of the pool, and
brings them back.

A connector exists twice. The *scheduler side* sees requests, tokens and block ids; the
*worker side* sees tensors. The order of calls:

    worker, once                register_kv_caches or register_cross_layers_kv_cache,
                                register_kv_cache_references,
                                set_host_xfer_buffer_ops, get_handshake_metadata
    scheduler, once             set_xfer_handshake_metadata_pp_aware, which by default calls
                                set_xfer_handshake_metadata
    scheduler, new request      check_request, on_new_request
    scheduler, before it runs   get_num_new_matched_tokens, update_state_after_alloc
    scheduler, every step       build_connector_meta
    worker, every step          bind_connector_metadata, (handle_preemptions,) start_load_kv,
                                (for every layer wait_for_layer_load, its forward, save_kv_layer;
                                wait_for_save,) get_finished,
                                get_block_ids_with_load_errors, take_failures,
                                take_completed_params, get_kv_connector_stats,
                                get_kv_connector_kv_cache_events, build_connector_worker_meta,
                                clear_connector_metadata
    scheduler, every step       update_connector_output, get_kv_connector_stats, take_events
    scheduler, on finish        request_finished or request_finished_all_groups

A step without a forward pass runs when only the connector has something to do: what
``request_finished`` leaves behind travels in the metadata of the next step, and loads in the
background begin and end there. Names and signatures are those of upstream's V1 connectors, so
that out-of-tree ones work here; one that needs a hook of upstream's that is not called here
(:data:`HOOKS_NOT_CALLED`) is refused at the start. Who pays for a hook that raises, or takes
longer than ``kv_timeout_seconds``, stands in ``docs/extraction.md``.

Layer by layer. A class that defines ``wait_for_layer_load`` or ``save_kv_layer`` is called inside
the forward pass: before a layer reads its cache, and after it wrote it. Layers whose cache others
fill (rows of hidden states, the keys of an indexer, caches of transformers' modules that run one
request after another) have their turn before and after the whole pass, and so has every layer in
a step that was recorded as a CUDA graph; with ``requires_piecewise_for_cudagraph`` no step is
recorded. Layers that a shorter pass leaves out are not named.

Loading. ``get_num_new_matched_tokens`` offers tokens after those that the pool has; the scheduler
takes all of an offer or nothing (``update_state_after_alloc`` says which) and computes what it
does not take: prompts whose hidden states somebody wants (unless :attr:`loads_rows`), or whose
log-probabilities. Of a recurrent model an offer ends at a multiple of the tokens after which
states are kept (``SchedulerOutput.state_snapshots`` tells a connector which are, and in which
blocks), and brings that state into the first block of each recurrent group's table. Table entries
of 0 hold nothing and are not loaded: a sliding window needs its last blocks only.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm.utils.time_limit import time_limit

if TYPE_CHECKING:
    import torch

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
    )
    from vllm.exceptions import Failure
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheReferences
    from vllm.v1.outputs import KVConnectorOutput, SaveStats
    from vllm.v1.request import Request


class KVConnectorRole(enum.Enum):
    """Which half of a connector an instance is."""

    SCHEDULER = 0
    WORKER = 1


CopyBlocksOp = Callable[
    [
        "dict[str, torch.Tensor]",
        "dict[str, torch.Tensor]",
        list[int],
        list[int],
        Literal["h2d", "d2h"],
    ],
    None,
]
"""``copy(sources, destinations, source_blocks, destination_blocks, direction)``: blocks of every
layer, by layer name, between views whose first dimension is blocks."""

HOOKS_NOT_CALLED = (
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "finish_forward",
    "get_transfer_results",
    "has_pending_block_frees",
    "register_finished_partial_tail",
)
"""Hooks of some of upstream's releases that this engine does not call."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - a base for out-of-tree dataclasses
    """What a worker tells those who want to reach it."""


class KVConnectorWorkerMetadata(ABC):
    """What the worker side tells the scheduler side after a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What two workers say, as one."""


class KVConnectorMetadata(ABC):  # noqa: B024 - a base for out-of-tree dataclasses
    """What the scheduler side tells the worker side about one step."""


class StillReadingError(Exception):
    """The end of a request failed, and ``get_finished`` will report it all the same: another of
    several connectors reads its blocks until then. Its cause is what failed."""


class SupportsHMA(ABC):
    """A connector that understands several block tables for each request.

    The hybrid manager (HMA) gives every group of layers its own blocks; a connector
    without this class only ever sees the first group's.
    """

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`KVConnectorBase_V1.request_finished`, with the blocks of every group."""


def supports_hma(connector: type[object] | object) -> bool:
    """Whether a connector, class or instance, declares :class:`SupportsHMA`."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


def call_request_finished(
    connector: KVConnectorBase_V1, request: Request, block_ids: tuple[list[int], ...]
) -> tuple[bool, dict[str, Any] | None]:
    """Tell a connector of an end, with the blocks of all groups where it knows several."""
    if isinstance(connector, SupportsHMA):
        is_delayed, params = connector.request_finished_all_groups(request, block_ids)
    else:
        is_delayed, params = connector.request_finished(request, block_ids[0])
    return is_delayed, params


def call_handle_preemptions(
    connector: KVConnectorBase_V1, metadata: KVConnectorMetadata, preempted_req_ids: set[str]
) -> None:
    """Tell a connector in the terms of the release that it was written for."""
    if "preempted_req_ids" in inspect.signature(connector.handle_preemptions).parameters:
        ids: Any = preempted_req_ids
        connector.handle_preemptions(ids)
    else:
        connector.handle_preemptions(metadata)


def hook_limit(connector: object, hook: str, seconds: float | None) -> AbstractContextManager[None]:
    """TimeoutError that names the hook when it takes longer than that; None: no limit."""
    return time_limit(seconds, f"{type(connector).__name__}.{hook} (kv_timeout_seconds)")


class ConnectorCapabilities(NamedTuple):
    """What a connector can do with its configuration, known before one is made."""

    rows_leave_each_step: bool
    lacks_hma: tuple[str, ...] = ()
    """Classes that do not declare SupportsHMA: itself, or of those it stands for."""
    unsupported: tuple[str, ...] = ()
    """Why it cannot work here: hooks that nobody calls."""
    keeps: frozenset[str] = frozenset()
    """As the attribute of the class."""
    needs_eager_steps: bool = False
    """Its hooks have to be called inside of every pass, so none may be recorded."""


class KVConnectorBase_V1(ABC):  # noqa: N801 - upstream's name
    """Base of all connectors. The methods with a body are safe to leave as they are."""

    reply_when_saved: bool = False
    """The scheduler holds a request's last output until ``get_finished`` reports it.
    False: the output goes out at once, as upstream does, and only the blocks wait."""
    keeps: frozenset[str] = frozenset()
    """Fields that go out beside hidden states, by name (``vllm.v1.rows.fields``)."""
    rows_leave_each_step: bool = False
    """Hidden-state rows are taken out in the step that computes them, so the scheduler
    may free full hidden-state blocks after each step. False: they are kept until the
    request is done."""
    reads_metadata_later: bool = True
    """Its hooks may look at a step's attention metadata when the next step runs already. False:
    metadata may share memory with that of the next step."""
    loads_rows: bool = False
    """Whatever it loads includes the hidden-state rows of the tokens, where the pool has rows."""
    reads_all_layers: bool = True
    """It takes the cache of every layer for granted, so every request runs them all. False: it
    takes rows only, or tells requests of different depth apart (``Request.prefix_hashes``)."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError(
                f"{type(self).__name__} needs a kv_transfer_config, and the config has none"
            )
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """Which half of the connector this is."""
        return self._role

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether it wants one tensor over all layers, where they lie alike in one group."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """What attention caches must have first in a block: tokens ("NHD"), heads ("HND"); None:
        either. Views have the same dimensions all the same, with other strides."""
        return None

    @classmethod
    def capabilities(cls, kv_transfer_config: KVTransferConfig) -> ConnectorCapabilities:
        """What the class declares; one that stands for others sums up theirs."""
        own = cls._overridden()
        uncalled = [name for name in HOOKS_NOT_CALLED if name in own]
        return ConnectorCapabilities(
            cls.rows_leave_each_step,
            () if supports_hma(cls) else (cls.__name__,),
            tuple(f"{cls.__name__}.{name}" for name in uncalled),
            cls.keeps,
            cls.requires_piecewise_for_cudagraph(kv_transfer_config.kv_connector_extra_config),
        )

    @classmethod
    def _overridden(cls) -> set[str]:
        """Names that the class or a base of it defines, up to this one."""
        classes = cls.__mro__[: cls.__mro__.index(KVConnectorBase_V1)]
        return {name for one in classes for name in vars(one)}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the hooks of layers have to be called inside of every pass: then all steps run
        eagerly on CUDA. False: of steps that are recorded they are called around."""
        return False

    @property
    def works_layer_by_layer(self) -> bool:
        """Whether it has hooks of layers."""
        return not self._overridden().isdisjoint(("wait_for_layer_load", "save_kv_layer"))

    @property
    def sends_rows_on(self) -> bool:
        """Whether rows may be out of reach after the step that computes them, so that a request
        whose load failed cannot be computed once more."""
        return self.rows_leave_each_step

    def drop_saves(self) -> None:  # noqa: B027
        """What the step under way computes may be wrong, for another connector could not load."""

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request that is preempted before its blocks are handed over is computed
        again; here every one is."""
        return self._kv_transfer_config.is_kv_producer

    @classmethod  # noqa: B027
    def check_config(cls, vllm_config: VllmConfig) -> None:
        """Look at the configuration before the model is loaded.

        Raises ValueError for what the connector cannot serve, so that nobody waits for it.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Finish what is under way and let go of threads and files. May be called twice."""

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Take the cache tensor of each layer, by layer name; once, before the first step.

        A hidden-state layer's tensor is a strided view ``[blocks, layers, rows, hidden]``, the
        same that ``save_kv_layer`` gets. A recurrent layer has a tuple, as its kernels keep it:
        its spec (``kv_cache_config.spec_of``) reads and writes it in the checkpoint's terms.
        """

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:  # noqa: B027
        """Take the pool as bytes; once, after :meth:`register_kv_caches`."""

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one view over all layers, [layers, blocks, pages, 16, kv_heads, K | V]; once, in
        the place of :meth:`register_kv_caches`.

        Where :attr:`prefer_cross_layer_blocks` is true and all layers lie alike in one group.
        ``attn_backend`` says how the dimensions lie in memory
        (:class:`~vllm.v1.attention.backend.AttentionBackend`).
        """

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """Take what copies blocks between views on the device and on the host; once."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What others have to know to reach this worker; once, after ``register_kv_caches``."""
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Requests of this step were preempted; their blocks are not overwritten before return.

        An override whose parameter is called ``preempted_req_ids`` gets the set of their ids.
        """

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set the metadata of the step that begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the metadata of the step that ends."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The metadata of the step under way."""
        assert self._connector_metadata is not None, "no step is under way"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to load what this step's requests find elsewhere; before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """Return when the loads of one layer are done; called before it reads its cache."""

    def save_kv_layer(  # noqa: B027
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to save what one layer wrote; called when it has, inside the forward pass.

        ``kv_layer`` is what ``register_kv_caches`` gave; of a recurrent layer a tuple.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the pool may be overwritten; right after the forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose sending, and whose receiving, is done since the last call.

        ``finished_req_ids``: requests that ended since the last step. An id whose
        ``request_finished`` returned True has to come back here once.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call.

        Of a load before the forward pass in the same step; of one in the background no later
        than ``get_finished`` reports its request, which it does all the same.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this side counted since the last call; None: nothing. Asked of both sides."""
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Cache events of the worker side since the last call; None: none."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What ``update_connector_output`` finds as ``kv_connector_worker_meta``."""
        return None

    def get_finished_count(self) -> int | None:
        """Workers that report a request before it counts as done; None: all."""
        return None

    def take_failures(self) -> dict[str, Failure]:
        """Request id -> why its data could not be delivered, since the last call."""
        return {}

    def take_completed_params(self) -> dict[str, dict[str, Any]]:
        """Request id -> additions to its kv_transfer_params, since the last call."""
        return {}

    def save_stats(self) -> SaveStats | None:
        """What was written so far; None where the connector does not count."""
        return None

    # ---- scheduler side

    def check_request(self, request: Request) -> None:  # noqa: B027
        """Look at a request before it is queued.

        Raises ValueError for ``kv_transfer_params`` that cannot be served.
        """

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """A request was queued."""

    def set_xfer_handshake_metadata(  # noqa: B027
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """What the workers told, by rank; once."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by (pipeline, tensor-parallel) rank: this is what is called."""
        self.set_xfer_handshake_metadata({rank: told for (_, rank), told in metadata.items()})

    def has_pending_push_work(self) -> bool:
        """Whether steps have to go on although no request is left."""
        return False

    def reset_cache(self) -> bool | None:
        """Forget everything that was saved; whether that was done.

        Called by ``reset_prefix_cache(reset_connector=True)``.
        """
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats again, of the ``data`` of some that came from another process."""
        return None

    @classmethod
    def stats_of_config(
        cls, kv_transfer_config: KVTransferConfig, data: dict[str, Any]
    ) -> KVConnectorStats | None:
        """The same, for a class that depends on its configuration."""
        return cls.build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Metrics for ``/metrics``, told the data of stats; None: there are none."""
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be loaded, and whether in the background.

        None: not known yet, ask again later.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Learn which blocks a request got, ``num_external_tokens`` of them to be loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker side needs in the step just decided; leaves the step as it is."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Learn what the worker side reported after a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, before its blocks are freed.

        Returns whether the connector still works for it (its id then comes back from
        ``get_finished``, and its blocks stay until then), and the kv_transfer_params
        of its reply. A connector with ``reply_when_saved`` is called once more, with status
        FINISHED_ABORTED, when the client goes away before the reply: what was saved is to
        be removed, and the id still comes back from ``get_finished``. So is one that raised, with
        FINISHED_ERROR; its request fails, and the blocks do not stay.
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Cache events collected since the last call, for ``on_kv_cache_events``."""
        return ()

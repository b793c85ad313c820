"""The interface of a connector, which takes cached data out of the pool and brings them back.

A connector has two instances. The *scheduler side* sees requests, tokens and block ids; the
*worker side* sees tensors. The engine calls their hooks in this order:

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
                                get_block_ids_with_load_errors, (drop_computed,) wait_for_save,)
                                get_finished, get_block_ids_with_load_errors, take_failures,
                                take_completed_params, get_kv_connector_stats,
                                get_kv_connector_kv_cache_events, build_connector_worker_meta,
                                clear_connector_metadata
    scheduler, every step       update_connector_output, get_kv_connector_stats, take_events
    scheduler, on finish        request_finished or request_finished_all_groups

Several ranks (tensor parallelism, pipeline stages): each has a worker side of its own, with the
caches that it fills; ``kv_cache_config`` has the layers of these. Only the first rank of the last
stage has rows; a class with :attr:`takes_rows_only` has a worker side there alone. All worker sides
get the metadata of a step, so these have to be picklable, and so have the reports. The scheduler
side gets one report, in which a request is finished when all worker sides have said so (or
``get_finished_count`` of them). A load that failed on one rank has failed on all.

When only the connector has work, a step without a forward pass runs. The metadata of the next step
carries what ``request_finished`` leaves to do, and background loads begin and end in such steps.
Names and signatures are those of upstream's V1 connectors, so out-of-tree connectors work here. A
connector that needs an upstream hook that this engine does not call (:data:`HOOKS_NOT_CALLED`) is
refused at the start. ``docs/extraction.md`` says which requests fail when a hook raises or takes
longer than ``kv_timeout_seconds``.

Hooks of layers: a class that defines ``wait_for_layer_load`` or ``save_kv_layer`` is called inside
the forward pass, before a layer reads its cache and after the layer wrote it. Some layers do not
fill their own cache (rows of hidden states, the keys of an indexer, caches of transformers' modules
that run one request after another): their hooks are called before and after the whole pass. In a
step that was recorded as a CUDA graph this holds for every layer; with
``requires_piecewise_for_cudagraph`` no step is recorded. No hook is called for layers that a
shorter pass leaves out.

Loading: ``get_num_new_matched_tokens`` offers tokens after those that the pool has. The scheduler
takes all of an offer or nothing (``update_state_after_alloc`` tells the connector) and computes
what it does not take: prompts whose log-probabilities are requested, or whose hidden states are
(unless :attr:`loads_rows`). For a recurrent model an offer ends at a multiple of the tokens after
which states are kept, and brings that state into the first block of each recurrent group's table;
``SchedulerOutput.state_snapshots`` lists the states that are kept, and their blocks. Table entries
of 0 hold nothing and are not loaded: a sliding window needs its last blocks only.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from vllm.utils.text import brief, error_text, message_of
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
    """The side of a connector that an instance is."""

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
"""``copy(sources, destinations, source_blocks, destination_blocks, direction)`` copies blocks of
every layer, by layer name, between views whose first dimension is blocks."""

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
    """The metadata that others need to reach a worker."""


class KVConnectorWorkerMetadata(ABC):
    """The metadata that the worker side sends to the scheduler side after a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the metadata of two workers."""


class KVConnectorMetadata(ABC):  # noqa: B024 - a base for out-of-tree dataclasses
    """The metadata of one step that the scheduler side sends to the worker side."""


class StillReadingError(Exception):
    """``request_finished`` failed, but ``get_finished`` will still report the request: another of
    several connectors reads its blocks until then. ``__cause__`` is the original error."""


class SupportsHMA(ABC):
    """A connector that understands several block tables for each request.

    The hybrid manager (HMA) gives every group of layers its own blocks; a connector
    without this class sees only the blocks of the first group.
    """

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as :meth:`KVConnectorBase_V1.request_finished`, with the blocks of every group."""


def supports_hma(connector: type[object] | object) -> bool:
    """Return whether a connector, class or instance, declares :class:`SupportsHMA`."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


def call_request_finished(
    connector: KVConnectorBase_V1, request: Request, block_ids: tuple[list[int], ...]
) -> tuple[bool, dict[str, Any] | None]:
    """Call the hook for an ended request, with the blocks of all groups if it takes them.

    TypeError: its answer is not what the hook has to return.
    """
    if isinstance(connector, SupportsHMA):
        answer = connector.request_finished_all_groups(request, block_ids)
    else:
        answer = connector.request_finished(request, block_ids[0])
    is_delayed, params = checked_pair(answer, "(blocks are kept, kv_transfer_params or None)")
    if params is not None and not isinstance(params, dict):
        raise TypeError(f"kv_transfer_params={brief(params)} has to be a dict or None")
    check_sendable(params, dict[str, Any] | None)
    return bool(is_delayed), params


def checked_pair(answer: object, meaning: str) -> tuple[Any, Any]:
    """Return the pair that a hook returned. TypeError: it is something else."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"the answer {brief(answer)} has to be {meaning}")
    first, second = answer
    return first, second


def check_sendable(answer: object, kind: Any) -> None:
    """Raise TypeError unless a hook's answer can be sent to another process as a ``kind``."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=kind)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"the answer {brief(answer)} cannot be sent to another process: {message_of(error)}"
        ) from None


def call_handle_preemptions(
    connector: KVConnectorBase_V1, metadata: KVConnectorMetadata, preempted_req_ids: set[str]
) -> None:
    """Call the hook with the argument of the release that the connector was written for."""
    if "preempted_req_ids" in inspect.signature(connector.handle_preemptions).parameters:
        ids: Any = preempted_req_ids
        connector.handle_preemptions(ids)
    else:
        connector.handle_preemptions(metadata)


@contextmanager
def hook_limit(connector: object, hook: str, seconds: float | None) -> Iterator[None]:
    """A context that raises TimeoutError, which names the hook, after ``seconds``; None: never.

    What ends coroutines and generators is an error like others here: a hook may wait for a
    coroutine of its own that was cancelled.
    """
    with time_limit(seconds, f"{type(connector).__name__}.{hook} (kv_timeout_seconds)"):
        try:
            yield
        except (CancelledError, GeneratorExit, StopIteration) as error:
            raise RuntimeError(error_text(error)) from None


class ConnectorCapabilities(NamedTuple):
    """The abilities of a connector with its configuration, known before it is made."""

    rows_leave_each_step: bool
    lacks_hma: tuple[str, ...] = ()
    """Classes that do not declare SupportsHMA, among its own and those of connectors inside it."""
    unsupported: tuple[str, ...] = ()
    """Hooks that it needs and this engine does not call, so it cannot work here."""
    keeps: frozenset[str] = frozenset()
    """The class attribute of that name."""
    needs_eager_steps: bool = False
    """True if its hooks have to be called inside every pass, so no pass may be recorded."""
    keeps_prefixes: bool = True
    """The class attribute of that name."""
    takes_rows_only: bool = False
    """The class attribute of that name."""


class KVConnectorBase_V1(ABC):  # noqa: N801 - upstream's name
    """Base of all connectors. The methods with a body are safe to leave as they are."""

    reply_when_saved: bool = False
    """True: the scheduler holds a request's last output until ``get_finished`` reports it.
    False: the output goes out at once, as upstream does, and only the blocks are held."""
    keeps: frozenset[str] = frozenset()
    """Fields that it stores besides hidden states, by name (``vllm.v1.rows.fields``)."""
    rows_leave_each_step: bool = False
    """True: it takes hidden-state rows out in the step that computes them, so the scheduler
    may free full hidden-state blocks after each step. False: they are kept until the
    request is done."""
    reads_metadata_later: bool = True
    """True: its hooks may read a step's attention metadata while the next step already runs.
    False: metadata may share memory with that of the next step."""
    loads_rows: bool = False
    """True if a load brings the tokens' hidden-state rows too, when the pool has rows."""
    keeps_prefixes: bool = True
    """True if it may store prefixes: then blocks of rows are kept until the hash of their prefix is
    known, and recurrent states are kept, also with ``enable_prefix_caching=False``."""
    outlives_engine: bool = False
    """True if what it stores is found by other engines of the same checkpoint: then the weights of
    this engine cannot be replaced."""
    takes_rows_only: bool = False
    """True if it reads hidden states and no other cache: then only the rank that has them, of
    several, has a worker side."""
    reads_all_layers: bool = True
    """True: it needs the cache of every layer, so every request runs all layers. False: it
    takes rows only, or tells requests of different depth apart (``Request.prefix_hashes``)."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError(
                f"{type(self).__name__} needs a kv_transfer_config, but the config has none"
            )
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """The side of the connector that this is."""
        return self._role

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """True if it wants one tensor over all layers, provided they share a layout and a group."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the order that attention caches must have in a block: tokens first ("NHD") or
        heads first ("HND"); None: either. The order changes strides of views, not dimensions."""
        return None

    @classmethod
    def capabilities(cls, kv_transfer_config: KVTransferConfig) -> ConnectorCapabilities:
        """Return what the class declares; a connector that contains others combines theirs."""
        own = cls._overridden()
        uncalled = [name for name in HOOKS_NOT_CALLED if name in own]
        return ConnectorCapabilities(
            cls.rows_leave_each_step,
            () if supports_hma(cls) else (cls.__name__,),
            tuple(f"{cls.__name__}.{name}" for name in uncalled),
            cls.keeps,
            cls.requires_piecewise_for_cudagraph(kv_transfer_config.kv_connector_extra_config),
            cls.keeps_prefixes,
            cls.takes_rows_only,
        )

    @classmethod
    def _overridden(cls) -> set[str]:
        """Return the names that the class and its bases below this one define."""
        classes = cls.__mro__[: cls.__mro__.index(KVConnectorBase_V1)]
        return {name for one in classes for name in vars(one)}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether the hooks of layers have to be called inside every pass: then all steps
        run eagerly on CUDA. False: in recorded steps they are called before and after the pass."""
        return False

    @property
    def works_layer_by_layer(self) -> bool:
        """True if it defines hooks of layers."""
        return not self._overridden().isdisjoint(("wait_for_layer_load", "save_kv_layer"))

    @property
    def sends_rows_on(self) -> bool:
        """True if rows leave in the step that computes them."""
        return self.rows_leave_each_step

    @property
    def keeps_rows_back(self) -> bool:
        """True if :meth:`drop_computed` and :meth:`take_rows_back` work for rows, so that a request
        whose load failed can be computed again although rows are sent on."""
        return False

    def drop_computed(self, request_ids: set[str]) -> None:  # noqa: B027
        """Keep nothing that this step computed for these requests, because a load of theirs failed.

        Called on the worker side before ``wait_for_save``, for a failure that is reported later
        once more before ``build_connector_worker_meta``.
        """

    def take_rows_back(self, request_id: str) -> None:  # noqa: B027
        """Expect all rows of a request once more that were computed since it last began to run.
        Called on the scheduler side, after :meth:`drop_computed` in each step of that time."""

    @property
    def requires_kv_delivery(self) -> bool:
        """True if a request that is preempted before its blocks are delivered is computed again;
        this engine computes every preempted request again."""
        return self._kv_transfer_config.is_kv_producer

    @classmethod  # noqa: B027
    def check_config(cls, vllm_config: VllmConfig) -> None:
        """Check the configuration before the model is loaded.

        Raises ValueError for what the connector cannot serve, before the time of a load is spent.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Finish pending work, end threads and close files. May be called twice."""

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Take the cache tensor of each layer, by layer name; once, before the first step.

        A hidden-state layer's tensor is a strided view ``[blocks, layers, rows, hidden]``, the
        same that ``save_kv_layer`` gets. A recurrent layer has a tuple in its kernels' layout:
        its spec (``kv_cache_config.spec_of``) reads and writes it in the checkpoint's layout.
        """

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:  # noqa: B027
        """Take the pool as bytes; once, after :meth:`register_kv_caches`."""

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one view over all layers, [layers, blocks, pages, 16, kv_heads, K | V]; once,
        instead of :meth:`register_kv_caches`.

        Called if :attr:`prefer_cross_layer_blocks` is true and all layers have one layout and one
        group. ``attn_backend`` knows the order of the dimensions in memory
        (:class:`~vllm.v1.attention.backend.AttentionBackend`).
        """

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """Take the function that copies blocks between device and host views; once."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the metadata that others need to reach this worker; called once, after
        ``register_kv_caches``."""
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Handle the preemption of requests; their blocks are not overwritten before return.

        An override whose parameter is called ``preempted_req_ids`` gets the set of their ids.
        """

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set the metadata of the step that begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the metadata of the step that ends."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Return whether a step is under way."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """Return the metadata of the step under way."""
        assert self._connector_metadata is not None, "no step is under way"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the loads of this step's requests; called before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """Return when the loads of one layer are done; called before it reads its cache."""

    def save_kv_layer(  # noqa: B027
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to save what one layer wrote; called after the write, inside the forward pass.

        ``kv_layer`` is the cache from ``register_kv_caches``; a recurrent layer has a tuple.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the pool may be overwritten; called right after the forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose sending, and whose receiving, is done since the last call.

        ``finished_req_ids``: requests that ended since the last step. An id whose
        ``request_finished`` returned True has to be returned here once.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load failed since the last call.

        A failed load before the forward pass is reported in the same step. A failed background
        load is reported no later than ``get_finished`` reports its request, which it still does.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call; None: nothing. Called on both sides."""
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Return the worker side's cache events since the last call; None: none."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the ``kv_connector_worker_meta`` that ``update_connector_output`` gets."""
        return None

    def get_finished_count(self) -> int | None:
        """Return how many workers report a request before it counts as done; None: all."""
        return None

    def take_failures(self) -> dict[str, Failure]:
        """Return request id -> why its data could not be delivered, since the last call."""
        return {}

    def take_completed_params(self) -> dict[str, dict[str, Any]]:
        """Return request id -> additions to its kv_transfer_params, since the last call."""
        return {}

    def save_stats(self) -> SaveStats | None:
        """Return what was written so far; None: the connector does not count."""
        return None

    # Scheduler side

    def check_request(self, request: Request) -> None:  # noqa: B027
        """Check a request before it is queued.

        Raises ValueError for ``kv_transfer_params`` that cannot be served.
        """

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """Note that a request was queued."""

    def set_xfer_handshake_metadata(  # noqa: B027
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' handshake metadata, by rank; once."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the same by (pipeline, tensor-parallel) rank; this is the one that is called.

        ValueError: there are pipeline stages, and the connector defines only the other one.
        """
        stages = {stage for stage, _ in metadata}
        if len(stages) > 1 and "set_xfer_handshake_metadata" in self._overridden():
            raise ValueError(
                f"pipeline_parallel_size={max(stages) + 1}: {type(self).__name__} takes the "
                "handshake metadata of tensor-parallel ranks only (set_xfer_handshake_metadata); "
                "use pipeline_parallel_size=1, or define set_xfer_handshake_metadata_pp_aware"
            )
        self.set_xfer_handshake_metadata({rank: one for (_, rank), one in metadata.items()})

    def has_pending_push_work(self) -> bool:
        """Return whether steps have to go on although no request is left."""
        return False

    def reset_cache(self) -> bool | None:
        """Forget everything that was saved, and return whether that was done.

        Called by ``reset_prefix_cache(reset_connector=True)``.
        """
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Make stats from the ``data`` of stats that came from another process."""
        return None

    @classmethod
    def stats_of_config(
        cls, kv_transfer_config: KVTransferConfig, data: dict[str, Any]
    ) -> KVConnectorStats | None:
        """Do the same, for a class whose stats depend on its configuration."""
        return cls.build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Make metrics for ``/metrics``, which observe the data of stats; None: there are none."""
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded, and whether in the
        background.

        None: not known yet; the scheduler calls again later.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that a request got, and how many of its tokens are to be loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the worker side's metadata for the planned step; does not change the step."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Take the worker side's report of a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request, before its blocks are freed.

        Returns whether the connector still works on the request (then ``get_finished`` has to
        report its id, and its blocks stay until then), and the kv_transfer_params of its reply. A
        connector with ``reply_when_saved`` is called again, with status FINISHED_ABORTED, when the
        client goes away before the reply: it removes what was saved, and ``get_finished`` still
        reports the id. A connector that raised is called again with FINISHED_ERROR; the request
        fails, and its blocks do not stay.
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Return the cache events since the last call, for ``on_kv_cache_events``."""
        return ()

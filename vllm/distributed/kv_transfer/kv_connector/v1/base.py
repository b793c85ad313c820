"""What the engine asks of a connector: the thing that takes cached data out of the pool.

A connector exists twice. The *scheduler side* sees requests, tokens and block ids; the
*worker side* sees tensors. The order of calls:

    scheduler, once a request   check_request, get_num_new_matched_tokens,
                                update_state_after_alloc
    scheduler, every step       build_connector_meta
    worker, once                register_kv_caches
    worker, every step          bind_connector_metadata, start_load_kv,
                                (forward: wait_for_layer_load, save_kv_layer,
                                wait_for_save,) get_finished, take_failures,
                                take_completed_params, clear_connector_metadata
    scheduler, every step       update_connector_output
    scheduler, on finish        request_finished or request_finished_all_groups

A step without a forward pass runs when only the connector has something to do: what
``request_finished`` leaves behind travels in the metadata of the next step. Names and
signatures are those of upstream's V1 connectors, so that out-of-tree ones work here.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.exceptions import Failure
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, SaveStats
    from vllm.v1.request import Request


class KVConnectorRole(enum.Enum):
    """Which half of a connector an instance is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - a base for out-of-tree dataclasses
    """What the scheduler side tells the worker side about one step."""


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


class ConnectorCapabilities(NamedTuple):
    """What a connector can do with its configuration, known before one is made."""

    supports_hma: bool
    rows_leave_each_step: bool


class KVConnectorBase_V1(ABC):  # noqa: N801 - upstream's name
    """Base of all connectors. The methods with a body are safe to leave as they are."""

    reply_when_saved: bool = False
    """The scheduler holds a request's last output until ``get_finished`` reports it.
    False: the output goes out at once, as upstream does, and only the blocks wait."""
    rows_leave_each_step: bool = False
    """Hidden-state rows are taken out in the step that computes them, so the scheduler
    may free full hidden-state blocks after each step. False: they are kept until the
    request is done."""

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
        """Whether one tensor over all layers would suit better than one a layer."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The dimension order ("NHD" or "HND") that attention caches must have; None: any."""
        return None

    @classmethod
    def capabilities(cls, kv_transfer_config: KVTransferConfig) -> ConnectorCapabilities:
        """What the class declares; one that stands for others sums up theirs."""
        return ConnectorCapabilities(supports_hma(cls), cls.rows_leave_each_step)

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

        A hidden-state layer's tensor is a strided view ``[blocks, layers, rows, hidden]``.
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

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the loads of one layer are done."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to save what one layer wrote; called inside the forward pass."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the pool may be overwritten; right after the forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose sending, and whose receiving, is done since the last call.

        ``finished_req_ids``: requests that ended since the last step. An id whose
        ``request_finished`` returned True has to come back here once.
        """
        return None, None

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
        be removed, and the id still comes back from ``get_finished``.
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Cache events collected since the last call."""
        return ()

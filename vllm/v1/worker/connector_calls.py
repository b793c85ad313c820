"""The worker side of a connector: which of its hooks is called when, in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    call_handle_preemptions,
)
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.attention.backend import backend_of
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

logger = init_logger(__name__)


class WorkerConnector:
    """One connector, through the steps of one worker.

    What it raises while it loads costs the requests for which it loads; what it raises
    elsewhere, the step.
    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self.connector = connector
        self._load_error: str | None = None

    def register(
        self, published: dict[str, Any], config: KVCacheConfig, pool: torch.Tensor
    ) -> None:
        """The pool is there; ``published`` are the views of its layers."""
        whole = None
        if self.connector.prefer_cross_layer_blocks:
            whole = config.cross_layers_view(pool)
            if whole is None and not takes_layers(self.connector):
                raise ValueError(
                    f"{type(self.connector).__name__} takes one view over all layers "
                    "(register_cross_layers_kv_cache) and has no register_kv_caches, but the "
                    "layers of this model do not all lie alike in one group"
                )
        if whole is None:
            self.connector.register_kv_caches(published)
        else:
            self.connector.register_cross_layers_kv_cache(whole, backend_of(whole))
        self.connector.register_kv_cache_references(config.references(pool))
        self.connector.set_host_xfer_buffer_ops(copy_layer_blocks)

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Before anything of the step is written."""
        self._load_error = None
        metadata = scheduled.kv_connector_metadata
        if metadata is None:
            return
        self.connector.bind_connector_metadata(metadata)
        if scheduled.preempted_req_ids:
            call_handle_preemptions(self.connector, metadata, scheduled.preempted_req_ids)

    def load(self, context: ForwardContext, layers: Mapping[str, Any]) -> None:
        """Before the forward pass of ``layers``; without one, for loads in the background."""
        if not self.connector.has_connector_metadata():
            return
        try:
            self.connector.start_load_kv(context)
            for name in layers:
                self.connector.wait_for_layer_load(name)
        except Exception as error:
            logger.exception("%s could not load", type(self.connector).__name__)
            self._load_error = f"the connector could not load: {type(error).__name__}: {error}"

    def save(self, context: ForwardContext, layers: Mapping[str, Any]) -> None:
        """After the forward pass."""
        for name, view in layers.items():
            self.connector.save_kv_layer(name, view, context.attn_metadata[name])
        self.connector.wait_for_save()

    def end_step(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        """What it reports."""
        connector = self.connector
        sent, received = connector.get_finished(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=sent or set(),
            finished_recving=received or set(),
            failures=connector.take_failures(),
            completed_params=connector.take_completed_params(),
            save_stats=connector.save_stats(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            load_error=self._load_error,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def shutdown(self) -> None:
        """End its threads."""
        self.connector.shutdown()


def takes_layers(connector: KVConnectorBase_V1) -> bool:
    """Whether it can be given a view a layer."""
    return type(connector).register_kv_caches is not KVConnectorBase_V1.register_kv_caches


def copy_layer_blocks(
    sources: dict[str, torch.Tensor],
    destinations: dict[str, torch.Tensor],
    source_blocks: list[int],
    destination_blocks: list[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copy blocks of every layer between views [blocks, ...] on the device and on the host."""
    for name, source in sources.items():
        target = destinations[name]
        target[destination_blocks] = source[source_blocks].to(target.device)

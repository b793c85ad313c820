"""What both sides of a connector counted and noted in a step, for who asks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.hook_limit import hook_limit
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_messages import EngineStats
from vllm.v1.outputs import KVConnectorOutput, SaveStats

logger = init_logger(__name__)


class ConnectorNews:
    """Of one connector. What it raises here costs no request: it is told once, and dropped."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._stats: Any = None
        self._events: list[Any] = []
        self._has_warned = False

    def take(self, connector: KVConnectorBase_V1, report: KVConnectorOutput) -> None:
        """Of the step that ``report`` is of."""
        try:
            with hook_limit(connector, "get_kv_connector_stats", self._timeout_seconds):
                own = connector.get_kv_connector_stats()
            parts = [one for one in (report.kv_connector_stats, own) if one is not None]
            parts = [one for one in parts if not one.is_empty()]
            if parts:
                self._stats = parts[0] if len(parts) == 1 else parts[0].aggregate(parts[1])
        except Exception as error:
            self._warn("stats", error)
        try:
            with hook_limit(connector, "take_events", self._timeout_seconds):
                self._events = list(connector.take_events())
        except Exception as error:
            self._warn("cache events", error)

    def put_into(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Hand them on with a step's outputs, which are returned."""
        if self._stats is not None:
            outputs.kv_connector_stats, self._stats = [self._stats], None
        outputs.kv_cache_events, self._events = self._events, []
        return outputs

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s of the KV connector are dropped", what, exc_info=error)


def count_saves(totals: EngineStats, saved: SaveStats | None) -> None:
    """What a connector wrote since its start."""
    if saved is not None:
        totals.rows_written, totals.bytes_written = saved.num_rows, saved.num_bytes
        totals.files_written, totals.bytes_in_flight = saved.num_files, saved.bytes_in_flight
        totals.write_seconds = saved.write_seconds

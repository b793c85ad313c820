"""KVEventsConfig: what enters and leaves the prefix cache, told to others."""

from __future__ import annotations

from typing import Annotated, Literal

from vllm.utils.checked import UNSET, Fillable, config, is_unset


@config("kv_events_config")
class KVEventsConfig:
    """Where cache events go (BlockStored, BlockRemoved, AllBlocksCleared)."""

    enable_kv_cache_events: bool = False
    """Note what enters and leaves the prefix cache, and publish it."""
    publisher: Annotated[Literal["null", "zmq"], Fillable] = UNSET
    """"zmq" where events are enabled, else "null". With "null" they go to ``on_kv_cache_events`` of
    the engine only."""
    endpoint: str = "tcp://*:5557"
    """Address on which they are published."""
    replay_endpoint: str | None = None
    """Address at which batches that were missed can be asked for."""
    buffer_steps: int = 10_000
    """Batches that can be asked for again."""
    hwm: int = 100_000
    """Batches that wait for a slow consumer; what is more is lost to it."""
    max_queue_size: int = 100_000
    """Batches that wait to be published; then the engine waits."""
    topic: str = ""
    """Topic under which they are published."""

    def __post_init__(self) -> None:
        if is_unset(self.publisher):
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"kv_events_config.{name}={getattr(self, name)} is not a positive number"
                )

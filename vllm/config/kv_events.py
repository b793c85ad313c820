"""KVEventsConfig: upstream's option for publishing cache events, which this engine does not do."""

from __future__ import annotations

from typing import Annotated, Literal

from vllm.utils.checked import UNSET, Fillable, config, is_unset


@config("kv_events_config")
class KVEventsConfig:
    """Where events would go. Connectors of others may read it: nothing is ever enabled."""

    enable_kv_cache_events: bool = False
    """Publish what enters and leaves the cache: not supported, so only False."""
    publisher: Annotated[Literal["null", "zmq"], Fillable] = UNSET
    """"null", the only one while nothing is enabled."""
    endpoint: str = "tcp://*:5557"
    """Address of a publisher."""
    replay_endpoint: str | None = None
    """Address at which a publisher repeats what was missed."""
    buffer_steps: int = 10_000
    """Steps that can be repeated."""
    hwm: int = 100_000
    """Events that wait for slow consumers."""
    max_queue_size: int = 100_000
    """Events that wait to be published."""
    topic: str = ""
    """Topic of a publisher."""

    def __post_init__(self) -> None:
        if is_unset(self.publisher):
            self.publisher = "null"
        if self.enable_kv_cache_events or self.publisher != "null":
            raise ValueError(
                f"kv_events_config.enable_kv_cache_events={self.enable_kv_cache_events}, "
                f"publisher={self.publisher!r}: this engine publishes no cache events; leave both "
                "out, and read kv_cache_usage_perc and prefix_cache_hits from /metrics"
            )

"""KVEventsConfig: publishing what enters and leaves the prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

from vllm.utils.checked import UNSET, Fillable, config, is_unset
from vllm.utils.network_utils import check_port
from vllm.utils.text import brief

ALL_ADDRESSES = {"*", "0.0.0.0", "[::]"}
HERE = {*ALL_ADDRESSES, "127.0.0.1", "[::1]", "localhost"}


@config("kv_events_config")
class KVEventsConfig:
    """Publishing of cache events (BlockStored, BlockRemoved, AllBlocksCleared)."""

    enable_kv_cache_events: bool = False
    """Record what enters and leaves the prefix cache, and publish it."""
    publisher: Annotated[Literal["null", "zmq"], Fillable] = UNSET
    """Default: "zmq" if events are enabled, else "null". With "null" they only go to
    ``on_kv_cache_events`` of the engine."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address on which they are published, by default for this machine only."""
    replay_endpoint: str | None = None
    """Address at which missed batches can be requested."""
    buffer_steps: int = 10_000
    """Number of batches that can be requested again."""
    hwm: int = 100_000
    """Most batches that wait for a slow consumer, which misses the rest."""
    max_queue_size: int = 100_000
    """Most batches that wait to be published; beyond that the engine waits."""
    topic: str = ""
    """Topic under which events are published."""

    def __post_init__(self) -> None:
        if is_unset(self.publisher):
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not 1 <= value < 2**31 - 1:
                raise ValueError(
                    f"kv_events_config.{name}={value} is not a positive number below 2147483647"
                )
        self.check_ports(1)

    def check_ports(self, num_engines: int) -> None:
        """Raise ValueError unless each engine has a port: engine I uses the port of an endpoint
        plus I. zmq itself takes any number, and uses its last 16 bits."""
        hosts, ports = set(), []
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if self.publisher == "zmq" and address is not None and address.startswith("tcp://"):
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                option = f"kv_events_config.{name}"
                check_port(option, address, port, num_ports=num_engines)
                hosts.add(host)
                ports.append(int(port))
        may_meet = len(hosts) == 1 or (hosts <= HERE and not hosts.isdisjoint(ALL_ADDRESSES))
        if len(ports) == 2 and may_meet and abs(ports[0] - ports[1]) < num_engines:
            several = "" if num_engines == 1 else f" (engine I of {num_engines} adds I)"
            raise ValueError(
                f"kv_events_config.endpoint={brief(self.endpoint)} and replay_endpoint="
                f"{brief(self.replay_endpoint)} use the same ports{several}; use ports that are at "
                f"least {num_engines} apart"
            )

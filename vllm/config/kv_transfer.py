"""KVTransferConfig: the connector that moves blocks out of the pool and into it."""

from __future__ import annotations

import uuid
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm.utils.checked import UNSET, Fillable, config, is_unset

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]


@config("kv_transfer_config")
class KVTransferConfig:
    """The KV connector, its role, and the options that it reads itself."""

    kv_connector: str | None = None
    """Name of the connector: a registered one, or a class in kv_connector_module_path."""
    kv_role: KVRole | None = None
    """Role of this engine: saves blocks (producer), loads them (consumer), or both."""
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the connector, as it documents them."""
    kv_connector_module_path: str | None = None
    """Python module to import the connector class from."""
    engine_id: Annotated[str, Fillable] = UNSET
    """Name of this engine among those that exchange blocks. Default: a random one."""
    kv_rank: int | None = None
    """Number of this engine among those that exchange blocks."""
    kv_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Number of engines that exchange blocks."""
    kv_buffer_size: float = 1e9
    """Bytes of a connector's transfer buffer."""
    kv_buffer_device: str = "cpu"
    """Device of a connector's transfer buffer."""
    kv_ip: str = "127.0.0.1"
    """Address at which the connector listens."""
    kv_port: Annotated[int, Field(ge=1, le=65535)] = 14579
    """Port at which the connector listens."""
    enable_permute_local_kv: bool = False
    """Let the connector change the order of dimensions while it copies."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    """Reaction to blocks that could not be loaded: compute them, or fail the request."""
    rows_before_layers: bool = False
    """Give a connector of kv_connector_module_path its view of the rows as [blocks, rows, layers,
    hidden], as older releases of vLLM did, instead of [blocks, layers, rows, hidden]."""
    kv_timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a call of the connector (once the engine runs), a load in the background
    or a reply that waits for the connector has failed. Default: no limit."""

    def __post_init__(self) -> None:
        if is_unset(self.engine_id):
            self.engine_id = str(uuid.uuid4())
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError(
                f"kv_transfer_config.kv_role is missing for kv_connector={self.kv_connector!r}; "
                "use 'kv_producer', 'kv_consumer' or 'kv_both'"
            )
        if self.kv_connector is None and (self.kv_role or self.kv_connector_module_path):
            raise ValueError(
                "kv_transfer_config.kv_connector is missing; name the connector to use, for "
                "instance 'ExampleHiddenStatesConnector'"
            )

        if self.rows_before_layers and self.kv_connector_module_path is None:
            raise ValueError(
                "kv_transfer_config.rows_before_layers is for connectors of "
                f"kv_connector_module_path, and kv_connector={self.kv_connector!r} is not one; "
                "leave it out"
            )

    @property
    def is_kv_transfer_instance(self) -> bool:
        """True if there is a connector."""
        return self.kv_connector is not None

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """The connector's own option ``key``; ``default`` if it was not given."""
        return self.kv_connector_extra_config.get(key, default)

"""ECTransferConfig: upstream's option for encoder caches, which this engine does not have."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from vllm.utils.checked import config

ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]


@config("ec_transfer_config")
class ECTransferConfig:
    """A connector for outputs of vision encoders. Models run text only, so it must be None."""

    ec_connector: str | None = None
    """Name of the connector; only None is supported."""
    ec_role: ECRole | None = None
    """Role: saves outputs (producer), loads them (consumer), or both."""
    ec_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the connector."""
    ec_connector_module_path: str | None = None
    """Module of the connector."""

    def __post_init__(self) -> None:
        if self.ec_connector is not None:
            raise ValueError(
                f"ec_transfer_config.ec_connector={self.ec_connector!r} is not supported: models "
                "run text only here and have no encoder cache; leave the option out"
            )

    @property
    def is_ec_transfer_instance(self) -> bool:
        """Always False: there is no connector."""
        return False

    is_ec_producer = is_ec_consumer = is_ec_transfer_instance

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """The connector's own option ``key``; ``default`` if it was not given."""
        return self.ec_connector_extra_config.get(key, default)

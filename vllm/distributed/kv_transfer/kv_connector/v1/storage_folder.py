"""The options of the configured connector that writes hidden states to files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.connectors import find_connector_class
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    sub_connector_configs,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def storage_options(config: VllmConfig) -> HiddenStatesOptions | None:
    """Return the options of our connector; None if no such connector is configured."""
    part = next(filter(_writes_files, _parts(config)), None)
    return None if part is None else HiddenStatesOptions.among(part.kv_connector_extra_config)


def extract_only_when_asked(config: VllmConfig) -> None:
    """Set this option of our connectors. Raises ValueError if no such connector is configured."""
    transfer, parts = config.connector_config, _parts(config)
    if not any(map(_writes_files, parts)):
        raise ValueError(
            "extract_only_when_asked has no effect: this server has no connector that writes files "
            "of hidden states; set speculative_config and a kv_transfer_config with "
            "ExampleHiddenStatesConnector, or leave it out"
        )
    assert transfer is not None
    for part in filter(_writes_files, parts):
        part.kv_connector_extra_config["extract_only_when_asked"] = True
    if parts[0] is not transfer:
        transfer.kv_connector_extra_config["connectors"] = parts


def _parts(config: VllmConfig) -> list[KVTransferConfig]:
    """Return the configs of all connectors, unless nothing is extracted."""
    transfer = config.connector_config
    if transfer is None or config.speculative_config is None:
        return []
    is_multi = transfer.kv_connector == MultiConnector.__name__
    return sub_connector_configs(transfer) if is_multi else [transfer]


def _writes_files(part: KVTransferConfig) -> bool:
    is_ours = issubclass(find_connector_class(part), ExampleHiddenStatesConnector)
    return is_ours and part.is_kv_producer

"""The folder to which the configured connector writes hidden states."""

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
    from vllm.config import VllmConfig


def storage_options(config: VllmConfig) -> HiddenStatesOptions | None:
    """Return the options of our connector; None if no such connector is configured."""
    transfer = config.connector_config
    if transfer is None or config.speculative_config is None:
        return None
    is_multi = transfer.kv_connector == MultiConnector.__name__
    for part in sub_connector_configs(transfer) if is_multi else [transfer]:
        is_ours = issubclass(find_connector_class(part), ExampleHiddenStatesConnector)
        if is_ours and part.is_kv_producer:
            return HiddenStatesOptions.among(part.kv_connector_extra_config)
    return None

"""Files that exist, while the one who asked for them has not been told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
)


class UndeliveredFiles:
    """Hidden-state files whose paths are still on their way; false when there are none."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """The file of a request that has ended, if it has one."""
        path = (kv_transfer_params or {}).get("hidden_states_path")
        if isinstance(path, str):
            self._paths.append(path)

    def discard(self) -> None:
        """Remove them and their locks: nobody will learn of them."""
        paths, self._paths = self._paths, []
        for path in paths:
            cleanup_hidden_states(path)

"""Messages between the process of an engine core and those of its other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.config.connectors import Location
from vllm.exceptions import Failure
from vllm.logger import LogFormat
from vllm.v1.executor.rank_wiring import Wiring
from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True)
class RankSettings:
    """Everything that a rank's process needs to know."""

    vllm_config: VllmConfig
    wiring: Wiring
    """Its descriptors are inherited by the process."""
    models: dict[str, str]
    """Architectures registered in the engine core's process: name -> "module:Class"."""
    connectors: dict[str, Location]
    """Connectors that are known by name there."""
    log_format: LogFormat


class RankCall(NamedTuple):
    """Something that all ranks do at the same time."""

    number: int
    method: str
    """A method of ``rank_process.Rank``."""
    args: tuple[Any, ...]


class RankAnswer(NamedTuple):
    """The end of a call."""

    number: int
    result: Any = None
    reports: Sequence[KVConnectorOutput] = ()
    """Reports of the rank's connector after steps, each of them once."""
    failure: Failure | None = None
    was_cut_off: bool = False
    """True if the call failed because another rank had left the group."""

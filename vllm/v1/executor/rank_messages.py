"""Messages between the process of an engine core and those of its other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.exceptions import Failure
from vllm.logger import LogFormat
from vllm.v1.executor.rank_wiring import Wiring


@dataclass(frozen=True)
class RankSettings:
    """Everything that a rank's process needs to know."""

    vllm_config: VllmConfig
    wiring: Wiring
    """Its descriptors are inherited by the process."""
    models: dict[str, str]
    """Architectures registered in the engine core's process: name -> "module:Class"."""
    log_format: LogFormat


class RankNote(NamedTuple):
    """Something that a rank has to do before its next call; it cannot fail and has no result."""

    method: str
    """A method of ``rank_process.Rank``."""
    args: tuple[Any, ...]


class RankCall(NamedTuple):
    """Something that all ranks do at the same time."""

    number: int
    method: str
    """A method of ``rank_process.Rank``."""
    args: bytes
    """Pickled by itself: what a rank cannot import fails this call alone."""
    notes: list[RankNote]


class RankAnswer(NamedTuple):
    """The end of a call."""

    number: int
    result: Any = None
    failure: Failure | None = None
    was_cut_off: bool = False
    """True if the call failed because another rank had left the group."""

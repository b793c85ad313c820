"""Messages between the process of an engine core and those of its other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.config.connectors import Location
from vllm.distributed.broadcast import BroadcastPlace
from vllm.distributed.communicators import GroupClosedError
from vllm.exceptions import Failure, FailureError, FailureKind, kind_of
from vllm.logger import LogFormat
from vllm.utils.text import error_text, message_of
from vllm.v1.executor.gloo_wiring import GlooWiring
from vllm.v1.executor.node_links import SocketPlace
from vllm.v1.executor.rank_wiring import Wiring
from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True)
class RankSettings:
    """Everything that a rank's process needs to know."""

    vllm_config: VllmConfig
    wiring: Wiring | GlooWiring
    """Descriptors in it are inherited by the process."""
    models: dict[str, str]
    """Architectures registered in the engine core's process: name -> "module:Class"."""
    connectors: dict[str, Location]
    """Connectors that are known by name there."""
    log_format: LogFormat
    calls: SocketPlace | BroadcastPlace
    """The place where the process hears calls. Answers go the same way if it is a socket, else
    through a socket in the process's folder."""


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
    reports: Sequence[KVConnectorOutput] = ()
    """Reports of the rank's connector after steps, each of them once."""
    failure: Failure | None = None
    was_cut_off: bool = False
    """True if the call failed because another rank had left the group."""


def failed_answer(number: int, error: BaseException) -> RankAnswer:
    """Return the answer to a call that ended with this error."""
    was_cut_off, is_refusal = (isinstance(error, c) for c in (GroupClosedError, ValueError))
    kind = FailureKind.BAD_REQUEST if is_refusal else kind_of(error, FailureKind.STEP_FAILED)
    says_all = is_refusal or isinstance(error, FailureError)
    failure = Failure(kind, message_of(error) if says_all else error_text(error))
    return RankAnswer(number, failure=failure, was_cut_off=was_cut_off)


def raise_first_failure(answers: Iterable[tuple[int, RankAnswer]]) -> None:
    """Raise what ended a call for all ranks, if one of these ranks knows it."""
    failed = [pair for pair in answers if pair[1].failure is not None]
    for rank, answer in sorted(failed, key=lambda pair: pair[1].was_cut_off):
        assert answer.failure is not None
        if answer.failure.kind is FailureKind.BAD_REQUEST:
            raise ValueError(answer.failure.message)
        message = f"rank {rank}: {answer.failure.message}"
        raise FailureError(Failure(answer.failure.kind, message))

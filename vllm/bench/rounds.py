"""Contenders in separate processes, run in turn, round by round.

Each has its own peak memory, threads, caches and allocator. While one runs, the others wait on
their pipes. The order alternates, so that none always follows the same one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import statistics
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self
from unittest import mock

from vllm.bench.contenders import Contender, Prompts, Round, Workload
from vllm.bench.peer import PeerMissing
from vllm.bench.profile import Profile
from vllm.platforms import get_platform


class Entry(NamedTuple):
    """A contender and its name in the results."""

    name: str
    contender: type[Contender]
    workload: Workload


@dataclass
class Measurement:
    """One contender over the rounds so far."""

    name: str
    num_tokens: int
    """Tokens computed in one round."""
    seconds: list[float] = field(default_factory=list)
    bytes_written: int = 0
    """Bytes written in one round."""
    peak_memory_bytes: int = 0
    """Largest resident set of its process, or of one that it started and waited for."""
    note: str = ""
    profile: Profile | None = None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def speed_over(self, other: Measurement) -> float:
        """Return the speed relative to ``other``: the median of the ratios of each round."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return statistics.median(theirs / mine for theirs, mine in pairs)


def _peak_bytes() -> int:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(who).ru_maxrss for who in whose)
    return peak if sys.platform == "darwin" else peak * 1024


def _serve(entry: Entry, pipe: Connection) -> None:
    """Run the child process: load, then answer each ``(method, prompts)`` until None arrives."""
    contender: Contender | None = None
    try:
        get_platform("cpu").set_num_threads()
        contender = entry.contender(entry.workload)
        pipe.send(contender.note)
        while (message := pipe.recv()) is not None:
            method, prompts = message
            pipe.send((getattr(contender, method)(prompts), _peak_bytes()))
    except (EOFError, KeyboardInterrupt):
        pass
    except PeerMissing as missing:
        pipe.send(missing)
    except BaseException:
        pipe.send(RuntimeError(f"{entry.name} failed:\n{traceback.format_exc()}"))
    finally:
        if contender is not None:
            contender.close()


class ContenderProcess:
    """A handle of a contender in its child process."""

    def __init__(self, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(entry, child_pipe))
        with mock.patch.dict(os.environ, entry.contender.environment):
            self._process.start()
        child_pipe.close()
        self.entry = entry
        self.measurement = Measurement(entry.name, entry.workload.num_tokens)

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            name = self.entry.name
            raise RuntimeError(f"{name}: its process ended without an answer") from None
        if isinstance(answer, RuntimeError | PeerMissing):
            raise answer
        return answer

    def wait_until_loaded(self) -> None:
        self.measurement.note = self._receive()

    def ask(self, method: str, prompts: Prompts) -> Any:
        """Return the result of that method of the contender."""
        self._pipe.send((method, prompts))
        result, self.measurement.peak_memory_bytes = self._receive()
        return result

    def close(self) -> None:
        """Let the process end; terminate it if it does not."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_in_turn(
    entries: Sequence[Entry], rounds: int, profiled: str | None = None
) -> dict[str, Measurement]:
    """Load all, warm them up, run them in turn; returns name -> measurement.

    Every round has new random prompts, the same for all, so no prefix cache has them.
    ``profiled``: name of the entry that runs a profile at the end. Progress goes to stderr.
    """
    with ExitStack() as stack:
        processes = []
        for entry in entries:  # one after another, because loading times alternatives
            processes.append(stack.enter_context(ContenderProcess(entry)))
            processes[-1].wait_until_loaded()
        for process in processes:
            process.ask("run", process.entry.workload.warm_up_prompts())
        for number in range(1, rounds + 1):
            for process in processes if number % 2 else reversed(processes):
                entry, measurement = process.entry, process.measurement
                result: Round = process.ask("run", entry.workload.prompts(seed=number))
                measurement.seconds.append(result.seconds)
                measurement.bytes_written = result.bytes_written
                progress = f"round {number}/{rounds}, {entry.name}: {result.seconds:.3f} s"
                print(progress, file=sys.stderr)
        for process in processes:
            if process.entry.name == profiled:
                prompts = process.entry.workload.prompts(seed=rounds + 1)
                process.measurement.profile = process.ask("profile", prompts)
        return {process.entry.name: process.measurement for process in processes}

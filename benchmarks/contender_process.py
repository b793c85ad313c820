"""A contender in a process of its own, driven round by round over a pipe.

So each has its own peak memory, threads, caches and allocator. While one runs, the others
wait on their pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, Self

from contenders import Contender, Kind, Prompts, Round, Workload, make_contender


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _serve(kind: Kind, workload: Workload, pipe: Connection) -> None:
    """Child process: load, then run one round for each message until there are no more."""
    contender: Contender | None = None
    try:
        contender = make_contender(kind, workload)
        pipe.send((contender.note, None))
        while (prompts := pipe.recv()) is not None:
            pipe.send((contender.run(prompts), _peak_bytes()))
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException:
        pipe.send((traceback.format_exc(), -1))
    finally:
        if contender is not None:
            contender.close()


class ContenderProcess:
    """Handle of a contender in its child process."""

    def __init__(self, kind: Kind, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, workload, child_pipe))
        self._process.start()
        child_pipe.close()
        self.kind = kind
        self.peak_bytes = 0
        self.note = str(self._receive()[0])

    def _receive(self) -> tuple[Any, Any]:
        try:
            answer: tuple[Any, Any] = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.kind}: its process ended without an answer") from None
        if answer[1] == -1:
            raise RuntimeError(f"{self.kind} failed:\n{answer[0]}")
        return answer

    def run(self, prompts: Prompts) -> Round:
        """Run one round and keep the process's peak memory."""
        self._pipe.send(prompts)
        result, self.peak_bytes = self._receive()
        return Round(*result)

    def close(self) -> None:
        """Let the process end, and see that it does."""
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

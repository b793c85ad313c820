"""Python modules that run in processes of their own and end with their parent.

The parent writes one pickled object to the child's standard input and keeps the pipe open. When
the pipe closes, the parent has ended in some way, and the child ends (:func:`receive_settings`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vllm.utils.gc_utils import without_garbage_collection
from vllm.utils.log_tail import LogTail


def private_folder(prefix: str) -> str:
    """Make a temporary folder that only this user can enter. ValueError: none is writable."""
    try:
        return tempfile.mkdtemp(prefix=prefix)  # mode 0700
    except OSError as error:
        raise ValueError(
            f"no folder for temporary files can be written ({error.strerror}); set TMPDIR to "
            "one where this user may create files"
        ) from None


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_that_wait() -> Iterator[None]:
    """Start processes in which signals wait until :func:`leave_signals`.

    They may reach the whole process group, also while a child loads its modules.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals(*signals: int) -> None:
    """Ignore these signals, of which the parent decides what they mean; take others again."""
    for one in signals:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class ChildProcess:
    """A process that runs ``main(folder)`` of a module. The folder is removed at its end.

    It inherits these file descriptors, with their numbers. environment: None: this process's.
    What it writes to standard error is passed on, and its last lines are kept.
    """

    def __init__(
        self,
        module: str,
        folder: str,
        file_descriptors: Collection[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with signals_that_wait():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.utils.child_process", module, folder],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=file_descriptors,
                env=environment,
            )
        assert self._process.stderr is not None
        self._tail = LogTail(self._process.stderr)
        self._cleanup = weakref.finalize(self, _end_process, self._process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last_lines(self) -> str:
        """The last lines of its standard error, once it has ended, without mere information."""
        return self._tail.text

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def send(self, settings: object) -> None:
        """Hand over the object that the child waits for. BrokenPipeError: it is gone."""
        self.send_pickled(pickle.dumps(settings))

    def send_pickled(self, settings: bytes) -> None:
        """Do the same for an object whose classes this process need not load."""
        stream = self._process.stdin
        assert stream is not None
        stream.write(settings)
        stream.flush()

    def wait(self) -> int:
        return self._process.wait()

    def end(self, grace_seconds: float = 0.0) -> None:
        """Give the process ``grace_seconds`` to end, then kill it; remove the folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._cleanup()


def _end_process(process: subprocess.Popen[bytes], folder: str) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def ending_of(noun: str, number: int, status: int) -> str:
    """Say how the process of a rank or an engine ended."""
    return f"the process of {noun} {number} ended with status {status}"


def with_last_lines(ending: str, last_lines: str) -> str:
    """Add what a process has written before its end, if that says something."""
    return f"{ending}; the end of its log:\n{last_lines}" if last_lines else ending


def receive_settings(folder: str) -> Any:
    """Wait for the object that the parent sends; from then on, end this process when the parent is
    gone, even after SIGKILL: standard input closes then. SystemExit: it is gone already.
    """
    from vllm.utils.lazy_modules import only_what_configs_need  # loads torch

    try:
        with only_what_configs_need():
            settings = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(1)

    def watch() -> None:
        # The raw descriptor: a thread inside the buffered object would break the exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    return settings


def _main(module: str, folder: str) -> int:
    leave_signals(*_SIGNALS)
    with without_garbage_collection():
        main = importlib.import_module(module).main
    status: int = main(folder)
    return status


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

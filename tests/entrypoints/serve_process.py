"""`vllm serve` as a user starts it: a process of its own, ended by its id."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.engine.harness import extraction_config

WAIT_SECONDS = 180.0


@dataclass
class ServeProcess:
    """A server's process, and where its log goes."""

    process: subprocess.Popen[bytes]
    log_file: Path
    url: str

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, trust_env=False)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """The exit status."""
        return self.process.wait(seconds)

    def core(self) -> psutil.Process:
        """The engine core's process."""
        children = psutil.Process(self.process.pid).children()
        (core,) = [one for one in children if "vllm.v1.engine.core_process" in one.cmdline()]
        return core


def command(checkpoint: Path, folder: Path | None, *flags: str) -> list[str]:
    """Arguments of a server that extracts into ``folder`` (None: that does not extract)."""
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    if "--max-model-len" not in flags:
        arguments += ["--max-model-len", "512"]
    arguments += ["--kv_cache_memory_bytes", "16MiB"]
    if folder is not None:
        for option, value in extraction_config([0, 2, 4], folder).items():
            arguments += [f"--{option}", json.dumps(value)]
    return [*arguments, *flags]


@contextmanager
def serve(
    checkpoint: Path, folder: Path | None, *flags: str, before: Sequence[str] = ()
) -> Iterator[ServeProcess]:
    """A server on a free port that is ready; killed at the end if it still runs.

    before: words of a command that becomes the server's process.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    flags = ("--host", "127.0.0.1", "--port", "0", *flags)
    with tempfile.TemporaryDirectory() as scratch:
        log_file = Path(scratch) / "log"
        with log_file.open("wb") as log:
            words = [*before, *command(checkpoint, folder, *flags)]
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        server = ServeProcess(process, log_file, "")
        try:
            server.url = wait_for_url(server)
            yield server
        finally:
            process.kill()
            process.wait(WAIT_SECONDS)


def wait_for_url(server: ServeProcess) -> str:
    """The address that the start-up summary names."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(r"  URL +(\S+)", server.log):
            return found[1]
        if server.process.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"the server did not start:\n{server.log}")


__all__ = ["ServeProcess", "command", "serve"]

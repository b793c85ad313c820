"""All that can be checked on one GPU, with the Python that is there: nothing is installed.

Says what is installed and what is missing, runs the tests marked ``gpu`` and those of the
Triton kernels, then the benchmark of the GPU targets, each within its time. Exit status 1 when
a test failed or a part could not run; a missed speed target is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 560
TEST_SECONDS = 240
"""Of them, when the benchmark runs too."""
FOR_KERNELS = {"torch", "triton", "numpy", "pytest"}
NEEDED = (
    *("torch", "triton", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy"),
    *("pydantic", "msgspec", "psutil", "xxhash", "tqdm", "jinja2", "yaml", "pytest"),
)
USED_IF_THERE = ("flashinfer", "fla")
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "flashinfer": "flashinfer-python",
    "fla": "flash-linear-attention",
}
"""Names of packages that differ from those of their modules."""
KERNEL_TESTS = {
    "elementwise": "tests/kernels/test_triton_elementwise.py",
    "attention": "tests/kernels/test_triton_attention.py",
    "attention, large": "tests/kernels/test_cuda_attention.py",
    "recurrent": "tests/kernels/test_triton_recurrent.py",
    "rows": "tests/kernels/test_device_rows.py",
}
"""These need no package but ``FOR_KERNELS``."""
ENGINE_TESTS = {"engine": "tests/gpu"}


def version_of(module: str) -> str:
    """Of what Python would import; empty when there is nothing."""
    if find_spec(module) is None:
        return ""
    try:
        return metadata.version(DISTRIBUTIONS.get(module, module))
    except metadata.PackageNotFoundError:
        return "unknown version"


def report_machine() -> set[str]:
    """Print what is installed; returns what is missing. Ends where there is no GPU."""
    print(f"python {sys.version.split()[0]} ({sys.executable})")
    versions = {module: version_of(module) for module in NEEDED}
    print(", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items()))
    print(", ".join(f"{name} {version_of(name) or 'not there'}" for name in USED_IF_THERE))
    missing = {DISTRIBUTIONS.get(name, name) for name, version in versions.items() if not version}
    if "torch" not in missing:
        torch = import_module("torch")
        if not torch.cuda.is_available():
            sys.exit(f"CUDA {torch.version.cuda}: no CUDA device can be used here")
        print(f"CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}", flush=True)
    return missing


class Command:
    """One child of this Python. ``log``: where its output goes; None: to ours."""

    def __init__(self, what: str, arguments: Sequence[str], log: IO[str] | None = None) -> None:
        self.what, self.log = what, log
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, **settings}
        self._child = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )

    def succeeds(self, end: float) -> bool:
        """Wait for it until ``end`` (time.monotonic), then stop it; says how it went."""
        try:
            code = self._child.wait(timeout=max(0.0, end - time.monotonic()))
            verdict = "ok" if code == 0 else f"FAILED (exit status {code})"
        except subprocess.TimeoutExpired:
            code, verdict = -1, "STOPPED: no time is left"
        finally:
            self.stop()
        if self.log is not None:
            self.log.seek(0)
            print(self.log.read())
        print(f"== {self.what}: {verdict}", flush=True)
        return code == 0

    def stop(self) -> None:
        """End it, with what it started, if it still runs."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


def run_tests(with_engine: bool, end: float) -> bool:
    """Side by side: most of their time is spent compiling, on one core each."""
    pytest = ["-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "--durations=5"]
    commands = KERNEL_TESTS | (ENGINE_TESTS if with_engine else {})
    with ExitStack() as stack:
        running = []
        for what, path in commands.items():
            log = stack.enter_context(TemporaryFile("w+"))
            running.append(Command(f"tests, {what}", [*pytest, path], log))
            stack.callback(running[-1].stop)
        verdicts = [command.succeeds(end) for command in running]
        return all(verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("all", "tests", "bench"), default="all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="benchmark rows")
    parser.add_argument("--json", metavar="FILE", help="the benchmark's figures")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    missing = report_machine()
    if missing:
        print(
            f"missing: {', '.join(missing)}. Nothing is installed here: bring them along, for "
            "instance with 'pip download' elsewhere, then 'pip install --no-index --target DIR' "
            "here and PYTHONPATH=DIR",
            flush=True,
        )
    went_well = not missing
    if options.part != "bench" and not missing & FOR_KERNELS:
        seconds = TOTAL_SECONDS if options.part == "tests" else TEST_SECONDS
        went_well &= run_tests(not missing, start + seconds)
    if options.part != "tests" and missing <= {"pytest"}:
        only = ["--only", *options.only] if options.only else []
        json = ["--json", os.path.abspath(options.json)] if options.json else []
        speed = Command("speed", ["benchmarks/gpu.py", *only, *json])
        went_well &= speed.succeeds(start + TOTAL_SECONDS)
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())

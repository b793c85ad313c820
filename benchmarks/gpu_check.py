"""All that can be checked on one GPU, with the Python that is there: nothing is installed.

Says what is installed and what is missing, runs the tests marked ``gpu`` and those of the
Triton kernels, then the benchmark of the GPU targets, each within its time, and prints a table
of what passed; what failed first is named by its test, with the shape in brackets. Exit status 1
when a test failed or a part could not run; a missed speed target is printed. All of it is also
written to one file, to be sent back.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, TextIO, cast

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 560
"""Seconds of everything, unless ``--seconds`` says otherwise."""
TEST_SHARE = 3 / 7
"""Share of the total that tests get when the benchmark runs too."""
PEER_SECONDS = 1200
"""More, when vLLM is measured beside this engine: four rows of at most 300 s."""
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
ENGINE_TESTS = {"engine": "tests/gpu --ignore=tests/gpu/test_card_memory.py"}
TESTS_ALONE = {"memory": "tests/gpu/test_card_memory.py"}
"""These look at the memory of the card, so that nothing runs beside them."""
PASS = "PASS"
SKIPPED = "SKIPPED: something that it needs is missing"


def version_of(module: str) -> str:
    """Version of the module that Python would import; empty if there is none."""
    if find_spec(module) is None:
        return ""
    try:
        return metadata.version(DISTRIBUTIONS.get(module, module))
    except metadata.PackageNotFoundError:
        return "unknown version"


def report_machine() -> set[str]:
    """Print what is installed; returns what cannot be used. Ends where there is no GPU."""
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
    if not missing & {"torch", "triton"}:
        sys.path.insert(0, str(ROOT))
        problem = import_module("vllm.ops.sources").why_no_triton()
        if problem is not None:
            print(f"{problem}. It needs gcc or clang (or CC), and Python.h", flush=True)
            missing.add("triton")
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
            stdout=log or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._echo = Thread(target=self._print_lines)
        self._echo.start()

    def _print_lines(self) -> None:
        for line in self._child.stdout or ():
            print(line, end="", flush=True)

    def verdict(self, end: float) -> str:
        """Wait for it until ``end`` (time.monotonic), then stop it; says how it went."""
        try:
            code = self._child.wait(timeout=max(0.0, end - time.monotonic()))
            verdict = PASS if code == 0 else f"FAIL: exit status {code}"
        except subprocess.TimeoutExpired:
            verdict = "FAIL: no time is left"
        finally:
            self.stop()
        if self.log is not None:
            self.log.seek(0)
            text = self.log.read()
            print(text)
            first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
            if first:
                verdict += f"; first {first[1]}"
        print(f"== {self.what}: {verdict}", flush=True)
        return verdict

    def stop(self) -> None:
        """End it, with what it started, if it still runs."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._echo.join()


class Report:
    """Prints everything to the terminal, and to a file as well."""

    def __init__(self, file: TextIO) -> None:
        self._places = (sys.stdout, file)

    def write(self, text: str) -> int:
        for place in self._places:
            place.write(text)
        return len(text)

    def flush(self) -> None:
        for place in self._places:
            place.flush()


def run_tests(tests: Mapping[str, str], end: float) -> dict[str, str]:
    """Side by side, on all cores: most of their time is spent compiling, on one core each."""
    pytest = ["-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "--durations=5"]
    workers = (os.cpu_count() or 1) // len(tests) if tests and find_spec("xdist") else 0
    pytest += ["-n", str(workers)] if len(tests) > 1 < workers else []
    pytest += ["-m", ""]  # whole grids: a card is quick
    with ExitStack() as stack:
        running = []
        for what, arguments in tests.items():
            log = stack.enter_context(TemporaryFile("w+"))
            running.append(Command(f"tests, {what}", [*pytest, *arguments.split()], log))
            stack.callback(running[-1].stop)
        return {command.what: command.verdict(end) for command in running}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("all", "tests", "bench"), default="all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="benchmark rows")
    parser.add_argument("--json", metavar="FILE", help="the benchmark's figures")
    parser.add_argument("--peer-python", metavar="FILE", help="interpreter that has vLLM")
    parser.add_argument("--report", metavar="FILE", default="gpu-report.txt", help="all of it")
    parser.add_argument("--seconds", type=float, metavar="N", default=TOTAL_SECONDS,
        help="what does not end in this time is stopped (%(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    with open(options.report, "w") as file, redirect_stdout(cast(TextIO, Report(file))):
        failed = check(options)
    print(f"All of this is in {os.path.abspath(options.report)}")
    return failed


def check(options: argparse.Namespace) -> int:
    """Exit status of what ``options.part`` names."""
    start = time.monotonic()
    missing = report_machine()
    if missing:
        print(
            f"missing: {', '.join(missing)}. Nothing is installed here: bring them along, for "
            "instance with 'pip download' elsewhere, then 'pip install --no-index --target DIR' "
            "here and PYTHONPATH=DIR",
            flush=True,
        )
    verdicts: dict[str, str] = {}
    if options.part != "bench":
        can_run = {
            **({} if missing & FOR_KERNELS else KERNEL_TESTS),
            **({} if missing else ENGINE_TESTS | TESTS_ALONE),
        }
        skipped = (KERNEL_TESTS | ENGINE_TESTS | TESTS_ALONE).keys() - can_run.keys()
        seconds = options.seconds * (1 if options.part == "tests" else TEST_SHARE)
        verdicts = dict.fromkeys((f"tests, {what}" for what in sorted(skipped)), SKIPPED)
        alone = {what: can_run.pop(what) for what in TESTS_ALONE.keys() & can_run.keys()}
        for tests in (can_run, alone):
            verdicts |= run_tests(tests, start + seconds)
    if options.part != "tests" and missing <= {"pytest"}:
        only = ["--only", *options.only] if options.only else []
        json = ["--json", os.path.abspath(options.json)] if options.json else []
        peer = (
            ["--peer-python", os.path.abspath(options.peer_python)] if options.peer_python else []
        )
        speed = Command("speed", ["benchmarks/gpu.py", *only, *json, *peer])
        end = start + options.seconds + (PEER_SECONDS if peer else 0)
        verdicts["speed"] = speed.verdict(end)
    elif options.part != "tests":
        verdicts["speed"] = SKIPPED
    print("\n".join(f"{what:24}{verdict}" for what, verdict in verdicts.items()), flush=True)
    return 0 if all(verdict == PASS for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

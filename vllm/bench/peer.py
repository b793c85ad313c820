"""Plain prefill and decoding by another package named ``vllm``, in another interpreter.

That package has this one's name and API, so the two cannot be in one environment. The
interpreter of a virtual environment with the other package runs this file, which uses only the
package's public ``LLM``. The interpreter is isolated (``-I``) and starts in an empty folder
without PYTHONPATH, so neither it nor its child processes find this package by accident. The
answer names the package that was found.

    request   {"model": ..., "options": {...}, "rounds": [[prompts, num_tokens], ...],
               "stand_in": false}
    answer    {"package": ..., "version": ..., "file": ..., "seconds": [...]}
              {"missing": reason}, if there is no package to measure

Each is one JSON object, on standard input and standard output; output of the package itself
goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_LEAD_HERE = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


class Round(NamedTuple):
    """Prompts of token ids that are processed at once, and the number of tokens each generates."""

    prompts: list[list[int]]
    num_tokens: int


class PeerMissing(Exception):
    """The interpreter has no package to measure; the message says what it has."""


class Measured(NamedTuple):
    """The times of another package."""

    name: str
    """Package, version and location."""
    seconds: list[float]
    """Seconds of each round."""


def measure_peer(
    python: Path,
    model: Path,
    options: Mapping[str, Any],
    rounds: Sequence[Round],
    timeout_seconds: float,
    stand_in: bool = False,
) -> Measured:
    """Load ``model`` in the other interpreter and run the rounds one after another.

    ``options``: arguments of ``LLM``. ``stand_in``: allow this engine as the other package, to test
    the code. Raises PeerMissing if there is no such package or interpreter, RuntimeError with the
    last lines of its output if it fails or takes longer.
    """
    request = {
        "model": str(model),
        "options": dict(options),
        "rounds": rounds,
        "stand_in": stand_in,
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = _ask(python.absolute(), json.dumps(request), Path(folder), timeout_seconds)
    if "missing" in answer:
        raise PeerMissing(f"{python}: {answer['missing']}")
    name = f"{answer['package']} {answer['version']} of {answer['file']}"
    return Measured(name, answer["seconds"])


def _ask(python: Path, request: str, folder: Path, timeout_seconds: float) -> Any:
    """Return the answer of one child process; it and its own children are ended afterwards."""
    if not os.access(python, os.X_OK):
        raise PeerMissing(f"{python}: there is no interpreter")
    # Files, not pipes, because the child's own processes may keep them open.
    request_path, answer_path, log = (folder / name for name in ("request", "answer", "log"))
    request_path.write_text(request)
    work = folder / "work"
    work.mkdir()
    with request_path.open() as stdin, answer_path.open("w") as stdout, log.open("w") as stderr:
        child = subprocess.Popen(
            [str(python), "-I", str(Path(__file__).resolve())],
            cwd=work,
            env=_environment(python),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{python}: no answer after {timeout_seconds:g} s") from None
        finally:
            _end_session(child)
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{python}: exit status {code}\n{last}")
    return json.loads(answer_path.read_text())


def _environment(python: Path) -> dict[str, str]:
    """Return our environment without paths to this package, and with the folder of ``python`` in
    PATH, which holds tools that build kernels."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEAD_HERE}
    return {**kept, "PATH": os.pathsep.join([str(python.parent), kept.get("PATH", os.defpath)])}


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """End the child and its session: an engine's own processes may outlive the child."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request, in the other interpreter."""
    try:
        import vllm
    except ImportError as error:
        return {"missing": str(error)}
    if find_spec("vllm.hidden_states") is not None and not request["stand_in"]:
        return {"missing": f"{vllm.__file__} is this engine, not vLLM"}
    return {
        "package": "vllm",
        "version": vllm.__version__,
        "file": vllm.__file__,
        "seconds": _run_rounds(vllm, request),
    }


def _run_rounds(vllm: Any, request: dict[str, Any]) -> list[float]:
    llm = vllm.LLM(model=request["model"], skip_tokenizer_init=True, **request["options"])
    seconds = []
    for prompts, num_tokens in request["rounds"]:
        params = vllm.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return seconds


def _main() -> None:
    """Answer standard input; output of the package's processes goes to standard error, too."""
    answer = os.dup(1)
    os.dup2(2, 1)
    text = json.dumps(_answer(json.load(sys.stdin)))
    with open(answer, "w") as file:
        file.write(text)


if __name__ == "__main__":
    _main()

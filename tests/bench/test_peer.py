"""vLLM beside this engine: measured by an interpreter of its own that cannot find this package."""

from __future__ import annotations

import json
import venv
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.models.checkpoints import make_checkpoint
from vllm.bench.peer import PeerMissing, Round, measure_peer
from vllm.entrypoints.cli.bench import bench

ROOT = Path(__file__).parents[2]
ROUNDS = [Round([[1, 2], [3, 4]], 1), Round([[5, 6]], 3)]
PACKAGE = """
import profile, subprocess, sys  # a module is named profile where this package's script is

assert not hasattr(profile, "profile_run"), profile
__version__ = "9.9"
print("a line that is no answer")
subprocess.run([sys.executable, "-c", "print('another')"], check=True)
search = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
found = subprocess.check_output([sys.executable, "-c", search], text=True).strip()
assert found == __file__, found


class SamplingParams:
    def __init__(self, **options):
        self.max_tokens = options["max_tokens"]


class LLM:
    def __init__(self, model, **options):
        assert options == {"skip_tokenizer_init": True, "dtype": "float32"}, options
        self.model = model

    def generate(self, inputs, params, use_tqdm):
        assert self.model == "/a/model" and not use_tqdm
        tokens = [prompt["prompt_token_ids"] for prompt in inputs]
        assert (tokens, params.max_tokens) in (([[1, 2], [3, 4]], 1), ([[5, 6]], 3))
"""


PACKAGE_OF_SLOW_PROMPTS = """
import time

__version__ = "9.9"


class SamplingParams:
    def __init__(self, **options):
        assert options["max_tokens"] == 1 and options["temperature"] == 0


class LLM:
    def __init__(self, model, skip_tokenizer_init, **options):
        sizes = {"max_num_seqs": 3, "max_model_len": 22, "max_num_batched_tokens": 32}
        assert options == sizes, options
        time.sleep(0.1)

    def generate(self, inputs, params, use_tqdm):
        time.sleep(len(inputs) * 0.1)
        assert all(len(prompt["prompt_token_ids"]) == 20 for prompt in inputs)
"""


class Environment:
    """A virtual environment without packages."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def install(self, text: str) -> Path:
        """A package of the name that both have."""
        path = self.packages / "vllm" / "__init__.py"
        path.parent.mkdir()
        path.write_text(text)
        return path

    def install_this_engine(self) -> None:
        """And what this environment has."""
        others = Path(torch.__file__).parents[1]
        (self.packages / "paths.pth").write_text(f"{ROOT}\n{others}\n")

    def measure(self, timeout_seconds: float = 60) -> tuple[str, list[float]]:
        options = {"dtype": "float32"}
        return measure_peer(self.python, Path("/a/model"), options, ROUNDS, timeout_seconds)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Beside all that might lead to this package."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Environment(tmp_path / "environment")


def test_the_package_there_is_measured_and_named(environment: Environment) -> None:
    """By its processes, too, which are not isolated unless it says so."""
    path = environment.install(PACKAGE)
    name, seconds = environment.measure()
    assert name == f"vllm 9.9 of {path}"
    assert len(seconds) == 2 and all(taken >= 0 for taken in seconds)


def test_nothing_is_measured_where_nothing_is(environment: Environment) -> None:
    with pytest.raises(PeerMissing, match="No module named 'vllm'"):
        environment.measure()
    environment.python = environment.python.with_name("no-python")
    with pytest.raises(PeerMissing, match="no-python: there is no interpreter"):
        environment.measure()


def test_this_engine_is_not_taken_for_the_other(environment: Environment) -> None:
    environment.install_this_engine()
    with pytest.raises(PeerMissing, match=r"vllm/__init__\.py is this engine, not vLLM"):
        environment.measure()


def test_a_failure_says_how(environment: Environment) -> None:
    path = environment.install("raise ValueError('no such architecture')")
    with pytest.raises(RuntimeError, match=r"(?s)python: exit status 1\n.*no such architecture$"):
        environment.measure()
    path.write_text("import signal\nsignal.pause()\n")
    with pytest.raises(RuntimeError, match="python: no answer after 1 s"):
        environment.measure(timeout_seconds=1)


def decoding(folder: Path, *more: str) -> dict[str, str]:
    """The row that compares with vLLM."""
    document = folder / "rows.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "3", "--json", str(document)]
    assert gpu.main([*arguments, "--only", "decode", *more]) == 0
    rows: list[dict[str, str]] = json.loads(document.read_text())["rows"]
    (row,) = (row for row in rows if "vLLM" in row["work"])
    return row


def test_a_row_of_the_benchmark(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This engine stands in for the other one: its own speed, measured beside it."""
    environment.install_this_engine()
    row = decoding(tmp_path, "--peer-python", str(environment.python))
    assert float(row["measured"]) > 0, row["note"]
    assert row["note"].startswith("vllm ") and str(ROOT / "vllm") in row["note"]
    assert row["note"] in capsys.readouterr().out


def test_extraction_beside_it(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same rounds; a run of one step is not timed."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    arguments = ["extraction", "--model", str(checkpoint), "--rounds", "2", "--layers", "1"]
    arguments += ["--prompts", "3", "--prompt-len", "20", "--max-num-batched-tokens", "32"]
    arguments += ["--peer-python", str(environment.python)]
    with pytest.raises(SystemExit) as ended:
        bench(arguments)
    missing = f"--peer-python {environment.python}: No module named 'vllm'"
    assert ended.value.code == 2 and missing in capsys.readouterr().err
    path = environment.install(PACKAGE_OF_SLOW_PROMPTS)
    assert bench([*arguments, "--json", str(tmp_path / "result.json")]) == 0
    (result,) = json.loads((tmp_path / "result.json").read_text())["results"]
    measured = result["contenders"]["vllm"]
    assert len(measured["seconds"]) == 2
    assert all(0.3 <= seconds < 3 for seconds in measured["seconds"])
    assert measured["note"] == f"vllm 9.9 of {path}"
    assert result["speed_ratios"]["vllm"] > 0
    assert "vLLM, no extraction" in capsys.readouterr().out


def test_steps_take_time() -> None:
    """One disturbed round does not count; where most are disturbed there is no figure."""
    assert gpu.median_step_seconds([(9, 1), (1, 3), (7, 1)], 4) == 1.5
    with pytest.raises(RuntimeError, match=r"^4 more steps took -2\.000 s: other work"):
        gpu.median_step_seconds([(9, 1), (1, 3), (1, 3)], 4)


def test_the_report_says_that_it_is_not_there(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, note in (
        ((), "name the interpreter that has it: --peer-python"),
        (("--peer-python", str(environment.python)), "No module named 'vllm'"),
    ):
        row = decoding(tmp_path, *arguments)
        assert row["measured"] == "not there" and note in row["note"]
        assert row["note"] in capsys.readouterr().out

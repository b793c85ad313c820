"""Importing the package is cheap, and its public names are where they should be."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import get_type_hints

import pytest

import vllm
from vllm import envs
from vllm.version import __version__

IMPORT_SECONDS = 0.3


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import vllm; "
        "print(time.perf_counter() - start); "
        "print([m for m in ('torch', 'transformers', 'pydantic', 'numpy') if m in sys.modules])"
    )
    # The fastest of a few: another process may hold the machine.
    runs = [run_python(code).split("\n") for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < IMPORT_SECONDS
    assert {heavy for _, heavy in runs} == {"[]"}


def test_public_names() -> None:
    assert vllm.__version__ == __version__
    assert set(vllm._MODULE_OF) == set(vllm.__all__) - {"__version__"}
    for name, module in vllm._MODULE_OF.items():
        value = getattr(vllm, name)
        assert value is getattr(sys.modules[module], name)
    assert set(vllm.__all__) <= set(dir(vllm))


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'vllm' has no attribute 'Nonsense'"):
        _ = vllm.Nonsense


def test_command_line_is_light() -> None:
    start = time.perf_counter()
    version = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == __version__
    assert time.perf_counter() - start < 3


# Environment variables


def test_every_variable_is_annotated_and_documented() -> None:
    assert set(get_type_hints(envs)) - {"VARIABLES"} == set(envs.VARIABLES)
    assert all(variable.doc for variable in envs.VARIABLES.values())


def test_variables_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_THREADS", raising=False)
    assert envs.VLLM_CPU_THREADS is None
    monkeypatch.setenv("VLLM_CPU_THREADS", "3")
    assert envs.VLLM_CPU_THREADS == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert envs.OMP_NUM_THREADS == 4
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert envs.VLLM_LOGGING_LEVEL == "DEBUG"
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert envs.VLLM_PLUGINS == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("VLLM_CPU_THREADS", "0", "VLLM_CPU_THREADS='0': use a whole number of at least 1"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "VLLM_LOGGING_LEVEL='LOUD': use one of DEBUG, INFO"),
        ("VLLM_KERNELS", "fast", "VLLM_KERNELS='fast': use one of auto, plain, native"),
    ],
)
def test_bad_variables_are_named(
    name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        getattr(envs, name)

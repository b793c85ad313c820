"""The things that are shipped: the archives, the unit for systemd, the file for Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGING = ROOT / "packaging"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, without what was built in it."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    left_out = (".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    return folder


def build(source: Path, what: str, folder: Path) -> Path:
    """An archive, made without a compiler: the kernels take minutes."""
    script = f"from setuptools.build_meta import *; build_{what}({str(folder)!r})"
    environment = {**os.environ, "CXX": "no-compiler-here"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.iterdir()
    return archive


def test_a_wheel_without_kernels_is_for_any_machine(source: Path, tmp_path: Path) -> None:
    wheel = build(source, "wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert "vllm/py.typed" in names
    assert {"status_page.html", "api_page.html"} <= {Path(name).name for name in names}
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    for version in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}\n" in metadata
    assert "Hidden-states engine" in metadata


def test_a_wheel_with_kernels_is_for_any_python(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries need no Python, so that their wheel must not either."""
    monkeypatch.chdir(source)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--quiet", "--name"])
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(source / "setup.py")}
    exec((source / "setup.py").read_text(), names)
    from setuptools import Distribution

    command = names["Wheel"](Distribution())  # type: ignore[operator]
    command.bdist_dir, command.plat_name, command.plat_name_supplied = str(tmp_path), "p_x", True
    assert command.get_tag() == ("py3", "none", "any")
    (tmp_path / "vllm" / "ops").mkdir(parents=True)
    (tmp_path / "vllm" / "ops" / "_cpu_avx2.so").touch()
    assert command.get_tag() == ("py3", "none", "p_x")


def test_the_source_archive_can_be_tested(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"LICENSE", "Makefile", "CONTRIBUTING.md", "csrc/cpu/linear.cpp", "docs/design.md"}
    expected |= {"examples/demo.py", "examples/texts.jsonl", "tests/conftest.py"}
    expected |= {"packaging/Dockerfile", "requirements/pins.txt", "benchmarks/README.md"}
    expected |= {"CHANGELOG.md", "docs/journal/README.md", "benchmarks/results/zen5.json"}
    assert expected <= names


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    text = (PACKAGING / "hidden-states-engine.service").read_text()
    unit = tmp_path / "hidden-states-engine.service"
    unit.write_text(text.replace("/opt/engine/bin/vllm", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "hidden-states-engine" in line]
    assert not complaints, done.stderr


def test_the_file_for_docker_copies_what_there_is() -> None:
    """Docker itself is not asked: what it would copy exists, and .dockerignore lets it through."""
    text = (PACKAGING / "Dockerfile").read_text()
    allowed = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    sources = [name for line in copied for name in line.split()]
    assert "vllm" in sources
    for name in sources:
        assert (ROOT / name).exists(), name
        assert name in allowed, name
    pins = (ROOT / "requirements" / "pins.txt").read_text()
    assert "torch==" in pins

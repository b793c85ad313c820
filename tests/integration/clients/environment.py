"""The clients' own virtual environment, made once and kept in ``.cache/clients-venv``."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FOLDER = ROOT / ".cache" / "clients-venv"
LENS = FOLDER / "lens"
"""Folder of vllm-lens alone."""
RAY = FOLDER / "ray"
"""Folder of Ray and what it asks for."""
PINS = ROOT / "requirements" / "pins.txt"
INSTALL_SECONDS = 900.0
COMMAND_SECONDS = 240.0


@dataclass(frozen=True)
class ClientEnvironment:
    """Programs of the environment, run as a user would: in a process each, without a network."""

    home: Path
    """Folder where the programs may keep caches."""

    def run(self, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Run ``program`` (e.g. "python"); what it prints is one text, errors included."""
        variables = {
            **os.environ,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            **environment,
        }
        variables.pop("PYTHONPATH", None)
        return subprocess.run(
            [str(FOLDER / "bin" / program), *arguments],
            env=variables,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )

    def run_beside(self, program: Path, *arguments: str) -> str:
        """Run a Python program that sees this package beside the clients' packages; return what it
        prints. If both have a package, this one's is used. It has to exit with 0."""
        (folder,) = FOLDER.glob("lib/python*/site-packages")
        code = f"import runpy, sys; sys.path.append({str(folder)!r}); sys.argv.pop(0);" + (
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(program), *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def speculators(self, command: str, **options: object) -> str:
        """Output of ``speculators COMMAND``, which has to end well. A list repeats its option."""
        done = self.run("speculators", command, *as_arguments(options))
        assert done.returncode == 0, done.stdout
        return done.stdout


def as_arguments(options: dict[str, object]) -> list[str]:
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            arguments += [flag] if one is True else [flag, str(one)]
    return arguments


def prepare() -> None:
    """Make the environment, unless it is there and as the files beside this one say."""
    files = [
        HERE / name for name in ("dependencies.txt", "requirements.txt", "lens.txt", "ray.txt")
    ]
    pin = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    text = "\n".join([sys.version, pin, *(file.read_text() for file in files)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    stamp = FOLDER / "installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    venv.create(FOLDER, clear=True, with_pip=True)
    constraint = FOLDER / "torch.txt"
    constraint.write_text(pin + "\n")
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    for arguments in (
        ["-c", str(constraint), "-r", str(files[0])],
        ["--no-deps", "-r", str(files[1])],
        ["--no-deps", "--ignore-requires-python", "--target", str(LENS), "-r", str(files[2])],
        ["--target", str(RAY), "-r", str(files[3])],
    ):
        subprocess.run([*pip, "--quiet", *arguments], check=True, timeout=INSTALL_SECONDS)
    stamp.write_text(digest)


def hs_connectors_folder(target: Path) -> Path:
    """A folder that holds nothing but the package hs_connectors, for a server's PYTHONPATH."""
    (source,) = FOLDER.glob("lib/python*/site-packages/hs_connectors")
    target.mkdir(parents=True, exist_ok=True)
    (target / source.name).symlink_to(source)
    return target


__all__ = ["LENS", "RAY", "ClientEnvironment", "as_arguments", "hs_connectors_folder", "prepare"]

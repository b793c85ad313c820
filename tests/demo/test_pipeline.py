"""The CI pipeline names targets and tests that exist, and gives extraction a job of its own."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def commands() -> dict[str, str]:
    """Command line of each job, by its key."""
    pipeline = yaml.safe_load((ROOT / ".buildkite" / "pipeline.yaml").read_text())
    found = {}
    for step in pipeline["steps"]:
        command = step["command"]
        found[step["key"]] = command if isinstance(command, str) else "\n".join(command)
    return found


def test_extraction_has_a_job_of_its_own() -> None:
    jobs = commands()
    assert "tests/engine" in jobs["extraction"]
    assert "--ignore=tests/engine" in jobs["unit"]


def test_targets_and_paths_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job, command in commands().items():
        for path in re.findall(r"tests/\w+", command):
            assert (ROOT / path).is_dir(), f"{job}: {path}"
        for line in command.splitlines():
            words = line.split()
            assert words[0] == "make", job
            assert words[1] in targets, f"{job}: {words[1]}"


def test_ignored_tests_run_in_another_job() -> None:
    jobs = commands()
    for path in re.findall(r"--ignore=(tests/\w+)", jobs["unit"]):
        others = [command for key, command in jobs.items() if key != "unit"]
        assert any(path in command for command in others), path

"""kill -9 at any moment, then the same command again: the bytes of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extract.job_harness import digests, run, token_lists, write_token_ids

NUM_KILLS = 12
_TOUCHING_THE_DISK = ("open", "fsync", "pwrite", "replace", "rename", "unlink", "mkdir", "close")
"""Between two of these nothing on the disk changes; so killing before each is killing anywhere."""
VARYING = 8
"""Calls by which runs differ, because threads find each other's work done or not."""


def run_and_count(last: int | None, job: Callable[[], int], report: int) -> None:
    """In a child: run the job, and die before call number ``last`` of what touches the disk."""
    count = 0
    sys.dont_write_bytecode = True  # only the first run would write, and count, it

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return function(*arguments, **keywords)

        return counted

    write = os.write
    for name in _TOUCHING_THE_DISK:
        setattr(os, name, counting(getattr(os, name)))
    status = 1
    try:
        status = job()
    except BaseException:
        traceback.print_exc()
    finally:
        write(report, count.to_bytes(8, "little"))
        os._exit(status)


def in_child(last: int | None, job: Callable[[], int]) -> tuple[int, int]:
    """(wait status, calls counted)"""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # makes torch's pool anew before several threads could
        run_and_count(last, job, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as report:
        count = int.from_bytes(report.read(), "little")
    return os.waitpid(child, 0)[1], count


@pytest.mark.parametrize("form", ["sharded", "files"])
def test_killed_at_random_moments(form: str, tiny_llama: Path, tmp_path: Path) -> None:
    data = write_token_ids(tmp_path / "data.jsonl", token_lists(5, 40))
    undisturbed = tmp_path / "undisturbed"
    status, num_calls = in_child(None, lambda: run(tiny_llama, data, undisturbed, format=form))
    assert status == 0
    expected = digests(undisturbed)
    rng = random.Random(7)
    for moment in sorted(rng.sample(range(num_calls - VARYING), NUM_KILLS // 2)):
        # Each one alone, from the beginning, and continued to the end ...
        alone = tmp_path / f"at_{moment}"
        status, _ = in_child(moment, lambda out=alone: run(tiny_llama, data, out, format=form))
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert run(tiny_llama, data, alone, format=form) == 0
        assert digests(alone) == expected, f"killed before call {moment} of {num_calls}"
    num_killed = num_folders = 0
    while num_killed < NUM_KILLS // 2:  # ... and one after the other
        output = tmp_path / f"output_{num_folders}"
        moment = rng.randrange(num_calls // 3)
        status, _ = in_child(moment, lambda out=output: run(tiny_llama, data, out, format=form))
        if os.WIFSIGNALED(status):
            num_killed += 1
            continue
        assert status == 0
        assert digests(output) == expected
        num_folders += 1
    assert run(tiny_llama, data, output, format=form) == 0
    assert digests(output) == expected

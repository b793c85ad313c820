"""Conditions of every test: one thread, the same data each time, no device that is not there."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny models gain nothing from threads, and threads that wait for a core on a busy machine
# take a hundred times as long. Tests of threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # after the number of threads

# Triton reads it when it is imported, which transformers does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


with suppress(ImportError):  # which kernels' tests on a card can do without
    from hypothesis import settings

    settings.register_profile("same each time", derandomize=True, database=None, deadline=None)
    settings.load_profile("same each time")


def pytest_configure(config: pytest.Config) -> None:
    from tests.not_collected import NotCollected  # after the setting of Triton

    config.pluginmanager.register(NotCollected())


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # the same numbers whatever ran before, and on whichever worker
    settle_modules()


num_settled_modules = 0


def settle_modules() -> None:
    """Full collections look at what tests made, not at the 400,000 objects of imported modules.

    Every engine that ends asks for one, which takes ten times as long as the engine otherwise.
    """
    global num_settled_modules
    if len(sys.modules) > num_settled_modules + 50:
        gc.collect()
        gc.freeze()
        num_settled_modules = len(sys.modules)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(family, dtype=..., **config)``: the folder of a tiny checkpoint, made once."""
    from tests.models.checkpoints import make_checkpoint  # tests of kernels alone do without

    made: dict[str, Path] = {}

    def make(family: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        key = repr((family, dtype, sorted(config.items(), key=str)))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(folder, family, dtype=dtype, **config)
        return made[key]

    return make

"""Conditions of every test: one thread, the same data each time, no device that is not there."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
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
    collections.settle()


SLOW_COLLECTION_SECONDS = 0.05


class CollectionClock:
    """Full collections look at what a test made, not at modules or at what other tests left.

    Every engine that ends asks for a collection. Among the 400,000 objects of imported modules
    it takes ten times as long as the engine, and more when thousands of tests have run.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._was_slow = False
        self._num_modules = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._started = now
        elif info["generation"] == 2 and now - self._started > SLOW_COLLECTION_SECONDS:
            self._was_slow = True

    def settle(self) -> None:
        """Leave out of collections what there is now, if one was slow or is going to be."""
        if self._was_slow or len(sys.modules) > self._num_modules + 50:
            gc.collect()
            gc.freeze()
            self._num_modules, self._was_slow = len(sys.modules), False


collections = CollectionClock()


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

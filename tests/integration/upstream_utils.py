"""Names that upstream's tests import from ``tests.utils``: the few that connector tests use.

``tests.integration.upstream`` puts this file there.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

_SKIPPED = 77


def create_new_process_for_each_test(method: str | None = None) -> Callable[[Any], Any]:
    """Run a test in a child of its own; both methods fork here, before torch has any threads."""
    assert method in (None, "fork", "spawn")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            child = os.fork()
            if child == 0:
                os._exit(_status_of(lambda: test(*args, **kwargs)))
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code == _SKIPPED:
                pytest.skip("the test skipped itself")
            assert code == 0, f"{test.__name__} ended with {code}; what it printed is above"

        return run

    return decorate


def _status_of(test: Callable[[], None]) -> int:
    try:
        test()
    except pytest.skip.Exception as reason:
        print(reason)
        return _SKIPPED
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def multi_gpu_test(*, num_gpus: int) -> pytest.MarkDecorator:
    """Skip where so many cards are not there."""
    return pytest.mark.skipif(
        torch.cuda.device_count() < num_gpus, reason=f"{num_gpus} GPUs are needed"
    )

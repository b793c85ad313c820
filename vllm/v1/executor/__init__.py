"""Which executor a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BY_BACKEND: dict[str | None, type[Executor]] = {None: UniProcExecutor, "uni": UniProcExecutor}


def create_executor(vllm_config: VllmConfig) -> Executor:
    """The executor of ``parallel_config``: in this process, as long as there is one rank."""
    backend = vllm_config.parallel_config.distributed_executor_backend
    if backend not in _BY_BACKEND:
        raise ValueError(
            f"distributed_executor_backend={backend!r} is not supported: this version runs "
            'one worker in the engine\'s process ("uni")'
        )
    return _BY_BACKEND[backend](vllm_config)

"""The choice of the executor for a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.uniproc_executor import UniProcExecutor


def create_executor(vllm_config: VllmConfig) -> UniProcExecutor:
    """Create the executor of ``parallel_config``: one in this process, for a single rank."""
    backend = vllm_config.parallel_config.distributed_executor_backend
    if backend not in (None, "uni"):
        raise ValueError(
            f"distributed_executor_backend={backend!r} is not supported: this version runs "
            'one worker in the engine\'s process ("uni")'
        )
    # Imported late: it loads the worker, the models' layers and their operations.
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return UniProcExecutor(vllm_config)

"""The choice of the executor for a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.uniproc_executor import UniProcExecutor


def create_executor(vllm_config: VllmConfig) -> UniProcExecutor:
    """Create the executor of ``parallel_config``."""
    if (node := vllm_config.parallel_config.node_rank) > 0:
        raise ValueError(
            f"node_rank={node}: only node 0 has an engine; run `vllm serve MODEL --headless` here, "
            "with the options of node 0"
        )
    # Imported late: they load the worker, the models' layers and their operations.
    if vllm_config.parallel_config.is_external:
        from vllm.v1.executor.external_launcher import ExternalLauncherExecutor, place_ranks

        vllm_config.parallel_config = place_ranks(vllm_config.parallel_config)
        if vllm_config.parallel_config.world_size > 1:
            return ExternalLauncherExecutor(vllm_config)
    if vllm_config.parallel_config.engine_files:
        from vllm.v1.executor.rank_wiring import join_engines

        join_engines(vllm_config.parallel_config)
    if vllm_config.parallel_config.world_size == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        return UniProcExecutor(vllm_config)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(vllm_config)

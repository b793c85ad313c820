"""Parallel ranks, and the ways in which data leave the engine."""

from __future__ import annotations

from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_decode_context_model_parallel_rank,
    get_decode_context_model_parallel_world_size,
    get_dp_group,
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

__all__ = [
    "get_dcp_group",
    "get_decode_context_model_parallel_rank",
    "get_decode_context_model_parallel_world_size",
    "get_dp_group",
    "get_pcp_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]

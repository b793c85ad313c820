"""The function with which TRL sends weights to an engine's workers."""

from vllm.distributed.weight_transfer import refuse_transfer as packed_nccl_broadcast_producer

__all__ = ["packed_nccl_broadcast_producer"]

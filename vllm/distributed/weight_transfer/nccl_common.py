"""The function with which TRL joins the group of an engine's workers."""

from vllm.distributed.weight_transfer import refuse_transfer as trainer_init

__all__ = ["trainer_init"]

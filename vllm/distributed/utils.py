"""The process group of TRL up to 1.10."""

from vllm.distributed.weight_transfer import WeightGroup as StatelessProcessGroup

__all__ = ["StatelessProcessGroup"]

"""The function with which TRL joins the group of an engine's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm.distributed.weight_transfer import Communicator, WeightGroup


def trainer_init(init_info: Mapping[str, Any]) -> Communicator:
    """Wait at ``master_address`` and ``master_port`` for the workers; the trainer is rank 0.

    The group uses the current CUDA device and NCCL; without one, gloo.
    """
    address, port = init_info["master_address"], init_info["master_port"]
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return Communicator(WeightGroup(address, port, 0, init_info["world_size"]), device)


__all__ = ["trainer_init"]

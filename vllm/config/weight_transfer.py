"""WeightTransferConfig: the way in which a trainer sends weights to a server."""

from __future__ import annotations

from typing import Annotated, Literal

from vllm.utils.checked import ABOVE_0, FINITE, config


@config("weight_transfer_config")
class WeightTransferConfig:
    """A group of the processes of trainer and workers."""

    backend: Literal["gloo", "nccl"] = "nccl"
    """nccl: between CUDA devices; gloo: through host memory."""
    timeout: Annotated[float, ABOVE_0, FINITE] = 300.0
    """Seconds for the group to meet, for each transfer, and between the calls of an update."""

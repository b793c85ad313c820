"""The communicator of TRL up to 1.10."""

from vllm.distributed.weight_transfer import Communicator as PyNcclCommunicator

__all__ = ["PyNcclCommunicator"]

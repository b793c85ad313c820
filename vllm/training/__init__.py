"""Training on hidden states while an engine extracts them.

Every public name is imported on first use, so that a trainer that only reads a stream does not
load the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.training.activation_buffer import ActivationBuffer
    from vllm.training.extracting_dataset import ExtractingDataset
    from vllm.training.hidden_states_stream import HiddenStatesStream
    from vllm.training.mooncake_store import MooncakeStore
    from vllm.training.stream_messages import StreamError
    from vllm.training.streamed_dataset import StreamedDataset

__all__ = [
    "ActivationBuffer",
    "ExtractingDataset",
    "HiddenStatesStream",
    "MooncakeStore",
    "StreamError",
    "StreamedDataset",
]
_MODULES = {
    "ActivationBuffer": "activation_buffer",
    "ExtractingDataset": "extracting_dataset",
    "HiddenStatesStream": "hidden_states_stream",
    "MooncakeStore": "mooncake_store",
    "StreamError": "stream_messages",
    "StreamedDataset": "streamed_dataset",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vllm.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm.training.{_MODULES[name]}"), name)

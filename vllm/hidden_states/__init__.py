"""Hidden states as data: samples, their storage on disk, and their reader.

Nothing here needs the engine: a dataset can be opened on a machine that runs no model. Every
public name is imported on first use, so importing this package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.hidden_states.batches import pack_samples, pad_samples
    from vllm.hidden_states.dataset import HiddenStatesDataset
    from vllm.hidden_states.sample import (
        ExtractRequest,
        FailedSample,
        HiddenStatesError,
        HiddenStatesSample,
    )
    from vllm.hidden_states.windows import cut_windows

__all__ = [
    "ExtractRequest",
    "FailedSample",
    "HiddenStatesDataset",
    "HiddenStatesError",
    "HiddenStatesSample",
    "cut_windows",
    "pack_samples",
    "pad_samples",
]
_MODULES = {
    "HiddenStatesDataset": "dataset",
    "cut_windows": "windows",
    "pack_samples": "batches",
    "pad_samples": "batches",
}
"""Name -> its module, if that is not ``sample``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vllm.hidden_states' has no attribute {name!r}")
    module = importlib.import_module(f"vllm.hidden_states.{_MODULES.get(name, 'sample')}")
    return getattr(module, name)

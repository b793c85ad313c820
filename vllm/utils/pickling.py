"""Pickling of objects with tensors of every dtype."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_PICKLED_BY_TORCH = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.complex64, torch.complex128),
)
"""Dtypes with a storage of their own; ``pickle.loads`` fails at others, such as fp8."""


def dumps(value: object) -> bytes:
    """Do what ``pickle.dumps`` does. ``pickle.loads`` reads it."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.dtype in _PICKLED_BY_TORCH:
            return NotImplemented
        content = value.contiguous().flatten().view(torch.uint8)
        return _rebuilt, (content, value.dtype, value.shape)


def _rebuilt(content: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return content.view(dtype).view(shape)

"""Names of torch's dtypes."""

from __future__ import annotations

import torch

STR_DTYPE_TO_TORCH_DTYPE = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
"""The dtypes of models and of their keys and values, by the names that options use."""


def get_kv_cache_torch_dtype(
    cache_dtype: str | torch.dtype, model_dtype: str | torch.dtype | None = None
) -> torch.dtype:
    """The dtype of keys and values; "auto" means the model's.

    ValueError: keys and values cannot have this dtype.
    """
    dtype = model_dtype if cache_dtype == "auto" else cache_dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in STR_DTYPE_TO_TORCH_DTYPE:
        known = ", ".join(STR_DTYPE_TO_TORCH_DTYPE)
        raise ValueError(f"cache_dtype={dtype!r} is not one of: auto, {known}")
    return STR_DTYPE_TO_TORCH_DTYPE[dtype]

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
"""The dtypes in which models run, and keys and values are kept, by what options call them."""


def get_kv_cache_torch_dtype(
    cache_dtype: str | torch.dtype, model_dtype: str | torch.dtype | None = None
) -> torch.dtype:
    """Of keys and values; "auto" means the model's.

    ValueError: no dtype that they are kept in.
    """
    asked = model_dtype if cache_dtype == "auto" else cache_dtype
    if isinstance(asked, torch.dtype):
        return asked
    if asked not in STR_DTYPE_TO_TORCH_DTYPE:
        known = ", ".join(STR_DTYPE_TO_TORCH_DTYPE)
        raise ValueError(f"cache_dtype={asked!r} is none of: auto, {known}")
    return STR_DTYPE_TO_TORCH_DTYPE[asked]

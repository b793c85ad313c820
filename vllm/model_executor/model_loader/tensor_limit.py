"""Refuses tensors that cannot fit into memory before they are allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from vllm.config.failures import flat_entries
from vllm.utils.mem_utils import format_bytes, total_memory_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MAKERS = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange}
)
_NOT_ON_META = ("generator", "pin_memory")
_NO_SIZE = re.compile(r"position|token_id|window")
"""Names of entries that seldom are a dimension."""


class TensorLimit(TorchFunctionMode):
    """Raises ValueError for a tensor that is larger than all memory of this machine, or that the
    allocator of the CPU refuses. The error names the entry of config.json that made it so large."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        self._config = vllm_config.model_config.hf_config
        platform = vllm_config.device_config.platform
        self._memory_bytes = max(platform.total_memory_bytes(), total_memory_bytes())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKERS or "out" in kwargs:
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _NOT_ON_META}
        outline = make_outline(func, args, {**options, "device": "meta"})
        if outline.nbytes > self._memory_bytes:
            raise self._too_large(outline)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise self._too_large(outline) from error

    def _too_large(self, outline: torch.Tensor) -> ValueError:
        sizes = [(0, "its sizes")]
        for name, value in flat_entries(self._config.to_dict()):
            is_size = isinstance(value, int) and 1 < value <= max(outline.shape)
            if is_size and (value in outline.shape or not _NO_SIZE.search(name)):
                sizes.append((value, f"{name}={value}"))
        return ValueError(
            f"config.json: {max(sizes)[1]} makes a tensor of shape {list(outline.shape)}, "
            f"{format_bytes(outline.nbytes)}; this machine has {format_bytes(self._memory_bytes)}"
        )


def make_outline(
    func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> torch.Tensor:
    """Call ``func``; on "meta" the tensor that it makes has a shape and no memory."""
    if func is torch.arange:
        args, options = _length_of_range(*args, **options)
        func = torch.empty
    outline: torch.Tensor = func(*args, **options)
    return outline


def _length_of_range(*bounds: Any, **options: Any) -> tuple[tuple[int], dict[str, Any]]:
    """Arguments of ``torch.empty`` for the tensor that ``torch.arange`` makes of these.

    For a range on "meta" torch imports its compiler, which takes a second.
    """
    names = ("end",) if len(bounds) == 1 and "end" not in options else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, bounds, strict=False))}
    given |= {name: options.pop(name) for name in given.keys() | {"end"} if name in options}
    start, end, step = numbers = [
        one.item() if isinstance(one, torch.Tensor) else one
        for one in (given["start"], given["end"], given["step"])
    ]
    if all(isinstance(number, int) for number in numbers):
        options.setdefault("dtype", torch.int64)
    return (max(math.ceil((end - start) / step), 0) if step else 0,), options

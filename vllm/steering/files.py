"""Steering vectors in files.

A file has either one tensor, [hidden] or [layers, hidden], without layer ids, or a tensor
[hidden] for each of some layers, whose names tell the ids:

* safetensors: ``layers.N`` for layer id N; any other name for the only tensor.
* torch.save: a tensor, or a dict as in safetensors; its keys may also be the ids.
* GGUF, as repeng and llama.cpp write control vectors: ``direction.N`` is added to the output of
  layer N, counted from 0, so its layer id is N + 1.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.text import brief

if TYPE_CHECKING:
    import torch

MOST_BYTES = 256 << 20
"""Largest file that is read."""
_LAYER = re.compile(r"layers\.(\d{1,9})")
_DIRECTION = re.compile(r"direction\.(\d{1,9})")


def read_steering_file(path: str | os.PathLike[str]) -> torch.Tensor | dict[int, torch.Tensor]:
    """Return the only tensor of a file, or its tensors by layer id, ascending.

    ValueError: the file cannot be used. No code in it is run.
    """
    try:
        found = _read(os.fspath(path))
        return found if not isinstance(found, dict) else dict(sorted(found.items()))
    except Exception as error:  # whatever a damaged file leads to
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or str(error).partition("\n")[0] or type(error).__name__
        message = f"steering vectors in {brief(os.fspath(path))}: {reason}"
        raise VLLMValidationError(message, parameter="steering") from error


def _read(path: str) -> torch.Tensor | dict[int, torch.Tensor]:
    kind = os.path.splitext(path)[1]
    if kind not in (".safetensors", ".pt", ".pth", ".gguf"):
        raise ValueError("the name has to end in .safetensors, .pt, .pth or .gguf")
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is not a regular file")
    if info.st_size > MOST_BYTES:
        raise ValueError(f"it has {info.st_size:,} bytes; at most {MOST_BYTES:,} are read")
    with open(path, "rb") as file:
        data = file.read()
    if kind == ".gguf":
        from vllm.steering.gguf import read_gguf

        directions = read_gguf(data, _DIRECTION)
        return {int(name.rpartition(".")[2]) + 1: one for name, one in directions.items()}
    if kind == ".safetensors":
        from safetensors.torch import load

        return _by_layer(load(data))
    from vllm.utils.torch_archive import read_saved

    return _by_layer(read_saved(data))


def _by_layer(found: Any) -> torch.Tensor | dict[int, torch.Tensor]:
    """Return the only tensor, or those of a dict by layer id."""
    if not isinstance(found, Mapping):
        return _checked(found, "its content")
    if not found:
        raise ValueError("it has no tensor")
    names = list(found)
    if len(found) == 1 and isinstance(names[0], str) and not _LAYER.fullmatch(names[0]):
        return _checked(found[names[0]], names[0])
    by_layer = {_layer_id(name): _checked(one, name) for name, one in found.items()}
    if len(by_layer) < len(found):
        raise ValueError(f"two tensors are of the same layer: {brief(names)}")
    for layer_id, one in by_layer.items():
        if one.dim() != 1:
            raise ValueError(f"layer {layer_id} has shape {tuple(one.shape)}, not [hidden]")
    return by_layer


def _layer_id(name: object) -> int:
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    match = _LAYER.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"tensor {brief(name)}: several tensors have to be named layers.<id>")
    return int(match[1])


def _checked(value: Any, name: object) -> torch.Tensor:
    import torch

    if not torch.is_tensor(value) or not value.is_floating_point():
        kind = value.dtype if torch.is_tensor(value) else type(value).__name__
        raise ValueError(f"{brief(name)} is of type {kind}, not a tensor of floats")
    return value.detach()

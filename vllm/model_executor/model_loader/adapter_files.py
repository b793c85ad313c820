"""Reads low-rank adapters (LoRA) from folders that PEFT wrote.

adapter_config.json              rank, scale, and options of other methods, which are refused
adapter_model.safetensors, .bin  base_model.model.<module>.lora_A.weight   [rank, inputs]
                                 base_model.model.<module>.lora_B.weight   [outputs, rank]
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from vllm.utils.text import brief, parse_json

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_OTHER_METHODS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (),
    "lora_bias": (),
    "modules_to_save": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "use_qalora": (),
    "layer_replication": (),
    "use_bdlora": (),
    "arrow_config": (),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""Options of PEFT, each with the values that leave a plain adapter of an unchanged checkpoint, in
addition to null, false and nothing."""


class ModuleAdapter(NamedTuple):
    """Adds ``scale * up (down x)`` to the outputs of a linear module."""

    down: torch.Tensor
    """[rank, inputs]"""
    up: torch.Tensor
    """[outputs, rank]"""
    scale: float


class AdapterFiles(NamedTuple):
    """The content of a folder."""

    digest: str
    modules: dict[str, ModuleAdapter]
    """By the path of the module in transformers."""


def read_adapter(folder: Path, max_rank: int) -> AdapterFiles:
    """Read a folder. ValueError: it does not have a plain adapter of at most this rank."""
    if not folder.is_dir():
        raise ValueError("it is not a folder")
    config_bytes = _read(folder, "adapter_config.json")
    file = _read(folder, "adapter_model.safetensors", "adapter_model.bin")
    try:
        is_archive = file[:2] == b"PK"
        data = io.BytesIO(file)
        tensors = torch.load(data, "cpu", weights_only=True) if is_archive else load(file)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(f"adapter_model is damaged: {error}") from error
    if not isinstance(tensors, Mapping) or not tensors:
        raise ValueError("adapter_model has no tensors")
    try:
        config = parse_json(config_bytes)
    except ValueError as error:
        raise ValueError(f"adapter_config.json is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("adapter_config.json is not an object")
    _check_config(config)
    modules = {
        name: _module(name, parts, config, max_rank) for name, parts in _by_module(tensors).items()
    }
    return AdapterFiles(hashlib.sha256(config_bytes + b"\0" + file).hexdigest(), modules)


def _read(folder: Path, *names: str) -> bytes:
    for name in names:
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    raise ValueError(f"the folder has no {' or '.join(names)}")


def _check_config(config: Mapping[str, Any]) -> None:
    for option, plain in _OTHER_METHODS.items():
        value = config.get(option)
        if value and value not in plain:
            expected = f"; supported: {', '.join(map(repr, plain))}" if plain else ""
            raise ValueError(
                f"adapter_config.json: {option}={brief(value)} is not supported{expected}"
            )


def _by_module(tensors: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    found: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(str(name))
        if match is None:
            raise ValueError(f"tensor {brief(name)} is not a lora_A or lora_B of a linear module")
        is_matrix = torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.dim() == 2
        if not is_matrix or not tensor.isfinite().all():
            raise ValueError(f"tensor {brief(name)} is not a matrix of finite floats")
        if match[2] in found[match[1]]:
            raise ValueError(f"module {match[1]!r} has two tensors lora_{match[2]}")
        found[match[1]][match[2]] = tensor
    return found


def _module(
    name: str, parts: Mapping[str, torch.Tensor], config: Mapping[str, Any], max_rank: int
) -> ModuleAdapter:
    if len(parts) < 2:
        raise ValueError(f"module {name!r} has lora_{next(iter(parts))} alone")
    down, up = parts["A"], parts["B"]
    rank = _value(name, config, "r", "rank_pattern")
    alpha = _value(name, config, "lora_alpha", "alpha_pattern")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"adapter_config.json: the rank of {name!r} is {brief(rank)}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"adapter_config.json: lora_alpha of {name!r} is {brief(alpha)}")
    if down.shape[0] != rank or up.shape[1] != rank:
        raise ValueError(
            f"module {name!r} has lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)}, but "
            f"its rank in adapter_config.json is {rank}"
        )
    if rank > max_rank:
        raise ValueError(f"module {name!r} has rank {rank}, but max_lora_rank={max_rank}")
    return ModuleAdapter(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _value(name: str, config: Mapping[str, Any], option: str, patterns: str) -> Any:
    """Return an option of a module: that of the first pattern that its path ends with, or the
    adapter's. PEFT's default of both options is 8."""
    by_pattern = config.get(patterns) or {}
    if not isinstance(by_pattern, Mapping):
        raise ValueError(f"adapter_config.json: {patterns}={brief(by_pattern)} is not an object")
    for pattern, value in by_pattern.items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", name)
        except re.error as error:
            raise ValueError(f"adapter_config.json: {patterns}: {pattern!r}: {error}") from error
        if fits:
            return value
    return config.get(option, 8)

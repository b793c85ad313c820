"""Reads low-rank adapters (LoRA) from folders that PEFT wrote.

adapter_config.json              rank, scale, and options of other methods, which are refused
adapter_model.safetensors, .bin  base_model.model.<module>.lora_A.weight   [rank, inputs]
                                 base_model.model.<module>.lora_B.weight   [outputs, rank]

An embedding has lora_embedding_A [rank, vocabulary] and lora_embedding_B [width, rank]. A parameter
with a table for each expert (``target_parameters``) has lora_A [experts * rank, ...] and lora_B
[..., rank * experts] under the path of its module; a second one of the module has ``.base_layer``
behind that path.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from vllm.utils.regular_files import check_regular
from vllm.utils.text import brief, message_of, parse_json
from vllm.utils.torch_archive import FLOATS, MOST_FILE_PICKLE_BYTES, is_saved, read_saved

_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.[^.]+)?\.weight|embedding_([AB])(?:\.[^.]+)?)"
)
_DTYPES = (*FLOATS, torch.float64)
_TABLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")
_OTHER_METHODS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (),
    "lora_bias": (),
    "modules_to_save": (),
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


class Pair(NamedTuple):
    """The two tensors of a module, as the file has them."""

    a: torch.Tensor
    b: torch.Tensor
    is_embedding: bool


@dataclass(frozen=True)
class AdapterFiles:
    """The content of a folder."""

    digest: str
    config: Mapping[str, Any]
    pairs: Mapping[str, Pair]
    """By the path of the module in transformers; see the module about parameters."""
    tables: Mapping[str, torch.Tensor]
    """Tables of embeddings and heads, which PEFT adds to their adapters, by these paths."""
    max_rank: int

    def module(self, name: str, pair: Pair, num_tables: int = 1) -> ModuleAdapter:
        """Return a pair with its scale. name: what patterns of the config refer to.

        ValueError: the rank or the scale cannot be used.
        """
        config, rows, rank = self.config, len(pair.a), self.rank_of(name)
        alpha = _value(name, config, "lora_alpha", "alpha_pattern")
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"adapter_config.json: lora_alpha of {name!r} is {brief(alpha)}")
        if rows != rank * num_tables or pair.b.shape[1] != rows:
            raise ValueError(
                f"module {name!r} has lora_A {tuple(pair.a.shape)} and lora_B "
                f"{tuple(pair.b.shape)}, but its rank in adapter_config.json is {rank}"
            )
        if rank > self.max_rank:
            raise ValueError(f"module {name!r} has rank {rank}, but max_lora_rank={self.max_rank}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return ModuleAdapter(pair.a, pair.b, scale)

    def rank_of(self, name: str) -> int:
        """Return a module's rank. ValueError: it cannot be used."""
        rank: object = _value(name, self.config, "r", "rank_pattern")
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"adapter_config.json: the rank of {name!r} is {brief(rank)}")
        return rank

    def leaves_of(self, path: str) -> set[str]:
        """Return the parameters of a module that have adapters (``target_parameters``), without
        their module."""
        targets = [str(one) for one in self.config.get("target_parameters") or ()]
        leaves = {one: one.rpartition(".")[2] for one in targets}
        return {leaf for one, leaf in leaves.items() if f".{path}.{leaf}".endswith(f".{one}")}

    def key_of(self, path: str) -> str:
        """Return the name to which patterns refer: that of a module, or of its parameter."""
        return f"{path}.weight" if "weight" in self.leaves_of(path) else path

    @property
    def swaps_squares(self) -> bool:
        """True if the inputs of a square parameter [experts, outputs, inputs] are those of lora_B,
        as PEFT before 0.19 has them."""
        found = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version")))
        return found is None or (int(found[1]), int(found[2])) < (0, 19)


def read_adapter(folder: Path, max_rank: int) -> AdapterFiles:
    """Read a folder. ValueError: it does not have a plain adapter of at most this rank."""
    if not folder.is_dir():
        raise ValueError("it is not a folder")
    config_bytes = _read(folder, "adapter_config.json")
    file = _read(folder, "adapter_model.safetensors", "adapter_model.bin")
    try:
        if is_saved(file):
            tensors: Any = read_saved(file, _DTYPES, MOST_FILE_PICKLE_BYTES)
        else:
            tensors = load(file)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(f"adapter_model is damaged: {message_of(error)}") from error
    if not isinstance(tensors, Mapping) or not tensors:
        raise ValueError("adapter_model has no tensors")
    try:
        config = parse_json(config_bytes)
    except ValueError as error:
        raise ValueError(f"adapter_config.json is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("adapter_config.json is not an object")
    _check_config(config)
    digest = hashlib.sha256(config_bytes + b"\0" + file).hexdigest()
    tables = {
        match[1]: tensors[name]
        for name in tensors
        if "lora_" not in str(name) and (match := _TABLE.fullmatch(str(name)))
    }
    pairs = _pairs(
        {k: v for k, v in tensors.items() if "lora_" in str(k) or not _TABLE.fullmatch(str(k))}
    )
    return AdapterFiles(digest, config, pairs, tables, max_rank)


def _read(folder: Path, *names: str) -> bytes:
    for name in names:
        if check_regular(folder / name):
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


def _pairs(tensors: Mapping[str, Any]) -> dict[str, Pair]:
    found: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    embeddings = set()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(str(name))
        if match is None:
            raise ValueError(f"tensor {brief(name)} is not a lora_A or lora_B of a linear module")
        is_matrix = torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.dim() == 2
        if not is_matrix or not tensor.isfinite().all():
            raise ValueError(f"tensor {brief(name)} is not a matrix of finite floats")
        module, side = match[1], match[2] or match[3]
        if side in found[module]:
            raise ValueError(f"module {module!r} has two tensors lora_{side}")
        found[module][side] = tensor
        embeddings |= {module} if match[3] else set()
    for module, sides in found.items():
        if len(sides) < 2:
            raise ValueError(f"module {module!r} has lora_{next(iter(sides))} alone")
    return {name: Pair(one["A"], one["B"], name in embeddings) for name, one in found.items()}


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

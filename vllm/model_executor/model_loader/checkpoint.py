"""Finds the tensors of a checkpoint and reads them one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from vllm.utils.weight_files import read_torch_file, torch_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILE = "model.safetensors"
_VALUES_PER_STORED = 8
"""The most there can be: weights of 4 bits, eight in an integer."""
_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_UNREAD = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
_ALLOW_PATTERNS = {"safetensors": ["*.safetensors", "*.json"], "pt": ["pytorch_model*", "*.json"]}
"""Patterns of the files that are fetched from the hub, by format."""


def checkpoint_folder(
    model_config: ModelConfig, load_config: LoadConfig, *, fetches: bool = True
) -> Path:
    """The folder of a local checkpoint, or of a hub id after fetching its missing files.

    fetches: if False, only files that were fetched before are used.
    """
    folder = Path(model_config.model).expanduser()
    if folder.is_dir():
        return folder
    wanted = [load_config.load_format]
    if load_config.load_format not in _ALLOW_PATTERNS:
        wanted = ["safetensors", "pt"]
    for load_format in wanted:
        folder = _fetched(model_config, load_config, _ALLOW_PATTERNS[load_format], fetches)
        if any(folder.glob("*.safetensors")):
            break
    return folder


def _fetched(
    model_config: ModelConfig, load_config: LoadConfig, patterns: list[str], fetches: bool
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        fetched = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            allow_patterns=patterns,
            ignore_patterns=load_config.ignore_patterns,
            token=model_config.hf_token,
            local_files_only=not fetches,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"model={model_config.model!r} is no folder on this machine and cannot be fetched "
            f"from the hub: {error}"
        ) from error
    return Path(fetched)


def find_weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files with the weights, all of one format: safetensors if there are any, unless
    ``load_format`` says otherwise."""
    found: list[Path] = []
    if load_format != "pt":
        found = _safetensors_files(folder)
    if load_format != "safetensors":
        found = found or _torch_files(folder)
    if not found:
        endings = {"pt": ".bin", "safetensors": ".safetensors"}.get(load_format)
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _UNREAD)
        hint = f" ({', '.join(others)} cannot be read: convert to safetensors)" if others else ""
        if others and endings is not None:
            hint = f" ({', '.join(others)}: load_format={load_format!r} does not read them)"
        wanted = endings or ".safetensors or .bin"
        raise ValueError(f"no {wanted} files in the checkpoint folder {folder}{hint}")
    return found


def _safetensors_files(folder: Path) -> list[Path]:
    """The files of the index, or the single file, or all that there are."""
    index = folder / INDEX_FILES[0]
    if index.is_file():
        return _files_of_index(index)
    single = folder / SINGLE_FILE
    if single.is_file():
        return [single]
    # "consolidated" files repeat the weights under other names.
    return sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")
    )


def _torch_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILES[1]
    return _files_of_index(index) if index.is_file() else torch_files(folder)


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index.parent / name for name in sorted(names)]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    if not files:
        raise ValueError(f"{index} is not an index of weights: its weight_map names no files")
    for name in sorted(names):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{index} names a file outside of the checkpoint's folder, {name!r}, which is "
                "not followed; put the file into the folder"
            )
    missing = [name for name in sorted(names) if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


def check_sizes(files: list[Path], model_config: ModelConfig) -> None:
    """ValueError: the config describes a model that is far larger than these weights.

    This is checked before memory is allocated; single missing weights are found while loading.
    """
    num_tensors = num_values = 0
    for _, tensor in iterate_shapes(files):
        num_tensors += 1
        num_values += tensor.numel()
    num_layers = model_config.get_total_num_hidden_layers()
    if num_layers > num_tensors:
        raise ValueError(
            f"config.json: num_hidden_layers={num_layers}, but the checkpoint has only "
            f"{num_tensors} tensors; its config.json is that of another model, or damaged"
        )
    vocab_size, hidden_size = model_config.get_vocab_size(), model_config.get_hidden_size()
    if vocab_size * hidden_size > num_values * _VALUES_PER_STORED:
        raise ValueError(
            f"config.json: vocab_size={vocab_size} and hidden_size={hidden_size}, but the "
            f"checkpoint holds only {num_values} values; its config.json is that of another "
            "model, or damaged"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); fetch or write it again"
        ) from error


def iterate_shapes(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what :func:`iterate_weights` does, but tensors without memory, from the headers alone.

    ValueError: a name is there twice, so it is unknown which tensor is meant.
    """
    holders: dict[str, Path] = {}
    for path in files:
        for name, tensor in _shapes_of(path):
            if name in holders:
                raise ValueError(
                    f"weight {name!r} is in the checkpoint twice, in {holders[name].name} and in "
                    f"{path.name}; take away the file that is no part of it, or write it again"
                )
            holders[name] = path
            yield name, tensor


def _shapes_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not is_safetensors(path):
        yield from read_torch_file(path, shapes_only=True).items()
        return
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            if dtype not in _DTYPES:
                raise ValueError(
                    f"weight {name!r} is {dtype} in the checkpoint, which torch has not"
                )
            yield name, torch.empty(part.get_shape(), dtype=_DTYPES[dtype], device="meta")


def tensor_names(files: Iterable[Path]) -> set[str]:
    """Names of all tensors."""
    return {name for name, _ in iterate_shapes(files)}


def iterate_weights(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of every tensor, on the CPU; each is read when its turn comes."""
    for path in files:
        if not is_safetensors(path):
            yield from read_torch_file(path).items()
            continue
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def is_safetensors(path: Path) -> bool:
    """Tell safetensors files from torch's, which all other files of weights are."""
    return path.suffix == ".safetensors"

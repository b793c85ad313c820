"""Where the tensors of a checkpoint lie, and reading them one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_VALUES_PER_STORED = 8
"""At most: weights of 4 bits, eight in an integer."""
_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_UNREAD = (".bin", ".gguf", ".pt", ".pth")
_ALLOW_PATTERNS = ["*.safetensors", "*.json"]


def checkpoint_folder(
    model_config: ModelConfig, load_config: LoadConfig, *, fetches: bool = True
) -> Path:
    """The folder of a local checkpoint, or of a hub id after fetching what is missing of it.

    fetches: off, what was fetched before is all there is.
    """
    folder = Path(model_config.model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        fetched = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            allow_patterns=_ALLOW_PATTERNS,
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


def find_safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or the one file, or all there are."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _files_of_index(index)
    single = folder / SINGLE_FILE
    if single.is_file():
        return [single]
    # "consolidated" files repeat the weights under other names.
    found = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")
    )
    if not found:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _UNREAD)
        hint = f" ({', '.join(others)} cannot be read: convert to safetensors)" if others else ""
        raise ValueError(f"no .safetensors files in the checkpoint folder {folder}{hint}")
    return found


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{index} names a file outside of the checkpoint's folder, {name!r}, which is "
                "not followed; put the file into the folder"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
    return [index.parent / name for name in names]


def check_sizes(files: list[Path], model_config: ModelConfig) -> None:
    """ValueError: the config describes a far larger model than these weights are.

    Looked at before memory for it is asked for; what is missing in detail shows later.
    """
    num_tensors = num_values = 0
    for _, shape, _ in _headers(files):
        num_tensors += 1
        num_values += math.prod(shape)
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


def _headers(files: Iterable[Path]) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and dtype, as safetensors calls it, of every tensor."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                yield name, part.get_shape(), part.get_dtype()


def iterate_shapes(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`iterate_weights`, tensors without memory: from the files' headers alone."""
    for name, shape, dtype in _headers(files):
        if dtype not in _DTYPES:
            raise ValueError(f"weight {name!r} is {dtype} in the checkpoint, which torch has not")
        yield name, torch.empty(shape, dtype=_DTYPES[dtype], device="meta")


def tensor_names(files: Iterable[Path]) -> set[str]:
    """Of all tensors."""
    names: set[str] = set()
    for path in files:
        with _opened(path) as file:
            names.update(file.keys())
    return names


def iterate_weights(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every tensor, on the CPU, read when its turn comes."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)

"""Finds the tensors of a checkpoint and reads them one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from vllm.logger import init_logger
from vllm.utils.text import parse_json
from vllm.utils.weight_files import (
    has_named_safetensors,
    index_of,
    is_safetensors,
    read_torch_file,
    weight_map,
)

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

logger = init_logger(__name__)

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
_ALLOW_PATTERNS = {"safetensors": ["*.safetensors", "*.json"], "pt": ["pytorch_model*", "*.json"]}
"""Patterns of the files that are fetched from the hub, by format."""
Wanted = Callable[[str], bool]
"""Tells by a tensor's name whether it is read."""


def read_all(name: str) -> bool:
    """Want every tensor."""
    return True


def checkpoint_folder(
    model_config: ModelConfig, load_config: LoadConfig, *, fetches: bool = True
) -> Path:
    """The folder of a local checkpoint, or of a hub id after fetching its missing files.

    fetches: if False, only files that were fetched before are used.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    wanted = [load_config.load_format]
    if load_config.load_format not in _ALLOW_PATTERNS:
        wanted = ["safetensors", "pt"]
    for load_format in wanted:
        folder = _fetched(model_config, load_config, _ALLOW_PATTERNS[load_format], fetches)
        if has_named_safetensors(folder):
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
            revision=model_config.hub_commit or model_config.revision,
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


def check_sizes(files: list[Path], model_config: ModelConfig) -> None:
    """ValueError: the config describes a model that is far larger than these weights.

    This is checked before memory is allocated; single missing weights are found while loading.
    """
    sizes = [math.prod(shape) for path in files for shape in _shapes_in(path).values()]
    num_tensors, num_values = len(sizes), sum(sizes)
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
        path.open("rb").close()  # safe_open calls a file missing that it may not read
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        problem = f"{path} is not a whole safetensors file ({error}); fetch or write it again"
        raise ValueError(problem) from error


def _shapes_in(path: Path) -> dict[str, Sequence[int]]:
    """Shapes of all tensors in a file, whatever their dtypes are."""
    if not is_safetensors(path):
        return {name: one.shape for name, one in read_torch_file(path, shapes_only=True).items()}
    with _opened(path) as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def tensor_bytes(files: Iterable[Path]) -> int:
    """Bytes of all tensors in the files."""
    total = 0
    for path in files:
        if is_safetensors(path):
            with path.open("rb") as file:
                total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
        else:
            total += sum(one.nbytes for one in read_torch_file(path, shapes_only=True).values())
    return total


class _Places:
    """Chooses the tensors to read from each file: the wanted ones, as the index places them."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._indices: dict[Path, dict[str, str]] = {}
        self._holders: dict[str, str] = {}

    def names_in(self, path: Path, present: Collection[str]) -> list[str]:
        """Return the names of a file's tensors to read.

        ValueError: one is not where the index places it, or is there twice.
        """
        index = index_of(path)
        if index not in self._indices:
            self._indices[index] = weight_map(index) if index.is_file() else {}
        places, file = self._indices[index], path.name
        if file not in places.values():  # the index is not that of this file
            places = {}
        for name, place in places.items():
            if place == file and name not in present and self._wanted(name):
                raise ValueError(
                    f"weight {name!r} is missing from {file}, where {index.name} places it; "
                    "fetch or write that file again"
                )
        names = [name for name in present if places.get(name, file) == file and self._wanted(name)]
        for name in names:
            if name in self._holders:
                raise ValueError(
                    f"weight {name!r} is in the checkpoint twice, in {self._holders[name]} and in "
                    f"{file}; take away the file that is no part of it, or write it again"
                )
            self._holders[name] = file
        return names


def iterate_shapes(
    files: Iterable[Path], wanted: Wanted = read_all
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what :func:`iterate_weights` does, but tensors without memory, from the headers alone.

    ValueError: as there, or torch does not have the dtype of a wanted tensor.
    """
    return _iterate(files, wanted, shapes_only=True)


def iterate_weights(
    files: Iterable[Path], wanted: Wanted = read_all
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of every tensor, on the CPU; each is read when its turn comes.

    wanted: tells by its name whether a tensor is read at all. An index decides which file a tensor
    is read from. ValueError: a wanted tensor is not there, or is in two files without an index.
    """
    return _iterate(files, wanted, shapes_only=False)


def iterate_mapped_weights(
    files: Iterable[Path], wanted: Wanted = read_all
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same, but tensors of safetensors files are views of the mapped file, which take
    memory of the page cache only. For those who keep a small part of each."""
    return _iterate(files, wanted, shapes_only=False, maps=True)


def _iterate(
    files: Iterable[Path], wanted: Wanted, *, shapes_only: bool, maps: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    places = _Places(wanted)
    for path in files:
        if not is_safetensors(path):
            tensors = read_torch_file(path, shapes_only=shapes_only)
            yield from ((name, tensors[name]) for name in places.names_in(path, tensors))
            continue
        with _opened(path) as file:
            get = _mapped(path, file) if maps else file.get_tensor
            for name in places.names_in(path, file.keys()):
                yield name, _shape_of(file, name) if shapes_only else get(name)


def _mapped(path: Path, file: Any) -> Callable[[str], torch.Tensor]:
    """Map a whole safetensors file; returns a function from a tensor's name to its view."""
    with path.open("rb") as header:
        begin = 8 + int.from_bytes(header.read(8), "little")
        entries = parse_json(header.read(begin - 8))
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def get(name: str) -> torch.Tensor:
        like = _shape_of(file, name)
        first, end = (begin + offset for offset in entries[name]["data_offsets"])
        view = content[first:end]
        if first % like.dtype.itemsize:
            view = view.clone()
        return view.view(like.dtype).view(like.shape)

    return get


def _shape_of(file: Any, name: str) -> torch.Tensor:
    part = file.get_slice(name)
    dtype = part.get_dtype()
    if dtype not in _DTYPES:
        raise ValueError(f"weight {name!r} is {dtype} in the checkpoint, which torch has not")
    return torch.empty(part.get_shape(), dtype=_DTYPES[dtype], device="meta")


def tensor_names(files: Iterable[Path], wanted: Wanted = read_all) -> set[str]:
    """Names of all wanted tensors."""
    return {name for name, _ in iterate_shapes(files, wanted)}


def stored_names(files: Iterable[Path]) -> Iterator[str]:
    """Yield the names of all tensors in all files."""
    for path in files:
        yield from _shapes_in(path)


def stored_shapes(files: Iterable[Path]) -> dict[str, Sequence[int]]:
    """Return the shapes of all tensors in all files, by name."""
    return {name: shape for path in files for name, shape in _shapes_in(path).items()}

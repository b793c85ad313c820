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
from vllm.utils.weight_files import check_not_adapter, read_torch_file, torch_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

logger = init_logger(__name__)

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
_OTHER_FILES = ("consolidated", "adapter_")
"""Beginnings of the names of files that repeat the weights under other names, or change them."""
_UNREAD = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
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
        check_not_adapter(folder, str(folder))
        endings = {"pt": ".bin", "safetensors": ".safetensors"}.get(load_format)
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _UNREAD)
        hint = f" ({', '.join(others)} cannot be read: convert to safetensors)" if others else ""
        if others and endings is not None:
            hint = f" ({', '.join(others)}: load_format={load_format!r} does not read them)"
        wanted = endings or ".safetensors or .bin"
        raise ValueError(f"no {wanted} files in the checkpoint folder {folder}{hint}")
    return found


def _safetensors_files(folder: Path) -> list[Path]:
    """The single file, or the files of the index, or all that there are.

    An index that does not name the single file is from an earlier time, as for transformers.
    """
    index, single = folder / INDEX_FILES[0], folder / SINGLE_FILE
    has_index, has_single = index.is_file(), single.is_file()
    if has_index and has_single and SINGLE_FILE not in _names_in_index(index):
        logger.warning("%s is not used: it does not name %s, which is there", index, SINGLE_FILE)
        has_index = False
    if has_index:
        return _files_of_index(index)
    if has_single:
        return [single]
    found = (path for path in folder.glob("*.safetensors") if path.is_file())
    return sorted(path for path in found if not path.name.startswith(_OTHER_FILES))


def _torch_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILES[1]
    return _files_of_index(index) if index.is_file() else torch_files(folder)


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index: name of a tensor -> name of its file."""
    try:
        return dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error


def _names_in_index(index: Path) -> list[str]:
    names = set(_weight_map(index).values())
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is not an index of weights: its weight_map names no files")
    return sorted(names)


def _files_of_index(index: Path) -> list[Path]:
    names = _names_in_index(index)
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
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); fetch or write it again"
        ) from error


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
        index = path.parent / INDEX_FILES[0 if is_safetensors(path) else 1]
        if index not in self._indices:
            self._indices[index] = _weight_map(index) if index.is_file() else {}
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


def is_safetensors(path: Path) -> bool:
    """Tell safetensors files from torch's, which all other files of weights are."""
    return path.suffix == ".safetensors"

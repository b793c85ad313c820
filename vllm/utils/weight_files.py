"""Files with the weights of a local checkpoint: listing them, telling them apart, and reading files
of ``torch.save`` without ever running code from them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from vllm.logger import init_logger
from vllm.utils.regular_files import check_files
from vllm.utils.text import message_of, parse_json
from vllm.utils.torch_archive import map_saved

logger = init_logger(__name__)

NOT_WEIGHTS = ("adapter_", "training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Beginnings of the names of ``.bin`` files that lie beside a model's weights."""

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_OTHER_FILES = ("consolidated", "adapter_")
"""Beginnings of the names of files that repeat the weights under other names, or change them."""
_UNREAD = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
_EDGE_BYTES = 1 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_SMALL_TENSOR_BYTES = 1 << 16
_MOST_WHOLE_BYTES = 1 << 30
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_ARCHIVE_BYTES = 512
"""Room for what precedes a tensor in an archive of ``torch.save``."""


def find_weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files with the weights, all of one format: safetensors if there are any, unless
    ``load_format`` says otherwise, or only torch's files are named as a model's weights are."""
    check_files(folder)  # also of the hub's cache, whose links may have lost their files
    found: list[Path] = []
    if load_format != "pt" and not (load_format == "auto" and _only_torch_files_are_named(folder)):
        found = _safetensors_files(folder)
    if load_format != "safetensors":
        found = found or _indexed_torch_files(folder)
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


def has_named_safetensors(folder: Path) -> bool:
    """True if a folder has safetensors files, or an index of them, named as a model's weights are.

    Other files may hold something else: a value head, a projection.
    """
    return (folder / INDEX_FILES[0]).is_file() or any(folder.glob("model*.safetensors"))


def _only_torch_files_are_named(folder: Path) -> bool:
    return not has_named_safetensors(folder) and any(folder.glob("pytorch_model*.bin"))


def _safetensors_files(folder: Path) -> list[Path]:
    """The single file, or the files of the index, or all that there are."""
    if named := _named_files(folder / INDEX_FILES[0], folder / SINGLE_FILES[0]):
        return named
    found = (path for path in folder.glob("*.safetensors") if path.is_file())
    return sorted(path for path in found if not path.name.startswith(_OTHER_FILES))


def _indexed_torch_files(folder: Path) -> list[Path]:
    named = _named_files(folder / INDEX_FILES[1], folder / SINGLE_FILES[1])
    return named or torch_files(folder)


def _named_files(index: Path, single: Path) -> list[Path]:
    """The files of the index, or the single file, or none.

    An index that does not name the single file is from an earlier time, as for transformers.
    """
    has_index, has_single = index.is_file(), single.is_file()
    if has_index and has_single and single.name not in _names_in_index(index):
        logger.warning("%s is not used: it does not name %s, which is there", index, single.name)
        has_index = False
    if has_index:
        return _files_of_index(index)
    return [single] if has_single else []


def weight_map(index: Path) -> dict[str, str]:
    """Read an index: name of a tensor -> name of its file."""
    try:
        return dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error


def _names_in_index(index: Path) -> list[str]:
    names = set(weight_map(index).values())
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


def index_of(path: Path) -> Path:
    """The place of the index that may name a file of weights."""
    return path.parent / INDEX_FILES[0 if is_safetensors(path) else 1]


def is_safetensors(path: Path) -> bool:
    """Tell safetensors files from torch's, which all other files of weights are."""
    return path.suffix == ".safetensors"


def check_not_adapter(folder: Path, model: str) -> None:
    """Raise ValueError if a folder without a model's weights or config has those of an adapter."""
    path = folder / "adapter_config.json"
    if path.is_file():
        base = None
        with suppress(ValueError, AttributeError):  # a damaged file tells no name
            base = parse_json(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise not_a_model(model, repr(base))


def not_a_model(adapter: str, base: str) -> ValueError:
    """Make the error for an adapter that is given as a model."""
    return ValueError(
        f"model={adapter!r} has only an adapter (adapter_config.json) of {base}; merge it, or give "
        "that model to run without it. PEFT merges it: "
        "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)"
    )


def digest_of_ends(paths: list[Path]) -> str:
    """A digest of the names, the sizes and both ends of files, 1 MiB each."""
    return _digest(
        paths, lambda _, size: ((0, _EDGE_BYTES), (max(0, size - _EDGE_BYTES), _EDGE_BYTES))
    )


def digest_of_content(paths: list[Path]) -> str:
    """A digest of all bytes of files of at most 1 GiB together; of larger ones, of places.

    These are 4 KiB at 256 places all over each file, the first 4 KiB of each tensor, and all of
    tensors up to 64 KiB, such as norms and biases. So it differs if any matrix was trained further,
    or any vector, but not if only some rows of a large matrix changed.
    """
    is_small = sum(path.stat().st_size for path in paths) <= _MOST_WHOLE_BYTES
    return _digest(paths, _whole if is_small else _samples)


def _whole(_: Path, size: int) -> Iterable[tuple[int, int]]:
    return ((start, _EDGE_BYTES) for start in range(0, size, _EDGE_BYTES))


def _samples(path: Path, size: int) -> Iterable[tuple[int, int]]:
    for i in range(_SAMPLES):
        yield size * i // _SAMPLES, _SAMPLE_BYTES
    for start, length in _tensor_places(path):
        yield start, length if length <= _SMALL_TENSOR_BYTES else _SAMPLE_BYTES


def _tensor_places(path: Path) -> list[tuple[int, int]]:
    """Return where the tensors of a file lie; nothing if it does not say so, or is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        if not is_safetensors(path):
            with zipfile.ZipFile(path) as archive:
                parts = archive.infolist()
            return [(one.header_offset, one.file_size + _ARCHIVE_BYTES) for one in parts]
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(begin - 8, _MOST_HEADER_BYTES)))
        found = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        return sorted((begin + start, end - start) for start, end in found if 0 <= start <= end)
    return []


def _digest(paths: list[Path], places: Callable[[Path, int], Iterable[tuple[int, int]]]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb", buffering=0) as file:
            for start, length in places(path, size):
                digest.update(os.pread(file.fileno(), length, start))
    return "xxh3_128:" + digest.hexdigest()


def torch_files(folder: Path) -> list[Path]:
    """The ``.bin`` files with weights, sorted by name."""
    files = (path for path in folder.glob("*.bin") if path.is_file())
    found = sorted(path for path in files if not path.name.startswith(NOT_WEIGHTS))
    named = [path for path in found if path.name.startswith("pytorch_model")]
    return named or found


def read_torch_file(path: Path, *, shapes_only: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, on the CPU. The file is mapped into memory, so tensors are
    read when they are used. shapes_only: on the meta device. ValueError names the file: it is
    damaged, or holds something else.
    """
    try:
        found = map_saved(path)
    except Exception as error:  # whatever damaged bytes lead to
        reason = message_of(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path} is not a file of tensors, or is not complete ({reason}); other content is not "
            "loaded, because it may be code; fetch or write it again, or convert it to safetensors"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} holds {name!r}: {type(tensor).__name__}, not a tensor")
    if shapes_only:
        return {name: tensor.to("meta") for name, tensor in found.items()}
    return dict(found)

"""Files with the weights of a local checkpoint: listing them, telling them apart, and reading files
of ``torch.save`` without ever running code from them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from vllm.utils.text import parse_json

NOT_WEIGHTS = ("adapter_", "training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Beginnings of the names of ``.bin`` files that lie beside a model's weights."""


_EDGE_BYTES = 1 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def weight_files(folder: Path) -> list[Path]:
    """All files with weights in a local checkpoint, sorted by name; empty if there are none."""
    return sorted(folder.glob("*.safetensors")) or torch_files(folder)


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
        paths, lambda size: ((0, _EDGE_BYTES), (max(0, size - _EDGE_BYTES), _EDGE_BYTES))
    )


def digest_of_samples(paths: list[Path]) -> str:
    """A digest of 4 KiB at 256 places all over each file.

    It differs even if only some matrices changed, as after merging an adapter, and both ends of
    the files did not.
    """
    return _digest(
        paths, lambda size: ((size * i // _SAMPLES, _SAMPLE_BYTES) for i in range(_SAMPLES))
    )


def _digest(paths: list[Path], places: Callable[[int], Iterable[tuple[int, int]]]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb", buffering=0) as file:
            for start, length in places(size):
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
    read when they are used; a file older than torch 1.6 is read at once. shapes_only: on the meta
    device. ValueError names the file: it is damaged, or holds something else.
    """
    try:
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
        place = "meta" if shapes_only and is_archive else "cpu"
        mapped = is_archive and not shapes_only
        found = torch.load(path, map_location=place, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a file of tensors, or is not complete; other content is not loaded, "
            f"because it may be code ({_first_line(error)}); convert it to safetensors"
        ) from error
    except Exception as error:  # whatever damaged bytes lead to
        raise ValueError(
            f"{path} is not a complete torch file ({_first_line(error)}); fetch or write it again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} holds {name!r}: {type(tensor).__name__}, not a tensor")
    if shapes_only and not is_archive:
        return {name: tensor.to("meta") for name, tensor in found.items()}
    return dict(found)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

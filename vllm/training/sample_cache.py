"""A folder of extracted samples, so that later epochs need not compute them again.

    FOLDER/IDENTITY/000012/12345.safetensors      sample 12345: tensors with checksums

The identity stands for everything that all samples of a run depend on. A file states the digest
of its own request. A file that cannot be used is treated as one that is not there.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from vllm.hidden_states.mapped_file import DamagedFileError, MappedFile
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import file_parts
from vllm.logger import init_logger
from vllm.utils.whole_files import remove_temporary, temporary_path

logger = init_logger(__name__)

_SAMPLES_PER_FOLDER = 1000
_STALE_SECONDS = 600.0


def digest_of(value: object) -> str:
    """Return a digest of a request or of settings; equal digests mean equal values."""
    return xxhash.xxh3_128_hexdigest(pickle.dumps(value))


class SampleCache:
    """The samples that fit into ``most_bytes``; those that were stored first stay.

    All samples are needed once in each epoch, so nothing would be gained by replacing some. What
    other runs stored in ``folder`` counts, too. Several processes may use one folder: each of
    ``num_processes`` takes its part of the bytes that are left when it starts.
    """

    def __init__(self, folder: str, identity: str, most_bytes: int, num_processes: int = 1) -> None:
        """OSError: the folder cannot be written."""
        self._folder = os.path.join(folder, identity)
        os.makedirs(self._folder, exist_ok=True)
        for name in os.listdir(self._folder):
            remove_temporary(os.path.join(self._folder, name), least_age_seconds=_STALE_SECONDS)
        self._num_bytes_left = (most_bytes - _bytes_in(folder)) // num_processes
        self._is_full = False

    def read(self, index: int, request: str) -> HiddenStatesSample | None:
        """Return the sample that was stored for a request's digest; None if there is none.

        The tensors are views of the file.
        """
        try:
            file = MappedFile(self._path(index))
            if file.metadata.get("request") != request or any(file.problems()):
                return None
            return _sample_in(file, index)
        except (OSError, DamagedFileError, KeyError, ValueError):
            return None

    def write(self, sample: HiddenStatesSample, request: str) -> None:
        """Store a sample if there is room. Errors of the file system end the storing."""
        if self._is_full:
            return
        path = self._path(sample.index)
        tensors = {name: tensor.contiguous() for name, tensor in sample.tensors.items()}
        tensors |= {"token_ids": sample.token_ids, "positions": sample.positions}
        parts = file_parts(tensors, _metadata_of(sample, request))
        size = sum(map(len, parts))
        if size > self._num_bytes_left:
            self._stop("its limit is reached")
            return
        try:
            self._num_bytes_left -= size - _size_of(path)
            _write(path, parts)
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        self._is_full = True
        logger.info("%s: no more samples are stored (%s)", self._folder, reason)

    def _path(self, index: int) -> str:
        folder = f"{index // _SAMPLES_PER_FOLDER:06}"
        return os.path.join(self._folder, folder, f"{index}.safetensors")


def _metadata_of(sample: HiddenStatesSample, request: str) -> dict[str, str]:
    return {
        "request": request,
        "request_id": sample.request_id,
        "layer_ids": json.dumps(sample.layer_ids),
        "constants": json.dumps({name: list(v) for name, v in sample.constants.items()}),
    }


def _sample_in(file: MappedFile, index: int) -> HiddenStatesSample:
    tensors: dict[str, torch.Tensor] = {name: file.tensor(name) for name in sorted(file.names)}
    constants: Mapping[str, Sequence[int]] = json.loads(file.metadata["constants"])
    layer_ids: list[Any] = json.loads(file.metadata["layer_ids"])
    return HiddenStatesSample(
        index=index,
        request_id=file.metadata["request_id"],
        token_ids=tensors.pop("token_ids"),
        positions=tensors.pop("positions"),
        tensors=tensors,
        layer_ids=tuple(layer_ids),
        constants=constants,
    )


def _write(path: str, parts: Sequence[memoryview]) -> None:
    """Write a file that is whole or absent."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _size_of(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _bytes_in(folder: str) -> int:
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )

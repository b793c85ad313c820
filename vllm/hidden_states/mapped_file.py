"""A reader of safetensors files in place: tensors are views of the mapped file.

A view holds only its own bytes of the file, so sending it to another process sends
only those. No file stays open: the mapping lives as long as a view of it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash

from vllm.hidden_states.names import CHECKSUM_KIND
from vllm.hidden_states.tensor_file import CHECKSUM_KEY, DTYPE_NAMES, checksum
from vllm.utils.regular_files import open_regular
from vllm.utils.text import parse_json

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LARGEST_HEADER_BYTES = 100_000_000
_READ_BYTES = 1 << 20


class DamagedFileError(ValueError):
    """A file has changed since it was written; the message begins with its path."""


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Offset of the first byte from the beginning of the file."""
    end: int


class MappedFile:
    """A safetensors file; raises DamagedFileError if it is cut off or its header is invalid."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open_regular(path) as file:
            self._header = _read_header(path, file)
            self.header_checksum, self.metadata, self._entries, size = self._header
            # A private mapping: writing to a view does not change the file. torch takes paths in
            # UTF-8 only.
            opened = f"/proc/self/fd/{file.fileno()}"
            content = torch.from_file(opened, shared=False, size=size, dtype=torch.uint8)
        self._bytes = content.numpy()

    @property
    def names(self) -> set[str]:
        """Names of its tensors."""
        return set(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> torch.Size:
        """Return a tensor's shape; raises DamagedFileError if the file has none of this name."""
        return self._entry(name).shape

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the rows [start, stop) of a tensor; a copy only if its bytes are not aligned."""
        entry = self._entry(name)
        rows = range(entry.shape[0])[start:stop]
        shape = (len(rows), *entry.shape[1:])
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=entry.dtype)
        row_bytes = (entry.end - entry.start) // entry.shape[0]
        first = entry.start + rows.start * row_bytes
        data = self._bytes[first : first + len(rows) * row_bytes]
        if first % entry.dtype.itemsize:
            data = data.copy()
        return torch.frombuffer(data.data, dtype=entry.dtype, count=count).view(shape)

    def offsets(self, name: str) -> torch.Tensor:
        """Return ``row_offsets`` or ``token_offsets``, int64 [samples + 1]; a file without them has
        one sample."""
        if name in self:
            return self.tensor(name)
        counted = {"row_offsets": "hidden_states", "token_offsets": "token_ids"}[name]
        return torch.tensor([0, self.shape(counted)[0]])

    def scales(self, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        """Return float32 [rows, layers] for the rows [start, stop); None if they are not fp8."""
        if self._entry("hidden_states").dtype != torch.float8_e4m3fn:
            return None
        if "hidden_states_scales" in self:  # hs_connectors: one scale for each token
            scales = self.tensor("hidden_states_scales", start, stop)
            return scales.view(-1, 1).expand(-1, self.shape("hidden_states")[1])
        return self.tensor("scales", start, stop)

    def columns(self, place: int) -> dict[str, Any]:
        """Return the columns that were kept of the sample at ``place``."""
        text = self.metadata.get("columns", "{}")
        if "column_offsets" in self:
            span = self.tensor("column_offsets", place, place + 2).tolist()
            text = self.tensor("columns", *span).numpy().tobytes().decode()
        columns: dict[str, Any] = parse_json(text)
        return columns

    def problems(self) -> Iterator[str]:
        """Yield a line for each tensor that differs from its checksum; reads the whole file."""
        with open_regular(self.path) as file:
            yield from _damaged_tensors(self.path, file, self._header)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise DamagedFileError(f"{self.path}: there is no tensor {name}")
        return self._entries[name]


def header_checksum(path: str) -> str | None:
    """Return the header's checksum; None if the file is not safetensors with checksums."""
    try:
        with open_regular(path) as file:
            header = _read_header(path, file)
    except (DamagedFileError, OSError):
        return None
    has_checksums = any(key.startswith(CHECKSUM_KEY) for key in header.metadata)
    return header.checksum if has_checksums else None


def check_file(path: str, expected_header: str) -> None:
    """Compare the header with its checksum, and every tensor with its own; reads the whole file.

    Nothing is mapped, because a file that another process truncates would kill a process that
    has it mapped. Raises DamagedFileError if the file has changed, OSError if it cannot be read.
    """
    with open_regular(path) as file:
        header = _read_header(path, file)
        if header.checksum != expected_header:
            raise DamagedFileError(f"{path}: its header is not the one that was written")
        for problem in _damaged_tensors(path, file, header):
            raise DamagedFileError(problem)


class _Header(NamedTuple):
    checksum: str
    metadata: dict[str, str]
    entries: dict[str, _Entry]
    file_bytes: int


def _read_header(path: str, file: BinaryIO) -> _Header:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if 8 + length > size or length > _LARGEST_HEADER_BYTES:
        raise DamagedFileError(f"{path}: the file is cut off inside its header")
    text = file.read(length)
    metadata, entries = _parse_header(path, text)
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end != size:
        raise DamagedFileError(f"{path}: {size} bytes, but its header describes {end}")
    return _Header(checksum(prefix + text), metadata, entries, size)


def _damaged_tensors(path: str, file: BinaryIO, header: _Header) -> Iterator[str]:
    for name, entry in header.entries.items():
        stored = header.metadata.get(CHECKSUM_KEY + name)
        if stored is None:
            continue
        file.seek(entry.start)
        digest, num_left = xxhash.xxh3_128(), entry.end - entry.start
        while num_left and (data := file.read(min(num_left, _READ_BYTES))):
            digest.update(data)
            num_left -= len(data)
        found = CHECKSUM_KIND + digest.hexdigest()
        if found != stored:
            yield f"{path}: {name} is damaged (checksum {found}, stored {stored})"


def _parse_header(path: str, text: bytes) -> tuple[dict[str, str], dict[str, _Entry]]:
    try:
        header = parse_json(text)
        metadata = dict(header.pop("__metadata__", {}))
        entries = {
            name: _Entry(
                _DTYPES[entry["dtype"]],
                torch.Size(entry["shape"]),
                8 + len(text) + entry["data_offsets"][0],
                8 + len(text) + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedFileError(f"{path}: its header cannot be read ({error!r})") from None
    end = 8 + len(text)
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        length = entry.shape.numel() * entry.dtype.itemsize
        if entry.start != end or entry.end != end + length:
            raise DamagedFileError(f"{path}: its header gives {name} a wrong place")
        end = entry.end
    return metadata, entries

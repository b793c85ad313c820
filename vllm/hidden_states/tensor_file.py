"""A writer of safetensors files whose first tensor grows row by row.

    | length (8 bytes) | JSON header, padded with spaces | first tensor | the others |

The header's size does not depend on the number of rows, so rows go straight to their final
place before their number is known; the header is written last. It holds a checksum of each
tensor, so the checksum of the header covers every byte of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from vllm.hidden_states.names import CHECKSUM_KIND
from vllm.v1.rows.fields.layout import TensorForm

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes in our files, as safetensors spells them."""
CHECKSUM_KEY = "checksum."
"""The prefix of a tensor's name in the metadata of a file."""
_HEADER_ALIGNMENT_BYTES = 64
_ENTRY_BYTES = 256
"""Room in the header for one tensor, more than any entry and its checksum take."""
_WRITE_BYTES = 512 << 10
"""Most bytes of one write. Longer ones get huge pages of page cache, which a virtual machine
returns to its host when free and pays for again: measured, twice the CPU time of a write."""


def checksum(data: memoryview | bytes) -> str:
    """Return ``xxh3_128:`` and 32 hexadecimal digits."""
    return CHECKSUM_KIND + xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: str) -> str:
    """Return the checksum of all bytes of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_WRITE_BYTES):
            digest.update(part)
    return CHECKSUM_KIND + digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense host tensor without a copy."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``, and so on."""
    return str(dtype).removeprefix("torch.")


def file_parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> list[memoryview]:
    """Return the content of a file of dense host tensors: its header, with checksums, then the
    bytes of each tensor, which are not copied."""
    parts = [bytes_of(tensor) for tensor in tensors.values()]
    forms = {name: TensorForm(one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    return [memoryview(file_header(forms, {**metadata, **checksums_of(tensors)})), *parts]


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the metadata with the checksums of dense host tensors."""
    return {CHECKSUM_KEY + name: checksum(bytes_of(one)) for name, one in tensors.items()}


def file_header(forms: Mapping[str, TensorForm], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file of tensors of these whole forms, one after another."""
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, form in forms.items():
        start, end = end, end + form.num_bytes
        entries[name] = _entry(form.dtype, list(form.shape), start, end)
    text = _json(entries)
    text = text.ljust(len(text) + -(8 + len(text)) % _HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


class SpooledTensor:
    """A tensor [rows, ...] that grows in an unnamed file of a folder instead of in memory."""

    def __init__(self, folder: str, form: TensorForm) -> None:
        self._form = form
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._num_rows = 0

    def append(self, rows: torch.Tensor) -> None:
        """Write the next rows, dense, on the host."""
        data = bytes_of(rows)
        while data:
            data = data[self._file.write(data[:_WRITE_BYTES]) :]
        self._num_rows += len(rows)

    def whole(self) -> torch.Tensor:
        """Return all rows, mapped from the file."""
        dtype, shape = self._form
        if not self._num_rows:
            return torch.empty((0, *shape), dtype=dtype)
        mapped = torch.from_numpy(np.memmap(self._file, dtype=np.uint8, mode="r+"))
        return mapped.view(dtype).view(self._num_rows, *shape)

    def close(self) -> None:
        """Free the space on the disk, once nothing uses the mapped rows."""
        self._file.close()


class TensorFile:
    """A writer of a new file at ``path``; only one thread at a time may use it.

    ``rows_name`` is the tensor that grows, with rows of shape ``row_shape``; the header has room
    for ``num_others`` more, which :meth:`complete` takes, and for ``name_bytes`` more of their
    names. All methods except :meth:`discard` raise the file system's ``OSError``; after one, only
    :meth:`discard` may be called.
    """

    def __init__(
        self,
        path: str,
        rows_name: str,
        row_shape: Sequence[int],
        dtype: torch.dtype,
        num_others: int,
        metadata: Mapping[str, str],
        name_bytes: int = 0,
    ) -> None:
        self.path = path
        self.num_rows = 0
        self.header_checksum = ""  # until the file is complete
        self._rows_name = rows_name
        self._row_shape = tuple(row_shape)
        self._dtype = dtype
        self._row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        self._metadata = dict(metadata)
        header_room = len(_json(self._metadata)) + _ENTRY_BYTES * (1 + num_others) + name_bytes
        self._data_start = 8 + header_room + -(8 + header_room) % _HEADER_ALIGNMENT_BYTES
        self._checksum = xxhash.xxh3_128()
        self._descriptor: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )

    def append(self, rows: torch.Tensor) -> None:
        """Write the next rows, [rows, ...], dense, on the host."""
        assert rows.shape[1:] == self._row_shape, f"{tuple(rows.shape)} after {self._row_shape}"
        assert rows.dtype == self._dtype, f"{rows.dtype} in a file of {self._dtype}"
        data = bytes_of(rows)
        self._checksum.update(data)
        self._write(data, self._data_start + self.num_rows * self._row_bytes)
        self.num_rows += rows.shape[0]

    def complete(self, others: Mapping[str, torch.Tensor]) -> None:
        """Add the other tensors and the header, and close the file; network file systems report
        some failed writes only at the close."""
        end = self.num_rows * self._row_bytes
        shape = [self.num_rows, *self._row_shape]
        entries = {self._rows_name: _entry(self._dtype, shape, 0, end)}
        rows_checksum = CHECKSUM_KIND + self._checksum.hexdigest()
        metadata = {**self._metadata, CHECKSUM_KEY + self._rows_name: rows_checksum}
        for name, tensor in others.items():
            data = bytes_of(tensor)
            self._write(data, self._data_start + end)
            entries[name] = _entry(tensor.dtype, list(tensor.shape), end, end + len(data))
            metadata[CHECKSUM_KEY + name] = checksum(data)
            end += len(data)
        length = self._data_start - 8
        text = _json({"__metadata__": metadata, **entries})
        assert len(text) <= length, f"a header of {len(text)} bytes in {length}"
        header = struct.pack("<Q", length) + text.ljust(length)
        self._write(memoryview(header), 0)
        self.close()
        self.header_checksum = checksum(header)

    def close(self) -> None:
        """Close the file as it is; it may be closed already."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def discard(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _write(self, data: memoryview, offset: int) -> None:
        assert self._descriptor is not None, "the file is closed"
        while data:
            written = os.pwrite(self._descriptor, data[:_WRITE_BYTES], offset)
            data = data[written:]
            offset += written


def _entry(dtype: torch.dtype, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

"""A safetensors file that grows row by row and appears only when it is whole.

    | length (8 bytes) | JSON header, padded with spaces | hidden_states | token_ids |

The header's size does not depend on the number of tokens, so rows go straight to their
final place although nobody knows yet how many will come; the header is written last.
All of it happens under a hidden temporary name in the same folder, and one rename makes
the file visible.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import uuid
from collections.abc import Mapping, Sequence

import torch
import xxhash
from safetensors import safe_open

from vllm.version import __version__

_SAFETENSORS_DTYPE = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
_HEADER_ALIGNMENT_BYTES = 64
_CHECKSUM_KEY = "checksum."
_CHECKSUM_KIND = "xxh3_128:"
_NAME_BYTES_KEPT = 128
_MANY_ROWS = 2**40
"""More rows than any file has: room is kept for the digits of their numbers."""


def temporary_path(path: str) -> str:
    """A hidden name beside ``path`` that nothing else uses."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:_NAME_BYTES_KEPT]}.{uuid.uuid4().hex}.tmp")


class HiddenStatesFile:
    """Writer of one file; used by one thread at a time.

    ``row_shape``: (layers, hidden). ``metadata`` goes into the file as it is; dtype,
    engine version and checksums are added. ``OSError`` of the file system comes through
    from every method but :meth:`discard`; after one, only :meth:`discard` may follow.
    """

    def __init__(
        self,
        path: str,
        row_shape: tuple[int, int],
        dtype: torch.dtype,
        metadata: Mapping[str, str],
    ) -> None:
        if dtype not in _SAFETENSORS_DTYPE:
            raise ValueError(
                f"hidden states of dtype {dtype} cannot be stored; one of "
                f"{', '.join(str(known) for known in _SAFETENSORS_DTYPE)} can"
            )
        self.path = path
        self.num_rows = 0
        self._row_shape = row_shape
        self._dtype = dtype
        self._metadata = dict(metadata)
        self._row_bytes = row_shape[0] * row_shape[1] * dtype.itemsize
        longest = 8 + len(self._header(_MANY_ROWS, "0" * 32, "0" * 32))
        self._data_start = longest + -longest % _HEADER_ALIGNMENT_BYTES
        self._checksum = xxhash.xxh3_128()
        self._temporary_path = temporary_path(path)
        self._descriptor: int | None = os.open(
            self._temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )

    def append(self, rows: torch.Tensor) -> None:
        """Write the next rows, [rows, layers, hidden], dense, on the host."""
        assert rows.shape[1:] == self._row_shape, f"{tuple(rows.shape)} after {self._row_shape}"
        assert rows.dtype == self._dtype, f"{rows.dtype} in a file of {self._dtype}"
        data = _bytes_of(rows)
        self._checksum.update(data)
        self._write(data, self._data_start + self.num_rows * self._row_bytes)
        self.num_rows += rows.shape[0]

    def finish(self, token_ids: Sequence[int]) -> None:
        """Add the token ids and the header, and make the file visible.

        Raises ValueError when there is not one row for each token.
        """
        check_row_count(self.num_rows, len(token_ids))
        ids = _bytes_of(torch.tensor(token_ids, dtype=torch.int64))
        self._write(ids, self._data_start + self.num_rows * self._row_bytes)
        header = self._header(
            self.num_rows, self._checksum.hexdigest(), xxhash.xxh3_128_hexdigest(ids)
        )
        length = self._data_start - 8
        self._write(memoryview(struct.pack("<Q", length) + header.ljust(length)), 0)
        self._close()  # network file systems report some failed writes here
        os.replace(self._temporary_path, self.path)

    def discard(self) -> None:
        """Remove the temporary file; nothing of it was ever visible."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary_path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _write(self, data: memoryview, offset: int) -> None:
        assert self._descriptor is not None, "the file is finished"
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data = data[written:]
            offset += written

    def _header(self, num_rows: int, rows_checksum: str, ids_checksum: str) -> bytes:
        """The JSON part, longest for the largest number of rows."""
        rows_end = num_rows * self._row_bytes
        entries = {
            "__metadata__": {
                **self._metadata,
                "dtype": str(self._dtype).removeprefix("torch."),
                "engine_version": __version__,
                f"{_CHECKSUM_KEY}hidden_states": _CHECKSUM_KIND + rows_checksum,
                f"{_CHECKSUM_KEY}token_ids": _CHECKSUM_KIND + ids_checksum,
            },
            "hidden_states": {
                "dtype": _SAFETENSORS_DTYPE[self._dtype],
                "shape": [num_rows, *self._row_shape],
                "data_offsets": [0, rows_end],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": [num_rows],
                "data_offsets": [rows_end, rows_end + 8 * num_rows],
            },
        }
        return json.dumps(entries, separators=(",", ":")).encode()


def check_row_count(num_rows: int, num_tokens: int) -> None:
    """Raise ValueError unless there is one row for each token."""
    if num_rows != num_tokens:
        raise ValueError(f"{num_rows} rows of hidden states were computed for {num_tokens} tokens")


def write_hidden_states(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``hidden_states`` [tokens, layers, hidden] and ``token_ids`` [tokens] at once."""
    rows = tensors["hidden_states"]
    file = HiddenStatesFile(path, (rows.shape[1], rows.shape[2]), rows.dtype, metadata)
    try:
        file.append(rows.contiguous())
        file.finish(tensors["token_ids"].tolist())
    except BaseException:
        file.discard()
        raise


def read_hidden_states(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a file, compared with the checksums it carries (if any).

    Raises ValueError when a tensor differs from its checksum.
    """
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        stored = metadata.get(_CHECKSUM_KEY + name, "")
        if not stored.startswith(_CHECKSUM_KIND):
            continue
        found = _CHECKSUM_KIND + xxhash.xxh3_128_hexdigest(_bytes_of(tensor))
        if found != stored:
            raise ValueError(
                f"{path}: {name} is damaged (checksum {found}, stored {stored}); extract it again"
            )
    return tensors


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense host tensor, not copied."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data

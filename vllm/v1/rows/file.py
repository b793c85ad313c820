"""The file of one request: it grows row by row and appears only when it is complete.

    | length (8 bytes) | JSON header, padded with spaces | hidden_states | token_ids | others |

It is written under a hidden temporary name in the same folder, and one rename makes it visible.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch
from safetensors import safe_open

from vllm.forward_context import HIDDEN_STATES
from vllm.hidden_states.tensor_file import (
    CHECKSUM_KEY,
    DTYPE_NAMES,
    TensorFile,
    bytes_of,
    checksum,
    dtype_name,
)
from vllm.utils.regular_files import open_regular
from vllm.utils.whole_files import temporary_path
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields import StoredNames
from vllm.v1.rows.fields.layout import ALL_FIELDS, TensorForm
from vllm.version import __version__

_LEAST_OTHERS = 3
"""Fewest tensors besides hidden states that a header has room for, so that the bytes of a file with
hidden states alone do not change."""


class HiddenStatesFile:
    """Writes one file under a temporary name; it is complete and visible after :meth:`finish`.

    hidden: ``hidden_states`` [rows, layers, hidden]; others: tensors [rows, ...] of other fields,
    which wait in host memory until the file is complete. ``metadata`` is stored unchanged; dtype,
    engine version and checksums are added. Every method but :meth:`discard` lets the file system's
    ``OSError`` through; after one, only :meth:`discard` may be called.
    """

    keeps = ALL_FIELDS

    def __init__(
        self,
        path: str,
        hidden: TensorForm,
        metadata: Mapping[str, str],
        others: Collection[str] = (),
    ) -> None:
        if hidden.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"hidden states of dtype {hidden.dtype} cannot be stored; use one of "
                f"{', '.join(str(known) for known in DTYPE_NAMES)}"
            )
        more = {"dtype": dtype_name(hidden.dtype), "engine_version": __version__}
        self._file = TensorFile(
            temporary_path(path),
            HIDDEN_STATES,
            hidden.shape,
            hidden.dtype,
            max(_LEAST_OTHERS, 1 + len(others)),
            {**metadata, **more},
        )
        self._final_path = path
        self._others: dict[str, list[torch.Tensor]] = {name: [] for name in others}

    def append(self, rows: ExtractedRows) -> None:
        """Write the next rows."""
        for name, parts in self._others.items():
            parts.append(rows.tensors[name].clone())
        self._file.append(rows.hidden_states)

    def finish(self, token_ids: Sequence[int]) -> None:
        """Add the token ids and the header, and make the file visible.

        ValueError: there is not one row for each token.
        """
        check_row_count(self._file.num_rows, len(token_ids))
        tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64)}
        tensors |= {name: torch.cat(parts) for name, parts in self._others.items()}
        self._others.clear()
        self._file.complete(tensors)
        os.replace(self._file.path, self._final_path)

    def discard(self) -> None:
        """Remove what there is of the file."""
        self._others.clear()
        self._file.discard()


def check_row_count(num_rows: int, num_tokens: int) -> None:
    """Raise ValueError unless there is one row for each token."""
    if num_rows != num_tokens:
        raise ValueError(f"{num_rows} rows of hidden states were computed for {num_tokens} tokens")


def write_hidden_states(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``hidden_states`` [tokens, layers, hidden], ``token_ids`` [tokens] and any other
    tensors with a row for each token, all at once."""
    rows, others = tensors[HIDDEN_STATES].contiguous(), dict(tensors)
    del others[HIDDEN_STATES], others["token_ids"]
    metadata = {**StoredNames(tuple(others)).metadata, **metadata}
    file = HiddenStatesFile(path, TensorForm(rows.dtype, tuple(rows.shape[1:])), metadata, others)
    try:
        file.append(ExtractedRows({HIDDEN_STATES: rows, **others}))
        file.finish(tensors["token_ids"].tolist())
    except BaseException:
        file.discard()
        raise


def read_hidden_states(path: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a file, and compare them with the checksums in it (if any).

    Raises ValueError when a tensor differs from its checksum, and OSError if it is not a file.
    """
    open_regular(path).close()
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        stored = metadata.get(CHECKSUM_KEY + name)
        if stored is None:
            continue
        found = checksum(bytes_of(tensor))
        if found != stored:
            raise ValueError(
                f"{path}: {name} is damaged (checksum {found}, stored {stored}); extract it again"
            )
    return tensors

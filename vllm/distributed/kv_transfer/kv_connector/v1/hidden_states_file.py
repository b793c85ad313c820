"""The file of one request: it grows row by row and appears only when it is whole.

    | length (8 bytes) | JSON header, padded with spaces | hidden_states | token_ids | others |

It is written under a hidden temporary name in the same folder, and one rename makes it visible.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open

from vllm.hidden_states.tensor_file import (
    CHECKSUM_KEY,
    DTYPE_NAMES,
    TensorFile,
    bytes_of,
    checksum,
    dtype_name,
)
from vllm.utils.expert_trace import ExpertChoices
from vllm.version import __version__

_NAME_BYTES_KEPT = 128


def temporary_path(path: str) -> str:
    """A hidden name beside ``path`` that nothing else uses."""
    folder, name = os.path.split(path)
    kept = os.fsencode(name)[:_NAME_BYTES_KEPT].decode(errors="ignore")
    return os.path.join(folder, f".{kept}.{uuid.uuid4().hex}.tmp")


class CollectedExperts:
    """Choices of experts of one request, in host memory until its file is complete."""

    def __init__(self) -> None:
        self._parts: list[ExpertChoices] = []

    def append(self, choices: ExpertChoices) -> None:
        """Those of the next rows."""
        self._parts.append(choices)

    def take(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """``expert_ids`` and ``expert_weights``, if there are any.

        ValueError: not for each token.
        """
        if not self._parts:
            return {}
        ids, weights = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        self.discard()
        check_row_count(len(ids), num_tokens)
        return {"expert_ids": ids, "expert_weights": weights}

    def discard(self) -> None:
        """Let go of them."""
        self._parts.clear()


class HiddenStatesFile(TensorFile):
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
        if dtype not in DTYPE_NAMES:
            raise ValueError(
                f"hidden states of dtype {dtype} cannot be stored; one of "
                f"{', '.join(str(known) for known in DTYPE_NAMES)} can"
            )
        more = {"dtype": dtype_name(dtype), "engine_version": __version__}
        super().__init__(
            temporary_path(path),
            "hidden_states",
            row_shape,
            dtype,
            ["token_ids", "expert_ids", "expert_weights"],
            {**metadata, **more},
        )
        self._final_path = path
        self._experts = CollectedExperts()

    def append_experts(self, choices: ExpertChoices) -> None:
        """Choices of experts of the next rows."""
        self._experts.append(choices)

    def finish(self, token_ids: Sequence[int]) -> None:
        """Add the token ids and the header, and make the file visible.

        Raises ValueError when there is not one row for each token.
        """
        check_row_count(self.num_rows, len(token_ids))
        tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64)}
        self.complete(tensors | self._experts.take(len(token_ids)))
        os.replace(self.path, self._final_path)


def check_row_count(num_rows: int, num_tokens: int) -> None:
    """Raise ValueError unless there is one row for each token."""
    if num_rows != num_tokens:
        raise ValueError(f"{num_rows} rows of hidden states were computed for {num_tokens} tokens")


def write_hidden_states(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``hidden_states`` [tokens, layers, hidden] and ``token_ids`` [tokens] at once.

    So are ``expert_ids`` and ``expert_weights`` [tokens, layers with experts, top_k], if given.
    """
    rows = tensors["hidden_states"]
    file = HiddenStatesFile(path, (rows.shape[1], rows.shape[2]), rows.dtype, metadata)
    try:
        if "expert_ids" in tensors:
            file.append_experts(ExpertChoices(tensors["expert_ids"], tensors["expert_weights"]))
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
        stored = metadata.get(CHECKSUM_KEY + name)
        if stored is None:
            continue
        found = checksum(bytes_of(tensor))
        if found != stored:
            raise ValueError(
                f"{path}: {name} is damaged (checksum {found}, stored {stored}); extract it again"
            )
    return tensors

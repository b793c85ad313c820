"""Read files of hidden states without this package: safetensors and a file lock are enough.

python examples/extract_offline.py      # writes some files into hidden_states/
python examples/read_hidden_states.py   # or with the names of files
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from collections.abc import Sequence
from glob import glob
from typing import NamedTuple

import torch
from safetensors import safe_open


class HiddenStates(NamedTuple):
    """``rows`` [tokens, layers, hidden], ``token_ids`` [tokens], and the file's metadata."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    metadata: dict[str, str]


def wait_until_complete(path: str) -> None:
    """Take the lock that the engine holds while it writes, then remove it.

    After that both files belong to the caller. A caller that only reads should take a shared
    lock and leave the lock file in place.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path + ".lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.unlink(path + ".lock")
        finally:
            os.close(descriptor)


def read(path: str) -> HiddenStates:
    """Wait for the file and read it."""
    wait_until_complete(path)
    with safe_open(path, framework="pt") as file:
        return HiddenStates(
            file.get_tensor("hidden_states"), file.get_tensor("token_ids"), file.metadata()
        )


def describe(path: str) -> None:
    """Print the metadata of a file, and the norms of its rows by layer."""
    states = read(path)
    tokens, layers, hidden = states.rows.shape
    print(f"{path}: {tokens} tokens, {layers} layers, hidden size {hidden}, {states.rows.dtype}")
    for key, value in sorted(states.metadata.items()):
        print(f"    {key}: {value}")
    for column in range(layers):
        norms = states.rows[:, column].float().norm(dim=-1)
        print(
            f"    column {column}: norm of a row {norms.mean():.3f} on average, "
            f"{norms.min():.3f} to {norms.max():.3f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="default: the files in hidden_states/")
    paths = parser.parse_args(arguments).paths or sorted(glob("hidden_states/*.safetensors"))
    if not paths:
        parser.error("there are no files in hidden_states/; run extract_offline.py, or name files")
    for path in paths:
        describe(path)


if __name__ == "__main__":
    main()

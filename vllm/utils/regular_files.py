"""Opening files in folders that others can write to, which may hold a pipe or a huge file."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

_KNOWN_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json"),
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names by which this package and transformers find the files of a checkpoint."""


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # a name that no file can have
        return False


def check_regular(path: Path) -> bool:
    """Return whether ``path`` is a regular file; ValueError if something else has this name."""
    if not is_regular(path) and os.path.lexists(path):
        kind = "a link to nothing" if not path.exists() else "not a file"
        raise ValueError(f"{path} is {kind}; put the file there, or remove it")
    return is_regular(path)


def check_files(folder: Path) -> None:
    """Raise ValueError if something that is no file has the name of a file of checkpoints. It would
    count as absent, and values would depend on other files, or defaults."""
    for name in _KNOWN_FILES:
        check_regular(folder / name)


def open_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; never waits, as opening a pipe would.

    OSError: there is none, it is something else, or it has more than ``max_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(
                f"{os.fspath(path)} has {status.st_size:,} bytes, more than the {max_bytes:,} that "
                "such a file can have"
            )
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise

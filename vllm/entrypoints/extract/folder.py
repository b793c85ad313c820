"""The output folder: whose it is, who works in it, what was left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.entrypoints.extract.plan import BUILDING_PREFIX
from vllm.hidden_states import records
from vllm.hidden_states.tensor_file import checksum
from vllm.logger import init_logger

logger = init_logger(__name__)

PLAN_FOLDER = "plan"


@contextmanager
def lock_folder(directory: Path, kind: int) -> Iterator[None]:
    """ValueError: there is no such folder, or another command works in it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"--output {directory}: {error}") from None
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {directory}: another command is writing there") from None
        except OSError:
            logger.warning("%s cannot be locked; run one command in it at a time", directory)
        yield
    finally:
        os.close(descriptor)


def check_is_ours(directory: Path) -> None:
    """ValueError: something else is in the folder."""
    if (directory / records.SETTINGS_FILE).exists():
        return
    ours = (PLAN_FOLDER, BUILDING_PREFIX, ".tmp-")
    for path in directory.iterdir():
        if not path.name.startswith(ours):
            raise ValueError(
                f"--output {directory}: there is something else in it ({path.name}); use an "
                "empty folder"
            )


def remove_rubbish(directory: Path) -> None:
    """What runs that were killed left."""
    records.remove_temporary_files(str(directory))
    for path in directory.glob(f"{BUILDING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def index_is_sound(directory: Path) -> bool:
    """Whether a finished dataset's index is the one its manifest was written for."""
    try:
        manifest = json.loads((directory / records.MANIFEST_FILE).read_bytes())
        expected = manifest["index_checksum"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # not finished, or the manifest is what is damaged: it is written again
    index = directory / records.INDEX_FILE
    return not index.exists() or checksum(index.read_bytes()) == expected


__all__ = ["PLAN_FOLDER", "check_is_ours", "index_is_sound", "lock_folder", "remove_rubbish"]

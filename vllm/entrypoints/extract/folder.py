"""The output folder: its lock, the check of its content, and the check of its disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm.entrypoints.extract.plan import PLAN_FOLDER, Plan
from vllm.exceptions import FailureError, FailureKind, kind_of
from vllm.hidden_states import metadata as records
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.units import writer_of
from vllm.logger import init_logger
from vllm.utils.disk import FILE_BYTES, check_room
from vllm.utils.whole_files import TemporaryName, remove_folder

logger = init_logger(__name__)


def check_disk(
    directory: Path, plan: Plan, units: Sequence[int], settings: DatasetSettings
) -> None:
    """Raise ValueError if ``units``, which are still to be written, do not fit on the disk."""
    has_shards = writer_of(settings.format).has_shards
    files = len(units) if has_shards else sum(len(plan.samples_of(unit)) for unit in units)
    needed = plan.num_bytes(units) + files * FILE_BYTES
    advice = "fewer layers or samples, or --storage-dtype fp8; use --no-check-disk to continue"
    check_room("--output", directory, needed, advice)


@contextmanager
def output_folder(directory: Path, world_size: int) -> Iterator[None]:
    """Make and lock the folder; remove what a refused command left in it.

    A command is refused by a ValueError, its own or a worker's, before any unit is committed.
    Commands that share the work (``world_size``) remove nothing, because others may need it.
    """
    is_alone = world_size == 1
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        is_link = directory.is_symlink() and not directory.exists()
        problem = "it is a link to nothing" if is_link else "there is a file of that name"
        raise ValueError(f"--output {directory}: {problem}") from None
    try:
        with lock_folder(directory, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH):
            _check_is_ours(directory)
            if is_alone:
                remove_rubbish(directory)
            was_begun = (directory / records.SETTINGS_FILE).exists()
            was_planned = (directory / PLAN_FOLDER).exists()
            try:
                yield
            except (ValueError, FailureError) as error:
                is_refused = kind_of(error, FailureKind.BAD_REQUEST) is FailureKind.BAD_REQUEST
                has_units = was_begun or records.read_unit_records(str(directory))
                if is_alone and is_refused and not has_units:
                    for name in (PLAN_FOLDER, records.UNITS_FOLDER):
                        remove_folder(directory / name)
                    (directory / records.SETTINGS_FILE).unlink(missing_ok=True)
                elif is_alone and is_refused and not was_planned:
                    remove_folder(directory / PLAN_FOLDER)
                raise
    except (ValueError, FailureError):
        with contextlib.suppress(OSError):  # it is not empty
            for path in missing:
                path.rmdir()
        raise


@contextmanager
def lock_folder(directory: Path, kind: int) -> Iterator[None]:
    """Lock the folder; raises ValueError if it does not exist, or another command works in it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"--output {directory}: there is no such folder") from None
    except NotADirectoryError:
        raise ValueError(f"--output {directory}: it is a file, not a folder") from None
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


def _check_is_ours(directory: Path) -> None:
    """Raise ValueError if something else is in the folder."""
    if (directory / records.SETTINGS_FILE).exists():
        return
    names = {path.name for path in directory.iterdir()} - {PLAN_FOLDER}
    others = [name for name in names if TemporaryName.parse(name) is None]
    if others:
        raise ValueError(
            f"--output {directory}: it contains something else ({others[0]}); use an empty folder"
        )


def remove_rubbish(directory: Path) -> None:
    """Remove the files that killed runs left."""
    records.remove_temporary_files(str(directory))

"""The files that this server made: their downloads and their removal.

The store knows only the files that a reply of this server named, and those that an earlier server
left in the folder (:func:`earlier_files`), so an id cannot lead to another file. Clients without
access to the folder get them at ``/v1/hidden_states/{id}``. Files that are not fetched are removed
by age (``--hidden-states-ttl``) and by size (``--hidden-states-quota-gib``), the oldest first, but
never one that is being read.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request
from safetensors import SafetensorError, safe_open

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.distributed.kv_transfer.kv_connector.v1.storage_folder import storage_options
from vllm.entrypoints.openai.errors import ApiError
from vllm.hidden_states.mapped_file import DamagedFileError, check_file, header_checksum
from vllm.logger import init_logger
from vllm.utils.mem_utils import GIB_BYTES, format_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.cli_args import ServerSettings

logger = init_logger(__name__)

_FILE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_SUFFIX = ".safetensors"
SPARED_SECONDS = 60.0
"""Time after making or fetching a file in which the quota does not remove it."""
LOOK_AGAIN_SECONDS = 1.0
"""Time between two checks of a full store for files that have gone."""
SWEEP_SECONDS = 30.0
_OF_SERVER = re.compile(r"(?:\d+_)?(?:chat)?cmpl-.*-(?:[0-9a-f]{8}|[0-9a-f]{16})\.safetensors")
_OUR_METADATA = {"engine_version", "checksum.hidden_states", "checksum.token_ids"}


def storage_folder(config: VllmConfig, settings: ServerSettings) -> str | None:
    """Return the folder of this server's files: our connector's, or the one of the settings; None
    if there is neither."""
    options = storage_options(config)
    return settings.hidden_states_folder if options is None else options.shared_storage_path


class QuotaExceededError(ApiError):
    """The quota has no room for another file (HTTP 507)."""

    def __init__(self, message: str) -> None:
        super().__init__(507, message, type="InsufficientStorageError")


@dataclass
class StoredFile:
    """A file that a reply named."""

    path: str
    num_bytes: int
    touched: float
    """Time when it was made or last fetched, on the store's clock."""
    header_checksum: str | None = None
    """None: the file is not one of ours, and only its size is known."""
    num_readers: int = 0
    version: tuple[int, ...] = ()
    """The :func:`version_of` the content that was last found to be right."""


class HiddenStatesStore:
    """The files of one server, for use on the event loop's thread only.

    ``storage``: the connector's options. ``clock``: returns monotonic seconds.
    """

    def __init__(
        self,
        storage: HiddenStatesOptions,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = os.path.realpath(storage.shared_storage_path)
        self.writes_file = storage.writes_file
        self.can_download = settings.enable_hidden_states_download
        self._ttl_seconds = settings.hidden_states_ttl
        quota = settings.hidden_states_quota_gib
        self.quota_bytes = math.inf if quota is None else int(quota * GIB_BYTES)
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        """Files by id; the least recently touched first."""
        self.num_bytes = 0
        """Size of all files."""
        self._last_look = float("-inf")

    @classmethod
    def from_config(cls, config: VllmConfig, settings: ServerSettings) -> HiddenStatesStore | None:
        """Return the store of a server; None if no option needs it.

        Raises ValueError if an option does, and the server writes no hidden-state files.
        """
        options = {
            "enable_hidden_states_download": settings.enable_hidden_states_download,
            "hidden_states_ttl": settings.hidden_states_ttl > 0,
            "hidden_states_quota_gib": settings.hidden_states_quota_gib is not None,
            "hidden_states_folder": settings.hidden_states_folder is not None,
        }
        if not any(options.values()):
            return None
        storage = storage_options(config)
        if storage is None and settings.hidden_states_folder is not None:
            storage = HiddenStatesOptions(
                shared_storage_path=settings.hidden_states_folder, extract_only_when_asked=True
            )
        if storage is None:
            raise ValueError(
                f"{max(options, key=options.__getitem__)} has no effect: this server writes no "
                "hidden-state files that it knows of; set hidden_states_folder, or "
                "speculative_config and a kv_transfer_config with ExampleHiddenStatesConnector, or "
                "leave it out"
            )
        if settings.hidden_states_folder is not None:
            if config.speculative_config is not None:
                raise ValueError(
                    f"hidden_states_folder={settings.hidden_states_folder!r} has no effect: this "
                    "server gives rows to a connector (speculative_config); leave it out"
                )
            try:
                os.makedirs(settings.hidden_states_folder, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"hidden_states_folder={settings.hidden_states_folder!r} cannot be made: "
                    f"{error.strerror}; name a folder where this user may create files"
                ) from error
        return cls(storage, settings)

    @property
    def num_files(self) -> int:
        return len(self._files)

    async def adopt_earlier_files(self) -> None:
        """Add the files that an earlier server left in the folder, with their age."""
        for path, age_seconds in await asyncio.to_thread(earlier_files, self.folder):
            self.add(path, age_seconds)
        if self._files:
            logger.info("Found %d files of earlier servers in %s", len(self._files), self.folder)

    def url_for(self, request: Request, path: str) -> str | None:
        """Add a file that a reply names, and return its download URL.

        Returns None if downloads are off, or the file is not directly in the folder.
        """
        file_id = self.add(path)
        if file_id is None or not self.can_download or "/" in file_id:
            return None
        return f"{str(request.base_url).rstrip('/')}/v1/hidden_states/{file_id}"

    def add(self, path: str, age_seconds: float = 0.0) -> str | None:
        """Add a complete file; returns its id, or None if it is outside the folder.

        A file in a subfolder, or with a name that no download could have, counts for age and quota
        only: its id has a slash. Files with an age must be added oldest first, before all others.
        """
        file_id = self.id_of(path)
        if file_id is None:
            return None
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError:  # a client took it, or it was removed
            return None
        self._forget(file_id)  # a client may choose the same path again
        touched = self._clock() - age_seconds
        self._files[file_id] = StoredFile(path, status.st_size, touched, header_checksum(path))
        self.num_bytes += status.st_size
        return file_id

    def id_of(self, path: str) -> str | None:
        """Return the id that a file has in this store; None if it is outside the folder."""
        folder, name = os.path.split(path)
        folder, file_id = os.path.realpath(folder), name.removesuffix(_SUFFIX)
        is_inside = os.path.join(folder, "").startswith(os.path.join(self.folder, ""))
        if not is_inside or name.endswith(".lock"):
            return None
        if folder != self.folder or file_id == name or not _FILE_ID.fullmatch(file_id):
            file_id = os.path.join(os.path.relpath(folder, self.folder), name)
        return file_id

    async def announce(self, path: str) -> None:
        """Take in that this process has written a file: :meth:`url_for` adds it."""

    async def admit(self) -> None:
        """Do what :meth:`check_quota` does."""
        self.check_quota()

    def find(self, file_id: str) -> StoredFile | None:
        """Return the file of an id; None if this server did not make it, or it is gone."""
        return self._files.get(file_id)

    @contextmanager
    def reading(self, file_id: str) -> Iterator[None]:
        """Keep the clean-up away from a file inside the block."""
        file = self._files.get(file_id) or StoredFile("", 0, 0.0)
        file.num_readers += 1
        try:
            yield
        finally:
            file.num_readers -= 1
            if self._files.get(file_id) is file:  # move it to the end, as the youngest
                file.touched = self._clock()
                self._files[file_id] = self._files.pop(file_id)

    def remove(self, file_id: str) -> bool:
        """Remove a file and its lock; False if it was gone. Raises OSError if that fails."""
        path = self._files[file_id].path
        exists = os.path.lexists(path)
        if exists:  # otherwise a client took it, and the lock is the client's too
            cleanup_hidden_states(path)
        self._forget(file_id)
        return exists

    def check_quota(self) -> None:
        """Raise QuotaExceededError if there is no room for another file."""
        now = self._clock()
        if self._is_full() and now - self._last_look >= LOOK_AGAIN_SECONDS:
            self._last_look = now
            self._make_room()
        if self._is_full():
            raise QuotaExceededError(
                f"Files of this server take {format_bytes(self.num_bytes)}, and its quota is "
                f"{format_bytes(int(self.quota_bytes))} (--hidden-states-quota-gib): fetch and "
                "delete some of them, or try again later"
            )

    def sweep(self) -> None:
        """Remove files that are too old, and those for which there is no room."""
        if self._ttl_seconds > 0:
            self._remove_while(self._ttl_seconds, lambda: True)
        if self._is_full():
            self._make_room()

    async def sweep_forever(self) -> None:
        """Forget files that clients took, and :meth:`sweep`, at intervals until cancelled."""
        period = min(SWEEP_SECONDS, self._ttl_seconds / 4) if self._ttl_seconds else SWEEP_SECONDS
        while True:
            known = dict(self._files)
            for file_id in await asyncio.to_thread(missing_files, known):
                if self._files.get(file_id) is known[file_id]:
                    self._forget(file_id)
            self.sweep()
            await asyncio.sleep(period)

    def _is_full(self) -> bool:
        return self.num_bytes >= self.quota_bytes

    def _make_room(self) -> None:
        for file_id in missing_files(self._files):
            self._forget(file_id)
        self._remove_while(SPARED_SECONDS, self._is_full)

    def _remove_while(self, min_age_seconds: float, should_continue: Callable[[], bool]) -> None:
        """Remove files of at least this age that are not being read, the oldest first."""
        latest = self._clock() - min_age_seconds
        for file_id, file in list(self._files.items()):
            if file.touched > latest or not should_continue():
                return
            if file.num_readers:
                continue
            try:
                if self.remove(file_id):
                    logger.info("Removed %s, which was not fetched", file.path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", file.path, error)

    def _forget(self, file_id: str) -> None:
        file = self._files.pop(file_id, None)
        if file is not None:
            self.num_bytes -= file.num_bytes


def version_of(status: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes whenever the file is written to."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_content(file: StoredFile, status: os.stat_result) -> None:
    """Check that the file has not changed, by its checksums or else by its size.

    Reads the whole file, once for each version. Raises DamagedFileError if it has changed.
    """
    if file.version == version_of(status):
        return
    if status.st_size != file.num_bytes:
        message = f"{file.path}: {status.st_size} bytes instead of {file.num_bytes}"
        raise DamagedFileError(message)
    if file.header_checksum is not None:
        check_file(file.path, file.header_checksum)
    file.version = version_of(status)


def missing_files(files: Mapping[str, StoredFile]) -> list[str]:
    """Return the ids of files that no longer exist."""
    return [file_id for file_id, file in files.items() if not os.path.lexists(file.path)]


def read_metadata(path: str) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty for any other file."""
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def earlier_files(folder: str) -> list[tuple[str, float]]:
    """Return complete files of earlier servers, with their ages in seconds, the oldest first.

    Such a file has a name that a server gives to a request, is a regular file of this user, and
    has the engine's version and checksums in its header. This call blocks on the disk.
    """
    found: list[tuple[str, float]] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_own = entry.is_file(follow_symlinks=False) and status.st_uid == os.geteuid()
                if not is_own or not _OF_SERVER.fullmatch(entry.name):
                    continue
                if read_metadata(entry.path).keys() >= _OUR_METADATA:
                    found.append((entry.path, max(0.0, time.time() - status.st_mtime)))
    return sorted(found, key=lambda item: -item[1])

"""``/v1/hidden_states/{id}``: clients download and remove the files that replies name."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError, failed
from vllm.entrypoints.openai.hidden_states_store import (
    HiddenStatesStore,
    StoredFile,
    check_content,
    read_metadata,
    version_of,
)
from vllm.entrypoints.openai.state import ServerState, State
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.mapped_file import DamagedFileError
from vllm.hidden_states.tensor_file import CHECKSUM_KEY
from vllm.logger import init_logger
from vllm.utils.regular_files import open_regular

logger = init_logger(__name__)
router = APIRouter(prefix="/v1/hidden_states", tags=["hidden states"])

STALLED_SECONDS = 60.0
"""A client that reads nothing for this long is treated as gone."""
GONE = Failure(FailureKind.FILE_GONE, "The file is gone: a client took it, or it was cleaned up")
_RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,18})-(?P<last>\d{0,18})|-(?P<length>\d{1,18}))")


@router.get("/{file_id}", response_class=Response)
@router.head("/{file_id}", response_class=Response, include_in_schema=False)
async def get_hidden_states(file_id: str, request: Request, state: State) -> Response:
    """Download the safetensors file of one extraction; ranges and If-None-Match are supported."""
    store, file = _find(state, file_id)
    with store.reading(file_id):
        status = await _checked_status(state, file)
    etag = _etag(file.path, status)
    known = request.headers.get("if-none-match", "").split(",")
    if {etag, "*"}.intersection(tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers={"etag": etag})
    download = FileDownload(file.path, status, etag, store.reading(file_id))
    if request.headers.get("if-range") in (None, etag, download.headers["last-modified"]):
        found = _single_range(request.headers)
        download.has_range = found is not None
        if found and (int(found["first"] or 0) >= status.st_size or int(found["length"] or 1) == 0):
            raise ApiError(416, f"The range lies outside the file of {status.st_size} bytes")
    return download


@router.delete("/{file_id}", status_code=204, response_class=Response)
async def delete_hidden_states(file_id: str, state: State) -> Response:
    """Remove the file and its lock."""
    store, _ = _find(state, file_id)
    try:
        was_there = store.remove(file_id)
    except OSError as error:
        raise ApiError(500, f"The file cannot be removed: {error.strerror}") from error
    if not was_there:
        raise failed(GONE)
    return Response(status_code=204)


def _find(state: ServerState, file_id: str) -> tuple[HiddenStatesStore, StoredFile]:
    store = state.store
    if store is None or not store.can_download:
        raise ApiError(404, "Downloads are off on this server (--enable-hidden-states-download)")
    file = store.find(file_id)
    if file is None:
        raise ApiError(404, "This server has no such file")
    return store, file


async def _checked_status(state: ServerState, file: StoredFile) -> os.stat_result:
    """Return the status of the unchanged file; raises ApiError if it is gone or damaged."""
    try:
        status = os.lstat(file.path)
        if stat.S_ISREG(status.st_mode):  # a symbolic link does not count
            await asyncio.to_thread(check_content, file, status)
            return status
    except DamagedFileError as error:
        state.metrics.damaged_files += 1
        logger.error("Not sent: %s", error)
        raise failed(Failure(FailureKind.FILE_DAMAGED, f"The file is damaged: {error}")) from None
    except OSError:
        pass
    raise failed(GONE)


def _etag(path: str, status: os.stat_result) -> str:
    """Return the ETag: the checksums in the file, or else facts that change with a rewrite."""
    metadata = read_metadata(path)
    sums = [metadata[key] for key in sorted(metadata) if key.startswith(CHECKSUM_KEY)]
    if sums and all(re.fullmatch(r"[\w:]+", value) for value in sums):
        return '"{}"'.format("-".join(value.rpartition(":")[2] for value in sums))
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'


def _single_range(headers: Headers) -> re.Match[str] | None:
    """Return the requested range; None if there is none, or it may be ignored."""
    found = _RANGE.fullmatch(headers.get("range", "").strip())
    is_one = found and int(found["first"] or 0) <= int(found["last"] or 10**20)
    return found if is_one else None


class FileDownload(FileResponse):
    """A download that holds the context ``hold`` while it reads; supports single ranges only."""

    chunk_size = 1 << 20
    has_range = False
    """True if the requested range is used."""

    def __init__(
        self, path: str, status: os.stat_result, etag: str, hold: AbstractContextManager[None]
    ) -> None:
        name, media_type = os.path.basename(path), "application/octet-stream"
        super().__init__(path, 200, {"etag": etag}, media_type, None, name, status)
        self._hold, self._version = hold, version_of(status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_SECONDS):
                await send(message)

        if not self.has_range:
            others = [(name, value) for name, value in scope["headers"] if name != b"range"]
            scope = {**scope, "headers": others}
        with self._hold, self._opened() as file:
            self.path = f"/proc/self/fd/{file.fileno()}"  # whatever becomes of the name
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                logger.warning("A download stalled and was stopped")

    def _opened(self) -> BinaryIO:
        """Open the file that was checked; raises ApiError if the name leads to another by now."""
        with suppress(OSError):
            file = open_regular(self.path)
            if version_of(os.fstat(file.fileno())) == self._version:
                return file
            file.close()
        raise failed(GONE)

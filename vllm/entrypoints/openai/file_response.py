"""A safetensors file as an HTTP response: streamed, in parts, or not at all when unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from io import FileIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError
from vllm.logger import init_logger

logger = init_logger(__name__)

CHUNK_BYTES = 1 << 20
STALLED_SECONDS = 60.0
"""A client that takes no byte for so long has gone."""
_MAX_HEADER_BYTES = 16 << 20
_CHECKSUM_KEY = "checksum."
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class FileDownload(Response):
    """Bytes ``start`` to ``end`` of an open file. ``hold`` is entered while it is read."""

    def __init__(
        self,
        file: FileIO | None,
        start: int,
        end: int,
        status_code: int,
        headers: Mapping[str, str],
        hold: AbstractContextManager[None],
    ) -> None:
        super().__init__(status_code=status_code, media_type="application/octet-stream")
        self.headers.update(headers)
        self.headers["content-length"] = str(end - start)
        if status_code == 304:
            del self.headers["content-length"]
        self._file = file
        self._start = start
        self._end = end
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        if self._file is None or self._start == self._end or scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        gone = asyncio.create_task(_client_gone(receive))
        try:
            with self._file, self._hold:
                await self._send_content(self._file, gone, send)
        finally:
            gone.cancel()

    async def _send_content(self, file: FileIO, gone: asyncio.Task[None], send: Send) -> None:
        offset = self._start
        while offset < self._end and not gone.done():
            length = min(CHUNK_BYTES, self._end - offset)
            data = await asyncio.to_thread(os.pread, file.fileno(), length, offset)
            if not data:
                raise OSError(f"{file.name} became shorter while it was sent")
            offset += len(data)
            more = offset < self._end
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                logger.warning("A download stalled and was given up")
                return


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def open_download(
    path: str, request_headers: Mapping[str, str], hold: AbstractContextManager[None]
) -> FileDownload | None:
    """The response to a request with these headers; None: there is no such file.

    A symbolic link is no file. Raises ApiError (416) for a range outside the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    file = FileIO(descriptor, "rb")  # closes with the response, also one that is never sent
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    etag = f'"{_checksum(descriptor) or _fingerprint(status)}"'
    headers = {
        "etag": etag,
        "accept-ranges": "bytes",
        "content-disposition": f'attachment; filename="{os.path.basename(path)}"',
    }
    if _matches(request_headers.get("if-none-match"), etag):
        return FileDownload(None, 0, 0, 304, headers, hold)
    size = status.st_size
    if request_headers.get("if-range") in (None, etag):
        part = _parse_range(request_headers.get("range"), size)
        if part is not None:
            start, end = part
            headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
            return FileDownload(file, start, end, 206, headers, hold)
    return FileDownload(file, 0, size, 200, headers, hold)


def _parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of a range; None: no range, or one that may be ignored."""
    found = _RANGE.fullmatch(value.strip()) if value is not None else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:  # the last bytes
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < int(first):
            return None
    if start >= end:
        raise RangeError(size)
    return start, end


class RangeError(ApiError):
    """The range lies outside the file."""

    def __init__(self, size: int) -> None:
        super().__init__(
            416, f"The range lies outside the file of {size} bytes", type="RangeNotSatisfiableError"
        )


def _matches(if_none_match: str | None, etag: str) -> bool:
    if if_none_match is None:
        return False
    given = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in given or etag in given


def _checksum(descriptor: int) -> str | None:
    """The checksums that the file carries of its tensors; None: it carries none."""
    with suppress(OSError, ValueError, struct.error, AttributeError):
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        if length > _MAX_HEADER_BYTES:
            return None
        metadata = json.loads(os.pread(descriptor, length, 8)).get("__metadata__", {})
        sums = [metadata[key] for key in sorted(metadata) if key.startswith(_CHECKSUM_KEY)]
        if sums and all(re.fullmatch(r"[\w:]+", value) for value in sums):
            return "-".join(value.rpartition(":")[2] for value in sums)
    return None


def _fingerprint(status: os.stat_result) -> str:
    """Stands in for a checksum: differs when the file is another, or was written again."""
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


__all__ = ["FileDownload", "open_download"]

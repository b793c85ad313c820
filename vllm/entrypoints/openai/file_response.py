"""A safetensors file as an HTTP response: Starlette's, with what it leaves open settled."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager

from safetensors import SafetensorError, safe_open
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError
from vllm.logger import init_logger

logger = init_logger(__name__)

STALLED_SECONDS = 60.0
"""A client that takes no byte for so long has gone."""
_CHECKSUM_KEY = "checksum."
_RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,18})-(?P<last>\d{0,18})|-(?P<length>\d{1,18}))")


class FileDownload(FileResponse):
    """``hold`` is entered while the file is read. Of ranges only single ones are understood."""

    chunk_size = 1 << 20

    def __init__(
        self,
        path: str,
        status: os.stat_result,
        headers: Mapping[str, str],
        hold: AbstractContextManager[None],
    ) -> None:
        super().__init__(
            path,
            headers=headers,
            stat_result=status,
            media_type="application/octet-stream",
            filename=os.path.basename(path),
        )
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_SECONDS):
                await send(message)

        asked = dict(scope["headers"]).get(b"range", b"").decode("latin-1").strip()
        if not _is_range(asked):
            others = [(name, value) for name, value in scope["headers"] if name != b"range"]
            scope = {**scope, "headers": others}
        with self._hold:
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                logger.warning("A download stalled and was given up")


def open_download(
    path: str, request_headers: Mapping[str, str], hold: AbstractContextManager[None]
) -> Response | None:
    """The response to a request with these headers; None: there is no such file.

    A symbolic link is no file. Raises ApiError (416) for a range outside the file.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    metadata = read_metadata(path)
    sums = [metadata[key] for key in sorted(metadata) if key.startswith(_CHECKSUM_KEY)]
    if sums and all(re.fullmatch(r"[\w:]+", value) for value in sums):
        etag = "-".join(value.rpartition(":")[2] for value in sums)
    else:  # differs when the file is another, or was written again
        etag = f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    headers = {"etag": f'"{etag}"'}
    given = re.split(r"\s*,\s*(?:W/)?", request_headers.get("if-none-match", "").removeprefix("W/"))
    if headers["etag"] in given or "*" in given:
        return Response(status_code=304, headers=headers)
    asked = request_headers.get("range", "").strip()
    if request_headers.get("if-range") in (None, headers["etag"]) and _is_range(asked):
        found = _RANGE.fullmatch(asked)
        if found and (int(found["first"] or 0) >= status.st_size or found["length"] == "0"):
            raise ApiError(416, f"The range lies outside the file of {status.st_size} bytes")
    return FileDownload(path, status, headers, hold)


def _is_range(value: str) -> bool:
    """Whether it is one range; everything else may be ignored."""
    found = _RANGE.fullmatch(value)
    return found is not None and int(found["first"] or 0) <= int(found["last"] or 10**20)


def read_metadata(path: str) -> dict[str, str]:
    """What a file of rows says of itself; empty for any other file."""
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}

"""A safetensors body whose rows are sent while later ones are computed.

    engine -> parts of rows -> :class:`WaitingBytes`, one queue a tensor -> body

The engine never waits for the client. Rows that are not sent yet wait in memory, and beyond
``MEMORY_BYTES`` in an unnamed file. A body has its tensors one after another, so all of them but
the first wait until the last row is computed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import IO

import torch
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.http_protocol import connection_of
from vllm.exceptions import FailureError
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import bytes_of, checksums_of, file_header
from vllm.logger import init_logger
from vllm.v1.engine.async_extraction import Parts
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.layout import TensorForm

logger = init_logger(__name__)

MEMORY_BYTES = 16 << 20
"""Most bytes of one body that wait in memory; one step's rows may be more."""
_CHUNK_BYTES = 1 << 20


class WaitingBytes:
    """Bytes of the tensors of one body: in memory, or in an unnamed file in ``folder``."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._file_bytes = self._memory_bytes = 0
        self._queues: dict[str, deque[memoryview | range]] = {}
        """Parts of each tensor, in memory or as their place in the file."""

    async def put(self, name: str, data: memoryview) -> None:
        """Add bytes of a tensor. OSError: the file cannot be written."""
        queue = self._queues.setdefault(name, deque())
        if self._memory_bytes + len(data) <= MEMORY_BYTES:
            self._memory_bytes += len(data)
            queue.append(data)
            return
        place = range(self._file_bytes, self._file_bytes + len(data))
        await asyncio.to_thread(self._write, data)
        queue.append(place)

    def _write(self, data: memoryview) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        while data:
            written = os.pwrite(self._file.fileno(), data[:_CHUNK_BYTES], self._file_bytes)
            self._file_bytes += written
            data = data[written:]

    async def take(self, name: str) -> bytes:
        """Return the next bytes of a tensor; empty: there are none now."""
        queue = self._queues.get(name)
        if not queue:
            return b""
        part = queue.popleft()
        if len(part) > _CHUNK_BYTES:
            queue.appendleft(part[_CHUNK_BYTES:])
            part = part[:_CHUNK_BYTES]
        if isinstance(part, range):
            assert self._file is not None
            return await asyncio.to_thread(os.pread, self._file.fileno(), len(part), part.start)
        self._memory_bytes -= len(part)
        return bytes(part)

    def close(self) -> None:
        self._queues.clear()
        if self._file is not None:
            self._file.close()


class RowBody:
    """The content of a body: a header once the first rows are there, then the tensors.

    describe: makes the metadata from the sample with its first rows.
    """

    def __init__(
        self,
        parts: Parts,
        known: Mapping[str, torch.Tensor],
        describe: Callable[[HiddenStatesSample], dict[str, str]],
        folder: str | None,
    ) -> None:
        self._sample, self._rows = parts
        self._num_rows = len(self._sample.positions)
        self._known = {**self._sample.tensors, **known}
        self._describe = describe
        self._waiting = WaitingBytes(folder)
        self._header = b""
        self._forms: dict[str, TensorForm] = {}
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._first: ExtractedRows | None = None

    async def begin(self) -> int:
        """Wait for the first rows; returns the length of the body. HiddenStatesError: the request
        failed before."""
        try:
            first = await anext(self._rows)
        except BaseException:
            await self._rows.aclose()
            raise
        count = (self._num_rows,)
        self._forms = {
            name: TensorForm(one.dtype, count + tuple(one.shape[1:]))
            for name, one in first.tensors.items()
        }
        forms = dict(self._forms)
        forms |= {k: TensorForm(one.dtype, tuple(one.shape)) for k, one in self._known.items()}
        sample = self._sample.with_tensors(**first.tensors)
        metadata = self._describe(sample.with_constants(first.constants))
        self._header = file_header(forms, {**metadata, **checksums_of(self._known)})
        self._first = first
        return len(self._header) + sum(form.num_bytes for form in forms.values())

    async def _fill(self) -> None:
        """Take the rows from the engine as they come."""
        rows, self._first = self._first, None
        try:
            async with aclosing(self._rows):
                while rows is not None:
                    for name, tensor in rows.tensors.items():
                        await self._waiting.put(name, bytes_of(tensor))
                    self._changed.set()
                    rows = await anext(self._rows, None)
        except Exception as error:
            self._error = error
        self._changed.set()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the content. Leaving the iteration aborts the request; an error of the engine is
        raised when the rows that came before it were yielded."""
        filling = asyncio.create_task(self._fill())
        try:
            yield self._header
            for name, form in self._forms.items():
                left = form.num_bytes
                while left:
                    chunk = await self._next(name)
                    left -= len(chunk)
                    yield chunk
            for tensor in self._known.values():
                data = bytes_of(tensor)
                for start in range(0, len(data), _CHUNK_BYTES):
                    yield bytes(data[start : start + _CHUNK_BYTES])
        finally:
            filling.cancel()
            with suppress(asyncio.CancelledError):
                await filling
            self._waiting.close()

    async def _next(self, name: str) -> bytes:
        while not (chunk := await self._waiting.take(name)):
            if self._error is not None:
                raise self._error
            await self._changed.wait()
            self._changed.clear()
        return chunk


class RowStreamResponse(Response):
    """The reply with such a body. A failure on the way ends the connection, so that the client
    gets fewer bytes than ``content-length`` says."""

    def __init__(self, body: RowBody, length: int, media_type: str) -> None:
        headers = {"content-length": str(length)}
        super().__init__(media_type=media_type, headers=headers)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._body.chunks()) as chunks:
            try:
                await send(start)
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except (FailureError, OSError) as error:
                logger.error("A body of rows ends early: %s", error)
                connection_of(scope).transport.close()
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            await send({"type": "http.response.body", "body": b""})

"""Whether a reply reached its client: decided here, once for each HTTP response.

The files that a reply names belong to it until its last byte has gone to the client's
socket, and to the client from then on. Whatever comes first (the client goes away, the
request fails or takes too long, the server ends), they are removed.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.http_protocol import connection_of
from vllm.v1.engine.undelivered_files import UndeliveredFiles

_KEY = "vllm.reply_files"


def reply_files(scope: Scope) -> UndeliveredFiles:
    """The files that the reply to this request names: the engine's outputs go through here."""
    files: UndeliveredFiles = scope[_KEY]
    return files


class DeliveryLayer:
    """ASGI layer around the endpoints; their requests come over ``PromptHeadProtocol``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        files = scope[_KEY] = UndeliveredFiles()
        is_delivered = False

        async def deliver(message: Message) -> None:
            nonlocal is_delivered
            is_start = message["type"] == "http.response.start"
            if is_start and message["status"] != 200:
                files.discard()
            if is_start or message.get("more_body", False) or not files:
                await send(message)
                return
            connection = connection_of(scope)
            if connection.has_client():
                await send(message)
                is_delivered = await connection.flushed()
            else:
                while (await receive())["type"] != "http.disconnect":
                    pass

        try:
            await self._app(scope, receive, deliver)
        finally:
            if not is_delivered:
                files.discard()

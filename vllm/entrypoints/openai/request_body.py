"""A request's bytes, made into a checked body."""

from __future__ import annotations

import json
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from vllm.entrypoints.openai.errors import ApiError, ClientGone, bad_form
from vllm.entrypoints.openai.protocol import Body
from vllm.logger import init_logger

logger = init_logger(__name__)

BodyT = TypeVar("BodyT", bound=Body)

MAX_NAMES_LOGGED = 200
"""Of unknown fields, over the life of the server: clients choose them."""
MAX_ERRORS_TOLD = 20
_names_logged: set[str] = set()


async def read_body(request: Request, kind: type[BodyT]) -> BodyT:
    """The body of ``request``.

    Raises:
        ApiError: "Bad Request", it does not have that form.
        ClientGone: the client closed its connection before all of it was there.
    """
    try:
        content = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if not content:
        raise bad_form(("body", "Field required"))
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise bad_form((None, f"Content-Type is {content_type!r}: has to be application/json"))
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        raise _form_error(error, content) from None
    for name in body.__pydantic_extra__ or ():
        if name not in _names_logged and len(_names_logged) < MAX_NAMES_LOGGED:
            _names_logged.add(name)
            logger.warning("The request field %.100r is not known and has no effect", name)
    return body


def _form_error(error: ValidationError, content: bytes) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return _json_error(found[0]["msg"], content)
    return bad_form(*((_path(item["loc"]), item["msg"]) for item in found[:MAX_ERRORS_TOLD]))


def _path(location: tuple[int | str, ...]) -> str:
    """``body.prompt.1``; names of forms in angle brackets are left out."""
    steps = [str(step) for step in location if not (isinstance(step, str) and step[:1] == "<")]
    return ".".join(["body", *steps])


def _json_error(message: str, content: bytes) -> ApiError:
    """Malformed JSON: the path is the offset where reading stopped, as far as it is known."""
    try:
        json.loads(content)
    except json.JSONDecodeError as error:
        return bad_form((f"body.{error.pos}", f"JSON decode error: {error.msg}"))
    except (ValueError, RecursionError) as error:
        message = f"JSON decode error: {error}"
    return bad_form(("body", message))

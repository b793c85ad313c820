"""What /openapi.json and /docs say of the endpoints.

Handlers read bodies themselves, so requests and answers are described here, from the
models that are used to read and write them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from vllm.entrypoints.openai.errors import ErrorResponse
from vllm.entrypoints.openai.protocol import REQUEST_MODELS, Body
from vllm.entrypoints.openai.responses import RESPONSE_TYPES, ChatChunk, CompletionChunk
from vllm.version import __version__

_REF = "#/components/schemas/{}"
ERROR_STATUSES: dict[int, str] = {
    400: "The body has the wrong form, or values that cannot be served",
    404: "The model does not exist",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "The request failed",
    503: "The engine is gone, or the server is about to end",
    507: "There is no room for the request's hidden states",
}


def takes(model: type[Body]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint whose body is a ``model``."""
    return {"requestBody": {"required": True, "content": _json_of(model.__name__)}}


def answers(
    type_name: str, *statuses: int, stream_of: str | None = None, is_list: bool = False
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: a body of this type (or a list of them), or these errors."""
    content = _json_of(type_name)
    if is_list:
        schema = content["application/json"]["schema"]
        content["application/json"]["schema"] = {"type": "array", "items": schema}
    if stream_of is not None:
        content["text/event-stream"] = {"schema": {"$ref": _REF.format(stream_of)}}
    errors = _json_of("ErrorResponse")
    documented: dict[int | str, dict[str, Any]] = {
        status: {"description": ERROR_STATUSES[status], "content": errors} for status in statuses
    }
    return {200: {"description": "Successful Response", "content": content}, **documented}


def _json_of(type_name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(type_name)}}}


def install_openapi(app: FastAPI) -> None:
    """Make ``app`` describe itself with the schemas that the endpoints refer to."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _request_schemas() | _response_schemas()
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _request_schemas() -> dict[str, Any]:
    template = _REF.format("{model}")
    _, schema = models_json_schema(
        [(model, "validation") for model in REQUEST_MODELS], ref_template=template
    )
    found: dict[str, Any] = schema["$defs"]
    return found


def _response_schemas() -> dict[str, Any]:
    types = [*RESPONSE_TYPES, CompletionChunk, ChatChunk, ErrorResponse]
    _, components = msgspec.json.schema_components(types, ref_template=_REF.format("{name}"))
    return dict(components)


__all__ = ["answers", "install_openapi", "takes"]

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
from vllm.entrypoints.openai.responses import RESPONSE_TYPES
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
_BODY_STATUSES = (400, 404, 413, 503)


def documented(
    answer: str,
    *statuses: int,
    body: type[Body] | None = None,
    stream_of: str | None = None,
    is_list: bool = False,
) -> dict[str, Any]:
    """What a route says of itself: the type of its body and of its answer (or a list of them),
    and its errors, to which a body adds its own."""
    content = _json_of(answer)
    if is_list:
        schema = content["application/json"]["schema"]
        content["application/json"]["schema"] = {"type": "array", "items": schema}
    if stream_of is not None:
        content["text/event-stream"] = {"schema": {"$ref": _REF.format(stream_of)}}
    statuses = tuple(sorted({*statuses, *(_BODY_STATUSES if body is not None else ())}))
    errors = _json_of("ErrorResponse")
    told: dict[str, Any] = {
        "responses": {
            200: {"description": "Successful Response", "content": content},
            **{one: {"description": ERROR_STATUSES[one], "content": errors} for one in statuses},
        }
    }
    if body is not None:
        request = {"required": True, "content": _json_of(body.__name__)}
        told["openapi_extra"] = {"requestBody": request}
    return told


def _json_of(type_name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(type_name)}}}


def install_openapi(app: FastAPI) -> None:
    """Make ``app`` describe itself with the schemas that the endpoints refer to."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            _, requests = models_json_schema(
                [(model, "validation") for model in REQUEST_MODELS],
                ref_template=_REF.format("{model}"),
            )
            _, answers = msgspec.json.schema_components(
                [*RESPONSE_TYPES, ErrorResponse], ref_template=_REF.format("{name}")
            )
            schemas |= requests["$defs"] | dict(answers)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

"""Errors of a request, in the one form of body that clients read.

There are two kinds of 400. "Bad Request": the body does not follow the endpoint's schema;
``param`` is a path such as ``body.prompt.1``. "BadRequestError": the form is right, but the
values cannot be served; ``param`` is a field's name or null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import Response

from vllm.exceptions import Failure, FailureError, FailureKind, NotReadyError, VLLMValidationError

NAMED_PARAMS = {
    "dimensions", "input", "input_tokens", "logprobs", "max_tokens", "model", "prompt",
    "prompt_logprobs", "stream_options", "suffix", "temperature", "top_logprobs", "top_p",
    "truncate_prompt_tokens",
}  # fmt: skip
"""Fields that ``param`` may name; errors of other fields name them in the message only."""
MAX_MESSAGE_LENGTH = 4000
MAX_PARAM_LENGTH = 1000
STATUS_CLIENT_GONE = 499
"""Status counted when a client went away before its reply; it is never sent."""
RETRY_AFTER_SECONDS = 1
"""Time after which a refused client may try again."""

_LOCAL_PATH = re.compile(r"(?<![\w.:/<~])(?:/[\w.@%+~-]+)+/?")
_STATUS: Mapping[FailureKind, int] = dict.fromkeys(FailureKind, 500) | {
    FailureKind.BAD_REQUEST: 400,
    FailureKind.NOT_READY: 503,
    FailureKind.ABORTED: 503,
    FailureKind.FILE_GONE: 404,
    FailureKind.FILE_DAMAGED: 410,
    FailureKind.DISK_FULL: 507,
}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    410: "GoneError",
    413: "RequestTooLargeError",
    414: "RequestTooLargeError",
    416: "RangeNotSatisfiableError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GenerationTimeoutError",
}
_HEADERS = {
    401: {"www-authenticate": "Bearer", "connection": "close"},
    429: {"retry-after": str(RETRY_AFTER_SECONDS)},
    503: {"retry-after": str(RETRY_AFTER_SECONDS)},
}


class ErrorInfo(BaseModel):
    """Description of an error; ``code`` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    """Body of every error that a handler reports."""

    error: ErrorInfo


class ApiError(Exception):
    """An error for a client. ``type``: see the module; None: the type of the status."""

    def __init__(
        self, status: int, message: str, *, type: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "InternalServerError")
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between the processes of a server.
        return _api_error, (self.status, self.message, self.type, self.param)

    def body(self) -> ErrorResponse:
        """Return the body that the client reads."""
        message = self.message
        if len(message) > MAX_MESSAGE_LENGTH:  # it quotes values of the request
            message = f"{message[:MAX_MESSAGE_LENGTH]}... ({len(message)} characters)"
        message = hide_local_paths(message)
        param = None if self.param is None else self.param[:MAX_PARAM_LENGTH]
        info = ErrorInfo(message=message, type=self.type, param=param, code=self.status)
        return ErrorResponse(error=info)

    def response(self) -> Response:
        """Return the whole response."""
        return Response(
            self.body().model_dump_json(),
            self.status,
            _HEADERS.get(self.status),
            media_type="application/json",
        )


def _api_error(status: int, message: str, type: str, param: str | None) -> ApiError:
    return ApiError(status, message, type=type, param=param)


MEANT_FOR_CLIENTS = (ApiError, ValueError, FailureError, RequestValidationError)
"""Exceptions whose messages clients may read; any other is a bug of ours."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error for a body of the right form whose values cannot be served."""
    return ApiError(400, message, param=param)


def bad_form(*problems: tuple[str | None, str]) -> ApiError:
    """Return the error for a body that does not follow the schema: pairs of path and problem."""
    lines = [f"  {path}: {problem}" if path else f"  {problem}" for path, problem in problems]
    message = "\n".join([f"{len(problems)} validation error(s):", *lines])
    return ApiError(400, message, type="Bad Request", param=problems[0][0])


def failed(failure: Failure) -> ApiError:
    """Return the error for a request that the engine could not complete."""
    is_dead = failure.kind is FailureKind.ENGINE_DEAD
    message = f"the engine is gone: {failure}" if is_dead else failure.message
    return ApiError(_STATUS[failure.kind], message)


def as_api_error(error: BaseException) -> ApiError:
    """Return the client's error for any exception, without details if it is a bug of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, VLLMValidationError):
        return bad_request(str(error), error.parameter if error.parameter in NAMED_PARAMS else None)
    if isinstance(error, NotReadyError):
        return ApiError(503, str(error))
    if isinstance(error, ValueError):
        return bad_request(str(error))
    if isinstance(error, FailureError):
        return failed(error.failure)
    if isinstance(error, RequestValidationError):  # of the address, because bodies are read here
        found = error.errors()
        return bad_form(*((".".join(map(str, one["loc"])), one["msg"]) for one in found))
    return ApiError(500, "an internal error; the server's log has the details")


def hide_local_paths(message: str) -> str:
    """Replace absolute paths of this machine, which clients need not know."""
    return _LOCAL_PATH.sub("<path>", message)


async def _handle(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


EXCEPTION_HANDLERS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (*MEANT_FOR_CLIENTS, Exception), _handle
)
"""FastAPI's handlers: every exception of an endpoint becomes an error of :func:`as_api_error`."""

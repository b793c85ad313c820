"""Which models there are, and how the server is: endpoints that ask no engine."""

from __future__ import annotations

import json

from fastapi import APIRouter
from starlette.responses import Response

from vllm.entrypoints.openai.errors import model_not_found
from vllm.entrypoints.openai.openapi import answers
from vllm.entrypoints.openai.responses import (
    ModelCard,
    ModelList,
    ModelPermission,
    json_response,
)
from vllm.entrypoints.openai.state import ServerState
from vllm.version import __version__


def check_model(state: ServerState, name: str | None) -> None:
    """ApiError: no such model is served. Requests may leave the name out."""
    if name and name not in state.served_model_names:
        raise model_not_found(name)


def model_card(state: ServerState, name: str) -> ModelCard:
    """What clients are told of the model under this name."""
    permission = ModelPermission(id=f"modelperm-{name}", created=state.started_seconds)
    return ModelCard(
        id=name,
        created=state.started_seconds,
        root=state.client.model_config.model,
        max_model_len=state.max_model_len,
        permission=[permission],
    )


def make_router(state: ServerState) -> APIRouter:
    """/v1/models, and the state of the server: /health, /ping, /version, /load."""
    router = APIRouter()

    @router.get("/v1/models", responses=answers("ModelList"))
    async def list_models() -> Response:
        """The names under which the model is served."""
        return json_response(
            ModelList(data=[model_card(state, name) for name in state.served_model_names])
        )

    @router.get("/v1/models/{name:path}", responses=answers("ModelCard", 404))
    async def get_model(name: str) -> Response:
        """One of them."""
        check_model(state, name)
        return json_response(model_card(state, name))

    @router.get("/health", responses={503: {"description": "The engine is gone"}})
    async def get_health() -> Response:
        """200 while the engine runs."""
        return Response(status_code=503 if state.client.errored else 200)

    @router.get("/ping")
    async def ping() -> Response:
        """As /health."""
        return await get_health()

    @router.get("/version")
    async def get_version() -> Response:
        """The version of this server."""
        return _json(version=__version__)

    @router.get("/load")
    async def get_load() -> Response:
        """How many requests for tokens are under way."""
        return _json(server_load=state.server_load)

    return router


def _json(**content: object) -> Response:
    return Response(json.dumps(content), media_type="application/json")


__all__ = ["check_model", "make_router", "model_card"]

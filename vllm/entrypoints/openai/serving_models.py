"""Which models there are, and how the server is: endpoints that ask no engine."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.openapi import documented
from vllm.entrypoints.openai.responses import ModelCard, ModelList, ModelPermission, json_response
from vllm.entrypoints.openai.state import ServerState
from vllm.version import __version__


def check_model(state: ServerState, name: str | None) -> None:
    """ApiError: no such model is served. Requests may leave the name out."""
    if name and name not in state.served_model_names:
        raise ApiError(404, f"The model `{name}` does not exist.", param="model")


def make_router(state: ServerState) -> APIRouter:
    """/v1/models, and the state of the server: /health, /ping, /version, /load."""
    router = APIRouter()
    cards = {
        name: ModelCard(
            id=name,
            created=state.started_seconds,
            root=state.engine.model_config.model,
            max_model_len=state.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=state.started_seconds)],
        )
        for name in state.served_model_names
    }

    @router.get("/v1/models", **documented("ModelList"))
    async def list_models() -> Response:
        """The names under which the model is served."""
        return json_response(ModelList(data=list(cards.values())))

    @router.get("/v1/models/{name:path}", **documented("ModelCard", 404))
    async def get_model(name: str) -> Response:
        """One of them."""
        check_model(state, name)
        return json_response(cards[name])

    @router.get("/health", responses={503: {"description": "The engine is gone"}})
    @router.get("/ping", responses={503: {"description": "The engine is gone"}})
    async def get_health() -> Response:
        """200 while the engine runs."""
        return Response(status_code=503 if state.engine.errored else 200)

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        """The version of this server."""
        return {"version": __version__}

    @router.get("/load")
    async def get_load() -> dict[str, int]:
        """How many requests for tokens are under way."""
        return {"server_load": state.server_load}

    return router

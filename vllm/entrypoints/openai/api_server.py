"""The application: endpoints, limits, documentation."""

from __future__ import annotations

from fastapi import FastAPI

from vllm.entrypoints.openai import (
    hidden_states_store,
    metrics,
    serving_generation,
    serving_models,
    serving_tokenization,
    status_page,
)
from vllm.entrypoints.openai.delivery import DeliveryLayer
from vllm.entrypoints.openai.errors import install_error_handlers
from vllm.entrypoints.openai.limits import install_limits
from vllm.entrypoints.openai.openapi import install_openapi
from vllm.entrypoints.openai.state import ServerState
from vllm.version import __version__

# Routes are tried in this order: the busiest come first.
_ROUTERS = (
    serving_generation.make_router,
    serving_models.make_router,
    serving_tokenization.make_router,
    metrics.make_router,
    hidden_states_store.make_router,
    status_page.make_router,
)


def build_app(state: ServerState) -> FastAPI:
    """The ASGI application of one server. Its engine must have started.

    It has to be served by uvicorn with ``http=PromptHeadProtocol``.
    """
    app = FastAPI(title="vllm", version=__version__)
    for make_router in _ROUTERS:
        app.include_router(make_router(state))
    install_error_handlers(app)
    app.add_middleware(DeliveryLayer)
    install_limits(app, state.settings, state)
    install_openapi(app)
    return app

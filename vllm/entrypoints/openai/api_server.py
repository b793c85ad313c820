"""The application: its endpoints, the errors they return, and its description in OpenAPI."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware import Middleware
from starlette.responses import Response

from vllm import envs
from vllm.entrypoints.openai import (
    development,
    downloads,
    pages,
    spec_capture,
    steering,
    trl,
    weights,
)
from vllm.entrypoints.openai.adapters import make_router
from vllm.entrypoints.openai.chat import Chat
from vllm.entrypoints.openai.completion import Completion
from vllm.entrypoints.openai.errors import EXCEPTION_HANDLERS, ErrorResponse, bad_form, bad_request
from vllm.entrypoints.openai.limits import install_limits
from vllm.entrypoints.openai.pooling import (
    ClassificationAnswer,
    EmbeddingAnswer,
    PoolingAnswer,
)
from vllm.entrypoints.openai.protocol import (
    ChatBody,
    ChatCompletionRequest,
    ClassificationBody,
    ClassificationRequest,
    CompletionBody,
    CompletionRequest,
    DetokenizeBody,
    DetokenizeRequest,
    EmbeddingBody,
    EmbeddingRequest,
    PoolingBody,
    PoolingRequest,
    SteeringVectorsBody,
    SteeringVectorsRequest,
    TokenizeBody,
    TokenizeRequest,
)
from vllm.entrypoints.openai.request_prompts import render, told_of_no_chat, told_of_unread
from vllm.entrypoints.openai.responses import (
    ChatChunk,
    ChatCompletionResponse,
    ClassificationResponse,
    CompletionChunk,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    ModelCard,
    ModelList,
    ModelPermission,
    PoolingResponse,
    RenderedRequest,
    Reply,
    SteeringVectorCard,
    TokenizeResponse,
)
from vllm.entrypoints.openai.state import ServerState, State, unknown_model
from vllm.steering import SteeringVector
from vllm.utils.build_info import commit
from vllm.version import PRODUCT, VERSION, __version__

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that tokenizers accept; none has so many tokens."""
ERROR_STATUSES = {
    400: "The body has the wrong form, or values that cannot be served",
    403: "The server does not take vectors from clients",
    404: "The model does not exist",
    413: "The body is too large",
    429: "Too many requests are waiting",
    500: "The request failed",
    503: "The engine is gone, or the server is shutting down",
    507: "There is no room for the request's hidden states",
}
STATUSES_OF_PARAMETERS = {
    "path": ("404", "There is none of this name"),
    "query": ("400", "A parameter is wrong"),
}
_MESSAGES = [{"role": "user", "content": "A question?"}]
EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "A text.", "max_tokens": 16},
    ChatCompletionRequest: {"messages": _MESSAGES, "max_tokens": 16},
    EmbeddingRequest: {"input": ["A text.", "Another."]},
    PoolingRequest: {"input": "A text.", "task": "embed"},
    ClassificationRequest: {"input": "A text."},
    SteeringVectorsRequest: {
        "name": "calm",
        "vectors": {"data": "AACAPwAAAAA=", "shape": [2]},
        "layers": 12,
    },
    TokenizeRequest: {"prompt": "A text."},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
}
"""A body for each endpoint that takes one."""
_OF_BODIES = (400, 404, 413, 503)
_REF = "#/components/schemas/{model}"
_DESCRIBED: tuple[type[BaseModel], ...] = (
    *(CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest),
    *(EmbeddingRequest, PoolingRequest, ClassificationRequest, CompletionChunk, ChatChunk),
    SteeringVectorsRequest,
)
"""Models that FastAPI does not see: bodies, which our own dependency reads, and events."""

router = APIRouter()


def build_app(state: ServerState, *layers: Middleware) -> FastAPI:
    """Build the ASGI application of one server, whose engine must have started.

    uvicorn must serve it with ``http=PromptHeadProtocol``. layers: what is between the gate and
    the endpoints.
    """
    app, paths = build_endpoints(state)
    for layer in layers:
        app.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    install_limits(app, state.settings, state, paths)
    return app


def build_endpoints(state: ServerState) -> tuple[FastAPI, list[str]]:
    """Build the application without the gate; returns the paths of its endpoints, too."""
    # FastAPI's own pages load their scripts from the internet.
    app = FastAPI(
        title=PRODUCT,
        version=__version__,
        exception_handlers=EXCEPTION_HANDLERS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    paths = ["/openapi.json"]
    routers = [router, pages.router, downloads.router, steering.router, trl.router]
    routers.append(spec_capture.make_router(state))
    routers.append(weights.trl_router)
    if envs.VLLM_SERVER_DEV_MODE:
        routers += [development.router, weights.vllm_router]
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        routers.append(make_router(state.adapters, lambda: state.share()))
    for one in routers:
        app.include_router(one)
        paths += [route.path for route in one.routes if isinstance(route, APIRoute)]
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app, paths


# ---- the description of the API


def _describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=__version__, routes=app.routes)
        modes: Any = [(model, "validation") for model in _DESCRIBED]
        described["components"]["schemas"] |= models_json_schema(modes, ref_template=_REF)[1][
            "$defs"
        ]
        for operation in (one for path in described["paths"].values() for one in path.values()):
            _describe_parameters(operation)
        app.openapi_schema = described
    return app.openapi_schema


def _describe_parameters(operation: dict[str, Any]) -> None:
    """Replace FastAPI's status for wrong parameters by those of this server."""
    operation["responses"].pop("422", None)
    content = {"application/json": _json(ErrorResponse)}
    for place in sorted({one["in"] for one in operation.get("parameters", ())}):
        status, about = STATUSES_OF_PARAMETERS[place]
        operation["responses"].setdefault(status, {"description": about, "content": content})


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": ErrorResponse, "description": ERROR_STATUSES[status]}
        for status in statuses
    }


def _takes(body: type[BaseModel], *statuses: int, events: type[BaseModel] | None = None) -> Any:
    """Return a route's description of its body, of the events of its streams, and of its errors."""
    responses = _errors(*sorted({*_OF_BODIES, *statuses}))
    if events is not None:
        responses[200] = {"content": {"text/event-stream": _json(events)}}
    content = {**_json(body), "example": EXAMPLES[body]}
    request = {"required": True, "content": {"application/json": content}}
    return {"responses": responses, "openapi_extra": {"requestBody": request}}


# ---- requests for tokens


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    **_takes(CompletionRequest, 429, 500, 507, events=CompletionChunk),
)
async def create_completion(
    state: State, request: Request, body: CompletionBody
) -> Reply | Response:
    """Continue a prompt, or each prompt of a list; a prompt is a text or token ids."""
    return await Completion(state, body, request).answer()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    **_takes(ChatCompletionRequest, 429, 500, 507, events=ChatChunk),
)
async def create_chat_completion(
    state: State, request: Request, body: ChatBody
) -> Reply | Response:
    """Answer a conversation."""
    return await Chat(state, body, request).answer()


@router.post("/v1/completions/render", **_takes(CompletionRequest))
async def render_completion(
    state: State, request: Request, body: CompletionBody
) -> list[RenderedRequest]:
    """Return token ids and settings of each prompt of a completion request."""
    return await Completion(state, body, request).render()


@router.post("/v1/chat/completions/render", **_takes(ChatCompletionRequest))
async def render_chat_completion(state: State, request: Request, body: ChatBody) -> RenderedRequest:
    """Return token ids and settings of a chat request."""
    (rendered,) = await Chat(state, body, request).render()
    return rendered


# ---- vectors and classes


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingResponse,
    **_takes(EmbeddingRequest, 429, 500),
)
async def create_embedding(state: State, request: Request, body: EmbeddingBody) -> Response:
    """Return a vector of each input: the pooled state after the final norm."""
    return await EmbeddingAnswer(state, body, request).answer()


@router.post("/pooling", response_model=PoolingResponse, **_takes(PoolingRequest, 429, 500))
async def pool(state: State, request: Request, body: PoolingBody) -> Response:
    """Return a vector or scores of each input, or of each of its tokens."""
    return await PoolingAnswer(state, body, request).answer()


@router.post(
    "/classify",
    response_model=ClassificationResponse,
    **_takes(ClassificationRequest, 429, 500),
)
async def classify(state: State, request: Request, body: ClassificationBody) -> Response:
    """Return the classes of each input."""
    return await ClassificationAnswer(state, body, request).answer()


@router.post("/v1/steering_vectors", **_takes(SteeringVectorsRequest, 403))
async def create_steering_vectors(
    state: State, request: Request, body: SteeringVectorsBody
) -> SteeringVectorCard:
    """Keep vectors under a name, by which requests can refer to them."""
    vector = await state.beside_loop(
        request, lambda: SteeringVector(steering.tensor_of(body.vectors), body.layers)
    )
    state.steering.put(body.name, vector)
    await state.share()
    return state.steering.card(body.name)


# ---- the tokenizer


@router.post("/tokenize", **_takes(TokenizeRequest))
async def tokenize_text(state: State, request: Request, body: TokenizeBody) -> TokenizeResponse:
    """Return token ids of a text or of a conversation."""
    state.check_model(body.model)
    return await state.beside_loop(request, _tokenize, state, body)


def _tokenize(state: ServerState, body: TokenizeRequest) -> TokenizeResponse:
    # A transformers tokenizer, which has methods that the engine does not use.
    tokenizer: Any = state.engine.get_tokenizer()
    if body.messages is not None:
        if body.prompt is not None:
            raise bad_request("prompt: cannot be combined with messages", "prompt")
        told_of_unread(state, body)  # may refuse them
        adds_special = bool(body.add_special_tokens)
        rendered = render(state, body.messages, body, adds_special, may_be_long=True)
        token_ids = rendered.token_ids or []
    elif body.prompt is not None:
        told_of_no_chat(state, body)
        adds_special = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt, add_special_tokens=adds_special, verbose=False)
    else:
        raise bad_form(("body.prompt", "Field required (or messages)"))
    words = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else []
    # Words of Qwen's first tokenizer are bytes.
    texts = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in words]
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=state.max_model_len,
        tokens=token_ids,
        token_strs=texts if body.return_token_strs else None,
    )


@router.post("/detokenize", **_takes(DetokenizeRequest))
async def detokenize_ids(
    state: State, request: Request, body: DetokenizeBody
) -> DetokenizeResponse:
    """Return the text of token ids, with special tokens; ids without a token give no text."""
    state.check_model(body.model)
    token_ids = [one for one in body.tokens if one <= MAX_TOKEN_ID]
    text = await state.beside_loop(request, lambda: state.decode(token_ids))
    return DetokenizeResponse(prompt=text)


# ---- the server


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    """List the names under which the model is served, and its adapters."""
    own = [_card(state, name) for name in state.served_model_names]
    return ModelList(data=own + state.adapters.cards(state.max_model_len))


@router.get("/v1/models/{name:path}", responses=_errors(404))
async def get_model(name: str, state: State) -> ModelCard:
    """Describe the model of one name."""
    if name in state.served_model_names:
        return _card(state, name)
    for card in state.adapters.cards(state.max_model_len):
        if card.id == name:
            return card
    raise unknown_model(name)


def _card(state: ServerState, name: str) -> ModelCard:
    created = state.started_seconds
    return ModelCard(
        id=name,
        created=created,
        root=state.engine.model_config.model,
        max_model_len=state.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=created)],
    )


@router.get("/health", responses={503: {"description": "The engine is gone or stopped"}})
@router.get("/ping", responses={503: {"description": "The engine is gone or stopped"}})
async def get_health(state: State) -> Response:
    """Return 200 while the engine runs."""
    is_gone = state.engine.errored or state.engine.is_stopped
    return Response(status_code=503 if is_gone else 200)


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return the version with the level of the API, then product, version and commit alone."""
    return {"version": __version__, "product": PRODUCT, "engine": VERSION, "commit": commit()}


@router.get("/load")
async def get_load(state: State) -> dict[str, int]:
    """Return the number of generation requests in progress."""
    return {"server_load": state.server_load}

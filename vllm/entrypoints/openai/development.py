"""Endpoints for those who run a server, not for its clients: they exist if the environment
variable VLLM_SERVER_DEV_MODE is 1."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from vllm.entrypoints.openai.address_fields import IN_ADDRESS
from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import Body
from vllm.entrypoints.openai.state import State
from vllm.v1.engine.worker_calls import PauseMode

router = APIRouter(tags=["development"])

Mode = Annotated[PauseMode, Query(description="The end of requests under way.")]
_RELOAD = "reload_weights"


class RpcRequest(Body):
    """Body of /collective_rpc."""

    method: Annotated[str, Field(pattern="^[a-zA-Z][a-zA-Z0-9_]*$")]
    """The name of a method of the worker, or of its extension."""
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None
    """Seconds."""


@router.post("/sleep", dependencies=IN_ADDRESS)
async def sleep(state: State, level: int = 1, mode: Mode = "abort") -> None:
    """Free memory: 1 keeps the weights in host memory, 2 discards them."""
    await state.engine.sleep(level, mode)


@router.post("/wake_up", dependencies=IN_ADDRESS)
async def wake_up(state: State, tags: Annotated[list[str] | None, Query()] = None) -> None:
    """Allocate the memory again; tags: only "weights" or "kv_cache"."""
    await state.engine.wake_up(tags)


@router.get("/is_sleeping")
async def is_sleeping(state: State) -> dict[str, bool]:
    """Return whether memory is freed."""
    return {"is_sleeping": await state.engine.is_sleeping()}


@router.post("/pause", dependencies=IN_ADDRESS)
async def pause(
    state: State,
    mode: Mode = "abort",
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
) -> dict[str, str]:
    """Let no request begin until /resume. wait_for_inflight_requests: mode=wait."""
    mode = "wait" if wait_for_inflight_requests else mode
    await state.engine.pause_generation(mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume", dependencies=IN_ADDRESS)
async def resume(state: State) -> dict[str, str]:
    """Let requests begin again."""
    await state.engine.resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(state: State) -> dict[str, bool]:
    """Return whether requests wait to begin."""
    return {"is_paused": await state.engine.is_paused()}


@router.post("/collective_rpc")
async def collective_rpc(
    state: State, body: Annotated[RpcRequest, Depends(RpcRequest.read)]
) -> dict[str, list[Any]]:
    """Call a method of every worker between two steps; results other than lists, objects and null
    become texts."""
    if body.method == _RELOAD and (path := [*body.args, *body.kwargs.values()]) != []:
        if len(path) != 1 or not isinstance(path[0], str):
            raise bad_request(f"{_RELOAD} takes weights_path alone")
        await state.weights.load_folder(path[0])
        return {"results": [None]}
    results = await state.engine.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
    return {"results": [_plain(result) for result in results]}


def _plain(result: Any) -> Any:
    return result if result is None or isinstance(result, dict | list) else str(result)

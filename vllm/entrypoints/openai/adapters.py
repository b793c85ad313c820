"""Adapters (LoRA) that requests name as their model, and the endpoints that change them.

The endpoints exist if the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING allows it: they
read folders of this machine that clients name.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends
from starlette.responses import Response

from vllm.entrypoints.openai.errors import ApiError, bad_request
from vllm.entrypoints.openai.protocol import LoadLoRARequest, UnloadLoRARequest
from vllm.entrypoints.openai.responses import ModelCard, ModelPermission
from vllm.lora.request import LoRARequest, check_lora_request
from vllm.utils.text import brief, parse_json

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class _Served(NamedTuple):
    request: LoRARequest
    created: int
    """Unix time, seconds."""


class ServedAdapters:
    """The adapters of a server by name. A request keeps the one that its name had when it came."""

    def __init__(self, engine: AsyncLLM, model_names: Sequence[str]) -> None:
        self._engine, self._model_names = engine, model_names
        self._numbers = itertools.count(1)
        self.served: dict[str, _Served] = {}
        """By name."""
        self._changing = asyncio.Lock()

    def check_modules(self, modules: Sequence[str]) -> None:
        """Raise ValueError for ``--lora-modules`` that cannot be loaded, whatever the model is."""
        is_enabled, names = self._engine.vllm_config.lora_config.enable_lora, [*self._model_names]
        for item in modules:
            name, path = _name_and_path(item)
            try:
                check_lora_request(LoRARequest(name, 1, path), is_enabled=is_enabled)
                if name in names:
                    raise ValueError(f"the name {brief(name)} comes twice")
                if not Path(path).expanduser().is_dir():
                    raise ValueError("there is no such folder")
            except ValueError as error:
                raise ValueError(f"lora_modules={item!r}: {error}") from error
            names.append(name)

    async def load_modules(self, modules: Sequence[str]) -> None:
        """Load the adapters of ``--lora-modules``. ValueError: one cannot be used."""
        for item in modules:
            name, path = _name_and_path(item)
            try:
                await self.load(name, path)
            except (ApiError, ValueError) as error:
                raise ValueError(f"lora_modules={item!r}: {error}") from error

    async def load(self, name: str, path: str) -> None:
        """Serve an adapter. ApiError: the name is taken. ValueError: the adapter cannot be used."""
        async with self._changing:
            if name in self.served or name in self._model_names:
                raise bad_request(f"The lora adapter {brief(name)} has already been loaded.")
            request = LoRARequest(name, next(self._numbers), path)
            await self._engine.add_lora(request)
            self.served[name] = _Served(request, int(time.time()))

    async def unload(self, name: str) -> None:
        """Serve an adapter no longer; requests under way keep it. ApiError: it is not there."""
        async with self._changing:
            served = self.served.pop(name, None)
            if served is None:
                raise ApiError(404, f"The lora adapter {brief(name)} cannot be found.")
            await self._engine.retire_lora(served.request.lora_int_id)

    def find(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a name; None: it has none."""
        served = self.served.get(name or "")
        return None if served is None else served.request

    def cards(self, max_model_len: int) -> list[ModelCard]:
        """Describe all of them."""
        return [
            ModelCard(
                id=name,
                created=served.created,
                root=served.request.lora_path,
                parent=self._model_names[0],
                max_model_len=max_model_len,
                permission=[ModelPermission(id=f"modelperm-{name}", created=served.created)],
            )
            for name, served in self.served.items()
        ]


def _name_and_path(item: str) -> tuple[str, str]:
    """Read NAME=PATH, or a JSON object with both."""
    if not item.startswith("{"):
        name, _, path = item.partition("=")
        return name, path
    try:
        found = parse_json(item)
        return found["name"], found["path"]
    except (ValueError, KeyError):
        raise ValueError(f"lora_modules={item!r}: an object has a name and a path") from None


def _body(**example: str) -> dict[str, Any]:
    """Return a route's description of its body."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {"example": example}}}
    }


def make_router(adapters: ServedAdapters, share: Callable[[], Awaitable[None]]) -> APIRouter:
    """Make the endpoints. share: called after each change."""
    router = APIRouter(prefix="/v1", tags=["adapters"])

    @router.post(
        "/load_lora_adapter", openapi_extra=_body(lora_name="calm", lora_path="/adapters/calm")
    )
    async def load_adapter(
        body: Annotated[LoadLoRARequest, Depends(LoadLoRARequest.read)],
    ) -> Response:
        """Serve an adapter under a name."""
        await adapters.load(body.lora_name, body.lora_path)
        await share()
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", openapi_extra=_body(lora_name="calm"))
    async def unload_adapter(
        body: Annotated[UnloadLoRARequest, Depends(UnloadLoRARequest.read)],
    ) -> Response:
        """Serve an adapter no longer."""
        await adapters.unload(body.lora_name)
        await share()
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router

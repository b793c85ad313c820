"""``POST /generate`` of SpecForge's online training: rows of prompts go to a Mooncake store.

The request and the reply are those of SpecForge 0.2, whose server is a patched SGLang. The reply
has the forms of the tensors, and no rows. Layer ids count from 0: k is the stream after layer k.
TRL's ``/generate/``, with a slash at its end, is another endpoint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Request

from vllm.entrypoints.openai.capture_bodies import Capture, CaptureRequest
from vllm.entrypoints.openai.errors import ApiError, bad_request, hide_local_paths
from vllm.entrypoints.openai.extraction import byte_limit
from vllm.entrypoints.openai.limits import at_end
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import Failure, FailureError
from vllm.hidden_states.layer_ids import resolve_layer_ids
from vllm.hidden_states.sample import ExtractRequest, FailedSample
from vllm.hidden_states.tensor_file import dtype_name
from vllm.sampling_params import RequestOutputKind
from vllm.training.mooncake_store import MooncakeStore
from vllm.utils.boundaries import NORM, LayerId
from vllm.v1.engine.extraction_settings import ExtractionSettings


class CaptureStore:
    """The store of a server, and the layers that it captures.

    ValueError: they do not go with the model or the package's environment.
    """

    def __init__(self, state: ServerState) -> None:
        settings, engine = state.settings, state.engine
        num_layers = engine.model_config.get_total_num_hidden_layers()
        ids = settings.spec_capture_aux_layer_ids
        if ids is None:
            try:
                usual = resolve_layer_ids("eagle3", num_layers)[:-1]
            except ValueError as error:
                raise ValueError(f"spec_capture_aux_layer_ids is not set, and {error}") from None
            ids = [one - 1 for one in usual if isinstance(one, int)]
        if wrong := [one for one in ids if not 0 <= one < num_layers]:
            raise ValueError(
                f"spec_capture_aux_layer_ids={ids}: {wrong[0]} is not a layer of this model; use "
                f"0 to {num_layers - 1}"
            )
        if engine.vllm_config.speculative_config is not None:
            raise ValueError(
                "mooncake_store: a server with speculative_config gives rows to its KV connector; "
                "leave one of the two out"
            )
        self.aux_layer_ids = ids
        self.layers: list[LayerId] = [*(one + 1 for one in ids), NORM]
        """Layers of the rows, as this engine counts them."""
        try:
            self._store = MooncakeStore.connect(**(settings.mooncake_store or {}))
        except (ValueError, ImportError, FailureError) as error:
            raise ValueError(f"mooncake_store: {error}") from None
        # A store that does not answer holds up one thread, and only these requests.
        self._thread = ThreadPoolExecutor(1, "mooncake-store")

    async def put(self, capture: Capture, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Store a sample; returns its result in the reply, an error if it cannot be stored."""

        def put() -> dict[str, Any]:
            try:
                forms = self._store.put(capture.prefix, tensors, replace=capture.replace)
            except FailureError as error:
                return error_of(capture, error.failure)
            return {
                "sample_id": capture.sample_id,
                "store_id": capture.store_id,
                "gen": capture.gen,
                "aux_layer_ids": self.aux_layer_ids,
                "features": {
                    name: {"shape": form.shape, "dtype": dtype_name(form.dtype)}
                    for name, form in forms.items()
                },
            }

        return await asyncio.get_running_loop().run_in_executor(self._thread, put)


def error_of(capture: Capture, failure: Failure) -> dict[str, Any]:
    """Return the result of a sample that failed."""
    message = hide_local_paths(failure.message)
    return {"sample_id": capture.sample_id, "error": message, "kind": failure.kind}


def make_router(state: ServerState) -> APIRouter:
    """Return the endpoint of one server. ValueError: its store cannot be used."""
    router = APIRouter(include_in_schema=False)
    store = None if state.settings.mooncake_store is None else CaptureStore(state)

    @router.post("/generate")
    async def generate(
        request: Request, body: Annotated[CaptureRequest, Depends(CaptureRequest.read)]
    ) -> list[dict[str, Any]]:
        """Compute the rows of each prompt and put them into the store."""
        if store is None:
            raise ApiError(
                403,
                "this server has no store for spec_capture: start it with --mooncake-store (TRL's "
                "endpoint is /generate/, with a slash at its end)",
            )
        state.check_model(body.model)
        given = await asyncio.to_thread(body.given_tensors)
        results = await _capture(state, store, request, body, given)
        return [*map(_reply, body.input_ids, results)]

    return router


def _reply(token_ids: list[int], result: dict[str, Any]) -> dict[str, Any]:
    about = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(token_ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "spec_capture": result,
    }
    return {"text": "", "output_ids": [], "meta_info": about}


async def _capture(
    state: ServerState,
    store: CaptureStore,
    request: Request,
    body: CaptureRequest,
    given: list[dict[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    """Return the result of each sample. ApiError: a prompt cannot be served."""
    settings = ExtractionSettings(
        layers=store.layers,
        positions="all",
        dtype=None,
        is_ordered=True,
        on_error="raise",
        max_in_flight=None,
        lora_request=state.adapters.find(body.model),
        byte_limit=byte_limit(state.settings, None),
        is_one_request=True,
    )
    prompts = [ExtractRequest({"prompt_token_ids": ids}) for ids in body.input_ids]
    results: dict[int, dict[str, Any]] = {}

    async def admit(num_bytes: int) -> None:
        await state.row_memory.reserve(num_bytes, at_end(request.scope))

    kind = RequestOutputKind.FINAL_ONLY
    try:
        outputs = state.engine.generate_with_rows(prompts, settings, kind, admit)
        async with aclosing(outputs):
            async for index, _, item in outputs:
                assert item is not None
                capture = body.spec_capture[index]
                if isinstance(item, FailedSample):
                    results[index] = error_of(capture, item.failure)
                    continue
                tensors = capture.row_tensors(item.hidden_states) | given[index]
                results[index] = await store.put(capture, tensors)
    except ValueError as error:
        raise bad_request(f"input_ids: {error}") from None
    return [results[index] for index in range(len(prompts))]

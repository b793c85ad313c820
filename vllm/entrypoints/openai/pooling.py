"""/v1/embeddings, /pooling and /classify: vectors and classes of texts."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from fastapi import Request
from starlette.responses import Response

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PooledBody,
    PoolingRequest,
)
from vllm.entrypoints.openai.request_prompts import (
    render,
    split_prompts,
    told_of_no_chat,
    told_of_unread,
)
from vllm.entrypoints.openai.responses import Usage
from vllm.entrypoints.openai.state import ServerState
from vllm.hidden_states.sample import ExtractRequest
from vllm.outputs import ClassificationRequestOutput
from vllm.v1.engine.pooling import Pooled, PoolingOptions

BodyT = TypeVar("BodyT", bound=PooledBody)
MAX_VALUES = 2**23
"""Most numbers in a reply, such as 2,048 vectors of 4,096. As JSON they take some 180 MB."""


class PooledAnswer(ABC, Generic[BodyT]):
    """One request, from its body to its reply.

    The constructor raises ApiError if the model is not served.
    """

    id_prefix: ClassVar[str]

    def __init__(self, state: ServerState, body: BodyT, request: Request) -> None:
        state.check_model(body.model)
        client_id = request.headers.get("x-request-id") or body.request_id
        self.id = f"{self.id_prefix}-{client_id or uuid.uuid4().hex[:16]}"
        self.arrival_time = time.time()
        self.state = state
        self.body = body
        self._request = request
        self._adapter = state.adapters.find(body.model)

    @abstractmethod
    def options(self, **of_prompts: Any) -> PoolingOptions:
        """Return what is computed; raises ValueError if that is not valid."""

    @abstractmethod
    def item(self, index: int, result: Pooled) -> dict[str, Any]:
        """Return the reply's item for one input."""

    async def answer(self) -> Response:
        """Return the reply. Raises ValueError or ApiError if the request cannot be served, and
        HiddenStatesError if the states of an input are wrong."""
        body = self.body
        prompts = [
            ExtractRequest(prompt, lora_request=self._adapter)
            for prompt in await self.state.beside_loop(self._request, self._prompts)
        ]
        options = self.options(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            add_special_tokens=body.add_special_tokens is not False,
        )
        results: list[Pooled] = []
        num_values = 0
        engine = self.state.engine
        async with aclosing(engine.pool(prompts, options, is_one_request=True)) as pooled:
            async for result in pooled:
                results.append(result)
                num_values += result.outputs.data.numel()
                if num_values > MAX_VALUES:
                    raise bad_request(
                        f"the reply would have more than {MAX_VALUES} numbers; send fewer inputs "
                        f"in a request ({len(results)} of {len(prompts)} are more already)",
                        "input",
                    )
        content = await engine.renderer.run(num_values, self._reply, results)
        return Response(content, media_type="application/json")

    def _prompts(self) -> list[dict[str, Any]]:
        body, salt = self.body, self.body.cache_salt
        if body.messages is None:
            body._warnings += told_of_no_chat(self.state, body)
            inputs = split_prompts(body.input, "input")
            key = "prompt" if isinstance(inputs[0], str) else "prompt_token_ids"
            return [{key: one, "cache_salt": salt} for one in inputs]
        if body.input is not None:
            raise bad_request("input: cannot be combined with messages", "input")
        fields = body.model_copy(update={"add_generation_prompt": bool(body.add_generation_prompt)})
        body._warnings += told_of_unread(self.state, fields)
        may_be_long = body.truncate_prompt_tokens is not None
        special = bool(body.add_special_tokens)
        rendered = render(self.state, body.messages, fields, special, may_be_long)
        return [{"prompt_token_ids": rendered.token_ids, "cache_salt": salt}]

    def _reply(self, results: list[Pooled]) -> bytes:
        """Encode item by item, so that other threads have their turn in between."""
        encode = msgspec.json.encode
        items = (self.item(index, result) for index, result in enumerate(results))
        num_tokens = sum(len(result.prompt_token_ids) for result in results)
        adapter = self._adapter
        reply = {
            "id": self.id,
            "object": "list",
            "created": int(self.arrival_time),
            "model": self.state.model_name if adapter is None else adapter.lora_name,
            "data": [msgspec.Raw(encode(item)) for item in items],
            "usage": Usage.of(num_tokens, 0).model_dump(),
        }
        warnings = self.body._warnings
        return encode(reply | ({"warnings": warnings} if warnings else {}))


class ClassificationAnswer(PooledAnswer[ClassificationRequest]):
    """One request for classes."""

    id_prefix = "classify"

    def options(self, **of_prompts: Any) -> PoolingOptions:
        activation = self.body.use_activation
        return PoolingOptions("classify", use_activation=activation, **of_prompts)

    def item(self, index: int, result: Pooled) -> dict[str, Any]:
        labels = self.state.engine.pooler.head.labels
        found = ClassificationRequestOutput.of(result, labels).outputs
        return {
            "index": index,
            "label": found.label,
            "probs": found.probs,
            "num_classes": found.num_classes,
        }


class EmbeddingAnswer(PooledAnswer[EmbeddingRequest]):
    """One request for vectors."""

    id_prefix = "embd"

    def options(self, **of_prompts: Any) -> PoolingOptions:
        body = self.body
        return PoolingOptions("embed", body.pooling, body.normalize, body.dimensions, **of_prompts)

    def item(self, index: int, result: Pooled) -> dict[str, Any]:
        numbers = _numbers(result.outputs.data, self.body.encoding_format)
        return {"index": index, "object": "embedding", "embedding": numbers}


class PoolingAnswer(PooledAnswer[PoolingRequest]):
    """One request for vectors or scores."""

    id_prefix = "pool"

    def options(self, **of_prompts: Any) -> PoolingOptions:
        body = self.body
        if body.task == "token_embed":
            width = body.dimensions or self.state.engine.model_config.get_hidden_size()
            of_prompts["most_tokens"] = MAX_VALUES // max(1, width)
        pooled = (body.pooling, body.normalize, body.dimensions, body.use_activation)
        return PoolingOptions(body.task or "embed", *pooled, **of_prompts)

    def item(self, index: int, result: Pooled) -> dict[str, Any]:
        numbers = _numbers(result.outputs.data, self.body.encoding_format)
        return {"index": index, "object": "pooling", "data": numbers}


def _numbers(data: torch.Tensor, encoding_format: str | None) -> str | list[Any]:
    """Return the numbers as a list, or float32 in little-endian order as base64."""
    if encoding_format == "base64":
        return base64.b64encode(data.contiguous().numpy().astype("<f4").tobytes()).decode()
    listed: list[Any] = data.tolist()
    return listed

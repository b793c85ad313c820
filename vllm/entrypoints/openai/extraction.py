"""The field ``hidden_states`` of a request: rows of prompt and output, without a connector.

The rows come inline in the reply, as a file in the storage folder, or as the body of the reply.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import torch
from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from vllm.entrypoints.openai.errors import bad_request, failed
from vllm.entrypoints.openai.limits import at_end
from vllm.entrypoints.openai.protocol import GenerationBody, HiddenStatesRequest
from vllm.entrypoints.openai.responses import HiddenStatesBody, TensorBody
from vllm.entrypoints.openai.row_stream import MEMORY_BYTES, RowBody, RowStreamResponse
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.layer_ids import convention_of
from vllm.hidden_states.sample import ExtractRequest, FailedSample, HiddenStatesSample
from vllm.hidden_states.tensor_file import bytes_of, dtype_name, file_parts
from vllm.inputs import ParsedPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringSpec
from vllm.transformers_utils.answer_masks import parse_mask_rule
from vllm.utils.text import brief, safe_name
from vllm.utils.whole_files import temporary_path
from vllm.v1.engine.extraction_settings import ByteLimit, ExtractionSettings
from vllm.v1.rows.fields import StoredNames
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.v1.engine.request_stream import UndeliveredFiles

_MEDIA_TYPE = "application/octet-stream"
_STREAM = 'hidden_states.delivery="safetensors"'
_MIB = 1 << 20
_CHUNK_BYTES = 1 << 20
_NOT_TOGETHER = ("prompt_logprobs", "kv_transfer_params", "echo")
"""Fields of a body that have no effect on rows, so they are refused."""


def requested_rows(body: GenerationBody) -> HiddenStatesRequest | None:
    """Return what a body asks for; None: no rows. ApiError: it cannot be served together."""
    extra = None if body.vllm_xargs is None else body.vllm_xargs.hidden_states
    if body.hidden_states is None and extra is None:
        return None
    if body.hidden_states is not None and extra is not None:
        raise bad_request("hidden_states is also in vllm_xargs: give it once")
    for name in _NOT_TOGETHER:
        value = body.__dict__.get(name)
        if value is not None and value is not False:
            raise bad_request(f"{name}: not together with hidden_states; leave it out")
    return body.hidden_states or extra


def byte_limit(settings: ServerSettings, other: str | None) -> ByteLimit:
    """Return the limit of the rows of one request; ``other``: the option that avoids JSON, None if
    the rows do not go into JSON."""
    if other is None:
        return ByteLimit(
            int(settings.max_hidden_states_mib * _MIB), "ask for less (--max-hidden-states-mib)"
        )
    advice = f"ask for less (--max-inline-hidden-states-mib), or use {other}"
    return ByteLimit(int(settings.max_inline_hidden_states_mib * _MIB), advice)


class Extraction:
    """The rows of one request."""

    def __init__(
        self,
        state: ServerState,
        options: HiddenStatesRequest,
        priority: int | None,
        scope: Scope,
    ) -> None:
        self._state = state
        self._scope = scope
        self._options = options
        self._priority = priority or 0
        mask = options.mask
        self.mask: Sequence[int] | None = None if isinstance(mask, str) else mask
        """A value for each token of a prompt; for a rule, the endpoint of chats sets it."""
        self.mask_rule = parse_mask_rule(mask) if isinstance(mask, str) else None
        self.steering: Sequence[SteeringSpec] | None = None
        """Vectors to add to the stream of requests that generate nothing."""
        self.adapter: LoRARequest | None = None
        self._num_inline_bytes = 0
        """Bytes of rows in the reply so far."""
        self._delivery = options.delivery or "auto"
        settings = state.settings
        self._folder = None if state.store is None else state.store.folder
        if state.extracts:
            raise bad_request(
                "hidden_states: this server gives rows to its KV connector (speculative_config); "
                "use kv_transfer_params, or a server without a connector"
            )
        if self._delivery == "file" and self._folder is None:
            raise bad_request(
                'hidden_states.delivery="file": this server has no storage folder; use "inline" '
                'or "safetensors", or start it with --hidden-states-folder'
            )
        self._inline_bytes = int(settings.max_inline_hidden_states_mib * _MIB)
        is_inline = self._delivery == "inline" or (self.is_auto and self._folder is None)
        self._limit = byte_limit(settings, _STREAM if is_inline else None)

    @property
    def is_auto(self) -> bool:
        """True if the size decides between the reply and a file."""
        return self._delivery == "auto"

    async def run(
        self,
        prompts: Sequence[ParsedPrompt],
        params: SamplingParams | None,
        num_choices: int,
    ) -> list[HiddenStatesSample]:
        """Return the rows of each choice. params: to generate with; None: rows of the prompts.

        ValueError: they cannot be served.
        """
        found = {}
        kind = RequestOutputKind.FINAL_ONLY
        async with aclosing(self._run(prompts, params, num_choices, kind)) as outputs:
            async for index, output, sample in outputs:
                assert sample is not None
                found[index, output.outputs[0].index] = sample
        return [found[place] for place in sorted(found)]

    def run_stream(
        self, prompts: Sequence[ParsedPrompt], params: SamplingParams | None, num_choices: int
    ) -> AsyncGenerator[tuple[int, RequestOutput, HiddenStatesSample | None], None]:
        """Yield new outputs with the numbers of their prompts, and the rows of a choice with its
        last one. ValueError, ApiError: they cannot be served, or a choice failed."""
        if self.is_stream:
            raise bad_request(f"stream: the reply of {_STREAM} is one file; leave stream out")
        return self._run(prompts, params, num_choices, RequestOutputKind.DELTA)

    async def _run(
        self,
        prompts: Sequence[ParsedPrompt],
        params: SamplingParams | None,
        num_choices: int,
        kind: RequestOutputKind,
    ) -> AsyncGenerator[tuple[int, RequestOutput, HiddenStatesSample | None], None]:
        requests = await self._requests(prompts, params, num_choices)
        settings = self._settings(params)
        engine = self._state.engine
        admit = self._admit if self.is_stream else self._admit_files
        async with aclosing(engine.generate_with_rows(requests, settings, kind, admit)) as outputs:
            async for index, output, item in outputs:
                if isinstance(item, FailedSample):
                    raise failed(item.failure)
                yield index, output, item

    async def _admit_files(self, num_bytes: int) -> None:
        """Wait for memory. QuotaExceededError: there is no room for the file of these rows."""
        if self._state.store is not None and not self._is_inline(num_bytes):
            await self._state.store.admit()
        await self._admit(num_bytes)

    async def _admit(self, num_bytes: int) -> None:
        await self._state.row_memory.reserve(num_bytes, at_end(self._scope))

    async def _admit_body(self, num_bytes: int) -> None:
        await self._admit(min(num_bytes, MEMORY_BYTES))

    async def _requests(
        self, prompts: Sequence[ParsedPrompt], params: SamplingParams | None, num_choices: int
    ) -> list[ExtractRequest]:
        """Return the engine's requests. ApiError: they cannot be served."""
        if self.mask_rule is not None and (self.mask is None or params is not None):
            what = (
                "a conversation has answers"
                if self.mask is None
                else "requests that generate nothing have rules"
            )
            raise bad_request(
                f"hidden_states.mask={brief(self._options.mask)}: only {what}; give a value for "
                "each token of the prompt, or leave mask out"
            )
        if params is None and num_choices > 1:
            raise bad_request(f"n={num_choices} with hidden_states: only with max_tokens above 0")
        if self.is_stream and len(prompts) * num_choices != 1:
            raise bad_request(
                f"{_STREAM} with {len(prompts)} prompts and n={num_choices}: ask for one choice"
            )
        return [ExtractRequest(_as_prompt(one), mask=self.mask) for one in prompts]

    async def begin_stream(self, prompt: ParsedPrompt) -> Response | None:
        """Return a reply whose rows are sent as they are computed; None if that cannot be."""
        if not self.is_stream or self._options.pooling not in (None, "none"):
            return None
        (request,) = await self._requests([prompt], None, 1)
        engine, settings = self._state.engine, self._settings(None)
        parts = await engine.extract_in_parts(request, settings, self._admit_body)
        if parts is None:
            return None
        body = RowBody(parts, self._places_of(parts.sample), self._metadata, self._folder)
        return RowStreamResponse(body, await body.begin(), _MEDIA_TYPE)

    def _settings(self, params: SamplingParams | None) -> ExtractionSettings:
        options = self._options
        return ExtractionSettings(
            layers=options.layers,
            positions=self._positions,
            dtype=options.dtype,
            is_ordered=True,
            on_error="raise",
            max_in_flight=None,
            pooling=options.pooling or "none",
            top_logprobs=options.top_logprobs or 0,
            logprob_temperature=options.logprob_temperature or 1.0,
            sampling_params=params,
            hooks=options.hooks,
            steering=self.steering if params is None else None,
            lora_request=self.adapter,
            byte_limit=self._limit,
            priority=self._priority,
            is_one_request=True,
        )

    @property
    def _positions(self) -> str | list[int]:
        return "all" if self._options.positions is None else self._options.positions

    @property
    def is_stream(self) -> bool:
        """True if the body of the reply is a file."""
        return self._delivery == "safetensors"

    async def stream(self, sample: HiddenStatesSample) -> Response:
        """Return a reply whose body is the safetensors file of a sample."""
        parts = await asyncio.to_thread(self._parts, sample)
        headers = {"content-length": str(sum(map(len, parts)))}
        return StreamingResponse(_chunks(parts), media_type=_MEDIA_TYPE, headers=headers)

    async def bodies(
        self,
        samples: Sequence[HiddenStatesSample],
        names: Sequence[str],
        request: Request,
        files: UndeliveredFiles,
    ) -> list[HiddenStatesBody]:
        """Return the part of the reply for each sample.

        names: ids of the samples' requests, with which names of files begin. files: takes the
        files that are written.
        """
        num_bytes = self._num_inline_bytes + sum(sample.nbytes for sample in samples)
        if self._is_inline(num_bytes):
            self._num_inline_bytes = num_bytes
            return await asyncio.to_thread(lambda: [*map(_inline, samples)])
        assert self._folder is not None
        bodies = []
        for sample, name in zip(samples, names, strict=True):
            body = _place_of(sample)
            path = body.hidden_states_path = await self._write(self._folder, sample, name)
            files.add({"hidden_states_path": path})
            if self._state.store is not None:
                await self._state.store.announce(path)
                body.hidden_states_url = self._state.store.url_for(request, path)
            bodies.append(body)
        return bodies

    def _is_inline(self, num_bytes: int) -> bool:
        """Return whether a reply with so many bytes of rows has them in its JSON."""
        is_small = num_bytes <= self._inline_bytes
        return self._delivery == "inline" or self._folder is None or (self.is_auto and is_small)

    async def _write(self, folder: str, sample: HiddenStatesSample, name: str) -> str:
        """Write a sample's file; returns its path."""
        name = safe_name(f"{name}-{uuid.uuid4().hex[:8]}")
        path = os.path.join(folder, f"{name}.safetensors")
        temporary = temporary_path(path)
        writing = asyncio.ensure_future(asyncio.to_thread(self._write_file, temporary, sample))
        try:
            await asyncio.shield(writing)
            os.replace(temporary, path)
        except OSError as error:
            kind = FailureKind.DISK_FULL if error.errno == errno.ENOSPC else FailureKind.JOB_FAILED
            raise failed(Failure(kind, f"the file cannot be written: {error.strerror}")) from error
        finally:  # a thread cannot be cancelled, so the file may still grow
            writing.add_done_callback(lambda _: _remove(temporary))
        return path

    def _write_file(self, path: str, sample: HiddenStatesSample) -> None:
        with open(path, "xb") as file:
            for part in self._parts(sample):
                file.write(part)

    def _parts(self, sample: HiddenStatesSample) -> list[memoryview]:
        """Return the content of a sample's file."""
        tensors = {name: tensor.contiguous() for name, tensor in sample.tensors.items()}
        return file_parts(tensors | self._places_of(sample), self._metadata(sample))

    def _places_of(self, sample: HiddenStatesSample) -> dict[str, torch.Tensor]:
        """Return the tensors that tell the tokens of the rows."""
        tensors = {"token_ids": sample.token_ids}
        if self._positions != "all" or self._options.pooling:
            tensors["positions"] = sample.positions.contiguous()
        return tensors

    def _metadata(self, sample: HiddenStatesSample) -> dict[str, str]:
        options, constants, positions = self._options, dict(sample.constants), self._positions
        model = self._state.engine.model_config
        more = {} if options.pooling in (None, "none") else {"pooling": str(options.pooling)}
        if (output := sample.output) is not None:
            more |= {"num_prompt_tokens": str(sample.num_prompt_tokens), "text": output.text}
            more["finish_reason"] = str(output.finish_reason)
        return {
            "model": self._state.model_name,
            **({} if self.adapter is None else {"adapter": self.adapter.lora_name}),
            "layer_ids": json.dumps(sample.layer_ids),
            "layer_convention": convention_of(sample.layer_ids),
            "num_hidden_layers": str(model.get_total_num_hidden_layers()),
            "positions": positions if isinstance(positions, str) else "list",
            "dtype": dtype_name(sample.hidden_states.dtype),
            "engine_version": __version__,
            **more,
            **StoredNames(tuple(sample.other_tensors), tuple(constants)).metadata,
            **{name: json.dumps(list(values)) for name, values in constants.items()},
        }


def as_output(prompt: ParsedPrompt, samples: Sequence[HiddenStatesSample]) -> RequestOutput:
    """Return the output of a prompt from the samples of its choices."""
    nothing = CompletionOutput(0, "", [], None, None, "length")
    completions = [nothing if sample.output is None else sample.output for sample in samples]
    ids = samples[0].token_ids[: samples[0].num_prompt_tokens].tolist()
    return RequestOutput(samples[0].request_id, prompt.text, ids, None, completions, True)


def _as_prompt(prompt: ParsedPrompt) -> Any:
    content = {"prompt_token_ids": prompt.token_ids}
    if prompt.embeds is not None:
        content = {"prompt_embeds": prompt.embeds}
    return {**content, "cache_salt": prompt.cache_salt}


def _place_of(sample: HiddenStatesSample) -> HiddenStatesBody:
    return HiddenStatesBody(
        layers=list(sample.layer_ids),
        positions=sample.positions.tolist(),
        num_prompt_tokens=sample.num_prompt_tokens,
    )


def _inline(sample: HiddenStatesSample) -> HiddenStatesBody:
    body = _place_of(sample)
    body.tensors = {
        name: TensorBody(
            data=base64.b64encode(bytes_of(tensor.contiguous())).decode(),
            shape=list(tensor.shape),
            dtype=dtype_name(tensor.dtype),
        )
        for name, tensor in sample.tensors.items()
    }
    body.constants = {name: list(v) for name, v in sample.constants.items()} or None
    return body


async def _chunks(parts: Sequence[memoryview]) -> AsyncGenerator[bytes, None]:
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):
            yield bytes(part[start : start + _CHUNK_BYTES])


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)

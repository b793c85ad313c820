"""The options of vllm-lens in ``extra_args``: rows and steering, against ``extract`` and
``SteeringVector``."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch

from tests.engine.harness import engine, extraction_config, random_prompts
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, SteeringVector
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.steering.lens import MOST_UNPACKED_BYTES, STEERING

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(83, [5, 33, 17])
WIDTH = 72
DRAWN = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(6)) * 3


def params(extra: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 7, "temperature": 0, "ignore_eos": True, "extra_args": extra, **more}
    )


def vector(**fields: Any) -> Any:
    """An object with the attributes of vllm-lens' SteeringVector."""
    defaults = {"scale": 1.0, "norm_match": False, "position_indices": None}
    return SimpleNamespace(**{**defaults, **fields})


def as_json(tensor: torch.Tensor, *, is_compressed: bool = True) -> dict[str, Any]:
    """The JSON of vllm-lens, written from its documentation."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    data = bits.contiguous().numpy().tobytes()
    if is_compressed:
        data = pyarrow.compress(data, "zstd", asbytes=True)
    return {
        "data": base64.b64encode(data).decode(),
        "dtype": str(bits.dtype).removeprefix("torch."),
        "original_dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        **({"compression": "zstd"} if is_compressed else {}),
    }


def check(outputs: list[RequestOutput], llm: LLM, lens_layers: list[int], **more: Any) -> None:
    """Rows are those that extract() gives of the outputs of these layers, but of the last token."""
    samples = llm.extract(
        PROMPTS, layers=[one + 1 for one in lens_layers], sampling_params=params(**more)
    )
    for output, sample in zip(outputs, samples, strict=True):
        assert output.activations is not None and output.outputs[0].extracted is None
        rows = output.activations["residual_stream"]
        assert sample.output is not None
        assert output.outputs[0].token_ids == sample.output.token_ids
        assert torch.equal(rows, sample.hidden_states[:-1].transpose(0, 1))
        assert rows.is_contiguous()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_rows_of_generate_and_chat(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    with engine(folder, max_num_batched_tokens=16, dtype="bfloat16") as llm:
        num_layers = llm.llm_engine.model_config.get_total_num_hidden_layers()
        for asked in ([num_layers - 1, 0, 2, 0], "[0, 2]", True):
            layers = range(num_layers) if asked is True else {*json.loads(str(asked))}
            outputs = llm.generate(PROMPTS, params({"output_residual_stream": asked}))
            check(outputs, llm, sorted(layers))
            assert outputs[0].activations["residual_stream"].dtype == torch.bfloat16  # type: ignore[index]
        both = [params({"output_residual_stream": [1]}), params(), params({"other": 1})]
        outputs = llm.generate(PROMPTS, both)
        assert [output.activations is None for output in outputs] == [False, True, True]
        for no in (None, False):
            (output,) = llm.generate(PROMPTS[:1], params({"output_residual_stream": no}))
            assert output.activations is None
        messages = [{"role": "user", "content": "Why?"}]
        (answer,) = llm.chat(messages, params({"output_residual_stream": [1]}))
        ids = [*(answer.prompt_token_ids or ()), *answer.outputs[0].token_ids]
        (sample,) = llm.extract({"prompt_token_ids": ids[:-1]}, layers=[2])
        rows = answer.activations["residual_stream"]  # type: ignore[index]
        assert torch.equal(rows[0], sample.hidden_states[:, 0])


@pytest.mark.exhaustive
def test_a_stop_string_and_kinds_of_output(checkpoint: Checkpoint) -> None:
    """Tokens after a stop string have no rows; only the last of several outputs has rows."""
    with engine(checkpoint("llama")) as llm:
        (whole,) = llm.generate(PROMPTS[:1], params())
        stop = whole.outputs[0].text[2:4]
        extra = {"output_residual_stream": [3]}
        (output,) = llm.generate(PROMPTS[:1], params(extra, stop=[stop], max_tokens=40))
        assert output.outputs[0].finish_reason == "stop"
        num_tokens = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids)
        rows = output.activations["residual_stream"]  # type: ignore[index]
        assert rows.shape == (1, num_tokens - 1, WIDTH)
        (sample,) = llm.extract(PROMPTS[:1], layers=[4])
        assert torch.equal(rows[0, : len(sample.token_ids)], sample.hidden_states[:, 0])
        expected = llm.generate(PROMPTS[1:2], params(extra))[0].activations["residual_stream"]  # type: ignore[index]
    arguments = AsyncEngineArgs(model=str(checkpoint("llama")), max_model_len=256)

    async def run(kind: RequestOutputKind) -> list[RequestOutput]:
        async_llm = AsyncLLM.from_engine_args(arguments)
        try:
            settings = params(extra, output_kind=kind)
            return [one async for one in async_llm.generate(PROMPTS[1], settings, "a")]
        finally:
            await async_llm.shutdown()

    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        *first, last = asyncio.run(run(kind))
        assert first and all(output.activations is None for output in first)
        assert torch.equal(last.activations["residual_stream"], expected)  # type: ignore[index]


STEERED: list[tuple[dict[str, Any], SteeringVector]] = [
    (
        {"activations": DRAWN[:2, 0], "layer_indices": [0, 2], "scale": 0.5},
        SteeringVector(DRAWN[:2, 0], [1, 3], 0.5),
    ),
    (
        {"activations": DRAWN[:1, 1].bfloat16(), "layer_indices": [1], "norm_match": True},
        SteeringVector(DRAWN[0, 1].bfloat16(), 2, norm_match=True),
    ),
    (
        {"activations": DRAWN[:2], "layer_indices": [3, 0]},
        SteeringVector(DRAWN[:2], [4, 1], positions=[0, 1, 2, 3]),
    ),
    (
        {"activations": DRAWN[:1].half(), "layer_indices": [1], "position_indices": [7, 2, 35, 1]},
        SteeringVector(DRAWN[:1].half(), [2], positions=[7, 2, 35, 1]),
    ),
]


@pytest.mark.parametrize(("fields", "own"), STEERED)
def test_steering(fields: dict[str, Any], own: SteeringVector, checkpoint: Checkpoint) -> None:
    """Objects, dicts, and JSON; rows of the same request are those after the addition."""
    compressed = {**fields, "activations": as_json(fields["activations"])}
    plain = {**fields, "activations": as_json(fields["activations"], is_compressed=False)}
    with engine(checkpoint("llama")) as llm:
        unsteered = llm.generate(PROMPTS, params())
        outputs = []
        for value in ([vector(**fields)], [compressed], json.dumps([plain])):
            extra = {"apply_steering_vectors": value, "output_residual_stream": [1, 3]}
            settings = params(extra)
            assert settings.steering == own.specs()
            assert settings.extra_args == {"output_residual_stream": [1, 3]}
            assert extra["apply_steering_vectors"] is value
            outputs.append(llm.generate(PROMPTS, settings))
            check(outputs[-1], llm, [1, 3], steering=[own])
        again = llm.generate(PROMPTS, params())
    texts = [[one.outputs[0].token_ids for one in found] for found in (unsteered, again)]
    assert texts[0] == texts[1] != [one.outputs[0].token_ids for one in outputs[0]]


STEER, ROWS = "apply_steering_vectors", "output_residual_stream"
GOOD = {"activations": DRAWN[:1, 0], "layer_indices": [1]}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({STEER: 7}, 'extra_args."apply_steering_vectors".: 7: has to be a list of steering vec'),
        ({STEER: "["}, "it is not JSON"),
        ({STEER: [3]}, "each has to have activations and layer_indices"),
        ({STEER: [{**GOOD, "x": 1}]}, r"\['x'\]: each has to have .*only fields of vllm-lens"),
        ({STEER: [{**GOOD, "activations": DRAWN[0, 0]}]}, "activations have 1 dimensions"),
        ({STEER: [{**GOOD, "position_indices": [1]}]}, "position_indices with activations .layers"),
        ({STEER: [{**GOOD, "layer_indices": [1, 2]}]}, "a row for each of the 2 layers"),
        ({STEER: [{**GOOD, "layer_indices": 1}]}, "layer_indices=1: has to be a list"),
        ({STEER: [{"activations": DRAWN[:2, 0], "layer_indices": [1, 1]}]}, "has a layer twice"),
        ({STEER: [{"activations": DRAWN[:1], "layer_indices": [1], "position_indices": [1]}]},
         "has to be 4 different positions"),
        ({STEER: [{**GOOD, "activations": {"data": "x"}}]}, "not a tensor of vllm-lens' JSON"),
        ({STEER: [{**GOOD, "activations": {**as_json(DRAWN), "shape": [9]}}]}, "not a tensor of"),
        ({STEER: [{**GOOD, "activations": {**as_json(DRAWN), "shape": [1 << 40]}}]}, "bytes"),
        ({STEER: [{**GOOD, "activations": {**as_json(DRAWN), "original_dtype": "torch.int8"}}]},
         "has to be one of float32"),
        ({STEER: [{**GOOD, "activations": DRAWN[:1, 0] / 0}]}, "has to be finite"),
        ({"apply_hooks": [1]}, "apply_hooks.*it runs code of the request"),
        ({"output_qk": True}, "output_qk.*queries and keys are not returned"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(extra)


def test_what_the_engine_refuses(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    with engine(folder) as llm:
        for extra, more, message in (
            ({ROWS: [4]}, {}, r"\[4\]: has to be true, or a list of layers from 0 to 3"),
            ({ROWS: [-1]}, {}, r"\[-1\]: has to be true"),
            ({ROWS: []}, {}, r"\[\]: has to be true"),
            ({ROWS: [True]}, {}, r"\[True\]: has to be true"),
            ({ROWS: "x"}, {}, "it is not JSON"),
            ({ROWS: [1]}, {"n": 2, "temperature": 1}, "with n=2: ask for one answer"),
            ({STEER: [{**GOOD, "layer_indices": [4]}]}, {}, "layers=5: has to be a layer id from"),
            ({STEER: [{**GOOD, "activations": DRAWN[:1, 0, :5]}]}, {}, "72 elements, as the str"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(PROMPTS, params(extra, **more))
        with pytest.raises(ValueError, match=r"extract\(\) returns the rows of its layers"):
            list(llm.extract(PROMPTS, layers=[1], sampling_params=params({ROWS: [1]})))
        assert llm.generate(PROMPTS, params())
    with (
        engine(folder, **extraction_config([1], tmp_path)) as llm,
        pytest.raises(ValueError, match="gives rows to its KV connector"),
    ):
        llm.generate(PROMPTS, params({ROWS: [1]}))


@pytest.mark.parametrize(
    "shape", [["a", 1 << 40], [[0], 1 << 40], [2, True], [-1, -72], {"a": 1}, 3]
)
def test_a_shape_is_a_list_of_sizes(shape: Any) -> None:
    activations = {**as_json(torch.ones(1, WIDTH)), "shape": shape}
    with pytest.raises(ValueError, match="is not a list of sizes"):
        params({STEERING: [{"activations": activations, "layer_indices": [1]}]})


def test_what_vectors_of_one_request_unpack_to_is_bounded() -> None:
    """Zeros that take a few bytes in the request."""
    one = {"activations": as_json(torch.zeros(1, MOST_UNPACKED_BYTES // 12)), "layer_indices": [1]}
    assert len(json.dumps(one)) < 3000
    assert len(params({STEERING: [one] * 3}).steering_specs) == 3
    with pytest.raises(ValueError, match="of this request have more than 67,108,864 bytes"):
        params({STEERING: [one] * 4})
    with pytest.raises(ValueError, match="list of steering vectors, at most 1024"):
        params({STEERING: [one] * 1025})
    with pytest.raises(ValueError, match="has to be a list of layers"):
        params({STEERING: [{**one, "layer_indices": [1 << 61]}]})

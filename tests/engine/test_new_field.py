"""One more thing that is kept of a token is one more field: here the length of its stream.

It is made in this file alone. It arrives in every way that hidden states do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    load_hidden_states,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states import HiddenStatesDataset, HiddenStatesError, HiddenStatesSample
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.verify import verify_dataset
from vllm.v1.rows.fields import find_field
from vllm.v1.rows.fields.layout import Cells, Field, FieldFacts, TensorForm

Checkpoint = Callable[..., Path]
MODULE = "tests.engine.test_new_field"
FIELD = f"{MODULE}:StreamNorm"
LENGTHS = [5, 33, 70, 1, 130, 17]


@dataclass(frozen=True)
class StreamNorm(Field):
    """The length of the stream in the middle of the model, float32 [tokens, 1]."""

    name: ClassVar[str] = "stream_norm"
    tensor_names: ClassVar[tuple[str, ...]] = ("stream_norm",)
    constant_names: ClassVar[tuple[str, ...]] = ("stream_norm_layer",)

    layer_id: int

    @classmethod
    def make(cls, facts: FieldFacts) -> Self:
        return cls(facts.num_hidden_layers // 2)

    @classmethod
    def deepest_layer(cls, num_hidden_layers: int) -> int:
        return num_hidden_layers // 2

    @property
    def cells(self) -> Cells:
        return Cells(torch.float32, 1, 1)

    @property
    def boundaries(self) -> frozenset[int]:
        return frozenset({self.layer_id})

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, residual = values
        stream = hidden if residual is None else hidden + residual
        return stream.float().norm(dim=-1, keepdim=True), None

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        return {"stream_norm": TensorForm(torch.float32, (1,))}

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"stream_norm": cells.flatten(1).contiguous()}

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        bad = (~(tensors["stream_norm"] > 0)).nonzero()
        if not len(bad):
            return None
        message = f"the stream of token {positions[int(bad[0, 0])]} has no length"
        return Failure(FailureKind.STEP_FAILED, message)

    @property
    def constants(self) -> Mapping[str, Sequence[int]]:
        return {"stream_norm_layer": [self.layer_id]}


def norms(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().norm(dim=-1, keepdim=True)


def check(samples: Sequence[Any], streams: Sequence[torch.Tensor]) -> None:
    """streams: those of whole prompts in the middle of the model."""
    assert len(samples) == len(streams)
    for sample, stream in zip(samples, streams, strict=True):
        assert isinstance(sample, HiddenStatesSample)
        found = sample.tensors["stream_norm"]
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, norms(stream)[sample.positions], rtol=1e-5, atol=0)
        assert list(sample.constants["stream_norm_layer"]) == [2]


def middle_streams(folder: Path, prompts: list[Any]) -> list[torch.Tensor]:
    with engine(folder) as llm:
        return [s.hidden_states[:, 0] for s in llm.extract(prompts, [2], ordered=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_have_it(family: str, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Over chunks, for chosen positions, as fp8, with rows from below its layer and from above."""
    folder = checkpoint(family, dtype=dtype)
    prompts = random_prompts(31, LENGTHS)
    streams = middle_streams(folder, prompts)
    with engine(folder, row_fields=[FIELD], max_num_batched_tokens=19) as llm:
        for layers, options in (
            ([1], {}),
            ([2, 0, 4], {"dtype": "fp8"}),
            ([3], {"positions": "every:3", "dtype": "float16"}),
            ([1], {"positions": [-1, 0, -1]}),
            ([1], {"pooling": "last"}),
        ):
            check(list(llm.extract(prompts, layers, ordered=True, **options)), streams)
    with engine(folder) as llm:
        (plain,) = llm.extract(prompts[:1], [1])
        assert "stream_norm" not in plain.tensors


def test_over_preemption(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    prompts = random_prompts(32, LENGTHS * 4)
    streams = middle_streams(folder, prompts)
    small = {"kv_cache_memory_bytes": 220_000, "max_model_len": 160}
    with engine(folder, row_fields=[FIELD], long_prefill_token_threshold=16, **small) as llm:
        check(list(llm.extract(prompts, [4], ordered=True)), streams)
        assert core_of(llm).stats().num_preemptions


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_have_it(
    family: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Also of tokens that were found in the prefix cache, and in a pool that preempts."""
    folder = checkpoint(family, dtype=dtype)
    prompts = random_prompts(33, LENGTHS)
    streams = middle_streams(folder, prompts)
    some, more = {"llama": (0, 90_000), "qwen3_5": (200_000, 37_500)}[family]
    pool_bytes = some + more * dtype.itemsize
    small = {"kv_cache_memory_bytes": pool_bytes, "max_model_len": 180}
    for options in ({}, small):
        config = extraction_config([1, 2], tmp_path)
        chunks = {"row_fields": [FIELD], "max_num_batched_tokens": 64}
        with engine(folder, **chunks, **options, **config) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
                for output, stream in zip(outputs, streams, strict=True):
                    assert output.kv_transfer_params is not None, output.outputs[0].stop_reason
                    tensors = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
                    assert torch.equal(tensors["hidden_states"][:, 1], stream)
                    torch.testing.assert_close(tensors["stream_norm"], norms(stream))
            if options:
                assert core_of(llm).stats().num_preemptions
            else:
                assert outputs[4].num_cached_tokens
    for sample in HiddenStatesDataset(tmp_path):
        assert list(sample.constants["stream_norm_layer"]) == [2]
        assert len(sample.tensors["stream_norm"]) == len(sample.token_ids)
    assert list(verify_dataset(str(tmp_path))) == []


def test_another_process_hands_it_over(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    prompts = random_prompts(34, LENGTHS)
    streams = middle_streams(folder, prompts)

    async def extract() -> list[Any]:
        args = AsyncEngineArgs(str(folder), row_fields=[FIELD], max_model_len=256)
        engine = AsyncLLM.from_engine_args(args)
        try:
            return [s async for s in engine.extract(prompts, [1], ordered=True)]
        finally:
            await engine.shutdown()

    check(asyncio.run(extract()), streams)


@pytest.mark.parametrize("fmt", ["sharded", "files"])
def test_datasets_have_it(fmt: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Written by ``vllm extract``, read, verified, converted to another format and dtype."""
    folder = checkpoint("llama")
    prompts = random_prompts(35, LENGTHS)
    streams = middle_streams(folder, prompts)
    lines = [json.dumps({"input_ids": prompt["prompt_token_ids"]}) for prompt in prompts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ExtractOptions(
        input=[str(tmp_path / "in.jsonl")],
        output=str(tmp_path / "out"),
        layers="0,last",
        format=fmt,
        shard_size_gib=2e-5,
        positions="every:2",
    )
    args = EngineArgs(str(folder), row_fields=[FIELD], max_model_len=256)
    assert run_job(options, args) == 0
    check(list(HiddenStatesDataset(tmp_path / "out", verify="first_read")), streams)
    assert list(verify_dataset(str(tmp_path / "out"))) == []
    convert_dataset(str(tmp_path / "out"), str(tmp_path / "other"), "sharded", "fp8")
    check(list(HiddenStatesDataset(tmp_path / "other")), streams)
    with pytest.raises(ValueError, match="row_fields: "):  # another field is another dataset
        run_job(options, EngineArgs(str(folder), max_model_len=256))


def test_values_that_cannot_be_right_are_not_served(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(checkpoint("llama"), row_fields=[FIELD]) as llm:
        field = find_field(FIELD)
        monkeypatch.setattr(field, "encode", lambda self, hidden, _: (hidden[:, :1] * 0, None))
        with pytest.raises(HiddenStatesError, match="the stream of token 0 has no length"):
            list(llm.extract(random_prompts(36, [9]), [1]))
        monkeypatch.setattr(field, "boundaries", frozenset({7}))
        with pytest.raises(HiddenStatesError, match=r"'stream_norm': .* \[7\] for 0 of 9 tokens"):
            list(llm.extract(random_prompts(36, [9]), [1]))
        monkeypatch.undo()
        (sample,) = llm.extract(random_prompts(36, [9]), [1])
        assert (sample.tensors["stream_norm"] > 0).all()


class WithoutFields(ExampleHiddenStatesConnector):
    """A connector that takes hidden states alone."""

    keeps = frozenset()


def test_what_cannot_be_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(checkpoint("llama"))
    for name, match in (
        ("nowhere:Field", "row_fields: 'nowhere:Field' cannot be imported"),
        (f"{MODULE}:WithoutFields", "is not a subclass of"),
        ("vllm.v1.rows.fields.logprobs:TopLogprobs", "has no method make"),
        ("StreamNorm", "name a field as 'module:Class'"),
    ):
        with pytest.raises(ValueError, match=match):
            EngineArgs(folder, row_fields=[name]).create_engine_config()
    config = extraction_config([1], tmp_path)
    config["kv_transfer_config"] |= {
        "kv_connector": "WithoutFields",
        "kv_connector_module_path": MODULE,
    }
    with pytest.raises(ValueError, match="keeps no stream_norm besides hidden states"):
        EngineArgs(folder, row_fields=[FIELD], **config).create_engine_config()
    with (
        engine(Path(folder), row_fields=[FIELD]) as llm,
        pytest.raises(ValueError, match=r"pooling='mean' with row_fields=\['tests.*: there is no"),
    ):
        list(llm.extract([[1, 2]], [1], pooling="mean"))

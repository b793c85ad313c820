"""The engine with the kernels of CUDA, in Triton's interpreter: rows and tokens of transformers.

What this leaves out is what needs a card: streams, graphs, pinned memory (``tests/gpu``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_calls import triton_kernels
from triton_device import DEVICE, HAS_TRITON

if not HAS_TRITON or DEVICE != "cpu":
    pytest.skip("for Triton's interpreter, without a card", allow_module_level=True)

from test_flashinfer_attention import DecodeWrapper, Wrapper

from tests.engine.harness import core_of, engine, extraction_config, greedy, rows_of
from tests.grids import grid
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import Reference, reference_run, relative_error
from tests.worker.test_recorded_steps import Recorder
from vllm.ops import backends
from vllm.ops.attention import paged_attention
from vllm.ops.operation import use_sources
from vllm.ops.sources import find_source
from vllm.platforms.cpu import CpuPlatform

LAYERS = [0, 1, 2]
PROMPTS = [[(7 * n * n + 3 * n + first) % 300 for n in range(length)]
           for first, length in ((1, 19), (2, 70), (3, 3))]  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {  # few heads: each is a program that is interpreted
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
    },
}


@pytest.fixture(autouse=True)
def _cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every kernel of CUDA, on the CPU."""
    triton = triton_kernels().source
    use_sources(lambda device_type: triton)
    monkeypatch.setattr(CpuPlatform, "recurrent_chunk_tokens", 64)
    yield
    use_sources(find_source)


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Reference]]:
    """A checkpoint, and what transformers makes of each prompt and its greedy tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param, tokenizer=False, **SHAPES[request.param])
    references = []
    for prompt in PROMPTS:
        token_ids = list(prompt)
        for _ in range(3):
            token_ids.append(int(reference_run(folder, token_ids).logits[-1].argmax()))
        references.append(reference_run(folder, token_ids))
    return folder, references


@pytest.mark.parametrize(
    ("case", "way"),
    grid(
        SHAPES,
        ["at once", "in chunks", "bfloat16"],
        by_day=[
            ("mistral", "in chunks"),
            ("qwen3_5", "bfloat16"),
        ],
    ),
    indirect=["case"],
)
def test_rows_and_tokens(case: tuple[Path, list[Reference]], way: str, tmp_path: Path) -> None:
    """In one step; in chunks, then decoding as it is recorded on a card; with tensor cores."""
    folder, references = case
    recorder = Recorder()
    arguments: dict[str, Any] = {
        "dtype": "bfloat16" if way == "bfloat16" else "float32",
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64 if way == "in chunks" else 512,
        "async_scheduling": True,
        **extraction_config(LAYERS, tmp_path),
    }
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine(folder, **arguments) as llm:
        runner = core_of(llm).executor.worker.model_runner
        assert paged_attention.is_overridden("cpu")
        if way == "in chunks":
            runner.record_decode_steps(recorder)
        outputs = llm.generate(inputs, greedy(3), use_tqdm=False)
    assert bool(recorder.batch_sizes) == (way == "in chunks")
    for output, reference in zip(outputs, references, strict=True):
        rows = rows_of(output).float()
        predicted = reference.logits.argmax(-1)[len(rows) - 1 : len(rows) + 2]
        if way != "bfloat16":
            assert list(output.outputs[0].token_ids) == predicted.tolist()
        if way == "bfloat16":
            theirs = reference_run(folder, output.prompt_token_ids, torch.bfloat16).streams
        for column, layer in enumerate(LAYERS):
            expected = reference.streams[layer][: len(rows)]
            tolerance = 1e-4
            if way == "bfloat16":
                tolerance = 1.5 * relative_error(theirs[layer], expected)
            assert relative_error(rows[:, column], expected) <= tolerance


@pytest.mark.parametrize("is_recorded", [False, True])
def test_recorded_steps_are_never_planned(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run before a recording, which compiles the kernels, nor what is recorded."""
    names = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", names)
    monkeypatch.setattr(Wrapper, "planned", [])
    backends._flashinfer.cache_clear()
    folder = make_checkpoint(tmp_path, "mistral", tokenizer=False, num_hidden_layers=2, head_dim=64)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 96, "max_num_seqs": 2}
    recorder = Recorder()
    with engine(folder, **options) as llm:
        runner = core_of(llm).executor.worker.model_runner
        for layer in runner._cache_layers.values():
            layer.attention_backend = "FLASHINFER"
        if is_recorded:
            runner.record_decode_steps(recorder)
            assert not Wrapper.planned
        prompt = {"prompt_token_ids": PROMPTS[0]}
        (output,) = llm.generate([prompt], greedy(5), use_tqdm=False)
    backends._flashinfer.cache_clear()
    assert recorder.batch_sizes == ([1] * 4 if is_recorded else [])
    assert [wrapper.is_decode for wrapper in Wrapper.planned] == (
        [False] if is_recorded else [False] + [True] * 4
    )
    generated = list(output.outputs[0].token_ids)
    logits = reference_run(folder, [*PROMPTS[0], *generated[:-1]]).logits
    assert logits[len(PROMPTS[0]) - 1 :].argmax(-1).tolist() == generated

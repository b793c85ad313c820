"""The layer "norm": rows of the state after the final norm, as the LM head reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.engine.harness import (
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models.checkpoints import make_checkpoint
from tests.models.families import SLICE
from tests.models.oracle import reference_run, relative_error
from vllm.entrypoints.cli.main import main
from vllm.hidden_states import (
    ExtractRequest,
    FailedSample,
    HiddenStatesDataset,
    HiddenStatesSample,
)

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(92, [1, 17, 40, 97])
WITHOUT_NORM = {"openai_gpt"}


@pytest.mark.parametrize("family", SLICE)
def test_it_is_what_the_head_reads_in_transformers(family: str, checkpoint: Checkpoint) -> None:
    if family in WITHOUT_NORM:
        pytest.skip("it has none")
    folder = checkpoint(family)
    with engine(folder, max_num_batched_tokens=64) as llm:
        samples = list(llm.extract(PROMPTS, layers=["norm", 2, "norm"], ordered=True))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        reference = reference_run(folder, prompt["prompt_token_ids"])
        assert sample.layer_ids == ("norm", 2, "norm")
        rows = sample.hidden_states
        assert relative_error(rows[:, 0], reference.head_input) <= 1e-4
        assert relative_error(rows[:, 1], reference.streams[2]) <= 1e-4
        assert torch.equal(rows[:, 0], rows[:, 2])


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "minicpm3", "mamba2", "deepseek_v3"])
def test_as_a_module_of_transformers(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    with engine(folder, model_impl="transformers") as llm:
        samples = list(llm.extract(PROMPTS, layers="1,norm", ordered=True))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        expected = reference_run(folder, prompt["prompt_token_ids"]).head_input
        assert relative_error(sample.hidden_states[:, 1], expected) <= 1e-4


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_model_without_one_is_named(impl: str, checkpoint: Checkpoint) -> None:
    with engine(checkpoint("openai_gpt"), model_impl=impl) as llm:
        with pytest.raises(ValueError, match=r"OpenAIGPT.* has no state after a final norm"):
            list(llm.extract(PROMPTS, layers=[1, "norm"]))
        (sample,) = llm.extract(PROMPTS[:1], layers=[1])
        assert sample.layer_ids == (1,)


def test_a_head_of_another_width_is_named(tmp_path: Path) -> None:
    """OPT 350M projects what its head reads. Other requests of the step are not concerned."""
    folder = make_checkpoint(tmp_path, "opt", tokenizer=False, hidden_size=72)
    prompts: list[Any] = [ExtractRequest(PROMPTS[1], layers=["norm"]), *PROMPTS[2:]]
    with engine(folder) as llm:
        failed, *others = llm.extract(prompts, layers=[4], on_error="yield", ordered=True)
    assert isinstance(failed, FailedSample)
    assert "its head reads 96 elements of a token, and a row has 72" in failed.reason
    for prompt, sample in zip(PROMPTS[2:], others, strict=True):
        expected = reference_run(folder, prompt["prompt_token_ids"]).streams[4]
        assert isinstance(sample, HiddenStatesSample)
        assert relative_error(sample.hidden_states[:, 0], expected) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_bits_do_not_depend_on_the_batch(family: str, checkpoint: Checkpoint) -> None:
    """Chunks, prefixes, other depths beside it, and positions."""
    folder = checkpoint(family)
    with engine(folder, enable_prefix_caching=False) as llm:
        alone = [next(iter(llm.extract([prompt], layers="norm"))) for prompt in PROMPTS]
    requests = [
        ExtractRequest(prompt, layers=layers, positions=positions)
        for prompt in PROMPTS
        for layers, positions in (("norm", "all"), (1, "all"), (["norm", 0], "last"))
    ]
    with engine(folder, max_num_batched_tokens=32, num_gpu_blocks_override=40) as llm:
        for _ in range(2):
            samples = list(llm.extract(requests, ordered=True))
            for index, whole in enumerate(alone):
                assert torch.equal(samples[3 * index].hidden_states, whole.hidden_states)
                last = samples[3 * index + 2].hidden_states[:, :1]
                assert torch.equal(last, whole.hidden_states[-1:])
                assert samples[3 * index + 1].layer_ids == (1,)


def test_files_and_generated_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    layers: list[Any] = ["norm", 3]
    with engine(folder, **extraction_config(layers, tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, with_output_tokens(5), use_tqdm=False)
        prompt_only = llm.generate(PROMPTS, greedy(0), use_tqdm=False)
    for output, short in zip(outputs, prompt_only, strict=True):
        assert output.prompt_token_ids is not None
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        expected = reference_run(folder, token_ids)
        rows = rows_of(output)
        assert relative_error(rows[:, 0], expected.head_input) <= 1e-4
        assert relative_error(rows[:, 1], expected.streams[3]) <= 1e-4
        assert torch.equal(rows_of(short), rows[: len(output.prompt_token_ids)])
        params = output.kv_transfer_params
        assert params is not None
        with safe_open(params["hidden_states_path"], "pt") as file:
            assert json.loads(file.metadata()["layer_ids"]) == layers
            assert "'norm' is the state after" in file.metadata()["layer_convention"]


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_a_dataset_of_it(dtype: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    source = tmp_path / "input.jsonl"
    ids = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    source.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids))
    output = tmp_path / "out"
    command = ["extract", str(folder), "--input", str(source), "--layers", "2,norm,last"]
    command += ["--output", str(output), "--dtype", "float32", "--storage-dtype", dtype]
    assert main([*command, "--verify", "2"]) == 0
    assert main(["hidden-states", "verify", str(output)]) == 0
    dataset = HiddenStatesDataset(str(output), dtype=torch.float32)
    assert dataset.layer_ids == (2, "norm", 4)
    for sample in dataset:
        expected = reference_run(folder, sample.token_ids.tolist()).head_input
        limit = 1e-4 if dtype == "float32" else 0.5
        assert relative_error(sample.hidden_states[:, 1], expected) <= limit

"""Extracted rows against transformers: every layer asked, every token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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
from vllm.hidden_states import FailedSample
from vllm.v1.rows.fields.fp8 import quantize_rows

Checkpoint = Callable[..., Path]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 257]
LAYERS = [4, 0, 2, 2, 1, 3]


@pytest.mark.parametrize("family", SLICE)
def test_float32_rows_equal_transformers(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(1, LENGTHS)
    with engine(folder, **extraction_config(LAYERS, tmp_path)) as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = reference_run(folder, prompt["prompt_token_ids"])
        rows = rows_of(output)
        assert rows.shape[1] == len(LAYERS)
        for column, layer in enumerate(LAYERS):
            assert relative_error(rows[:, column], reference.streams[layer]) <= 1e-4
        assert output.outputs[0].token_ids[0] == int(reference.logits[-1].argmax())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5", "mamba2", "falcon_h1"])
def test_bfloat16_rows_are_as_exact_as_transformers(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Errors against a float32 run of the same rounded weights, row by row."""
    folder = checkpoint(family, dtype=torch.bfloat16)
    prompts = random_prompts(2, [40, 97, 160])
    with engine(folder, **extraction_config(LAYERS, tmp_path)) as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = rows_of(output)
        assert rows.dtype == torch.bfloat16
        exact = reference_run(folder, prompt["prompt_token_ids"], torch.float32)
        rounded = reference_run(folder, prompt["prompt_token_ids"], torch.bfloat16)
        for column, layer in enumerate(LAYERS):
            if layer == 0:
                assert torch.equal(rows[:, column], rounded.streams[0])
                continue
            expected = exact.streams[layer]
            ours.append((rows[:, column].float() - expected).norm(dim=-1))
            theirs.append((rounded.streams[layer].float() - expected).norm(dim=-1))
    ratios = torch.cat(ours) / torch.cat(theirs)
    assert ratios.median() <= 1.25
    assert ratios.quantile(0.9) <= 1.5


@pytest.mark.parametrize("layer_types", ["fllf", "llll", "ffff", "lflffl", "fl"])
def test_odd_layer_orders(layer_types: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = {"f": "full_attention", "l": "linear_attention"}
    kinds = [names[kind] for kind in layer_types]
    folder = checkpoint("qwen3_5", num_hidden_layers=len(kinds), layer_types=kinds)
    layers = list(range(len(kinds) + 1))
    (prompt,) = random_prompts(3, [83])
    with engine(folder, max_num_batched_tokens=48, **extraction_config(layers, tmp_path)) as llm:
        (output,) = llm.generate([prompt], greedy(), use_tqdm=False)
    reference = reference_run(folder, prompt["prompt_token_ids"])
    rows = rows_of(output)
    for layer in layers:
        assert relative_error(rows[:, layer], reference.streams[layer]) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_5"])
def test_rows_of_output_tokens(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(4, [5, 33])
    with engine(folder, **extraction_config([1, 4], tmp_path)) as llm:
        outputs = llm.generate(prompts, with_output_tokens(20), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)[:-1]
        rows = rows_of(output)
        assert len(rows) == len(tokens) == len(prompt["prompt_token_ids"]) + 19
        reference = reference_run(folder, tokens)
        for column, layer in enumerate([1, 4]):
            assert relative_error(rows[:, column], reference.streams[layer]) <= 1e-4
        # Greedy generation is transformers', token for token.
        start = len(prompt["prompt_token_ids"]) - 1
        assert reference.logits[start:].argmax(-1).tolist() == list(output.outputs[0].token_ids)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_no_tokens_needed_runs_no_layer_above_the_deepest(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(5, [70, 12])
    with engine(folder, **extraction_config([2, 0], tmp_path)) as llm:
        model = llm.llm_engine.engine_core.executor.worker.model_runner.model
        ran: list[int] = []
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
        outputs = llm.generate(prompts, greedy(0), use_tqdm=False)
        assert set(ran) == {0, 1}
        full = llm.generate(prompts, greedy(1), use_tqdm=False)
        assert set(ran) == set(range(len(model.model.layers)))
    for output, deep in zip(outputs, full, strict=True):
        assert list(output.outputs[0].token_ids) == []
        assert output.outputs[0].finish_reason == "length"
        assert torch.equal(rows_of(output), rows_of(deep))


def test_the_file_says_what_it_holds(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    with engine(folder, **extraction_config([3, 1], tmp_path)) as llm:
        (output,) = llm.generate(random_prompts(6, [9]), greedy(), use_tqdm=False)
    assert output.kv_transfer_params is not None
    with safe_open(output.kv_transfer_params["hidden_states_path"], "pt") as file:
        metadata = file.metadata()
    assert metadata["layer_ids"] == "[3, 1]"
    assert metadata["model"] == str(folder)
    assert metadata["dtype"] == "float32"
    assert "before the final norm" in metadata["layer_convention"]


@pytest.mark.parametrize("num_speculative_tokens", [0, 1])
def test_zero_speculative_tokens(
    num_speculative_tokens: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = extraction_config([4], tmp_path)
    config["speculative_config"]["num_speculative_tokens"] = num_speculative_tokens
    with engine(checkpoint("llama"), **config) as llm:
        (output,) = llm.generate(random_prompts(7, [9]), greedy(), use_tqdm=False)
    assert rows_of(output).shape == (9, 1, 72)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_fp8_rows_with_outliers_and_zeros(family: str, tmp_path: Path) -> None:
    """Outliers in one channel, tiny rows, and rows of zeros, which have no scale of their own."""
    folder = make_checkpoint(tmp_path / family, family)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][9] = 0
    weights[name][11, 5] = 3e4
    weights[name][12] *= 1e-6
    save_file(weights, folder / "model.safetensors")
    prompts = [[9], [3, 9, 11, 12] * 9, [12, 9, 11]]
    with engine(folder) as llm:
        exact = list(llm.extract(prompts, [0, 2, -1], on_error="yield"))
        rounded = list(llm.extract(prompts, [0, 2, -1], dtype="fp8", on_error="yield"))
    for prompt, one, other in zip(prompts, exact, rounded, strict=True):
        if isinstance(one, FailedSample):  # a stream of zeros alone stays one
            assert isinstance(other, FailedSample) and prompt == [9]
            continue
        rows = one.hidden_states
        values, scales = quantize_rows(rows)
        assert torch.equal(other.hidden_states.float(), values.float())
        assert torch.equal(other.scales, scales)
        is_zero = torch.tensor(prompt) == 9
        assert not other.rows()[is_zero, 0].any() and (other.scales[is_zero, 0] == 1).all()
        length = rows.norm(dim=-1)
        error = (other.rows(torch.float32) - rows).norm(dim=-1)
        assert (error <= 0.04 * length).all()
        assert rows[torch.tensor(prompt) == 11, 0].abs().max() == 3e4

"""The demo's verdict: right on right values, wrong on wrong ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from demo import LAYERS, Extraction, TransformersReference, compare, report
from demo_checkpoint import demo_checkpoint, load_texts
from example_runner import run_example
from safetensors.torch import load_file, save_file

TEXTS = ["one", "a longer text, still short"]


def test_demo_runs_and_agrees(cache: Path, tmp_path: Path) -> None:
    printed = run_example("demo.py", "--num-texts", "5", "--cache-dir", cache, "--keep", tmp_path)
    assert "every row agrees with transformers" in printed
    files = list(tmp_path.glob("*.safetensors"))
    longest = max(load_file(file)["hidden_states"].shape for file in files)
    assert longest[0] > 512, "the longest text is among a spread of five"
    assert longest[1:] == (len(LAYERS), 256)


@pytest.fixture(scope="module")
def reference(cache: Path) -> TransformersReference:
    return TransformersReference(demo_checkpoint(cache))


@pytest.fixture
def files(reference: TransformersReference, tmp_path: Path) -> list[Path]:
    """Files as the engine would write them, with transformers' own values."""
    paths = []
    for number, text in enumerate(TEXTS):
        expected = reference.run(text)
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(
            {"hidden_states": expected.rows.contiguous(), "token_ids": expected.token_ids},
            paths[-1],
        )
    return paths


def verdict(reference: TransformersReference, files: list[Path]) -> bool:
    checks, seconds = compare(reference, TEXTS, files)
    return report(len(TEXTS), Extraction(files, 1, 1.0), checks, seconds)


def test_right_values_pass(reference: TransformersReference, files: list[Path]) -> None:
    assert verdict(reference, files)


@pytest.mark.parametrize("wrong", [1e-2, math.nan, math.inf])
def test_one_wrong_value_fails(
    reference: TransformersReference, files: list[Path], wrong: float
) -> None:
    tensors = load_file(files[0])
    tensors["hidden_states"][-1, 2, 17] += wrong
    save_file(tensors, files[0])
    assert not verdict(reference, files)


def test_swapped_layers_fail(reference: TransformersReference, files: list[Path]) -> None:
    tensors = load_file(files[1])
    tensors["hidden_states"] = tensors["hidden_states"].flip(1).contiguous()
    save_file(tensors, files[1])
    assert not verdict(reference, files)


def test_missing_rows_and_other_tokens_fail(
    reference: TransformersReference, files: list[Path]
) -> None:
    whole = load_file(files[1])
    save_file({**whole, "hidden_states": whole["hidden_states"][:-1].contiguous()}, files[1])
    with pytest.raises(SystemExit, match="MISMATCH: rows"):
        compare(reference, TEXTS, files)
    save_file({**whole, "token_ids": whole["token_ids"].flip(0).contiguous()}, files[1])
    with pytest.raises(SystemExit, match="MISMATCH: the token ids"):
        compare(reference, TEXTS, files)


def test_reference_has_the_last_layer_before_the_norm(reference: TransformersReference) -> None:
    token_ids = reference.run(TEXTS[1]).token_ids
    with torch.inference_mode():
        output = reference.model(input_ids=token_ids[None], output_hidden_states=True)
    rows = reference.run(TEXTS[1]).rows
    for column, layer_id in enumerate(LAYERS[:-1]):
        torch.testing.assert_close(rows[:, column], output.hidden_states[layer_id][0])
    normed = reference.model.model.norm(rows[:, -1])
    torch.testing.assert_close(normed, output.hidden_states[LAYERS[-1]][0])


def test_texts_are_many_and_of_many_lengths() -> None:
    lengths = [len(text) for text in load_texts()]
    assert len(lengths) >= 24
    assert min(lengths) <= 2
    assert max(lengths) >= 1500


def test_checkpoint_is_reused_and_rebuilt_when_damaged(cache: Path) -> None:
    weights = demo_checkpoint(cache) / "model.safetensors"
    built_at, content = weights.stat().st_mtime_ns, weights.read_bytes()
    demo_checkpoint(cache)
    assert weights.stat().st_mtime_ns == built_at
    weights.write_bytes(content[:-100])
    demo_checkpoint(cache)
    assert weights.read_bytes() == content

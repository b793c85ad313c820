"""``vllm extract --format NAME`` writes the layout of another program directly."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.extract.fake_engine import fake_rows
from tests.extract.job_harness import HIDDEN_SIZE, digests, run, token_lists, write_jsonl
from tests.extract.test_kill import VARYING, in_child
from tests.hidden_states.test_export import EXPORTS
from tests.models.checkpoints import make_checkpoint
from vllm import LLM
from vllm.entrypoints.cli.extract import parse_extract_arguments
from vllm.entrypoints.extract.job import run_job
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.verify import verify_dataset

LISTS = token_lists(3, 30, 12)
OWN = ("settings.json", "index.json", "manifest.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = random.Random(4)
    records = [
        {"input_ids": ids, "loss_mask": [int(rng.random() < 0.6) for _ in ids]} for ids in LISTS
    ]
    return write_jsonl(tmp_path / "data.jsonl", records)


@pytest.mark.parametrize("fmt", EXPORTS)
def test_it_is_what_a_conversion_gives(
    tiny_llama: Path, data: Path, tmp_path: Path, fmt: str
) -> None:
    """The same files, whether rows go straight into the layout or through a dataset."""
    options = {"pack": 8, "layers": "0,3"} if fmt == "saelens" else {}
    needs_norm = fmt in ("specforge-eagle3", "specforge-dspark", "modelopt")
    options |= {"layers": "0,1,3,norm"} if needs_norm else {}
    run(tiny_llama, data, tmp_path / "direct", format=fmt, **options)
    run(tiny_llama, data, tmp_path / "dataset", **options)
    whole = 1 << 30
    convert_dataset(str(tmp_path / "dataset"), str(tmp_path / "b"), fmt, shard_bytes=whole)
    run(tiny_llama, data, tmp_path / "c", format=fmt, shard_size_gib=1.0, **options)
    found, expected = digests(tmp_path / "c"), digests(tmp_path / "b")
    assert {**found, **dict.fromkeys(OWN)} == {**expected, **dict.fromkeys(OWN)}
    assert len(found) > len(OWN)
    assert list(verify_dataset(str(tmp_path / "direct"))) == []
    skipped = [
        one["sample"]
        for folder in ("b", "c")
        for unit in json.loads((tmp_path / folder / "index.json").read_text())["units"]
        for one in unit["skipped"]
    ]
    assert bool(skipped) == (fmt in ("specforge-dflash", "specforge-domino", "specforge-dspark"))
    assert skipped == sorted(skipped[: len(skipped) // 2]) * 2


@pytest.mark.parametrize("fmt", ["modelopt", "huggingface"])
def test_killed_at_random_moments(tiny_llama: Path, data: Path, tmp_path: Path, fmt: str) -> None:
    options = {"format": fmt, "layers": "0,3,norm"}
    undisturbed = tmp_path / "undisturbed"
    status, num_calls = in_child(None, lambda: run(tiny_llama, data, undisturbed, **options))
    assert status == 0
    expected, rng = digests(undisturbed), random.Random(7)
    for moment in sorted(rng.sample(range(num_calls - VARYING), 6)):
        output = tmp_path / f"at_{moment}"
        in_child(moment, lambda out=output: run(tiny_llama, data, out, **options))
        assert run(tiny_llama, data, output, **options) == 0
        assert digests(output) == expected, f"killed before call {moment} of {num_calls}"


def test_a_damaged_file_is_made_again(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    run(tiny_llama, data, output, format="numpy")
    expected = digests(output)
    damaged = sorted(output.glob("*.npy"))[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    run(tiny_llama, data, output, format="numpy")
    assert digests(output) == expected


def test_texts_have_no_mask_however_they_were_made(tiny_llama: Path, tmp_path: Path) -> None:
    """In one pass, made again alone, and converted: each token counts, and no file says so."""
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": f"Text {i}."} for i in range(4)])
    direct, dataset, converted = tmp_path / "direct", tmp_path / "dataset", tmp_path / "converted"
    run(tiny_llama, data, direct, format="modelopt", layers="0,3,norm")
    expected = digests(direct)
    (direct / "00000002.pt").unlink()
    run(tiny_llama, data, direct, format="modelopt", layers="0,3,norm")
    assert digests(direct) == expected
    run(tiny_llama, data, dataset, layers="0,3,norm")
    convert_dataset(str(dataset), str(converted), "modelopt")
    for folder in (direct, converted):
        for number in range(4):
            stored = torch.load(folder / f"{number:08d}.pt", weights_only=True)
            assert "loss_mask" not in stored, folder


def test_values_of_arrays(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    run(tiny_llama, data, tmp_path / "output", format="numpy", shard_size_gib=1.0)
    rows = np.load(tmp_path / "output" / "shard-00000.hidden_states.npy", mmap_mode="r")
    expected = [fake_rows(ids, (0, 3, 4), HIDDEN_SIZE) for ids in LISTS]
    assert np.array_equal(rows, torch.cat(expected).numpy())


def test_default_layers_on_the_real_engine(tmp_path: Path) -> None:
    """EAGLE-3's three layers and the state after the final norm, as the engine computes them."""
    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=8)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "one two three"}, {"text": "four"}])
    flags = ["--input", str(data), "--output", str(tmp_path / "out"), "--max-model-len", "64"]
    parsed = parse_extract_arguments([str(model), *flags, "--format", "specforge-eagle3"])
    assert run_job(parsed.options, parsed.engine) == 0
    with LLM(str(model), max_model_len=64) as llm:
        samples = list(llm.extract(["one two three", "four"], layers=[2, 4, 5, "norm"]))
    for number, sample in enumerate(samples):
        found = torch.load(tmp_path / "out" / f"{number:08d}.ckpt", weights_only=True)
        rows = sample.hidden_states
        assert torch.equal(found["input_ids"], sample.token_ids)
        assert torch.equal(found["aux_hidden_state"][0], rows[:, :3].flatten(1))
        assert torch.equal(found["hidden_state"][0], rows[:, 3])
        assert found["loss_mask"].tolist() == [1] * len(rows)


def test_default_layers_of_speculators(tmp_path: Path) -> None:
    """The command of docs/recipes.md names no layers."""
    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=8)
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [3, 1, 4]}])
    run(model, data, tmp_path / "out", format="speculators", layers=None)
    (sample,) = HiddenStatesDataset(tmp_path / "out")
    assert sample.layer_ids == (2, 4, 5, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "zip"}, "format='zip': use sharded, files, speculators, huggingface, "),
        ({"format": "numpy", "layers": None}, "--layers is missing"),
        ({"format": "numpy", "id_column": "id"}, "id_column='id' is not valid"),
        ({"format": "numpy", "append": True}, "append=True is not valid; rows of format='numpy'"),
        ({"format": "numpy", "verify": 1}, "verify=1 is not valid; rows of format='numpy' are not"),
        ({"format": "numpy", "storage_dtype": "fp8"}, "dtype=fp8: it can store float32, float16"),
        ({"format": "saelens"}, "samples of any length.*--layers 0,3,4 --pack 1024 --format sael"),
        (
            {"format": "modelopt", "layers": "0,3"},
            "it needs norm, too; make one with",
        ),
        ({"format": "modelopt", "layers": None}, "are not different ids of a model of 4 layers"),
        ({"format": "modelopt", "layers": "0,3,norm", "positions": "last"}, "every token of a sam"),
        (
            {"format": "modelopt", "layers": "0,3,norm", "top_logprobs": 2},
            "not store token_logprobs",
        ),
    ],
)
def test_what_is_refused(
    tiny_llama: Path, data: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny_llama, data, tmp_path / "output", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "output").exists()


def test_a_dataset_of_the_same_name_is_refused(
    tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    run(tiny_llama, data, tmp_path / "output")
    with pytest.raises(ValueError, match="format: 'sharded' there, 'numpy' now"):
        run(tiny_llama, data, tmp_path / "output", format="numpy")
    assert len(HiddenStatesDataset(tmp_path / "output")) == len(LISTS)

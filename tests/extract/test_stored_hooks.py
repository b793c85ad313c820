"""Values at hook points in datasets: those of LLM.extract, and of transformers' modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.engine.harness import engine
from tests.extract.job_harness import digests, rewrite, token_lists, write_token_ids
from tests.models.oracle import ModuleOracle, place_of, relative_error
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import load_llm, run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states import (
    HiddenStatesDataset,
    HiddenStatesSample,
    pack_samples,
    pad_samples,
)
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.inspection import describe
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.verify import verify_dataset
from vllm.sampling_params import SamplingParams

LISTS = token_lists(77, 9)
HOOKS = (
    "model.layers.1.self_attn",
    "blocks.0.hook_resid_mid",
    "blocks.1.attn.hook_z",
    "blocks.0.mlp.hook_out",
    "blocks.1.hook_resid_post",
)
Extract = Callable[..., Path]


@pytest.fixture(scope="module")
def extract(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Extract:
    """Run a job with a real engine; returns its folder."""
    folder = tmp_path_factory.mktemp("data")
    data = write_token_ids(folder / "data.jsonl", LISTS)

    def run(
        output: Path | None = None,
        engine: dict[str, Any] | None = None,
        status: int = 0,
        **more: Any,
    ) -> Path:
        output = output or tmp_path_factory.mktemp("job") / "out"
        merged: dict[str, Any] = {
            "input": [str(data)],
            "output": str(output),
            "layers": "1",
            "hooks": ", ".join(HOOKS),
            "shard_size_gib": 5e-5,
            **more,
        }
        args = EngineArgs(model=str(tiny_llama), max_num_batched_tokens=48, **(engine or {}))
        assert run_job(ExtractOptions(**merged), args, load_llm) == status
        return output

    return run


@pytest.fixture(scope="module")
def made(extract: Extract) -> Path:
    return extract()


def of_engine(model: Path, **options: Any) -> list[HiddenStatesSample]:
    prompts = [{"prompt_token_ids": one} for one in LISTS]
    with engine(model, max_num_batched_tokens=48) as llm:
        return list(llm.extract(prompts, **{"layers": [1], "hooks": list(HOOKS), **options}))


def compare(folder: Path, expected: list[HiddenStatesSample], names: Any = HOOKS) -> None:
    assert list(verify_dataset(str(folder))) == []
    dataset = HiddenStatesDataset(folder, verify="first_read")
    assert len(dataset) == len(expected)
    for sample, right in zip(dataset, expected, strict=True):
        assert {*sample.activations} == {*names}
        assert torch.equal(sample.positions, right.positions)
        for name in names:
            value = sample.activations[name]
            assert value.dtype is right.activations[name].dtype
            assert torch.equal(value, right.activations[name]), name


def test_columns_for_saelens(extract: Extract, tmp_path: Path) -> None:
    """A column for each hook point, written directly or converted; others refuse them."""
    hooks = HOOKS[1:]
    options = {"pack": 8, "layers": "0", "hooks": ",".join(hooks)}
    direct, dataset = extract(format="saelens", **options), extract(**options)
    convert_dataset(str(dataset), str(tmp_path / "b"), "saelens")
    tables = [
        pa.concat_tables(
            pa.ipc.open_stream(file).read_all() for file in sorted(folder.glob("*.arrow"))
        )
        for folder in (direct, tmp_path / "b")
    ]
    assert tables[0].to_pylist() == tables[1].to_pylist()
    assert {*tables[0].column_names} == {"blocks.0.hook_resid_pre", *hooks, "token_ids"}
    for row, sample in zip(tables[0].to_pylist(), HiddenStatesDataset(dataset), strict=True):
        for name in hooks:
            assert torch.equal(torch.tensor(row[name]), sample.activations[name])
    with pytest.raises(ValueError, match=r"format=modelopt does not store blocks.0.hook_resid_mid"):
        extract(format="modelopt", layers="0,1,2,norm", hooks=hooks[0])


@pytest.mark.parametrize("form", ["sharded", "files", "speculators"])
def test_they_are_those_of_the_engine_and_of_transformers(
    form: str, extract: Extract, tiny_llama: Path
) -> None:
    layers = {"layers": "0,1,2,last"} if form == "speculators" else {}
    folder = extract(format=form, **layers)
    compare(folder, of_engine(tiny_llama))
    oracle = ModuleOracle(tiny_llama)
    names = {"model.layers.1.self_attn": "self_attn", "blocks.0.mlp.hook_out": "mlp"}
    places = {name: (place_of(name) or (0, ""))[0] for name in names}
    for sample in HiddenStatesDataset(folder):
        wanted = {name: (places[name], names[name]) for name in names}
        seen = oracle.run(sample.token_ids.tolist(), wanted.values())
        for name, place in wanted.items():
            assert relative_error(sample.activations[name], seen[place][1]) <= 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "every:3"},
        {"positions": "last", "storage_dtype": "fp8"},
        {"pooling": "mean", "storage_dtype": "fp8"},
        {"pooling": "mean", "storage_dtype": "float16"},
        {"pooling": "last", "top_logprobs": 3},
        {"storage_dtype": "bfloat16"},
    ],
)
def test_with_other_options(options: dict[str, Any], extract: Extract, tiny_llama: Path) -> None:
    asked = dict(options)
    asked["dtype"] = asked.pop("storage_dtype", "auto")
    compare(extract(**options), of_engine(tiny_llama, **asked))


def test_hooks_alone(extract: Extract, tiny_llama: Path, tmp_path: Path) -> None:
    """No layer is named: rows have no hidden states, and everything else works."""
    folder = extract(layers=None, hooks="model.layers.0.mlp", format="files")
    expected = of_engine(tiny_llama, layers=None, hooks=["model.layers.0.mlp"])
    compare(folder, expected, ["model.layers.0.mlp"])
    converted = tmp_path / "shards"
    convert_dataset(str(folder), str(converted), "sharded")
    compare(converted, expected, ["model.layers.0.mlp"])
    dataset = HiddenStatesDataset(converted)
    assert dataset.layer_ids == () and dataset[0].hidden_states.shape[1] == 0
    (rows,) = dataset.iter_rows(10**6)
    right = torch.cat([one.activations["model.layers.0.mlp"] for one in expected])
    assert torch.equal(rows.tensors["model.layers.0.mlp"], right)
    assert len(rows.rows) == len(right)
    assert "layer ids           []" in describe(dataset)
    for fmt, suffix in (("huggingface", "arrow"), ("parquet", "parquet")):
        convert_dataset(str(folder), str(tmp_path / fmt), fmt)
        path = tmp_path / fmt / f"data-00000.{suffix}"
        table = pq.read_table(path) if suffix == "parquet" else pa.ipc.open_stream(path).read_all()
        assert "hidden_states" not in table.column_names
        column = table["model.layers.0.mlp"].to_pylist()
        assert torch.equal(torch.tensor([row for rows in column for row in rows]), right.float())


def test_of_prompt_and_output(extract: Extract, tiny_llama: Path) -> None:
    folder = extract(generate=True, max_tokens=5, temperature=0.0, layers="2,norm")
    params = SamplingParams(max_tokens=5, temperature=0.0)
    compare(folder, of_engine(tiny_llama, layers=[2], sampling_params=params))


def test_windows_and_workers(extract: Extract) -> None:
    one = extract(pack=7, pack_separator="5")
    two = extract(pack=7, pack_separator="5", engine={"data_parallel_size": 2})
    assert digests(one) == digests(two)
    for sample in HiddenStatesDataset(one):
        assert sample.activations[HOOKS[0]].shape[0] == 7


def test_settings_batches_and_summary(made: Path) -> None:
    settings = DatasetSettings.read(str(made))
    assert settings.request_options == {"hooks": list(HOOKS)}
    samples = list(HiddenStatesDataset(made))
    widths = [samples[0].activations[name].shape[1] for name in HOOKS]
    assert settings.row_bytes == 4 * (settings.hidden_size + sum(widths))
    summary = describe(HiddenStatesDataset(made))
    assert f"blocks.0.hook_resid_mid float32 [{settings.hidden_size}]" in summary
    padded, packed = pad_samples(samples), pack_samples(samples)
    for name in HOOKS:
        each = torch.cat([sample.activations[name] for sample in samples])
        assert torch.equal(packed.tensors[name], each)
        assert torch.equal(padded.tensors[name][padded.mask], each)


def test_converted_there_and_back(made: Path, tmp_path: Path) -> None:
    files, plain, back = tmp_path / "files", tmp_path / "plain", tmp_path / "back"
    convert_dataset(str(made), str(files), "files", "fp8")
    plain.mkdir()
    for path in files.glob("*.safetensors"):
        shutil.copy(path, plain / path.name)
    convert_dataset(str(plain), str(back), "sharded")
    right = list(HiddenStatesDataset(made))
    for folder in (files, plain, back):
        for found, expected in zip(HiddenStatesDataset(folder), right, strict=True):
            for name in HOOKS:
                assert torch.equal(found.activations[name], expected.activations[name])


@pytest.mark.parametrize("form", ["sharded", "files"])
def test_repaired_appended_and_resumed(form: str, extract: Extract, tmp_path: Path) -> None:
    made, broken = extract(format=form), tmp_path / "broken"
    shutil.copytree(made, broken)
    victim = sorted(broken.glob("*.safetensors"))[1]
    content = bytearray(victim.read_bytes())
    content[-300] ^= 1  # in the last of the tensors
    victim.write_bytes(content)
    assert any(victim.name in line for line in verify_dataset(str(broken)))
    extract(broken, format=form)
    assert digests(broken) == digests(made)
    more = write_token_ids(tmp_path / "more.jsonl", LISTS[:2])
    extract(broken, format=form, input=[str(more)], append=True)
    assert list(verify_dataset(str(broken))) == []
    *_, last = HiddenStatesDataset(broken)
    right = HiddenStatesDataset(made)[1]
    assert torch.equal(last.activations[HOOKS[2]], right.activations[HOOKS[2]])
    with pytest.raises(ValueError, match="hooks: ") as error:
        extract(made, format=form, hooks=HOOKS[0])
    assert "holds a dataset of other settings" in str(error.value)


def test_long_names(extract: Extract, tiny_llama: Path) -> None:
    """The part of a path before the layer's number does not matter, and can be long."""
    name = f"{'é' * 2000}.layers.1.mlp"
    folder = extract(hooks=name)
    compare(folder, of_engine(tiny_llama, hooks=[name]), [name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": "blocks.1.hook_at_out"}, "no hook point 'blocks.1.hook_at_out'; the nearest"),
        ({"hooks": "blocks.9.hook_attn_out"}, "no hook point 'blocks.9.hook_attn_out'"),
        (
            {"hooks": "attention"},
            "hooks=['attention']: 'attention' is not the name of",
        ),
        ({"hooks": ""}, "hooks=['']: '' is not the name of a hook point"),
        ({"hooks": f"{HOOKS[0]},,{HOOKS[1]}"}, "'' is not the name of a hook point"),
        ({"hooks": None, "layers": None}, "--layers is missing"),
        ({"layers": None, "format": "speculators"}, "format='speculators' trains from hidden"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, extract: Extract) -> None:
    with pytest.raises(ValueError) as error:
        extract(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_with_transformers(
    dtype: str,
    extract: Extract,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = extract(engine={"dtype": dtype}, verify=5, layers="0,last")
    lines = capsys.readouterr().out.splitlines()
    for name in HOOKS:
        (line,) = [one for one in lines if one.strip().startswith(name) and "hooks" not in one]
        is_module = name in ("model.layers.1.self_attn", "blocks.0.mlp.hook_out", HOOKS[4])
        assert ("within" if is_module else "not compared") in line

    def change(sample: HiddenStatesSample) -> HiddenStatesSample:
        return sample.with_tensors(**{HOOKS[3]: sample.tensors[HOOKS[3]] * 1.2})

    other = rewrite(made, tmp_path / "other", change)
    assert list(verify_dataset(str(other))) == []
    capsys.readouterr()
    found = extract(other, engine={"dtype": dtype}, status=1, verify=5, layers="0,last")
    lines = capsys.readouterr().out.splitlines()
    assert found == other and sum("BEYOND" in one and HOOKS[3] in one for one in lines) == 1


def test_a_comparison_of_nothing_is_no_success(
    extract: Extract, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(status=1, verify=2, layers=None, hooks="blocks.0.hook_resid_mid, blocks.1.attn.hook_z")
    printed = capsys.readouterr().out
    assert printed.count("not compared") == 2 and printed.endswith("nothing was compared\n")


def test_verify_finds_values_that_are_not_finite(made: Path, tmp_path: Path) -> None:
    """The writer does not see them, so that checksums are right."""

    def change(sample: HiddenStatesSample) -> HiddenStatesSample:
        return sample.with_tensors(**{HOOKS[1]: sample.tensors[HOOKS[1]] / 0})

    other = rewrite(made, tmp_path / "other", change)
    assert any(f"{HOOKS[1]} of row 0 is not finite" in one for one in verify_dataset(str(other)))


_WRITE_A_SHARD = """
import json, resource, sys, torch
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import open_unit_writer

names = [f"blocks.{layer}.hook_attn_out" for layer in range(8)]
forms = {name: ("float32", [1024]) for name in names}
settings = DatasetSettings("m", (0,), 8, 1024, "float32", "all", "sharded", 1 << 30, 1, 100, "",
    options={"request_tensors": json.dumps(forms)})
rows = torch.ones(256, 1024)
tensors = {"hidden_states": rows[:, None], **dict.fromkeys(names, rows)}
ids = torch.arange(256)
sample = HiddenStatesSample(0, "", ids, ids, tensors, (0,))
with open_unit_writer(sys.argv[1], 0, settings) as writer:
    writer.append(sample, 0, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1, 40):
        writer.append(sample, number, number)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    writer.commit()
print(grown)
"""


def test_a_shard_is_not_held_in_memory(tmp_path: Path) -> None:
    """A shard of 320 MiB of activations: they go to the disk as they come."""
    command = [sys.executable, "-c", _WRITE_A_SHARD, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 64 << 10, "KiB"
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size > 40 * 256 * 4096 * 9

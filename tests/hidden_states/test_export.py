"""The layouts of other programs, value by value, and conversions that end early."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.grids import at_night, grid
from tests.hidden_states.sample_data import folder_bytes
from vllm.entrypoints.cli.hidden_states import hidden_states
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.exporters import format_names
from vllm.hidden_states.manifest import merge_units, start_dataset
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.names import FORMATS
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import open_unit_writer, plan_units, writer_of
from vllm.hidden_states.verify import verify_dataset
from vllm.utils.boundaries import NORM, LayerId
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES

HIDDEN_SIZE = 6
NUM_LAYERS = 10
EAGLE = (2, 5, 7)
LENGTHS = (5, 1, 9, 12, 3, 7, 2)
EXPORTS = sorted({*format_names()} - {*FORMATS})


def make_dataset(
    path: Path,
    layer_ids: Sequence[LayerId] = (*EAGLE, NORM),
    lengths: Sequence[int] = LENGTHS,
    dtype: str = "bfloat16",
    masks: bool = True,
    hidden_size: int = HIDDEN_SIZE,
    shard_bytes: int = 700,
    **options: str,
) -> Path:
    """Write a dataset; the mask of sample i leaves out its first i tokens and every third."""
    generator = torch.Generator().manual_seed(len(lengths))
    row_bytes = len(layer_ids) * hidden_size * STORAGE_DTYPES[dtype].itemsize
    units = list(plan_units((length * row_bytes for length in lengths), shard_bytes))
    settings = DatasetSettings(
        model="tiny", layer_ids=tuple(layer_ids), num_hidden_layers=NUM_LAYERS,
        hidden_size=hidden_size, dtype=dtype, positions="all", format="sharded",
        shard_bytes=shard_bytes, num_units=0, num_samples=0, input_digest="xxh3_128:0",
        options=options,
    )  # fmt: skip
    settings = settings.with_plan(len(units), len(lengths), masks)
    start_dataset(str(path), settings)
    for unit, numbers in enumerate(units):
        with open_unit_writer(str(path), unit, settings) as writer:
            for number in numbers:
                length = lengths[number]
                rows = torch.randn(length, len(layer_ids), hidden_size, generator=generator)
                mask = (torch.arange(length) >= number) & (torch.arange(length) % 3 > 0)
                stored = torch.float32 if dtype == "fp8" else STORAGE_DTYPES[dtype]
                tensors = {"hidden_states": rows.to(stored)} | (
                    {"loss_mask": mask} if masks else {}
                )
                columns = {"texts": [{"offset": 0, "start": 0, "end": length, "record": number}]}
                sample = HiddenStatesSample(
                    index=number,
                    request_id="",
                    token_ids=torch.randint(0, 1000, (length,), generator=generator),
                    positions=torch.arange(length),
                    tensors=tensors,
                    layer_ids=tuple(layer_ids),
                    columns=columns if "pack" in options else {"label": f"l{number} ä\ud800"},
                )
                writer.append(sample, number, 100 + number)
            writer.commit()
    merge_units(str(path))
    return path


def for_format(path: Path, fmt: str, **more: Any) -> Path:
    """Write a dataset that ``fmt`` can have."""
    if fmt == "saelens":
        return make_dataset(path, (0, 3), (8,) * 5, pack="8", **more)
    return make_dataset(path, **more)


def samples_of(path: Path) -> list[HiddenStatesSample]:
    return list(HiddenStatesDataset(path))


def skipped_of(path: Path) -> dict[int, str]:
    units = json.loads((path / "index.json").read_text())["units"]
    return {one["sample"]: one["reason"] for unit in units for one in unit["skipped"]}


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_every_module_is_a_format() -> None:
    assert EXPORTS == [
        "huggingface", "modelopt", "numpy", "parquet", "saelens", "specforge-dflash",
        "specforge-domino", "specforge-dspark", "specforge-eagle3", "webdataset",
    ]  # fmt: skip
    for name in format_names():
        assert writer_of(name).dtypes
    with pytest.raises(ValueError, match="format='zip': use sharded, files, speculators, hugging"):
        writer_of("zip")


def test_specforge_eagle3(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a")
    convert_dataset(str(path), str(tmp_path / "b"), "specforge-eagle3")
    for sample in samples_of(path):
        found = load(tmp_path / "b" / f"{sample.index:08d}.ckpt")
        assert sorted(found) == ["aux_hidden_state", "hidden_state", "input_ids", "loss_mask"]
        assert torch.equal(found["input_ids"], sample.token_ids)
        assert sample.loss_mask is not None and found["loss_mask"].dtype == torch.int64
        assert found["loss_mask"].tolist() == sample.loss_mask.int().tolist()
        rows = sample.hidden_states
        assert torch.equal(found["aux_hidden_state"], torch.cat([*rows[:, :3].unbind(1)], 1)[None])
        assert torch.equal(found["hidden_state"], rows[None, :, 3])
        size = (tmp_path / "b" / f"{sample.index:08d}.ckpt").stat().st_size
        assert size < 4000  # not the shard that the rows are a view of


@pytest.mark.parametrize("fmt", ["specforge-dflash", "specforge-domino", "specforge-dspark"])
def test_specforge_dflash(tmp_path: Path, fmt: str) -> None:
    path = make_dataset(tmp_path / "a", (NORM, 1, 4, 9, NUM_LAYERS))
    convert_dataset(str(path), str(tmp_path / "b"), fmt)
    kept = {
        sample.index
        for sample in samples_of(path)
        if "1, 1"
        in str((sample.loss_mask if sample.loss_mask is not None else None).int().tolist())
    }
    assert kept == {0, 2, 3}
    assert {int(file.stem) for file in (tmp_path / "b").glob("*.ckpt")} == kept
    reasons = skipped_of(tmp_path / "b")
    assert sorted(reasons) == [1, 4, 5, 6]
    assert {*reasons.values()} == {
        "format: its reader needs two consecutive tokens that the loss mask selects"
    }
    for sample in samples_of(path):
        if sample.index in kept:
            found = load(tmp_path / "b" / f"{sample.index:08d}.ckpt")
            last = found.pop("target_last_hidden_states", None)
            assert sorted(found) == ["hidden_states", "input_ids", "loss_mask"]
            assert torch.equal(found["hidden_states"], sample.hidden_states[:, 1:4].flatten(1))
            assert (last is None) == (fmt != "specforge-dspark")
            assert last is None or torch.equal(last, sample.hidden_states[:, 0])


@pytest.mark.parametrize("last", [NORM, NUM_LAYERS])
def test_modelopt(tmp_path: Path, last: LayerId) -> None:
    path = make_dataset(tmp_path / "a", (last, *EAGLE), masks=last == NORM)
    convert_dataset(str(path), str(tmp_path / "b"), "modelopt")
    for sample in samples_of(path):
        found = load(tmp_path / "b" / f"{sample.index:08d}.pt")
        assert found.pop("hidden_states_prenorm") == (last != NORM)
        assert ("loss_mask" in found) == (last == NORM)
        assert torch.equal(found["input_ids"], sample.token_ids)
        assert torch.equal(found["hidden_states"], sample.hidden_states[:, 0])
        assert torch.equal(found["aux_hidden_states"], sample.hidden_states[:, 1:].flatten(1))


def test_both_last_states(tmp_path: Path) -> None:
    """The state after the norm is taken, and the one before is not a draft's input."""
    path = make_dataset(tmp_path / "a", (*EAGLE, NUM_LAYERS, NORM))
    convert_dataset(str(path), str(tmp_path / "b"), "modelopt")
    convert_dataset(str(path), str(tmp_path / "c"), "specforge-eagle3")
    for sample in samples_of(path):
        found = load(tmp_path / "b" / f"{sample.index:08d}.pt")
        eagle = load(tmp_path / "c" / f"{sample.index:08d}.ckpt")
        assert not found["hidden_states_prenorm"]
        assert torch.equal(found["hidden_states"], sample.hidden_states[:, 4])
        assert torch.equal(eagle["hidden_state"][0], sample.hidden_states[:, 4])
        inputs = sample.hidden_states[:, :3].flatten(1)
        assert torch.equal(found["aux_hidden_states"], inputs)
        assert torch.equal(eagle["aux_hidden_state"][0], inputs)


def test_numpy(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", keep_columns='["label"]')
    convert_dataset(str(path), str(tmp_path / "b"), "numpy", shard_bytes=1400)
    places = {}
    for about in sorted((tmp_path / "b").glob("shard-*.json")):
        stated = json.loads(about.read_text())
        assert stated["layer_ids"] == [*EAGLE, NORM]
        arrays = {
            name: np.load(tmp_path / "b" / file, mmap_mode="r")
            for name, file in stated["arrays"].items()
        }
        assert arrays["hidden_states"].dtype == np.float32  # numpy has no bfloat16
        assert isinstance(arrays["hidden_states"], np.memmap)
        assert len(arrays["token_ids"]) == stated["samples"][-1]["tokens"][1]
        places |= {one["sample"]: (arrays, one) for one in stated["samples"]}
    assert len(list((tmp_path / "b").glob("shard-*.json"))) > 1
    for sample in samples_of(path):
        arrays, place = places[sample.index]
        assert (place["record"], place["columns"]) == (sample.record, sample.columns)
        rows, tokens = slice(*place["rows"]), slice(*place["tokens"])
        assert np.array_equal(arrays["hidden_states"][rows], sample.hidden_states.float().numpy())
        assert np.array_equal(arrays["positions"][rows], sample.positions.numpy())
        assert sample.loss_mask is not None
        assert np.array_equal(arrays["loss_mask"][rows], sample.loss_mask.numpy())
        assert np.array_equal(arrays["token_ids"][tokens], sample.token_ids.numpy())


def test_webdataset(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", dtype="float16", keep_columns='["label"]')
    convert_dataset(str(path), str(tmp_path / "b"), "webdataset", shard_bytes=1400)
    found: dict[str, bytes] = {}
    for name in sorted((tmp_path / "b").glob("*.tar")):
        with tarfile.open(name) as tar:
            for entry in tar:
                assert (entry.mtime, entry.uid, entry.uname) == (0, 0, "")
                content = tar.extractfile(entry)
                assert content is not None
                found[entry.name] = content.read()
    for sample in samples_of(path):
        key = f"{sample.index:08d}"
        about = json.loads(found[f"{key}.json"])
        assert (about["record"], about["columns"]) == (sample.record, sample.columns)
        for name in ("hidden_states", "token_ids", "positions", "loss_mask"):
            array = np.load(BytesIO(found[f"{key}.{name}.npy"]))
            assert np.array_equal(array, getattr(sample, name).numpy())
    assert len(found) == 5 * len(LENGTHS)


def read_arrow(folder: Path) -> pa.Table:
    state = json.loads((folder / "state.json").read_text())
    tables = []
    for one in state["_data_files"]:
        with pa.memory_map(str(folder / one["filename"])) as file:
            tables.append(pa.ipc.open_stream(file).read_all())
    return pa.concat_tables(tables)


def test_huggingface(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", keep_columns='["label"]')
    convert_dataset(str(path), str(tmp_path / "b"), "huggingface")
    rows = read_arrow(tmp_path / "b").to_pylist()
    for row, sample in zip(rows, samples_of(path), strict=True):
        assert (row["sample"], row["record"]) == (sample.index, sample.record)
        assert json.loads(row["columns"]) == sample.columns
        assert torch.equal(torch.tensor(row["hidden_states"]), sample.hidden_states.float())
        for name in ("token_ids", "positions", "loss_mask"):
            assert row[name] == getattr(sample, name).tolist()
    features = json.loads((tmp_path / "b" / "dataset_info.json").read_text())["features"]
    inner = {"feature": {"dtype": "float32", "_type": "Value"}, "length": 6, "_type": "Sequence"}
    layers = {"feature": inner, "length": 4, "_type": "Sequence"}
    assert features["hidden_states"] == {"feature": layers, "_type": "Sequence"}


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is that of the Arrow files, with the types and the features."""
    path = make_dataset(tmp_path / "a", keep_columns='["label"]')
    convert_dataset(str(path), str(tmp_path / "b"), "huggingface", shard_bytes=2000)
    monkeypatch.setattr("vllm.hidden_states.exporters.parquet._GROUP_BYTES", 900)
    convert_dataset(str(path), str(tmp_path / "c"), "parquet", shard_bytes=2000)
    expected, files = read_arrow(tmp_path / "b"), sorted((tmp_path / "c").glob("*.parquet"))
    assert [one.name for one in files[:2]] == ["data-00000.parquet", "data-00001.parquet"]
    found = pa.concat_tables(map(pq.read_table, files))
    assert found.equals(expected) and found.schema.metadata == expected.schema.metadata
    counts = [pq.read_metadata(one).num_row_groups for one in files]
    assert 1 < sum(counts) < len(expected), counts


def test_a_unit_without_samples_has_no_file(tmp_path: Path) -> None:
    """A file without a schema would fail a reader of all files."""
    path = make_dataset(tmp_path / "a")
    for fmt in ("huggingface", "parquet"):
        settings = dataclasses.replace(HiddenStatesDataset(path).settings, format=fmt)
        start_dataset(str(tmp_path / fmt), settings)
        with open_unit_writer(str(tmp_path / fmt), 0, settings) as writer:
            writer.skip(0, 0, "it failed")
            assert not writer.commit().files
        assert not [*(tmp_path / fmt).glob("data-*")]


def test_saelens(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", (0, 3, NUM_LAYERS), (8,) * 5, pack="8")
    convert_dataset(str(path), str(tmp_path / "b"), "saelens")
    table = read_arrow(tmp_path / "b")
    names = ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post", "blocks.9.hook_resid_post"]
    assert table.column_names == [*names, "token_ids"]
    for row, sample in zip(table.to_pylist(), samples_of(path), strict=True):
        assert row["token_ids"] == sample.token_ids.tolist()
        for place, name in enumerate(names):
            assert torch.equal(torch.tensor(row[name]), sample.hidden_states[:, place].float())
    info = json.loads((tmp_path / "b" / "dataset_info.json").read_text())
    assert info["features"][names[0]] == {"shape": [8, 6], "dtype": "float32", "_type": "Array2D"}
    field = table.schema.field(names[1]).metadata
    assert field[b"ARROW:extension:metadata"] == b'[[8, 6], "float32"]'


@pytest.mark.parametrize(
    ("fmt", "layers", "message"),
    [
        ("specforge-eagle3", (*EAGLE, 10),
         r"it needs norm, too; make one with: vllm extract tiny --input FILE --layers 2,5,7,norm "
         "--format specforge-eagle3 --output FOLDER"),
        ("specforge-eagle3", (2, 5, NORM), r"2 draft inputs \[2, 5\], and it takes 3"),
        ("specforge-eagle3", (2, 2, 5, NORM), "different draft inputs"),
        ("specforge-dspark", (2, 5, 10), r"--layers 2,3,5,7,8,norm --format specforge-dspark"),
        ("specforge-dflash", (NORM, 10), r"different draft inputs; .*--layers 2,3,5,7,8 --format"),
        ("modelopt", EAGLE, r"it needs norm, too; .*--layers 2,5,7,norm --format modelopt"),
        ("saelens", (0, 3), r"samples of any length.*; rows depend on all tokens before them, "
         "so rows of single texts are not those of texts that are joined; "
         ".*--layers 0,3 --pack 1024 --format saelens"),
    ],
)  # fmt: skip
def test_a_dataset_that_lacks_something(
    tmp_path: Path, fmt: str, layers: tuple[LayerId, ...], message: str
) -> None:
    path = make_dataset(tmp_path / "a", layers)
    with pytest.raises(ValueError, match=message):
        convert_dataset(str(path), str(tmp_path / "b"), fmt)
    assert not (tmp_path / "b").exists()


def test_a_dtype_that_a_format_lacks(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a")
    with pytest.raises(ValueError, match="dtype=bfloat16: it can store float32, "):
        convert_dataset(str(path), str(tmp_path / "b"), "numpy", "bfloat16")
    masked = make_dataset(tmp_path / "c", masks=False, loss_mask="false")
    with pytest.raises(ValueError, match="loss_mask=False, and it trains on the tokens that the"):
        convert_dataset(str(masked), str(tmp_path / "b"), "specforge-eagle3")
    fp8 = make_dataset(tmp_path / "d", dtype="fp8")
    convert_dataset(str(fp8), str(tmp_path / "e"), "modelopt")
    (sample, *_), found = samples_of(fp8), load(tmp_path / "e" / "00000000.pt")
    assert torch.equal(found["hidden_states"], sample.hidden_states[:, 3])
    assert found["hidden_states"].dtype == torch.bfloat16


def test_padded_windows_are_left_out(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", (0, 3), (8, 8, 5), pack="8", pack_last='"pad"')
    convert_dataset(str(path), str(tmp_path / "b"), "saelens")
    assert len(read_arrow(tmp_path / "b")) == 2
    assert skipped_of(tmp_path / "b") == {2: "format: it has 5 tokens, and a window has 8"}


@pytest.mark.parametrize("fmt", EXPORTS)
def test_the_same_bytes_twice_and_after_damage(tmp_path: Path, fmt: str) -> None:
    path = for_format(tmp_path / "a", fmt)
    convert_dataset(str(path), str(tmp_path / "b"), fmt, shard_bytes=900)
    convert_dataset(str(path), str(tmp_path / "c"), fmt, shard_bytes=900)
    expected = folder_bytes(tmp_path / "b")
    assert folder_bytes(tmp_path / "c") == expected
    assert list(verify_dataset(str(tmp_path / "b"))) == []
    files = [
        tmp_path / "b" / file["name"]
        for unit in json.loads(expected["index.json"])["units"]
        for file in unit["files"]
    ]
    damaged = files[len(files) // 2]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    times = {file: file.stat().st_mtime_ns for file in files}
    assert list(verify_dataset(str(tmp_path / "b"))) == [f"{damaged}: it is not as it was written"]
    convert_dataset(str(path), str(tmp_path / "b"), fmt, shard_bytes=900)
    assert folder_bytes(tmp_path / "b") == expected
    assert any(file.stat().st_mtime_ns == times[file] for file in files)
    with pytest.raises(ValueError, match=f"is in the format {fmt}, which is for another program"):
        HiddenStatesDataset(tmp_path / "b")


def test_a_folder_with_something_else(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"DST .*b: it contains something else \(notes.txt\)"):
        convert_dataset(str(path), str(tmp_path / "b"), "numpy")
    with pytest.raises(ValueError, match="a file"):
        convert_dataset(str(path), str(tmp_path / "b" / "notes.txt"), "numpy")
    convert_dataset(str(path), str(tmp_path / "c"), "numpy")
    with pytest.raises(ValueError, match="format: 'numpy' there, 'webdataset' now"):
        convert_dataset(str(path), str(tmp_path / "c"), "webdataset")


def test_the_command_lists_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_dataset(tmp_path / "a")
    arguments = ["convert", str(path), "--to", "specforge-dflash", str(tmp_path / "b")]
    assert hidden_states(arguments) == 0
    printed = capsys.readouterr().out
    assert "4 samples and records are left out" in printed
    assert "  4: format: its reader needs two consecutive tokens" in printed


def convert_in_child(*arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    """Start ``vllm hidden-states convert``; limit: most bytes of a file."""

    def lower() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = "import sys; from vllm.entrypoints.cli.hidden_states import hidden_states as run;"
    return subprocess.Popen(
        [sys.executable, "-c", f"{code} sys.exit(run(sys.argv[1:]))", "convert", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=lower,
    )  # fmt: skip


@pytest.mark.parametrize(
    "fmt",
    grid(EXPORTS, by_day=[("huggingface",), ("modelopt",), ("saelens",), ("webdataset",)]),
)
def test_a_disk_that_takes_no_more(tmp_path: Path, fmt: str) -> None:
    path = for_format(tmp_path / "a", fmt, hidden_size=2000, shard_bytes=1 << 20)
    output = tmp_path / "b"
    child = convert_in_child(str(path), str(output), "--to", fmt, limit=40_000)
    printed = child.communicate(timeout=100)[0]
    assert child.returncode == 2 and "File too large" in printed, printed
    assert not (output / "manifest.json").exists()
    left = [name for name in os.listdir(output) if name.startswith(".")]
    assert not left, left
    convert_dataset(str(path), str(output), fmt)
    convert_dataset(str(path), str(tmp_path / "c"), fmt)
    assert folder_bytes(output) == folder_bytes(tmp_path / "c")


@pytest.mark.parametrize("fmt", ["huggingface", at_night("parquet"), at_night("modelopt")])
def test_killed_and_continued(tmp_path: Path, fmt: str) -> None:
    path = make_dataset(tmp_path / "a", lengths=[50] * 200, hidden_size=500)
    output, expected = tmp_path / "b", tmp_path / "c"
    options = ("--to", fmt, "--shard-size", "0.001")
    for least in (1, 3, 6):
        child = convert_in_child(str(path), str(output), *options)
        units = output / "units"
        while child.poll() is None and (
            not units.exists() or sum(one.suffix == ".json" for one in units.iterdir()) < least
        ):
            time.sleep(0.001)
        child.kill()
        child.wait()
        assert not (output / "manifest.json").exists(), "it was too fast"
    done = convert_in_child(str(path), str(output), *options)
    assert "200 samples, 10000 rows" in done.communicate(timeout=100)[0]
    convert_dataset(str(path), str(expected), fmt, shard_bytes=int(0.001 * 2**30))
    assert folder_bytes(output) == folder_bytes(expected)


@pytest.mark.parametrize(
    "fmt", ["modelopt", *map(at_night, ["numpy", "huggingface", "parquet", "webdataset"])]
)
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path, fmt: str) -> None:
    peaks = []
    for number in (40, 400):
        path = make_dataset(
            tmp_path / f"a{number}", lengths=[40] * number, hidden_size=1000, shard_bytes=4 << 20
        )
        code = (
            "import sys; from vllm.hidden_states.convert import convert_dataset as convert;"
            "convert(*sys.argv[1:4], shard_bytes=4 << 20);"
            "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        )
        command = [sys.executable, "-c", code, str(path), str(tmp_path / f"b{number}"), fmt]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(printed) << 10)
    grown = sum(file.stat().st_size for file in (tmp_path / "a400").glob("*")) * 0.9
    assert grown > 100 << 20
    assert peaks[1] - peaks[0] < 16 << 20, [peak >> 20 for peak in peaks]

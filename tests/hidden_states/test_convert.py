"""From every format to every other, and what cannot be had."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.hidden_states.sample_data import folder_bytes, make_samples, make_settings, write_dataset
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states import convert as convert_module
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.manifest import merge_units, start_dataset
from vllm.hidden_states.metadata import SkippedRecord, read_unit_records
from vllm.hidden_states.names import FORMATS, DatasetFormat
from vllm.hidden_states.units import open_unit_writer, writer_of
from vllm.hidden_states.verify import verify_dataset
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.file import write_hidden_states

LENGTHS = [5, 1, 9, 12, 3, 7, 2]
PAIRS = list(itertools.product(FORMATS, FORMATS))


def assert_equal(path: Path, other: Path, dtype: torch.dtype | None = None) -> None:
    left, right = HiddenStatesDataset(path, dtype), HiddenStatesDataset(other, dtype)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.index, a.record, a.layer_ids) == (b.index, b.record, b.layer_ids)
        for name in ("token_ids", "positions", "hidden_states", "scales"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None and y is None) or torch.equal(x, y), name


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_nothing_is_lost(tmp_path: Path, source: DatasetFormat, target: DatasetFormat) -> None:
    path = write_dataset(tmp_path / "a", make_samples(LENGTHS), source)
    totals = convert_dataset(str(path), str(tmp_path / "b"), target, shard_bytes=3000)
    assert (totals.samples, totals.tokens) == (7, sum(LENGTHS))
    assert list(verify_dataset(str(tmp_path / "b"))) == []
    assert_equal(path, tmp_path / "b")
    convert_dataset(str(tmp_path / "b"), str(tmp_path / "c"), source, shard_bytes=4000)
    assert_equal(path, tmp_path / "c")
    # The rows are the same bytes again, whatever they went through.
    for file in path.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


@pytest.mark.parametrize(("source", "target"), [("sharded", "files"), ("files", "sharded")])
def test_fp8_and_positions(tmp_path: Path, source: DatasetFormat, target: DatasetFormat) -> None:
    samples = make_samples(LENGTHS, torch.float32, every=2)
    path = write_dataset(tmp_path / "a", samples, source, "fp8", positions="every:2")
    convert_dataset(str(path), str(tmp_path / "b"), target)
    assert_equal(path, tmp_path / "b", FP8)
    convert_dataset(str(path), str(tmp_path / "c"), target, dtype="float32")
    assert_equal(path, tmp_path / "c", torch.float32)


def test_to_fp8_measures_what_is_lost(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", make_samples(LENGTHS))
    totals = convert_dataset(str(path), str(tmp_path / "b"), "sharded", dtype="fp8")
    assert totals.fp8_errors is not None
    assert all(0.005 < error < 0.04 for error in totals.fp8_errors)
    direct = write_dataset(tmp_path / "c", make_samples(LENGTHS), dtype="fp8")
    assert_equal(tmp_path / "b", direct, FP8)


def test_the_origin_is_kept(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", make_samples(LENGTHS))
    convert_dataset(str(path), str(tmp_path / "b"), "files")
    convert_dataset(str(tmp_path / "b"), str(tmp_path / "c"), "sharded", dtype="float32")
    settings = HiddenStatesDataset(tmp_path / "c").settings
    assert settings is not None
    assert settings.origin is not None
    assert settings.origin.origin == HiddenStatesDataset(path).settings
    assert (settings.format, settings.dtype) == ("sharded", "float32")
    assert settings.origin.format == "files"


def test_it_continues_and_refuses_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_dataset(tmp_path / "a", make_samples(LENGTHS)))
    convert_dataset(path, str(tmp_path / "whole"), "files", shard_bytes=3000)
    written: list[int] = []

    def write(
        dataset: object, samples: range, destination: str, unit: int, settings: object, *more: Any
    ) -> None:
        if unit == 2 and not written.count(2):
            written.append(unit)
            raise KeyboardInterrupt
        written.append(unit)
        real(dataset, samples, destination, unit, settings, *more)  # type: ignore[arg-type]

    real = convert_module._write_unit
    monkeypatch.setattr(convert_module, "_write_unit", write)
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(path, str(tmp_path / "b"), "files", shard_bytes=3000)
    os.truncate(next(iter((tmp_path / "b").glob("*.safetensors"))), 100)
    totals = convert_dataset(path, str(tmp_path / "b"), "files", shard_bytes=3000)
    assert totals.samples == 7
    # One of the first two units was damaged, the other left alone.
    assert sorted(written)[:3] in ([0, 0, 1], [0, 1, 1])
    assert folder_bytes(tmp_path / "b") == folder_bytes(tmp_path / "whole")
    other = write_dataset(tmp_path / "other", make_samples(LENGTHS, seed=1))
    with pytest.raises(ValueError, match="input_digest"):
        convert_dataset(str(other), str(tmp_path / "b"), "files", shard_bytes=3000)


@pytest.mark.parametrize("fmt", ["files", "speculators"])
def test_one_damaged_file_is_written_again_alone(tmp_path: Path, fmt: DatasetFormat) -> None:
    path, output = str(write_dataset(tmp_path / "a", make_samples(LENGTHS))), tmp_path / "b"
    convert_dataset(path, str(output), fmt)
    assert len(read_unit_records(str(output))) == 1
    before = folder_bytes(output)
    files = sorted(output.glob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in files]
    os.truncate(files[3], 100)
    convert_dataset(path, str(output), fmt)
    assert folder_bytes(output) == before
    again = [i for i, file in enumerate(files) if file.stat().st_mtime_ns != times[i]]
    assert again == [3]


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = write_dataset(tmp_path / "a", make_samples(LENGTHS), "sharded"), tmp_path / "b"
    usage = SimpleNamespace(total=10**6, used=10**6 - 1000, free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    refused = (
        r"DST .*b: the dataset takes .* more, and 1000 B are free.*use --no-check-disk to continue"
    )
    with pytest.raises(ValueError, match=refused):
        convert_dataset(str(path), str(output), "files")
    assert not output.exists()
    convert_dataset(str(path), str(output), "files", check_disk=False)
    convert_dataset(str(path), str(output), "files")  # what is there needs no room
    assert_equal(path, output)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("positions", ["all", "every:2"])
def test_the_room_that_is_asked_for(
    tmp_path: Path, target: DatasetFormat, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target == "speculators" and positions != "all":
        pytest.skip("it takes all of them")
    samples = make_samples([900, 200, 700], torch.float32, every=1 if positions == "all" else 2)
    path = write_dataset(tmp_path / "a", samples, "sharded", "float32", positions=positions)
    asked = []
    monkeypatch.setattr(convert_module, "check_room", lambda *call: asked.append(call[2]))
    for dtype in ("float32",) if target == "speculators" else ("float32", "fp8"):
        convert_dataset(str(path), str(tmp_path / dtype), target, dtype)
        taken = sum(file.stat().st_size for file in (tmp_path / dtype).rglob("*.safetensors"))
        assert taken <= asked.pop() <= taken + 3 * 8192 + 8 * 1800


def test_skipped_records_stay_known(tmp_path: Path) -> None:
    samples = make_samples([4, 2, 3])
    settings = make_settings(samples, shard_bytes=10**6)
    start_dataset(str(tmp_path / "a"), settings)
    with open_unit_writer(str(tmp_path / "a"), 0, settings) as writer:
        writer.append(samples[0], 0, 10)
        writer.skip(1, 11, "not finite")
        writer.append(samples[2], 2, 13)
        writer.commit()
    merge_units(str(tmp_path / "a"), [SkippedRecord(12, "too long")])
    totals = convert_dataset(str(tmp_path / "a"), str(tmp_path / "b"), "speculators")
    assert (totals.samples, totals.skipped) == (2, 2)
    assert sorted(p.stem for p in (tmp_path / "b").glob("*.safetensors")) == ["hs_10", "hs_13"]
    assert_equal(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_a_damaged_source_leaves_nothing_at_the_destination(tmp_path: Path, name: str) -> None:
    source = write_dataset(tmp_path / "source", make_samples([5, 3]), "sharded")
    (source / name).unlink()
    with pytest.raises(ValueError, match=str(source)):
        convert_dataset(str(source), str(tmp_path / "new"), "files")
    assert not (tmp_path / "new").exists()


def test_a_plain_folder(tmp_path: Path) -> None:
    samples = make_samples([3, 6])
    (tmp_path / "plain").mkdir()
    for sample, name in zip(samples, ["cmpl-1-0", "cmpl-1-1"], strict=True):
        write_hidden_states(
            str(tmp_path / "plain" / f"{name}.safetensors"),
            {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids},
            {"model": "m", "layer_ids": "[0, 3, 8]"},
        )
    for fmt in ("sharded", "files"):
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / fmt), fmt)
        for read, sample in zip(HiddenStatesDataset(tmp_path / fmt), samples, strict=True):
            assert torch.equal(read.hidden_states, sample.hidden_states)
    assert (tmp_path / "files" / "cmpl-1-0.safetensors").exists()
    settings = HiddenStatesDataset(tmp_path / "sharded").settings
    assert settings is not None
    assert (settings.model, settings.dtype, settings.positions) == ("m", "bfloat16", "all")
    with pytest.raises(ValueError, match="record number of 'cmpl-1-0' is not"):
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / "s"), "speculators")
    assert not (tmp_path / "s").exists()


def test_a_plain_folder_that_does_not_fit(tmp_path: Path) -> None:
    rows, folder = torch.ones(2, 3, 5), tmp_path / "plain"
    folder.mkdir()

    def write(name: str, rows: torch.Tensor, layers: str) -> None:
        tensors = {"hidden_states": rows, "token_ids": torch.arange(2)}
        write_hidden_states(str(folder / f"{name}.safetensors"), tensors, {"layer_ids": layers})

    write("a", rows.double(), "[8, 0, 3]")
    with pytest.raises(ValueError, match=r"rows of float64 cannot be stored; use a dtype of flo"):
        convert_dataset(str(folder), str(tmp_path / "b"), "files")
    assert not (tmp_path / "b").exists()
    convert_dataset(str(folder), str(tmp_path / "b"), "files", "float32")
    settings = HiddenStatesDataset(tmp_path / "b").settings
    assert settings is not None and settings.num_hidden_layers == 8
    write("b", rows[:, :2].double(), "[8, 0, 3]")
    with pytest.raises(ValueError, match=r"b.safetensors: rows of shape \[2, 5\] for layers"):
        convert_dataset(str(folder), str(tmp_path / "c"), "files", "float32")


@pytest.mark.parametrize("fmt", ["sharded", "files", "numpy", "modelopt", "specforge-domino"])
def test_what_the_first_file_of_a_plain_folder_lacks_is_not_lost(fmt: str, tmp_path: Path) -> None:
    """Every token of a file without a mask counts; other tensors are an error."""
    samples, rest = make_samples([3, 6]), torch.arange(6)

    def convert(name: str, metadata: dict[str, str], **more: torch.Tensor) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for sample, stem in zip(samples, "ab", strict=True):
            tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
            stated = {"model": "m", "layer_ids": "[0, 3, 8]"}
            if stem == "b":
                tensors, stated = tensors | more, stated | metadata
            write_hidden_states(str(folder / f"{stem}.safetensors"), tensors, stated)
        try:
            convert_dataset(str(folder), str(tmp_path / f"{name}_out"), fmt, "float32")
        except ValueError as error:
            assert not (tmp_path / f"{name}_out").exists()
            return str(error)
        return ""

    masked = {"row_tensors": '["loss_mask"]'}
    assert not convert("masked", masked, loss_mask=rest % 2 == 0)
    others = [
        convert("scores", {"row_tensors": '["scores"]'}, scores=rest.float()),
        convert("columns", {"columns": '{"label": 5}'}),
    ]
    if fmt in ("modelopt", "specforge-domino"):  # they have no place for these
        assert others == ["", ""]
    else:
        assert "b.safetensors has scores, which" in others[0]
        assert not others[1]


def test_a_folder_of_several_models_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset states the first one. Paths of one model may differ, so it is no error."""
    lines: list[str] = []
    monkeypatch.setattr(
        convert_module.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    (tmp_path / "plain").mkdir()
    models = [{"model": "m"}, {"model": "m", "adapter": "b"}, {"model": "m"}, {"model": "n"}]
    for sample, model in zip(make_samples([2, 2, 2, 2]), models, strict=True):
        write_hidden_states(
            str(tmp_path / f"plain/{sample.index}.safetensors"),
            {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids},
            {"layer_ids": "[0, 3, 8]", "num_hidden_layers": "8", **model},
        )
    convert_dataset(str(tmp_path / "plain"), str(tmp_path / "out"), "sharded")
    assert [line.partition(": ")[2] for line in lines] == [
        "its files are of several models: m, m with b, n"
    ]


def test_generated_tokens_of_a_servers_files(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for sample, num_prompt in zip(make_samples([5, 4, 7]), (3, 4, 1), strict=True):
        write_hidden_states(
            str(tmp_path / f"plain/{sample.index}.safetensors"),
            {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids},
            {"layer_ids": "[0, 3, 8]", "num_prompt_tokens": str(num_prompt)},
        )
    for name in ("plain", "sharded", "files"):
        if name != "plain":
            convert_dataset(str(tmp_path / "plain"), str(tmp_path / name), name)
        dataset = HiddenStatesDataset(tmp_path / name)
        assert [sample.num_prompt_tokens for sample in dataset] == [3, 4, 1], name
        assert dataset["num_generated_tokens"] == [2, 0, 6]
        assert list(verify_dataset(str(tmp_path / name))) == []


def test_another_source_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    """Files of another program have no checksums in their headers."""
    (tmp_path / "plain").mkdir()
    for seed in (0, 1):
        for sample in make_samples([5, 5], seed=seed):
            tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
            path = tmp_path / f"plain/{sample.index}.safetensors"
            save_file(tensors, path, {"layer_ids": "[0, 3, 8]"})
        if seed == 0:
            for _ in range(2):  # the second finds everything there
                convert_dataset(str(tmp_path / "plain"), str(tmp_path / "out"), "sharded")
    with pytest.raises(ValueError, match="input_digest"):
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / "out"), "sharded")


def test_files_of_two_datasets_in_one_folder(tmp_path: Path) -> None:
    """Both state the samples 0 and 1, and the records 100 and 101."""
    (tmp_path / "plain").mkdir()
    lengths = {"a": [5, 3], "b": [4, 6]}
    for name in lengths:
        path = write_dataset(tmp_path / name, make_samples(lengths[name]), "files")
        for file in path.glob("*.safetensors"):
            file.rename(tmp_path / f"plain/{name}{file.name}")
    for fmt in FORMATS:
        if fmt == "speculators":  # a file for each record: the second would replace the first
            continue
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / fmt), fmt, shard_bytes=1)
        dataset = HiddenStatesDataset(tmp_path / fmt)
        assert [sample.index for sample in dataset] == [0, 1, 2, 3]
        assert [sample.record for sample in dataset] == [100, 101, 100, 101]
        assert [len(sample.token_ids) for sample in dataset] == [*lengths["a"], *lengths["b"]]
    for source in ("plain", "sharded", "files"):
        with pytest.raises(ValueError, match="samples 0 and 2 are both of record 100, so the file"):
            convert_dataset(
                str(tmp_path / source), str(tmp_path / "no"), "speculators", shard_bytes=1
            )
        assert not (tmp_path / "no").exists()


FORMS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    # what two files have: tensors, metadata
    "scores float64 []": (({"scores": torch.float32},), ({"scores": torch.float64},)),
    "scores int64 []": (({"scores": torch.int16},), ({"scores": torch.int64},)),
    "probe_at [1, 3]": (({}, {"probe_at": "[0, 2]"}), ({}, {"probe_at": "[1, 3]"})),
    "num_hidden_layers 12": (({}, {}), ({}, {"num_hidden_layers": "12"})),
    "pooling mean": (({}, {"positions": "last"}), ({}, {"positions": "last", "pooling": "mean"})),
    "positions last": (({}, {"positions": "every:2"}), ({}, {"positions": "last"})),
    "the rule of masks answers": (({}, {"mask": "last-answer"}), ({}, {"mask": "answers"})),
}


@pytest.mark.parametrize("fmt", ["sharded", "numpy", "webdataset"])
@pytest.mark.parametrize("found", FORMS)
def test_files_of_a_plain_folder_that_are_no_dataset(found: str, fmt: str, tmp_path: Path) -> None:
    """The dataset would have the first one's layers of experts, dtype of a tensor, and so on."""
    (tmp_path / "plain").mkdir()
    (sample,) = make_samples([1])
    for stem, (dtypes, *rest) in zip("ab", FORMS[found], strict=True):
        tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
        tensors |= {name: torch.ones(1, dtype=dtype) for name, dtype in dtypes.items()}
        metadata = {"layer_ids": "[0, 3, 8]", "row_tensors": json.dumps([*dtypes])}
        for more in rest:
            metadata |= more
        if "probe_at" in metadata:
            metadata["row_constants"] = '["probe_at"]'
        write_hidden_states(str(tmp_path / f"plain/{stem}.safetensors"), tensors, metadata)
    with pytest.raises(ValueError, match=rf"b\.safetensors has {re.escape(found)}, but a\.safet"):
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / "b"), fmt)
    assert not (tmp_path / "b").exists()


DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]
TARGETS = ["sharded", "files", "numpy", "parquet", "modelopt"]


@pytest.mark.parametrize("fmt", TARGETS)
@pytest.mark.parametrize(("first", "second"), itertools.permutations(DTYPES, 2))
def test_rows_of_a_plain_folder_keep_their_bits(
    first: torch.dtype, second: torch.dtype, fmt: str, tmp_path: Path
) -> None:
    """The dtype of the dataset follows from the first file; what it would round is an error."""
    (tmp_path / "plain").mkdir()
    rows = torch.tensor([2**-30, 1 + 2**-6, 1 + 2**-9, 1 + 2**-20]).repeat(3, 3, 2)
    stored = {}
    for stem, dtype in zip("ab", (first, second), strict=True):
        tensors = {"hidden_states": rows.to(dtype), "token_ids": torch.arange(3)}
        stored[stem] = tensors["hidden_states"].float()
        if dtype == FP8:
            tensors["scales"] = torch.ones(3, 3)
        path = str(tmp_path / f"plain/{stem}.safetensors")
        save_file(tensors, path, {"layer_ids": "[0, 3, 8]"})

    def convert(dtype: str | None) -> None:
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / "out"), fmt, dtype)

    has_float32 = fmt in ("numpy", "parquet") and first == torch.bfloat16
    wide = torch.float32 if has_float32 else first
    if first == FP8 and fmt not in FORMATS:  # these formats have no fp8
        wide = torch.float32 if fmt in ("numpy", "parquet") else torch.bfloat16
    is_kept = torch.equal(stored["b"].to(wide).float(), stored["b"])
    if second != FP8 and not is_kept:
        with pytest.raises(ValueError, match=r"b\.safetensors has rows of .* would round: it foll"):
            convert(None)
        assert not (tmp_path / "out").exists()
        convert("float32")
    else:
        convert(None)
    if fmt in FORMATS:
        dataset = HiddenStatesDataset(tmp_path / "out", torch.float32)
        for sample, expected in zip(dataset, stored.values(), strict=True):
            assert torch.equal(sample.hidden_states, expected)


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fmt", ["sharded", "files"])
def test_a_plain_folder_with_masks_in_some_files(
    tmp_path: Path, places: tuple[int, int], fmt: str
) -> None:
    """As requests over HTTP leave it. Where a file has no mask, every token counts."""
    samples, mask = make_samples([3, 4]), torch.tensor([False, True, True, False])
    (tmp_path / "plain").mkdir()
    tensors: list[dict[str, torch.Tensor]] = [{}, {"loss_mask": mask}]
    about = [{}, {"row_tensors": '["loss_mask"]', "columns": '{"a": 5}', "mask": "answers"}]
    for sample, place, more, metadata in zip(samples, places, tensors, about, strict=True):
        write_hidden_states(
            str(tmp_path / "plain" / f"{place}.safetensors"),
            {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids, **more},
            {"layer_ids": "[0, 3, 8]", **metadata},
        )
    convert_dataset(str(tmp_path / "plain"), str(tmp_path / "b"), fmt)
    dataset = HiddenStatesDataset(tmp_path / "b")
    plain, masked = (dataset[place] for place in places)
    assert torch.equal(masked.hidden_states, samples[1].hidden_states)
    assert plain.loss_mask is not None and plain.loss_mask.tolist() == [True] * 3
    assert masked.loss_mask is not None and torch.equal(masked.loss_mask, mask)
    assert (plain.columns, masked.columns) == ({}, {"a": 5})
    assert dataset.settings is not None and dataset.settings.mask_rule == "answers"


def test_experts_in_a_plain_folder(tmp_path: Path) -> None:
    (sample,) = make_samples([4])
    experts = {
        "expert_ids": torch.arange(16, dtype=torch.int16).view(4, 2, 2),
        "expert_weights": torch.rand(4, 2, 2),
    }
    (tmp_path / "plain").mkdir()
    write_hidden_states(
        str(tmp_path / "plain" / "a.safetensors"),
        {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids, **experts},
        {"layer_ids": "[0, 3, 8]", "expert_layers": "[1, 2]"},
    )
    for fmt in ("sharded", "files"):
        convert_dataset(str(tmp_path / "plain"), str(tmp_path / fmt), fmt)
        (read,) = HiddenStatesDataset(tmp_path / fmt)
        assert read.expert_layers == (1, 2)
        for name, expected in experts.items():
            assert torch.equal(getattr(read, name), expected)


def test_a_folder_is_not_converted_into_itself(tmp_path: Path) -> None:
    (sample,) = make_samples([4])
    tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
    file = tmp_path / "plain" / "a.safetensors"
    file.parent.mkdir()
    write_hidden_states(str(file), tensors, {"layer_ids": "[0, 3, 8]"})
    whole = file.read_bytes()
    for destination in ("plain", "plain/../plain"):
        with pytest.raises(ValueError, match="use a different folder from SRC"):
            convert_dataset(str(file.parent), str(tmp_path / destination), "files", "fp8")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == whole


def test_what_speculators_cannot_have(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", make_samples(LENGTHS, torch.float32), dtype="fp8")
    with pytest.raises(ValueError, match="dtype=fp8: speculators' loader does not read scales"):
        convert_dataset(str(path), str(tmp_path / "b"), "speculators")
    assert not (tmp_path / "b").exists()
    convert_dataset(str(path), str(tmp_path / "b"), "speculators", dtype="bfloat16")
    part = write_dataset(tmp_path / "c", make_samples(LENGTHS, every=2), positions="every:2")
    with pytest.raises(ValueError, match="positions=every:2: speculators trains on every token"):
        convert_dataset(str(part), str(tmp_path / "d"), "speculators")


def test_layers_that_speculators_trains_from() -> None:
    def note(*layer_ids: int) -> str | None:
        settings = make_settings(make_samples([2]), "speculators")
        settings = dataclasses.replace(settings, layer_ids=layer_ids, num_hidden_layers=36)
        return writer_of("speculators").check(settings)

    assert note(2, 18, 33, 36) is None
    assert note(2, 10, 18, 26, 34, 36) == "train with --target-layer-ids 2 10 18 26 34"
    with pytest.raises(ValueError, match="end the list with 36"):
        note(2, 18, 33)
    with pytest.raises(ValueError, match="different layers before the last"):
        note(2, 2, 36)

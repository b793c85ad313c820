"""Damage is found wherever it is, and a run that was cut off can be continued."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.hidden_states.sample_data import (
    folder_bytes,
    make_samples,
    make_settings,
    write_dataset,
    write_missing,
)
from vllm.entrypoints.cli.hidden_states import hidden_states
from vllm.hidden_states import HiddenStatesDataset, metadata
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.manifest import merge_units, missing_units, start_dataset
from vllm.hidden_states.mapped_file import DamagedFileError
from vllm.hidden_states.metadata import (
    DatasetSettings,
    read_unit_records,
    remove_temporary_files,
)
from vllm.hidden_states.names import FORMATS, DatasetFormat
from vllm.hidden_states.tensor_file import TensorFile
from vllm.hidden_states.units import open_unit_writer
from vllm.hidden_states.verify import verify_dataset, verify_unit
from vllm.utils.whole_files import TemporaryName, temporary_path
from vllm.v1.rows.file import read_hidden_states

LENGTHS = [5, 1, 9, 12, 3]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, fmt: DatasetFormat) -> None:
    samples = make_samples([5], dtype=torch.bfloat16)
    path = write_dataset(tmp_path / "d", samples, fmt, shard_bytes=10**6)
    (file,) = path.glob("*.safetensors")
    whole = file.read_bytes()
    for offset in [*range(0, len(whole), 61), len(whole) - 1]:
        flip(file, offset)
        problems = list(verify_dataset(str(path)))
        assert len(problems) == 1, offset
        assert problems[0].startswith(str(file))
        (record,) = read_unit_records(str(path))
        assert verify_unit(str(path), record, full=True) == problems
        assert verify_unit(str(path), record, full=False) == []
        file.write_bytes(whole)
    assert list(verify_dataset(str(path))) == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_truncated_missing_and_foreign_files(tmp_path: Path, fmt: DatasetFormat) -> None:
    path = write_dataset(tmp_path / "d", make_samples(LENGTHS), fmt)
    files = sorted(path.glob("*.safetensors"))
    size = files[0].stat().st_size
    os.truncate(files[0], size - 1)
    files[1].unlink()
    shutil.copy(files[2], path / "x.safetensors")
    assert sorted(verify_dataset(str(path))) == sorted(
        [
            f"{files[0]}: {size - 1} bytes instead of {size}",
            f"{files[1]}: the file is missing",
            f"{path / 'x.safetensors'}: the file belongs to no unit",
        ]
    )
    by_file = {r.files[0].name: r for r in read_unit_records(str(path)) if len(r.files) == 1}
    for file in files[:2]:
        if file.name in by_file:
            assert verify_unit(str(path), by_file[file.name], full=False)


@pytest.mark.parametrize("others", [(), ("manifest.json",), ("index.json",)])
def test_a_dataset_that_lost_its_settings_is_no_plain_folder(
    dataset: Path, others: tuple[str, ...]
) -> None:
    for name in ("settings.json", *others):
        (dataset / name).unlink()
    next(dataset.glob("*.safetensors")).unlink()
    (problem,) = verify_dataset(str(dataset))
    assert "is a dataset without settings.json" in problem
    with pytest.raises(ValueError, match=r"is a dataset without settings\.json"):
        HiddenStatesDataset(dataset, allow_incomplete=True)
    for path in dataset.glob("*.json"):  # of another program
        path.write_text('["units", 1]' if path.name == "manifest.json" else "7")
    assert list(verify_dataset(str(dataset))) == []


def test_units_without_settings_are_no_plain_folder(tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    settings = make_settings(samples)
    start_dataset(str(tmp_path), settings)
    with open_unit_writer(str(tmp_path), 0, settings) as writer:
        writer.append(samples[0], 0, 100)
        writer.commit()
    (tmp_path / "settings.json").unlink()
    (problem,) = verify_dataset(str(tmp_path))
    assert "is a dataset without settings.json (units is there)" in problem


def test_foreign_files_in_the_layout_of_another_program(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", make_samples(LENGTHS), "sharded")
    convert_dataset(str(source), str(tmp_path / "np"), "numpy")
    assert list(verify_dataset(str(tmp_path / "np"))) == []
    foreign = tmp_path / "np" / "shard-00009.positions.npy"
    foreign.touch()
    assert list(verify_dataset(str(tmp_path / "np"))) == [f"{foreign}: the file belongs to no unit"]


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "settings.json"])
def test_a_changed_description_is_found(dataset: Path, name: str) -> None:
    text = (dataset / name).read_text()
    (dataset / name).write_text(
        text.replace('"tiny"', '"other"').replace('tokens": 5', 'tokens": 6')
    )
    if name == "index.json":
        (dataset / name).write_text(text.replace('"num_tokens": ', '"num_tokens": 1'))
    assert list(verify_dataset(str(dataset)))


def test_rows_that_are_not_finite_and_wrong_offsets(tmp_path: Path) -> None:
    """Files whose checksums are right all the same: written so."""
    rows = torch.ones(4, 3, 5)
    rows[2, 1, 0] = torch.inf
    tensors = {
        "positions": torch.tensor([0, 1, 0, 1]),
        "token_ids": torch.arange(4),
        "row_offsets": torch.tensor([0, 2, 4]),
        "token_offsets": torch.tensor([0, 2, 4]),
        "sample_index": torch.tensor([7, 9]),
        "record_index": torch.tensor([7, 9]),
    }

    def problems(**changed: torch.Tensor) -> list[str]:
        path = str(tmp_path / "a.safetensors")
        file = TensorFile(path, "hidden_states", (3, 5), torch.float32, len(tensors), {})
        file.append(changed.pop("rows", torch.ones(4, 3, 5)))
        file.complete({**tensors, **changed})
        file.close()
        found = [line.removeprefix(f"{path}: ") for line in verify_dataset(str(tmp_path))]
        os.unlink(path)
        return found

    assert problems() == []
    assert problems(rows=rows) == ["row 2 (sample 9) is not finite"]
    descending = torch.tensor([0, 5, 4])
    assert problems(row_offsets=descending) == ["row_offsets do not ascend from 0 to 4"]
    assert problems(token_offsets=descending) == ["token_offsets do not ascend from 0 to 4"]
    assert problems(positions=torch.tensor([0, 0, 0, 1])) == [
        "positions are not ascending token numbers of their samples"
    ]
    assert problems(positions=torch.tensor([0, 2, 0, 1])) == [
        "positions are not ascending token numbers of their samples"
    ]


@pytest.mark.parametrize(
    ("tensors", "metadata", "told"),
    [
        ({}, {"layer_ids": "[0, 3, 7]"}, r"rows of layers \[0, 3, 7\], the files before"),
        ({"hidden_states": torch.ones(2, 3, 9)}, {}, "rows of width 9, the files before it have 8"),
        ({"hidden_states": torch.ones(2, 2, 8)}, {}, r"rows of shape \[2, 8\] for layers"),
        ({}, {"layer_ids": "[0, 3"}, "its layer_ids cannot be read"),
        ({}, {"record": "seven"}, "sample 0 cannot be read: ValueError"),
        ({}, {"columns": "{"}, "sample 0 cannot be read: JSONDecodeError"),
        ({}, {"row_tensors": "7"}, "sample 0 cannot be read: TypeError"),
        ({"token_ids": None}, {}, "there is no tensor token_ids"),
        ({"hidden_states": None}, {}, "there is no tensor hidden_states"),
    ],
)
def test_verify_finds_in_a_plain_folder_what_the_reader_refuses(
    tensors: dict[str, Any], metadata: dict[str, str], told: str, tmp_path: Path
) -> None:
    usual = {"hidden_states": torch.ones(2, 3, 8), "token_ids": torch.tensor([5, 6])}

    def write(name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        stored = {k: v for k, v in {**usual, **tensors}.items() if v is not None}
        save_file(stored, tmp_path / name, {"layer_ids": "[0, 3, 8]", **metadata})

    for number in range(3):
        write(f"{number}.safetensors", {}, {})
    assert list(verify_dataset(str(tmp_path))) == []
    assert len(list(HiddenStatesDataset(tmp_path))) == 3
    write("1.safetensors", tensors, metadata)
    (problem,) = verify_dataset(str(tmp_path))
    assert re.search(told, problem) and "1.safetensors" in problem
    with pytest.raises((ValueError, TypeError)):
        list(HiddenStatesDataset(tmp_path))


def test_the_first_read_checks_if_asked(dataset: Path) -> None:
    file = dataset / "shard-00000.safetensors"
    flip(file, file.stat().st_size - 40)
    assert len(HiddenStatesDataset(dataset)[0].token_ids) == 5
    checked = HiddenStatesDataset(dataset, verify="first_read")
    with pytest.raises(DamagedFileError, match=r"shard-00000.safetensors: \w+ is damaged"):
        _ = checked[0]
    assert len(checked[-1].token_ids) == 2


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_first_read_checks_the_header(tmp_path: Path, fmt: DatasetFormat) -> None:
    """The header has the numbers of records, by which labels are found, and the layers."""
    path = write_dataset(tmp_path, make_samples([5, 1]), fmt)
    (first, *_) = HiddenStatesDataset(path).file_paths
    whole = Path(first).read_bytes()
    found = whole.find(b'"record":"100"') if fmt != "sharded" else whole.find(b'"record_index"')
    for offset in (found + 11, whole.find(b'"layer_ids":"[0') + 14):
        flip(Path(first), offset)
        with pytest.raises(DamagedFileError, match=re.escape(first)):
            _ = HiddenStatesDataset(path, verify="first_read")[0]
        Path(first).write_bytes(whole)


def test_a_cut_header_is_an_error_not_a_crash(dataset: Path) -> None:
    file = dataset / "shard-00000.safetensors"
    for size in (0, 7, 8, 100):
        os.truncate(file, size)
        with pytest.raises(DamagedFileError, match=r"cut off|cannot be read"):
            _ = HiddenStatesDataset(dataset)[0]


# Interruptions


class Killed(BaseException):
    """The process ends here: nothing after this happens."""


def crash_points(
    monkeypatch: pytest.MonkeyPatch, path: Path, run: Callable[[], None]
) -> Iterator[int]:
    """Run on an empty folder again and again, each time killed one file operation later."""
    real: dict[str, Any] = {
        name: getattr(os, name) for name in ("replace", "fsync", "pwrite", "unlink", "open")
    }
    for limit in range(10_000):
        left = limit
        shutil.rmtree(path, ignore_errors=True)

        def make(name: str) -> Callable[..., Any]:
            def operation(*args: Any, **keywords: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return real[name](*args, **keywords)

            return operation

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, make(name))
            try:
                run()
            except Killed:
                pass
            else:
                return
        yield limit
    raise AssertionError("it never ends")


@pytest.mark.parametrize("fmt", FORMATS)
def test_killed_between_any_two_file_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: DatasetFormat
) -> None:
    """Even the clean-up after the error is cut off, as by kill -9."""
    samples = make_samples([5, 1, 9])
    settings = make_settings(samples, fmt, shard_bytes=2000)
    expected = folder_bytes(write_dataset(tmp_path / "whole", samples, fmt, shard_bytes=2000))
    path = tmp_path / "d"

    def run() -> None:
        remove_temporary_files(str(path))
        write_missing(path, samples, settings)

    kills = 0
    for kills in crash_points(monkeypatch, path, run):
        if (path / "manifest.json").exists():
            assert list(verify_dataset(str(path))) == []
        elif (path / "settings.json").exists():
            with pytest.raises(ValueError, match=r"not complete|run the command again"):
                HiddenStatesDataset(path)
            for record in read_unit_records(str(path)):
                assert verify_unit(str(path), record, full=True) == []
        run()
        assert folder_bytes(path) == expected, kills
    assert kills > 20


def test_a_full_disk_comes_through_and_leaves_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(LENGTHS)
    settings = make_settings(samples)
    full = OSError(28, "No space left on device")

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space") as raised:
            write_missing(tmp_path / "d", samples, settings)
    assert raised.value is full
    assert sorted(os.listdir(tmp_path / "d")) == ["settings.json", "units"]
    write_missing(tmp_path / "d", samples, settings)
    expected = write_dataset(tmp_path / "whole", samples)
    assert folder_bytes(tmp_path / "d") == folder_bytes(expected)


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["settings.json", "index.json", "manifest.json"])
def test_a_flipped_bit_in_what_describes_a_dataset(dataset: Path, name: str) -> None:
    """Every one is a line of the report; damaged settings are never taken for other settings."""
    path, settings = dataset / name, DatasetSettings.read(str(dataset))
    whole = path.read_bytes()
    for offset in range(0, len(whole), 1 if name == "settings.json" else 7):
        flip(path, offset)
        problems = list(verify_dataset(str(dataset)))
        if _json_of(path) != json.loads(whole):  # the last digit of a number may not matter
            assert problems and any(name in problem for problem in problems), offset
        if name == "settings.json":
            with pytest.raises(ValueError, match=r"settings\.json (is damaged|cannot be read)"):
                start_dataset(str(dataset), settings)
        path.write_bytes(whole)
    assert not list(verify_dataset(str(dataset)))


def test_a_damaged_index_is_not_read_as_fewer_samples(dataset: Path) -> None:
    path = dataset / "index.json"
    path.write_text(path.read_text().replace('"num_samples": 2', '"num_samples": 1', 1))
    with pytest.raises(ValueError, match=r"index.json is damaged: it is not the one that manif"):
        HiddenStatesDataset(dataset)


def test_opened_while_the_job_ends(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All units are seen, in their folder or in the index, whatever is read first."""
    record = json.loads((dataset / "index.json").read_text())["units"][0]
    index, manifest = (dataset / name for name in ("index.json", "manifest.json"))
    whole, description = index.read_bytes(), manifest.read_bytes()
    for path in (index, manifest):
        path.unlink()
    (dataset / "units").mkdir()
    (dataset / "units" / "unit-000000.json").write_text(json.dumps(record))
    read_json = metadata.read_json

    def read_then_end(path: str) -> Any:
        try:
            return read_json(path)
        finally:
            if not path.endswith("settings.json"):
                index.write_bytes(whole)
                manifest.write_bytes(description)
                shutil.rmtree(dataset / "units", ignore_errors=True)

    monkeypatch.setattr(metadata, "read_json", read_then_end)
    assert len(HiddenStatesDataset(dataset, allow_incomplete=True)) == 7


def test_a_damaged_entry_of_the_manifest_is_named(dataset: Path) -> None:
    path = dataset / "manifest.json"
    path.write_text(path.read_text().replace('"name"', '"na}e"', 1))
    (problem, other) = sorted(verify_dataset(str(dataset)))
    assert "manifest.json: shards[0].na}e is 'shard-00000" in problem + other


def test_settings_of_older_datasets_have_no_checksum(dataset: Path) -> None:
    path = dataset / "settings.json"
    settings = json.loads(path.read_text())
    del settings["checksum"]
    path.write_text(json.dumps(settings))
    assert not list(verify_dataset(str(dataset)))


def test_where_the_model_lies_is_no_other_setting(dataset: Path) -> None:
    """It is what its config, weights and tokenizer are; without weights it is its name."""
    there = DatasetSettings.read(str(dataset))
    elsewhere = dataclasses.replace(there, model="./models/../same")
    assert there.differences(elsewhere) == [f"model: {there.model!r} there, './models/../same' now"]
    known = {"weights": '"xxh3_128:1"'}
    there = dataclasses.replace(there, options=known)
    assert there.differences(dataclasses.replace(elsewhere, options=known)) == []


def test_repair_after_the_finish(dataset: Path) -> None:
    """A resume does this with a complete dataset in which a shard is damaged."""
    samples = make_samples([5, 1, 9, 12, 3, 7, 2])
    before = folder_bytes(dataset)
    flip(dataset / "shard-00001.safetensors", 4000)
    (bad,) = [r for r in read_unit_records(str(dataset)) if verify_unit(str(dataset), r, full=True)]
    settings = DatasetSettings.read(str(dataset))
    with open_unit_writer(str(dataset), bad.unit, settings) as writer:
        assert not (dataset / "manifest.json").exists()
        for number in range(bad.first_sample, bad.last_sample + 1):
            writer.append(samples[number], number, 100 + number)
        assert writer.commit() == bad
    merge_units(str(dataset))
    assert folder_bytes(dataset) == before


def test_changed_settings_are_refused_with_what_differs(dataset: Path) -> None:
    settings = DatasetSettings.read(str(dataset))
    assert settings.differences(settings) == []
    changed = DatasetSettings(
        **{**vars(settings), "layer_ids": (0, 3, 7), "options": {"max_length": "5"}}
    )
    with pytest.raises(ValueError, match="other settings") as raised:
        start_dataset(str(dataset), changed)
    assert "layer_ids: [0, 3, 8] there, [0, 3, 7] now" in str(raised.value)
    assert "max_length: None there, '5' now" in str(raised.value)
    assert str(raised.value).count("now") == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    settings = make_settings(samples, shard_bytes=1500)
    assert settings.num_units == 5
    start_dataset(str(tmp_path), settings)
    for number in (0, 3):
        with open_unit_writer(str(tmp_path), number, settings) as writer:
            writer.append(samples[number], number, number)
            writer.commit()
    assert missing_units(str(tmp_path)) == [1, 2, 4]
    message = r"not complete: 3 of 5 units are missing \(1, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        HiddenStatesDataset(tmp_path)
    with pytest.raises(ValueError, match=message):
        merge_units(str(tmp_path))
    part = HiddenStatesDataset(tmp_path, allow_incomplete=True)
    assert [sample.index for sample in part] == [0, 3]
    assert part.manifest is None
    assert any("unit 4 is missing" in problem for problem in verify_dataset(str(tmp_path)))


def test_only_the_named_units_lose_their_temporary_files(tmp_path: Path) -> None:
    samples = make_samples([4])
    settings = make_settings(samples)
    start_dataset(str(tmp_path), settings)
    writers = [open_unit_writer(str(tmp_path), unit, settings) for unit in (1, 12)]
    Path(temporary_path(tmp_path / "settings.json")).touch()
    remove_temporary_files(str(tmp_path), [1, 5])
    left = {TemporaryName.parse(p.name) for p in tmp_path.glob(".*.tmp")}
    assert left == {("settings.json", None), ("shard-00012.safetensors", "unit-000012")}
    remove_temporary_files(str(tmp_path))
    assert list(tmp_path.glob(".*.tmp")) == []
    for writer in writers:
        writer.abort()


def test_no_file_stays_open(tmp_path: Path) -> None:
    samples = make_samples([2] * 40)
    before = len(os.listdir("/proc/self/fd"))
    path = write_dataset(tmp_path / "d", samples, "files", shard_bytes=10**7)
    dataset = HiddenStatesDataset(path)
    kept = [dataset[i] for i in range(len(dataset))]
    assert len(os.listdir("/proc/self/fd")) == before
    shutil.rmtree(path)
    assert all(torch.equal(a.hidden_states, b.hidden_states) for a, b in zip(kept, samples))


def test_metadata_is_what_the_connector_writes(dataset: Path) -> None:
    with builtins.open(dataset / "shard-00000.safetensors", "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(length))["__metadata__"]
    assert json.loads(metadata["layer_ids"]) == [0, 3, 8]
    assert metadata["model"] == "tiny"
    assert metadata["dtype"] == "bfloat16"
    assert "residual stream after i decoder layers" in metadata["layer_convention"]


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.fixture
def limited_time() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("change", [_as_pipe, _as_huge])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.usefixtures("limited_time")
def test_what_is_no_file_of_a_dataset_is_not_read(
    tmp_path: Path, fmt: DatasetFormat, change: Callable[[Path], None]
) -> None:
    """A pipe would wait for ever, a huge file take all memory."""
    whole = write_dataset(tmp_path / "d", make_samples(LENGTHS), fmt)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) > 4
    for name in files:
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        change(damaged / name)
        for arguments in (
            ("verify", str(damaged)),
            ("inspect", str(damaged), "--no-plots"),
            ("convert", str(damaged), str(tmp_path / "new"), "--format", "files"),
        ):
            try:
                status = hidden_states(arguments)
            except SystemExit as error:
                status = error.code
            # A summary reads one file of samples, and a unit record may be made again.
            assert status in ((1, 2) if arguments[0] == "verify" else (0, 2)), (name, arguments)
            assert not (tmp_path / "new" / "manifest.json").exists() or status == 0
            shutil.rmtree(tmp_path / "new", ignore_errors=True)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.usefixtures("limited_time")
def test_a_file_of_rows_that_is_something_else(tmp_path: Path, make: Callable[[str], None]) -> None:
    path = str(tmp_path / "a.safetensors")
    make(path)
    with pytest.raises(OSError, match=f"{path} is not a regular file"):
        read_hidden_states(path)

"""One job on one engine: what ends up in the folder, whatever happened on the way."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.storage import mounted_tmpfs, remount
from tests.extract import job_harness as harness
from tests.extract.fake_engine import FAILING_TOKEN
from tests.extract.job_harness import check_rows, digests, run, token_lists, write_token_ids
from vllm.entrypoints.extract import job
from vllm.exceptions import FailureError
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.manifest import read_skipped
from vllm.hidden_states.tensor_file import TensorFile
from vllm.hidden_states.units import file_stem
from vllm.hidden_states.verify import verify_dataset

LISTS = token_lists(1, 60)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_token_ids(tmp_path / "data.jsonl", LISTS)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def test_every_sample_is_there_and_nothing_else(tiny_llama: Path, data: Path, output: Path) -> None:
    assert run(tiny_llama, data, output) == 0
    check_rows(output, LISTS)
    names = {path.name for path in output.iterdir()}
    shards = {name for name in names if name.startswith("shard-")}
    assert len(shards) > 10
    assert names - shards == {"settings.json", "index.json", "manifest.json"}


@pytest.mark.parametrize("form", ["files", "speculators"])
def test_formats_of_one_file_a_sample(
    form: str, tiny_llama: Path, data: Path, output: Path
) -> None:
    run(tiny_llama, data, output, format=form)
    check_rows(output, LISTS)
    name = "hs_7.safetensors" if form == "speculators" else "00000007.safetensors"
    assert (output / name).exists()


HOSTILE_NAMES: tuple[Any, ...] = (
    *("../../escaped", "/abs/escaped", "..", ".", ".tmp-x", "a\\b", "con", "a\0b", "\n", " "),
    *("manifest.json", "settings", "units", "x" * 5000, "\u202egnp", "\ud83d\ude00", "*?[a]"),
    *(0, -1, 1e300, True, ["a", "b"], {"a": 1}, "00000007", "plan/samples.bin"),
)


def test_names_that_mean_harm(tiny_llama: Path, tmp_path: Path, output: Path) -> None:
    """Each is one file in the folder itself, told apart from all others."""
    records = [{"id": name, "input_ids": LISTS[i % 9]} for i, name in enumerate(HOSTILE_NAMES)]
    records += [{"id": name, "input_ids": [1]} for name in (None, "")]
    data = harness.write_jsonl(tmp_path / "named.jsonl", records)
    run(tiny_llama, data, output, format="files", id_column="id")
    files = [path for path in output.rglob("*.safetensors") if path.parent == output]
    dataset = HiddenStatesDataset(output)
    assert len(files) == len(dataset) == len(list(output.rglob("*.safetensors")))
    assert len(dataset) == len(HOSTILE_NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"named.jsonl", "output"}
    assert not Path("/abs").exists() and max(len(path.name) for path in files) <= 255
    assert digests(output) and run(tiny_llama, data, output, format="files", id_column="id") == 0


def test_a_name_that_is_no_text_is_skipped(tiny_llama: Path, tmp_path: Path, output: Path) -> None:
    records = [{"id": "a", "input_ids": [1]}, {"id": "\ud800", "input_ids": [2]}]
    data = harness.write_jsonl(tmp_path / "named.jsonl", records)
    assert run(tiny_llama, data, output, format="files", id_column="id") == 0
    (skipped,) = read_skipped(str(output))
    assert skipped.record == 1 and skipped.reason.startswith("bad id: ")
    check_rows(output, [[1]])


def test_files_named_by_a_column(tiny_llama: Path, tmp_path: Path, output: Path) -> None:
    records = [{"id": f"doc/{i}", "input_ids": ids} for i, ids in enumerate(LISTS[:9])]
    data = harness.write_jsonl(tmp_path / "named.jsonl", records)
    run(tiny_llama, data, output, format="files", id_column="id")
    assert len(list(output.glob("doc_3-*.safetensors"))) == 1
    for name in ("doc/3", file_stem("doc/3")):
        harness.write_jsonl(data, [*records, {"id": name, "input_ids": [5]}])
        with pytest.raises(ValueError, match=r"two samples would be in doc_3-.*.safetensors; use"):
            run(tiny_llama, data, tmp_path / "other", format="files", id_column="id")


@pytest.mark.parametrize("positions", ["last", "every:3", "mask"])
def test_positions(positions: str, tiny_llama: Path, tmp_path: Path, output: Path) -> None:
    masks = [[(i + j) % 3 > 0 for j in range(len(ids))] for i, ids in enumerate(LISTS)]
    records = [
        {"input_ids": ids, "loss_mask": [int(one) for one in mask]}
        for ids, mask in zip(LISTS, masks, strict=True)
    ]
    data = harness.write_jsonl(tmp_path / "data.jsonl", records)
    run(tiny_llama, data, output, positions=positions)
    kept = [i for i, mask in enumerate(masks) if any(mask) or positions != "mask"]
    check_rows(output, [LISTS[i] for i in kept])
    for i, sample in zip(kept, HiddenStatesDataset(output), strict=True):
        expected = {
            "last": [len(LISTS[i]) - 1],
            "every:3": list(range(0, len(LISTS[i]), 3)),
            "mask": [j for j, wanted in enumerate(masks[i]) if wanted],
        }
        assert sample.positions.tolist() == expected[positions]
        assert sample.record == i


def test_fp8(
    tiny_llama: Path, data: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_llama, data, output, storage_dtype="fp8")
    sample = HiddenStatesDataset(output)[3]
    expected = harness.fake_rows(LISTS[3], harness.LAYERS, harness.HIDDEN_SIZE)
    lost = torch.linalg.vector_norm(sample.rows(torch.float32) - expected, dim=-1)
    assert (lost / torch.linalg.vector_norm(expected, dim=-1)).max() < 0.04


@pytest.mark.parametrize("form", ["files", "sharded"])
@pytest.mark.parametrize("positions", ["all", "mask"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_one_row_for_a_sample(
    pooling: str, positions: str, form: str, tiny_llama: Path, tmp_path: Path, output: Path
) -> None:
    masks = [[1] + [i % 2 for i in range(1, len(ids))] for ids in LISTS]
    records = [{"input_ids": i, "loss_mask": m} for i, m in zip(LISTS, masks, strict=True)]
    data = harness.write_jsonl(tmp_path / "data.jsonl", records)
    options = {"pooling": pooling, "positions": positions, "format": form}
    assert run(tiny_llama, data, output, **options) == 0
    dataset = HiddenStatesDataset(output, verify="first_read")
    assert list(verify_dataset(str(output))) == []
    for sample, ids, mask in zip(dataset, LISTS, masks, strict=True):
        rows = harness.fake_rows(ids, harness.LAYERS, harness.HIDDEN_SIZE)
        wanted = rows[torch.tensor(mask).bool()] if positions == "mask" else rows
        expected = wanted.mean(0, keepdim=True) if pooling == "mean" else wanted[-1:]
        assert torch.equal(sample.hidden_states, expected)
        last = max(i for i, one in enumerate(mask) if one or positions == "all")
        assert sample.positions.tolist() == [last]
    with pytest.raises(ValueError, match=r"pooling: .* there, 'none' now"):
        run(tiny_llama, data, output, positions=positions, format=form)


@pytest.mark.parametrize("form", ["files", "sharded"])
def test_columns_of_the_input_are_carried_along(
    form: str, tiny_llama: Path, tmp_path: Path, output: Path
) -> None:
    records: list[Any] = [
        {"input_ids": ids, "label": i % 3, "source": {"name": f"\0ü{i}"}, "id": f"a{i}\0"}
        for i, ids in enumerate(LISTS[:20])
    ]
    del records[4]["label"]
    data = harness.write_jsonl(tmp_path / "data.jsonl", records)
    named = {"id_column": "id"} if form == "files" else {}
    keep = ["label", "source"]
    run(tiny_llama, data, output, format=form, keep_columns=keep, shuffle_seed=2, **named)
    converted = tmp_path / "converted"
    convert_dataset(str(output), str(converted), "sharded" if form == "files" else "files")
    for folder in (output, converted):
        assert list(verify_dataset(str(folder))) == []
        for sample in HiddenStatesDataset(folder):
            record = records[sample.record or 0]
            assert sample.columns == {name: record.get(name) for name in keep}
    assert "columns label, source)" in repr(sample)
    with pytest.raises(ValueError, match="--keep-columns lable: no sample has such a column"):
        run(tiny_llama, data, tmp_path / "other", format=form, keep_columns=["lable"], **named)
    with pytest.raises(ValueError, match="--mask-column los_mask: no sample has such a column"):
        run(tiny_llama, data, tmp_path / "other", format=form, mask_column="los_mask", **named)
    assert not (tmp_path / "other").exists()


# Bad records


def test_bad_records_are_listed_with_their_lines(
    tiny_llama: Path, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Any] = [{"input_ids": ids} for ids in LISTS[:12]]
    records[2] = "{broken"
    records[4] = {"nothing": 1}
    records[5] = {"input_ids": [1, FAILING_TOKEN]}
    records[7] = {"input_ids": [1, 400]}
    data = harness.write_jsonl(tmp_path / "data.jsonl", records)
    assert run(tiny_llama, data, output) == 0
    check_rows(output, [ids for i, ids in enumerate(LISTS[:12]) if i not in (2, 4, 5, 7)])
    skipped = {one.record: one.reason for one in read_skipped(str(output))}
    assert list(skipped) == [2, 4, 5, 7]
    assert skipped[2].startswith("unreadable: not JSON")
    assert skipped[2].endswith("(data.jsonl:3)")
    assert skipped[5] == "engine: it was told to"
    assert "bad token ids: 1 to 400" in skipped[7]
    summary = capsys.readouterr().out
    assert re.search(r"skipped +4\n", summary)
    assert re.search(r"  engine +1\n", summary)
    harness.write_token_ids(data, [[FAILING_TOKEN], [1, FAILING_TOKEN]])
    for _ in range(2):  # no dataset without a sample, and the same command says so again
        with pytest.raises(FailureError, match="all 2 samples were skipped; the first: engine"):
            run(tiny_llama, data, tmp_path / "none")
    assert not (tmp_path / "none" / "manifest.json").exists()
    harness.write_jsonl(data, records)
    with pytest.raises(ValueError, match=r"data.jsonl:3: unreadable.*--on-error skip"):
        run(tiny_llama, data, tmp_path / "other", on_error="fail")
    harness.write_token_ids(data, [[1], [FAILING_TOKEN]])
    with pytest.raises(RuntimeError, match=r"sample 1 \(record 1\): it was told to"):
        run(tiny_llama, data, tmp_path / "third", on_error="fail")


def test_nothing_usable(tiny_llama: Path, tmp_path: Path, output: Path) -> None:
    data = harness.write_jsonl(tmp_path / "data.jsonl", ["[]", {}])
    with pytest.raises(ValueError, match="none of 2 records can be used; unreadable: not a record"):
        run(tiny_llama, data, output)


# Going on


def test_a_finished_dataset_is_left_alone(tiny_llama: Path, data: Path, output: Path) -> None:
    run(tiny_llama, data, output)
    times = {path.name: path.stat().st_mtime_ns for path in output.glob("shard-*")}
    before = digests(output)
    assert run(tiny_llama, data, output) == 0
    assert digests(output) == before
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("shard-*")} == times


def test_damaged_missing_and_cut_units_are_made_again(
    tiny_llama: Path, data: Path, output: Path
) -> None:
    run(tiny_llama, data, output)
    before = digests(output)
    shards = sorted(output.glob("shard-*"))
    times = {path: path.stat().st_mtime_ns for path in shards}
    flipped = bytearray(shards[2].read_bytes())
    flipped[-3] ^= 4
    shards[2].write_bytes(flipped)
    shards[5].unlink()
    os.truncate(shards[8], 1000)
    run(tiny_llama, data, output)
    assert digests(output) == before
    redone = {i for i, path in enumerate(shards) if path.stat().st_mtime_ns != times[path]}
    assert redone == {2, 5, 8}


@pytest.mark.parametrize("options", [{"format": "files", "id_column": "id"}, {"format": "files"},
                                     {"format": "speculators"}])  # fmt: skip
def test_damaged_files_are_made_again_alone(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path, output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    records: list[Any] = [{"input_ids": ids, "id": f"n{i}"} for i, ids in enumerate(LISTS)]
    records[5]["input_ids"] = [FAILING_TOKEN]
    data = harness.write_jsonl(tmp_path / "data.jsonl", records)
    options = {**options, "shard_size_gib": 1.0}
    run(tiny_llama, data, output, **options)
    before = digests(output)
    assert len(json.loads((output / "index.json").read_text())["units"]) == 1
    dataset = HiddenStatesDataset(output)
    files, token = [*map(Path, dataset.file_paths)], int(dataset[30].token_ids[0])
    times = {path: path.stat().st_mtime_ns for path in files}

    def damage() -> None:
        flipped = bytearray(files[7].read_bytes())
        flipped[-3] ^= 4
        files[7].write_bytes(flipped)
        files[30].unlink()

    def made_again() -> set[Path]:
        return {path for path in files if path.stat().st_mtime_ns != times[path]}

    damage()
    run(tiny_llama, data, output, **options)
    assert digests(output) == before
    assert made_again() == {files[7], files[30]}
    damage()
    with monkeypatch.context() as failing:
        failing.setattr("tests.extract.fake_engine.FAILING_TOKEN", token)
        with pytest.raises(RuntimeError, match=r"it was told to$"):
            run(tiny_llama, data, output, **options)
    assert run(tiny_llama, data, output, **options) == 0
    assert digests(output) == before
    damage()
    for module in ("worker", "resolve"):
        monkeypatch.setattr(f"vllm.entrypoints.extract.{module}.kernels_of", lambda _: "others")
    run(tiny_llama, data, output, mixed_kernels=True, **options)
    assert made_again() == set(files), "a unit is of one kind of kernels"


@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_damaged_index_and_manifest(name: str, tiny_llama: Path, data: Path, output: Path) -> None:
    run(tiny_llama, data, output)
    before = digests(output)
    path = output / name
    path.write_text(path.read_text().replace("1", "2", 3))
    run(tiny_llama, data, output)
    assert digests(output) == before


def test_checking_sizes_only(tiny_llama: Path, data: Path, output: Path) -> None:
    run(tiny_llama, data, output)
    shards = sorted(output.glob("shard-*"))
    before = digests(output)
    flipped = bytearray(shards[2].read_bytes())
    flipped[-3] ^= 4
    shards[2].write_bytes(flipped)
    shards[5].unlink()
    run(tiny_llama, data, output, resume_check="size")
    differing = {name for name, digest in digests(output).items() if digest != before[name]}
    assert differing == {shards[2].name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "0,2,last"}, r"layer_ids: \[0, 3, 4\] there, \[0, 2, 4\] now"),
        ({"positions": "last"}, "positions: 'all' there, 'last' now"),
        ({"storage_dtype": "bfloat16"}, "dtype: 'float32' there, 'bfloat16' now"),
        ({"format": "files"}, "format: 'sharded' there, 'files' now"),
        ({"max_length": 9}, "max_tokens"),
        ({"shuffle_seed": 1}, "shuffle_seed"),
        ({"quantization": "int8"}, "quantization: .* there, '\"int8\"' now"),
        (
            {"model_class_overrides": {"LlamaForCausalLM": "tests.config.test_identity:Changed"}},
            "model_classes: None there, .*test_identity:Changed",
        ),
    ],
)
def test_other_settings_are_refused(
    change: dict[str, Any], message: str, tiny_llama: Path, data: Path, output: Path
) -> None:
    run(tiny_llama, data, output)
    before = digests(output)
    with pytest.raises(ValueError, match=message):
        run(tiny_llama, data, output, **change)
    assert digests(output) == before


def test_another_input_or_model_is_refused(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path
) -> None:
    from tests.models.checkpoints import make_checkpoint

    run(tiny_llama, data, output)
    content = data.read_text()
    data.write_text(content + '{"input_ids": [1]}\n')
    with pytest.raises(ValueError, match="input_digest"):
        run(tiny_llama, data, output)
    data.write_text(content)
    retrained = tmp_path / "llama"
    make_checkpoint(retrained, "llama", seed=1)
    with pytest.raises(ValueError, match="weights"):
        run(retrained, data, output)


def _make_again(output: Path, name: str = "shard-00001.safetensors") -> None:
    (output / name).unlink()


def _age(output: Path, drop: tuple[str, ...]) -> None:
    """Settings as an older version of this package wrote them."""
    path = output / "settings.json"
    settings = json.loads(path.read_text())
    del settings["checksum"]
    settings["engine_version"] = "0.0.9"
    settings["options"] = {k: v for k, v in settings["options"].items() if k not in drop}
    settings["options"]["weights_sampled"] = "xxh3_128:0"
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("drop", [(), ("kernels", "weights_content", "values_version")])
def test_a_dataset_of_an_older_version_is_continued(
    drop: tuple[str, ...], tiny_llama: Path, data: Path, output: Path
) -> None:
    """Unless values are others in this one."""
    run(tiny_llama, data, output)
    before = digests(output)
    _age(output, drop)
    _make_again(output)
    assert run(tiny_llama, data, output) == 0
    assert digests(output)["shard-00001.safetensors"] == before["shard-00001.safetensors"]


def test_a_version_that_computes_other_values(
    tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_llama, data, output)
    _age(output, ("values_version",))
    monkeypatch.setattr("vllm.config.identity.VALUES_VERSION", 2)
    with pytest.raises(ValueError, match="values_version: '1' there, '2' now"):
        run(tiny_llama, data, output)


def test_other_kernels_go_on_only_where_they_may(
    tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of another instruction set differ in their last bits."""
    run(tiny_llama, data, output)
    before = digests(output)
    _make_again(output)
    for module in ("worker", "resolve"):
        monkeypatch.setattr(f"vllm.entrypoints.extract.{module}.kernels_of", lambda _: "others")
    with pytest.raises(
        ValueError, match=r"kernels: .*others.* now; use --mixed-kernels to continue"
    ):
        run(tiny_llama, data, output)
    assert run(tiny_llama, data, output, mixed_kernels=True) == 0
    units = json.loads((output / "index.json").read_text())["units"]
    others = [unit["unit"] for unit in units if unit["kernels"] == "others"]
    assert others == [1]
    (ours,) = {unit["kernels"] for unit in units} - {"others"}
    assert ours.startswith(("native_cpu", "plain"))
    changed = {name for name, digest in digests(output).items() if digest != before[name]}
    assert changed == {"index.json", "manifest.json"}


def test_a_worker_with_other_kernels(
    tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine than the one where the command runs."""
    monkeypatch.setattr("vllm.entrypoints.extract.worker.kernels_of", lambda _: "others")
    with pytest.raises(
        ValueError, match=r"kernels: .*others.* now; use --mixed-kernels to continue"
    ):
        run(tiny_llama, data, output)
    assert not output.exists()
    assert run(tiny_llama, data, output, mixed_kernels=True) == 0


def test_ranks_with_other_kernels(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_llama, data, output, rank=0, world_size=2)
    with monkeypatch.context() as other_machine:
        for module in ("worker", "resolve"):
            name = f"vllm.entrypoints.extract.{module}.kernels_of"
            other_machine.setattr(name, lambda _: "others")
        run(tiny_llama, data, tmp_path / "there", rank=1, world_size=2)
    shutil.copytree(tmp_path / "there", output, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"by different kernels \(.*; others\), .*--mixed-kernels"):
        run(tiny_llama, data, output, merge=True)
    assert run(tiny_llama, data, output, merge=True, mixed_kernels=True) == 0


def test_an_output_folder_in_the_folder_of_the_input(tiny_llama: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "data", tmp_path / "data" / "output"
    folder.mkdir()
    write_token_ids(folder / "a.jsonl", LISTS)
    assert run(tiny_llama, folder, output) == 0
    whole = digests(output)
    next(output.glob("shard-*")).unlink()
    assert run(tiny_llama, folder, output) == 0
    assert digests(output) == whole


@pytest.mark.parametrize("name", ["thesis.tex", "plans.txt"])
def test_a_folder_with_other_things_is_refused(
    name: str, tiny_llama: Path, data: Path, output: Path
) -> None:
    output.mkdir()
    (output / name).touch()
    with pytest.raises(ValueError, match="contains something else"):
        run(tiny_llama, data, output)


def test_a_folder_that_cannot_be_written(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """A dataset that is there is read, checked and converted; nothing else is begun."""
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as disk:
        run(tiny_llama, data, disk / "output")
        remount(disk, "ro")
        check_rows(disk / "output", LISTS)
        assert list(verify_dataset(str(disk / "output"))) == []
        convert_dataset(str(disk / "output"), str(tmp_path / "files"), "files")
        check_rows(tmp_path / "files", LISTS)
        assert run(tiny_llama, data, disk / "output", dry_run=True) == 0
        for write in (
            lambda: run(tiny_llama, data, disk / "output"),
            lambda: run(tiny_llama, data, disk / "new" / "output"),
            lambda: convert_dataset(str(disk / "output"), str(disk / "files"), "files"),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                write()
        check_rows(disk / "output", LISTS)


def test_an_output_that_is_a_file(tiny_llama: Path, data: Path, output: Path) -> None:
    output.write_text("a file")
    for folder in (output, output / "below"):
        with pytest.raises(ValueError, match=r"--output .*: there is a file of that name"):
            run(tiny_llama, data, folder)
    assert output.read_text() == "a file"


def test_an_output_that_is_a_link_to_nothing(tiny_llama: Path, data: Path, output: Path) -> None:
    output.symlink_to(output.parent / "gone")
    with pytest.raises(ValueError, match=r"--output .*: it is a link to nothing"):
        run(tiny_llama, data, output)


def test_full_disk(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_llama, data, tmp_path / "undisturbed")
    room = 40_000
    write = TensorFile._write

    def limited(self: TensorFile, content: memoryview, offset: int) -> None:
        nonlocal room
        room -= len(content)
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, content, offset)

    monkeypatch.setattr(TensorFile, "_write", limited)
    with pytest.raises(OSError, match="No space left"):
        run(tiny_llama, data, output)
    assert not [name for name in digests(output) if name.endswith(".tmp")]
    there = {path.name for path in output.glob("units/*")}
    assert there
    monkeypatch.undo()
    assert run(tiny_llama, data, output) == 0
    assert digests(output) == digests(tmp_path / "undisturbed")


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 bytes are free, which is a fifth of what is needed."""
    usage = SimpleNamespace(total=10**6, used=9 * 10**5, free=10**5)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)


@pytest.mark.usefixtures("small_disk")
def test_a_dataset_that_the_disk_cannot_hold(
    tiny_llama: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "output"
    refused = (
        r"--output .*takes \d.* KiB more, and 97.66 KiB are free.*use --no-check-disk to continue"
    )
    with pytest.raises(ValueError, match=refused):
        run(tiny_llama, data, output)
    assert not output.parent.exists(), "a refused command leaves no empty folder"
    with pytest.raises(ValueError, match=refused):
        run(tiny_llama, data, output, dry_run=True)
    assert re.search(r"free on the disk +97.66 KiB", capsys.readouterr().out)
    run(tiny_llama, data, output, check_disk=False)
    check_rows(output, LISTS)
    (output / "shard-00002.safetensors").unlink()
    assert run(tiny_llama, data, output) == 0, "what is there already needs no room"


def test_the_figure_for_bytes_is_what_the_files_take(
    tiny_llama: Path, data: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_llama, data, output, storage_dtype="bfloat16", shard_size_gib=1.0)
    printed = capsys.readouterr().out
    taken = sum(path.stat().st_size for path in output.glob("shard-*"))
    (stated,) = re.findall(r"  bytes +([\d.]+) KiB\n", printed)
    assert float(stated) == pytest.approx(taken / 1024, abs=0.01)
    assert "written" not in printed


@pytest.mark.parametrize(
    "options",
    [
        *({"layers": "77"}, {"max_length": 0}, {"chat_template": "/no/such"}),
        {"data_parallel_size": 0},
    ],
)
def test_a_refused_command_leaves_no_folder(
    options: dict[str, Any], tiny_llama: Path, data: Path, output: Path
) -> None:
    with pytest.raises(ValueError):
        run(tiny_llama, data, output, **options)
    assert not output.exists()


def test_an_engine_that_cannot_start_leaves_no_folder(
    tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder left there would refuse what the message proposes, as another dataset."""

    def refuse(engine_args: Any) -> Any:
        raise ValueError("the pool is too small")

    monkeypatch.setattr(harness, "load_fake", refuse)
    with pytest.raises(ValueError, match="pool is too small"):
        run(tiny_llama, data, output)
    assert not output.exists()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NonsenseForCausalLM"]}, "NonsenseForCausalLM"),
        ({"num_hidden_layers": 5}, "missing"),
    ],
)
def test_a_checkpoint_that_cannot_run_is_refused_before_the_input_is_read(
    change: dict[str, Any], message: str, dry_run: bool, tiny_llama: Path, data: Path,
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    monkeypatch.setattr("vllm.entrypoints.extract.job.find_sources", None)
    with pytest.raises(ValueError, match=message):
        run(model, data, output, dry_run=dry_run)
    assert not output.exists()


def test_interrupt(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.extract.fake_engine import FakeEngine

    run(tiny_llama, data, tmp_path / "undisturbed")
    result = FakeEngine._result

    def interrupted(self: FakeEngine, index: int, *arguments: Any) -> Any:
        if index == 33:
            raise KeyboardInterrupt
        return result(self, index, *arguments)

    monkeypatch.setattr(FakeEngine, "_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_llama, data, output)
    assert not [name for name in digests(output) if name.endswith(".tmp")]
    monkeypatch.undo()
    run(tiny_llama, data, output)
    assert digests(output) == digests(tmp_path / "undisturbed")


def test_two_commands_at_once(tiny_llama: Path, data: Path, output: Path) -> None:
    import fcntl

    output.mkdir()
    descriptor = os.open(output, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ValueError, match="another command is writing there"):
            run(tiny_llama, data, output)
    finally:
        os.close(descriptor)


# Other ways in


def test_standard_input(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_llama, data, tmp_path / "from_file")
    for _ in range(2):  # again: continued
        stdin = SimpleNamespace(buffer=io.BytesIO(data.read_bytes()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(tiny_llama, data, output, input=["-"]) == 0
    assert digests(output) == digests(tmp_path / "from_file")


def test_records_of_standard_input_have_a_place_that_is_always_the_same(
    tiny_llama: Path, data: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = data.read_bytes() + b'{"other": 1}\n'
    for folder in (output, tmp_path / "again"):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
        assert run(tiny_llama, data, folder, input=["-"]) == 0
    assert digests(output) == digests(tmp_path / "again")
    (skipped,) = json.loads((output / "index.json").read_text())["skipped"]
    assert skipped["reason"].endswith(f"(stdin:{lines.count(10)})")


def test_standard_input_that_is_closed_or_named_twice(
    tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"--input - - cannot be read: .* only once"):
        run(tiny_llama, data, output, input=["-", "-"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=r"--input -: standard input is closed"):
        run(tiny_llama, data, output, input=["-"])
    assert not output.exists()


def test_shuffled_selection(tiny_llama: Path, data: Path, output: Path) -> None:
    run(tiny_llama, data, output, shuffle_seed=3, max_samples=25)
    order = [sample.record for sample in HiddenStatesDataset(output)]
    assert len(set(order)) == 25
    assert order != sorted(order)  # type: ignore[type-var]
    check_rows(output, [LISTS[record] for record in order if record is not None])


@pytest.mark.parametrize("change", ["appended", "cut", "replaced"])
def test_an_input_that_changes_while_it_is_read(
    change: str, tiny_llama: Path, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset would state the digest of something that nobody has."""
    text, digest_of = data.read_text(), job.input_digest
    lines = text.splitlines(keepends=True)
    others = {"appended": text + lines[0], "cut": text[:-9], "replaced": "".join(lines[::-1])}

    def read_and_change(sources: Any) -> str:
        found = digest_of(sources)
        data.write_text(others[change])
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(job, "input_digest", read_and_change)
        with pytest.raises(ValueError, match="--input: a file changed while it was read"):
            run(tiny_llama, data, output)
    assert not output.exists()
    assert run(tiny_llama, data, output) == 0


def test_ranks_and_merge(tiny_llama: Path, data: Path, output: Path, tmp_path: Path) -> None:
    run(tiny_llama, data, tmp_path / "alone")
    with pytest.raises(ValueError, match=r"--output .*: there is no such folder"):
        run(tiny_llama, data, output, merge=True)
    run(tiny_llama, data, output, rank=1, world_size=3)
    run(tiny_llama, data, output, rank=0, world_size=3)
    with pytest.raises(ValueError, match="is not complete"):
        run(tiny_llama, data, output, merge=True)
    run(tiny_llama, data, output, rank=2, world_size=3)
    shard = output / "shard-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])  # as a copy that was interrupted
    with pytest.raises(ValueError, match=r"shard-00002.safetensors: .*; copy it, or run the"):
        run(tiny_llama, data, output, merge=True)
    assert not (output / "manifest.json").exists()
    shard.write_bytes(whole)
    assert run(tiny_llama, data, output, merge=True) == 0
    assert digests(output) == digests(tmp_path / "alone")


@pytest.mark.parametrize("others", [{"storage_dtype": "float16"}, {"positions": "last"}, {}])
@pytest.mark.parametrize("is_last", [True, False])
def test_folders_of_other_commands_are_not_merged(
    others: dict[str, Any],
    is_last: bool,
    tiny_llama: Path,
    data: Path,
    output: Path,
    tmp_path: Path,
) -> None:
    """Whichever folder's settings remain when one is copied over the other."""
    reverse = write_token_ids(tmp_path / "reverse.jsonl", LISTS[::-1])
    run(tiny_llama, data, tmp_path / "0", rank=0, world_size=2)
    run(tiny_llama, data if others else reverse, tmp_path / "1", rank=1, world_size=2, **others)
    for name in ("0", "1") if is_last else ("1", "0"):
        shutil.copytree(tmp_path / name, output, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"unit \d+ was made with other settings, or from another"):
        run(tiny_llama, data, output, merge=True)
    assert not (output / "manifest.json").exists()
    if not is_last:  # the settings are those of rank 0, so its command is what to run again
        assert run(tiny_llama, data, output) == 0
        check_rows(output, LISTS)


def test_a_rank_without_units(tiny_llama: Path, data: Path, output: Path) -> None:
    assert run(tiny_llama, data, output, rank=90, world_size=100) == 0


def test_dry_run(
    tiny_llama: Path, data: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_llama, data, output, dry_run=True) == 0
    assert not output.exists()
    text = capsys.readouterr().out
    assert "0, 3, 4 of 4" in text
    assert f"{sum(map(len, LISTS)):,}" in text
    run(tiny_llama, data, output)
    capsys.readouterr()
    run(tiny_llama, data, output, dry_run=True)
    num_units = json.loads((output / "settings.json").read_text())["num_units"]
    assert f"{num_units} of {num_units} units exist" in capsys.readouterr().out

"""Records from files of every kind."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.extract import records
from vllm.entrypoints.extract.records import Record, find_sources, input_digest, read_records

ROWS: list[dict[str, Any]] = [
    {"text": f"text {i} π", "input_ids": list(range(i + 1))} for i in range(150)
]


def read(path: Path, form: Any = "auto") -> list[Record]:
    return list(read_records(find_sources([str(path)], form), ("text", "input_ids")))


def values(path: Path, form: Any = "auto") -> list[Any]:
    found = read(path, form)
    assert [record.number for record in found] == list(range(len(found)))
    assert not any(record.problem for record in found)
    return [dict(record.values) for record in found]


def test_jsonl_with_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\n{broken\n[1]\n{"text": "\xff"}\r\n{"text": "b"}'
    )
    found = read(path)
    assert [record.place for record in found] == [f"a.jsonl:{line}" for line in (1, 3, 4, 5, 6)]
    assert [bool(record.problem) for record in found] == [False, True, True, True, False]
    assert (found[0].values, found[4].values) == ({"text": "a"}, {"text": "b"})
    assert found[1].problem.startswith("not JSON")
    assert found[2].problem == "not a record: not a JSON object"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_arrays_and_streams(
    chunk: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CHUNK_CHARACTERS", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS[:20], indent=indent, ensure_ascii=False) + "\n")
    assert values(path) == ROWS[:20]
    path.write_text("\n".join(json.dumps(row, indent=indent) for row in ROWS[:20]))
    assert values(path) == ROWS[:20]
    path.write_text("[]")
    assert values(path) == []


def test_records_too_deep_for_the_parser(tmp_path: Path) -> None:
    """Whatever a record does to the parser is that record's problem, and the next is read."""
    deep = '{"text": ' + "[" * 100_000 + '"]{"' + "]" * 100_000 + "}"
    for name, content in (
        ("a.jsonl", f'{deep}\n{{"text": "b"}}\n'),
        ("a.json", f'[{deep},\n{{"text": "b"}}]'),
    ):
        path = tmp_path / name
        path.write_text(content)
        found = read(path)
        assert [record.place for record in found] == [f"{name}:1", f"{name}:2"]
        assert "nested too deeply" in found[0].problem and found[1].values == {"text": "b"}
    path.write_text(f"[{deep[:-1]}")
    with pytest.raises(ValueError, match="line 1: the object does not end"):
        read(path)


@pytest.mark.parametrize("chunk", [7, 1 << 16])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_more_digits_than_python_reads(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CHUNK_CHARACTERS", chunk)
    path = tmp_path / name
    path.write_text(f'{{"text": "a", "id": {"9" * 5000}}}\n{{"text": "b"}}\n')
    found = read(path)
    assert [record.place for record in found] == [f"{name}:1", f"{name}:2"]
    assert "Exceeds the limit" in found[0].problem and found[1].values == {"text": "b"}


@pytest.mark.parametrize(
    ("name", "advice"), [("a.jsonl.gz", "unpack it"), ("a.csv", "use --input-format with one of")]
)
def test_unknown_formats(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"{name[-3:]}' files is not known; {advice}"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_utf_16(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-16")
    with pytest.raises(ValueError, match="is UTF-16 instead of UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"},\n{"text": "b"', "line 2: "),
        ('[{"text": "a"},\n', "line 2: no ]"),
        ('[{"text": "a"},\n\n17]', "line 3: '17]' is not an object"),
        ('[{"text": "a"}, {"text": b}]', "Expecting value"),
    ],
)
def test_json_that_cannot_be_read_further(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json cannot be read further") as caught:
        read(path)
    assert message in str(caught.value)


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n\nthree\xff")
    assert [record.problem[:9] for record in read(path)] == ["not UTF-8"]
    path.write_text("one\ntwo\n\nthree")
    assert values(path) == [{"text": "one\ntwo\n\nthree"}]
    assert values(path, "lines") == [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    assert [record.place for record in read(path, "lines")] == ["a.txt:1", "a.txt:2", "a.txt:4"]


def test_a_folder_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.jsonl").write_text('{"text": "c"}')
    (tmp_path / "picture.png").touch()
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "b-checkpoint.md").write_text("b")
    (tmp_path / ".b.md").write_text("b")
    assert values(tmp_path) == [{"text": "c"}, {"text": "b"}]


def test_packed_files_in_a_folder_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "pictures.zip"):
        (tmp_path / name).write_text(json.dumps({"text": "a"}))
    assert len(find_sources([str(tmp_path)], "auto")) == 1
    assert "b.jsonl.gz is not read: unpack it" in caplog.text
    assert "pictures" not in caplog.text


def test_linked_folders_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for path in (folder / "b.jsonl", folder / "c/c.jsonl", other / "a.jsonl", other / ".d/d.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": path.name}) + "\n")
    (folder / "linked").symlink_to(other)
    (folder / "c/up").symlink_to(folder)
    (other / "back").symlink_to(folder / "c")
    sources = find_sources([str(folder)], "auto")
    assert [str(one.path.relative_to(folder)) for one in sources] == [
        *("b.jsonl", "c/c.jsonl", "linked/a.jsonl"),
    ]
    scan = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("linked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"--input .*linked cannot be read: Permission denied"):
        find_sources([str(folder)], "auto")


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import ipc, parquet

    table = pa.Table.from_pylist([{**row, "other": 1} for row in ROWS])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    assert values(tmp_path / "a.parquet") == ROWS
    assert read(tmp_path / "a.parquet")[149].place == "a.parquet row 149"
    for name, new in (("stream", ipc.new_stream), ("file", ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
        assert values(path) == ROWS
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((tmp_path / "a.parquet").read_bytes()[:500])
    with pytest.raises(ValueError, match=r"cut\.parquet cannot be read further"):
        read(cut)


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.with_format("torch").save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert values(tmp_path / "one") == ROWS
    dataset.shuffle(seed=1).select(range(20)).save_to_disk(str(tmp_path / "part"))
    assert values(tmp_path / "part") == list(dataset.shuffle(seed=1).select(range(20)))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "split"))
    assert values(tmp_path / "split") == ROWS
    both = datasets.DatasetDict({"train": dataset, "test": dataset})
    both.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"give the folder of one split of \['train', 'test'\]"):
        read(tmp_path / "splits")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"needs pyarrow; pip install pyarrow"):
        read(tmp_path / "a.parquet")


def test_what_is_not_there_or_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: there is no such file or folder"):
        find_sources([str(tmp_path / "nowhere")], "auto")
    with pytest.raises(ValueError, match="--input '': name a file or a folder"):
        find_sources([""], "auto")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match="use --input-format with one of jsonl"):
        find_sources([str(tmp_path / "a.csv")], "auto")
    with pytest.raises(ValueError, match="no file in it ends in"):
        find_sources([str(tmp_path)], "auto")


@pytest.mark.parametrize("name", ["pipe.jsonl", "socket.jsonl"])
def test_input_that_is_not_a_file(name: str, tmp_path: Path) -> None:
    """A pipe would be waited for without end, and be empty when it is read again."""
    path = tmp_path / name
    with socket.socket(socket.AF_UNIX) as bound:
        os.mkfifo(path) if name == "pipe.jsonl" else bound.bind(str(path))
        for given in (path, tmp_path):
            with pytest.raises(ValueError, match=rf"--input {path}: .* pipe it into --input -"):
                find_sources([str(given)], "auto")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", "[[[", "it is damaged: JSONDecodeError"),
        ("state.json", "[" * 100_000, "it is damaged: .*nested too deeply"),
        ("state.json", "{}", "names no files"),
        ("state.json", '{"_data_files": 5}', "it is damaged: _data_files=5"),
        ("state.json", '{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow: there is no such"),
        ("dataset_dict.json", '{"splits": 5}', "it is damaged: splits=5"),
        ("dataset_dict.json", "5", "it is damaged"),
    ],
)
def test_damaged_saved_datasets(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"--input {tmp_path}.*{message}"):
        find_sources([str(tmp_path)], "auto")


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    for name, text in (("a", "x"), ("b", "y"), ("c", "x")):
        (tmp_path / f"{name}.jsonl").write_text(text)

    def digest(*names: str, form: Any = "auto") -> str:
        return input_digest(find_sources([str(tmp_path / f"{one}.jsonl") for one in names], form))

    assert digest("a", "b") == digest("c", "b")
    assert len({digest("a", "b"), digest("b", "a"), digest("a"), digest("a", form="lines")}) == 4

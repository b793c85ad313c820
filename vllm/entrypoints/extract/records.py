"""A reader of the input: files of many formats -> one stream of records, one batch in memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias

import xxhash

from vllm.hidden_states.names import CHECKSUM_KIND
from vllm.logger import init_logger
from vllm.utils.regular_files import is_regular
from vllm.utils.text import brief, parse_json

logger = init_logger(__name__)

InputFormat = Literal["auto", "jsonl", "json", "parquet", "arrow", "text", "lines"]
Values: TypeAlias = Mapping[str, object]
"""The columns of one record."""

STDIN = "-"
_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
}
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_LINE_FORMATS = ("jsonl", "lines", "text")
_BRACKETS_AND_STRINGS = re.compile(r'[][{}]|"(?:[^"\\]|\\.)*"', re.DOTALL)
_ROWS_PER_BATCH = 64
_CHUNK_CHARACTERS = 1 << 16


class Source(NamedTuple):
    """One file of the input."""

    path: Path
    format: InputFormat
    is_stdin: bool = False
    """The file is a copy of standard input, and its own name means nothing."""

    @property
    def name(self) -> str:
        """Name of the file in the places of records, which a dataset stores."""
        return "stdin" if self.is_stdin else self.path.name

    def __str__(self) -> str:
        return f"--input {STDIN}" if self.is_stdin else f"--input {self.path}"


class Record(NamedTuple):
    """One record: its columns, or the reason why it cannot be read."""

    number: int
    """Number of the record in the whole input, from 0."""
    place: str
    """File and line, or file and row."""
    values: Values
    problem: str = ""
    turn: int | None = None
    """Number of its last message, if it is the part of a record that ends there."""
    is_row: bool = False
    """True for a row of a table: its dicts have all keys that other rows have, with null."""


def find_sources(
    inputs: Sequence[str], fmt: InputFormat, output: Path | None = None
) -> list[Source]:
    """Find the files of ``--input``, also in folders; raises ValueError that names missing ones.

    fmt: the value of ``input_format``. output: files in this folder are not input.
    """
    sources = []
    for name in inputs:
        if not name:
            raise ValueError("--input '': name a file or a folder")
        path = Path(name).expanduser()
        if not path.exists():
            raise ValueError(f"--input {name}: there is no such file or folder")
        sources += _folder_sources(path, fmt, output) if path.is_dir() else [_source(path, fmt)]
    for source in sources:
        if not is_regular(source.path):
            raise ValueError(
                f"{source}: there is no such file, or it is not a regular one, and "
                "the input is read twice; pipe it into --input -"
            )
    return sources


def _source(path: Path, fmt: InputFormat) -> Source:
    form = _FORMATS.get(path.suffix.lower()) if fmt == "auto" else fmt
    if form is None:
        advice = "use --input-format with one of jsonl, json, parquet, arrow, text, lines"
        if path.suffix in _PACKED:
            advice = "unpack it, into a file or into --input -"
        name = repr(path.suffix or path.name)
        raise ValueError(f"--input {path}: the format of {name} files is not known; {advice}")
    return Source(path, form)


def _folder_sources(folder: Path, fmt: InputFormat, output: Path | None) -> list[Source]:
    """Find the files of an Arrow dataset (``datasets.save_to_disk``), or all known files below that
    are not hidden."""
    if (folder / "dataset_dict.json").is_file():
        splits = _saved_list(folder / "dataset_dict.json", "splits", str)
        if len(splits) != 1:
            raise ValueError(f"--input {folder}: give the folder of one split of {splits}")
        folder = folder / splits[0]
    if (folder / "state.json").is_file():
        if _saved_list(folder / "state.json", "_indices_files", dict):
            raise ValueError(
                f"--input {folder}: the dataset is a selection of its files; save it again after "
                "dataset.flatten_indices()"
            )
        files = _saved_list(folder / "state.json", "_data_files", dict)
        names = [one.get("filename") for one in files]
        if not names:
            raise ValueError(f"--input {folder}: its state.json names no files")
        return [Source(folder / str(name), "arrow") for name in names]
    found = sorted(_files_below(folder))
    paths = [path for path in found if path.suffix.lower() in _FORMATS]
    for path in found:
        if path.suffix in _PACKED and Path(path.stem).suffix.lower() in _FORMATS:
            logger.warning("%s is not read: unpack it", path)
    if output is not None:
        paths = [path for path in paths if output.resolve() not in path.resolve().parents]
    if not paths:
        raise ValueError(f"--input {folder}: no file in it ends in {', '.join(_FORMATS)}")
    return [_source(path, fmt) for path in paths]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and all below it, also behind links; each folder once.

    Editors and notebooks keep copies in hidden files and folders, which are left out. ValueError: a
    folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"--input {error.filename} cannot be read: {error.strerror}") from error

    seen = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        is_new = (real := os.path.realpath(parent)) not in seen
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        yield from (Path(parent, name) for name in names if is_new and not name.startswith("."))


def _saved_list(path: Path, name: str, kind: type) -> list[Any]:
    """Return an entry that ``datasets`` saved, a list that may be missing or null."""
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get(name)
    except (ValueError, AttributeError, OSError) as error:
        raise ValueError(f"--input {path}: it is damaged: {error!r}") from None
    found = [] if found is None else found
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ValueError(f"--input {path}: it is damaged: {name}={brief(found)}")
    return found


def input_digest(sources: Sequence[Source]) -> str:
    """Return a checksum of all content in its order; the paths of the files do not matter."""
    digest = xxhash.xxh3_128()
    for source in sources:
        digest.update(f"{source.format}:{source.path.stat().st_size}:".encode())
        with source.path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return CHECKSUM_KIND + digest.hexdigest()


def read_records(sources: Sequence[Source], columns: Sequence[str]) -> Iterator[Record]:
    """Yield every record of the input; of tables only ``columns`` are read.

    A record that cannot be read has a ``problem``. Raises ValueError if nothing after a place
    can be read (a damaged file).
    """
    number = 0
    for source in sources:
        _check_encoding(source)
        try:
            for place, values, problem in _READERS[source.format](source.path, columns):
                is_row = source.format in _TABLES
                name = f"{source.name}{place}"
                yield Record(number, name, values, problem, is_row=is_row)
                number += 1
        except ImportError as error:
            raise ValueError(f"{source}: reading it needs pyarrow; pip install pyarrow") from error
        except Exception as error:  # pyarrow's exceptions have no other common base
            if source.format in _LINE_FORMATS:
                raise
            raise ValueError(f"{source} cannot be read further: {error}") from error


def _check_encoding(source: Source) -> None:
    """Raise ValueError for UTF-16 text, no line of which would be read correctly."""
    if source.format not in (*_LINE_FORMATS, "json"):
        return
    with source.path.open("rb") as file:
        start = file.read(2)
    if start in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(
            f"{source}: the file is UTF-16 instead of UTF-8; convert it: iconv -f utf-16 -t utf-8"
        )


_Read: TypeAlias = Iterator[tuple[str, Values, str]]
"""Place in the file, columns, problem."""


def _read_jsonl(path: Path, columns: Sequence[str]) -> _Read:
    for line_number, line in _lines(path):
        try:
            values = parse_json(line)
        except ValueError as error:  # invalid UTF-8 too
            yield f":{line_number}", {}, f"not JSON that can be read: {error}"
            continue
        problem = "" if isinstance(values, dict) else "not a record: not a JSON object"
        yield f":{line_number}", {} if problem else values, problem


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, content) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield number, content


def _read_lines(path: Path, columns: Sequence[str]) -> _Read:
    for number, line in _lines(path):
        yield (f":{number}", *_text_record(line.rstrip(b"\r\n")))


def _read_text(path: Path, columns: Sequence[str]) -> _Read:
    yield ("", *_text_record(path.read_bytes().removeprefix(b"\xef\xbb\xbf")))


def _text_record(content: bytes) -> tuple[Values, str]:
    try:
        return {"text": content.decode()}, ""
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8: {error}"


def _read_json(path: Path, columns: Sequence[str]) -> _Read:
    with path.open(encoding="utf-8-sig") as file:
        for line_number, values, problem in _json_objects(file):
            yield f":{line_number}", values, problem


def _json_objects(file: TextIO) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (line, object, problem) of each object of an array, or of consecutive objects."""
    decoder, line_number, in_array = json.JSONDecoder(), 1, False
    text = file.read(_CHUNK_CHARACTERS)
    while True:
        content = text.lstrip(" \t\r\n,[]")
        skipped = text[: len(text) - len(content)]
        if "[" in skipped or "]" in skipped:
            in_array = skipped.rfind("[") > skipped.rfind("]")
        line_number += skipped.count("\n")
        text = content
        if text and text[0] != "{":
            raise ValueError(f"line {line_number}: {text[:20]!r} is not an object")
        problem = ""
        try:
            try:
                values, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                raise
            except (RecursionError, ValueError) as error:  # the latter: a number is too long
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
                problem = f"not JSON that can be read: {reason}"
                values, end = {}, _end_of_object(text)
        except ValueError as error:
            more = file.read(max(_CHUNK_CHARACTERS, len(text)))
            if more:
                text += more
                continue
            if text or in_array:
                raise ValueError(f"line {line_number}: {error if text else 'no ]'}") from None
            return
        yield line_number, values, problem
        line_number += text.count("\n", 0, end)
        text = text[end:]


def _end_of_object(text: str) -> int:
    """Return the end of the object at the start of ``text``, at any depth; raises ValueError if
    it does not end in ``text``."""
    depth = 0
    for token in _BRACKETS_AND_STRINGS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    raise ValueError("the object does not end")


def _read_parquet(path: Path, columns: Sequence[str]) -> _Read:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name in columns]
        yield from _rows_of(file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=names), names)


def _read_arrow(path: Path, columns: Sequence[str]) -> _Read:
    """Read a stream of record batches, as ``datasets`` writes it, or an Arrow file."""
    import pyarrow as arrow

    with arrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            file = arrow.ipc.open_file(mapped)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            mapped.seek(0)
            batches = file = arrow.ipc.open_stream(mapped)
        yield from _rows_of(batches, [name for name in file.schema.names if name in columns])


def _rows_of(batches: Iterator[Any], columns: Sequence[str]) -> _Read:
    row = 0
    for batch in batches:
        table = batch.select(columns)
        for start in range(0, table.num_rows, _ROWS_PER_BATCH):
            for values in table.slice(start, _ROWS_PER_BATCH).to_pylist():
                yield f" row {row}", values, ""
                row += 1


_TABLES = ("parquet", "arrow")
_READERS = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "lines": _read_lines,
    "text": _read_text,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}

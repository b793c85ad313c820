"""Temporary names are told from all others, and what writers left is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vllm.utils import whole_files
from vllm.utils.whole_files import TemporaryName, remove_temporary, temporary_path, write_whole


@pytest.mark.parametrize(
    "name", ["a.json", ".hidden", "x" * 200, "unit-3", "a.unit-3.b", "é.\udc80"]
)
@pytest.mark.parametrize("owner", [None, "unit-000012"])
def test_a_temporary_name_says_what_it_is_for(name: str, owner: str | None) -> None:
    made = [temporary_path(f"/folder/{name}", owner) for _ in range(2)]
    assert made[0] != made[1]
    folder, hidden = os.path.split(made[0])
    assert folder == "/folder" and hidden.startswith(".")
    kept = os.fsencode(name)[:128].decode(errors="ignore")
    assert TemporaryName.parse(hidden) == (kept, owner)


@pytest.mark.parametrize(
    "name", ["a.tmp", f"a.{'0' * 32}.tmp", ".a.0123.tmp", f".a.{'g' * 32}.tmp"]
)
def test_names_of_others_are_not_temporary(name: str) -> None:
    assert TemporaryName.parse(name) is None


def test_what_was_left_is_removed(tmp_path: Path) -> None:
    old, new = (Path(temporary_path(tmp_path / "data")) for _ in range(2))
    owned = Path(temporary_path(tmp_path / "data", "unit-7"))
    folder = Path(temporary_path(tmp_path / "folder"))
    for path in (old, new, owned, tmp_path / "data"):
        path.touch()
    folder.mkdir()
    (folder / "inside").touch()
    os.utime(old, (time.time() - 100, time.time() - 100))
    remove_temporary(tmp_path, least_age_seconds=50)
    assert not old.exists() and new.exists()
    remove_temporary(tmp_path, {"unit-6"})
    remove_temporary(tmp_path / "missing")
    assert owned.exists()
    remove_temporary(tmp_path, {"unit-7"})
    assert not owned.exists() and new.exists()
    remove_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(whole_files.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["data"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/stdout: a device or a pipe would be gone."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(OSError, match=f"not a regular file, so it is not replaced: .*{name}'"):
            write_whole(tmp_path / name, b"new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_loses_its_name_before_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the middle leaves a temporary folder, not half of one with the name."""
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "masks.bin").write_bytes(b"1")
    monkeypatch.setattr(whole_files.shutil, "rmtree", lambda *_, **__: None)
    whole_files.remove_folder(tmp_path / "plan")
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".plan.")
    whole_files.remove_temporary(tmp_path)
    assert not any(tmp_path.iterdir())
    whole_files.remove_folder(tmp_path / "plan")  # there is none

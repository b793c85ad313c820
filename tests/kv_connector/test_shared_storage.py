"""Blocks in files: saved by one engine, loaded by another, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector.loading import (
    FAMILIES,
    OFFLOADING,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from vllm.distributed.kv_transfer.kv_connector.v1.shared_storage_connector import (
    DamagedBlockError,
    StoredBlocks,
    logger,
)
from vllm.v1.core.block_pool import BlockKey

Checkpoint = Callable[..., Path]
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(72, [400])]
PROMPTS = [TEXT[:n] + [n % 300] * 20 for n in (300, 133, 64, 15, 377)]
FOUND = [n // 16 * 16 for n in (319, 152, 83, 34, 396)]

OFFERING = {
    "kv_connector": "OfferingConnector",
    "kv_connector_module_path": "tests.kv_connector.counting_connector",
}
"""It would load tokens without their rows, so its offers are passed over."""


def write(blocks: StoredBlocks, keys: list[BlockKey], data: bytes) -> None:
    blocks.publish(keys, blocks.stage(keys, data))


def storing(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "blocks"), **options},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_in_one_engine_loaded_in_another(
    family: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, dtype=dtype)
    arguments = {"dtype": "auto", "max_num_batched_tokens": 64}
    with engine(folder, enable_prefix_caching=False, **beside_extraction(tmp_path / "a")) as llm:
        expected = ask(llm, PROMPTS)
    connectors = beside_extraction(tmp_path, storing(tmp_path))
    with engine(folder, **arguments, **connectors) as llm:
        same(ask(llm, PROMPTS), expected)
    with engine(folder, **arguments, **connectors) as llm:
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        assert num_cached(outputs) == FOUND
    several = beside_extraction(tmp_path, OFFERING, OFFLOADING, storing(tmp_path))
    with engine(folder, **arguments, **several) as llm:
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        assert num_cached(outputs) == FOUND
        forget(llm)
        same(ask(llm, PROMPTS), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_whose_pools_preempt(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Chunks, preemptions, hits in the pool and loads at once, in the engine that saves and in the
    one that loads."""
    folder = checkpoint(family)
    prompts = [TEXT[:n] + [n % 300] * 9 for n in range(40, 200, 16)]
    with engine(folder, enable_prefix_caching=False, **beside_extraction(tmp_path / "a")) as llm:
        expected = ask(llm, prompts, 120)
    sizes: dict[str, Any] = {
        "max_model_len": 420,
        "max_num_batched_tokens": 96,
        "kv_cache_memory_bytes": 2**20,
    }
    for _ in range(2):
        with engine(folder, **sizes, **beside_extraction(tmp_path, storing(tmp_path))) as llm:
            outputs = ask(llm, prompts, 120)
            same(outputs, expected)
            assert core_of(llm).scheduler.stats().num_preemptions
    assert min(num_cached(outputs)) >= 32


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_producer", 1, 0), ("kv_consumer", 0, 1)])
def test_roles(role: str, saves: int, loads: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    arguments = only(storing(tmp_path), kv_role=role)
    with engine(folder, **arguments) as llm:
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    assert bool(list((tmp_path / "blocks").rglob("*.block"))) == bool(saves)
    with engine(folder, **only(storing(tmp_path))) as llm:
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    with engine(folder, **arguments) as llm:
        outputs = llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    assert num_cached(outputs) == [FOUND[0] * loads]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_and_lost_files(
    family: str, policy: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    arguments = only(storing(tmp_path), kv_load_failure_policy=policy)
    with engine(folder, enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    with engine(folder, **arguments) as llm:
        llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    files = sorted((tmp_path / "blocks").rglob("*.block"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()  # it may have other names
        file.write_bytes(content if number % 3 else content[:40])
    with engine(folder, **arguments) as llm:
        outputs = llm.generate([*PROMPTS, [5] * 40], greedy(4), use_tqdm=False)
        core_of(llm).scheduler.check_integrity()
    for output, right in zip(outputs, expected, strict=False):
        if output.outputs[0].finish_reason == "error":
            assert policy == "fail"
            assert "did not come" in str(output.outputs[0].stop_reason)
        else:
            assert output.outputs[0].token_ids == right.outputs[0].token_ids
    assert policy == "recompute" or outputs[0].outputs[0].finish_reason == "error"
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_a_missing_block_hides_damaged_ones_for_one_ask(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A hit ends before a missing block. When that is stored again, the damaged blocks behind it
    are found, all at once: they fail one ask, and no later one."""
    arguments = only(storing(tmp_path), kv_load_failure_policy="fail")
    with engine(checkpoint("llama"), **arguments) as llm:
        expected = llm.generate(PROMPTS[:1], greedy(4), use_tqdm=False)
        connector = core_of(llm).scheduler.connector
        folder = connector._blocks.folder
        paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        paths[2].unlink()
        for path in paths[5:9]:
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[:-1])
        failures = []
        for _ in range(4):
            llm.reset_prefix_cache()
            (output,) = llm.generate(PROMPTS[:1], greedy(4), use_tqdm=False)
            failures.append(output.outputs[0].failure is not None)
            if not failures[-1]:
                assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert failures == [False, True, False, False]


def test_what_was_found_once_is_not_remembered(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with engine(checkpoint("llama"), **only(storing(tmp_path))) as llm:
        index = core_of(llm).scheduler.connector._index
        for _ in range(2):
            outputs = llm.generate(PROMPTS[:3], greedy(1), use_tqdm=False)
            llm.reset_prefix_cache()
        assert num_cached(outputs) == FOUND[:3]
        assert index._numbers
        llm.generate([[5] * 40], greedy(1), use_tqdm=False)
        assert not index._numbers


def test_another_model_finds_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nor one of which the same files are made something else."""
    folder, other = checkpoint("llama"), checkpoint("llama", rms_norm_eps=1e-3)
    with engine(folder, **only(storing(tmp_path))) as llm:
        llm.generate(PROMPTS, greedy(1), use_tqdm=False)
    for path, arguments in ((other, {}), (folder, {"quantization": "int8"})):
        with engine(path, **arguments, **only(storing(tmp_path))) as llm:
            assert sum(num_cached(llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False))) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_files_that_change_places_are_not_loaded(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Each is whole, and of a block of this model, but not of the one that it is named after."""
    folder = checkpoint(family)
    arguments = only(storing(tmp_path), kv_load_failure_policy="recompute")
    prompts = [p["prompt_token_ids"] for p in random_prompts(73, [100, 100])]
    with engine(folder, **arguments) as llm:
        expected = llm.generate(prompts, greedy(4), use_tqdm=False)
    same_place: dict[str, list[Path]] = {}
    for path in sorted((tmp_path / "blocks").rglob("*.block")):
        group, _, index = path.stem.split("-")
        same_place.setdefault(f"{group}-{index}", []).append(path)
    for paths in same_place.values():
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
            path.unlink()  # it may have other names
            path.write_bytes(content)
    with engine(folder, **arguments) as llm:
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_a_quota_keeps_what_was_read_last(tmp_path: Path) -> None:
    blocks = StoredBlocks(tmp_path, max_bytes=11_500)
    for number in range(8):
        write(blocks, [(0, bytes([number]), 0), (0, bytes([number, 1]), 0)], bytes(1000))
        os.utime(blocks.path((0, bytes([number]), 0)), (number, number))
    blocks.read((0, bytes([0]), 0), 1000)
    for number in range(8, 14):
        write(blocks, [(0, bytes([number]), 0)], bytes(1000))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"0-00-0.block", "0-0001-0.block", "0-0d-0.block"} <= names
    assert "0-01-0.block" not in names
    assert len({path.stat().st_ino for path in tmp_path.iterdir()}) <= 10


@pytest.mark.parametrize("kind", ["folder", "loop", "link", "pipe"])
def test_a_quota_beside_what_is_no_file(kind: str, tmp_path: Path) -> None:
    strange = tmp_path / "0-ff-0.block"
    if kind == "folder":
        (strange / "more").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to({"loop": strange.name, "link": "/etc/hosts"}[kind])
    os.utime(strange, (1, 1), follow_symlinks=False)
    blocks = StoredBlocks(tmp_path, max_bytes=11_500)
    for number in range(40):
        write(blocks, [(0, bytes([number]), 0)], bytes(1000))
    assert len(list(tmp_path.iterdir())) <= 11
    assert os.path.lexists(strange)


def test_files_that_this_user_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user wrote them with a umask; prompts are computed instead."""
    blocks = StoredBlocks(tmp_path, None)
    write(blocks, [KEY], b"x")
    assert blocks.has(KEY)
    monkeypatch.setattr(
        os, "access", lambda path, mode: (path, mode) != (blocks.path(KEY), os.R_OK)
    )
    assert not blocks.has(KEY)


def test_a_quota_is_of_all_engines_together(tmp_path: Path) -> None:
    engines = [StoredBlocks(tmp_path, max_bytes=20_000) for _ in range(2)]
    for number in range(60):
        write(engines[number % 2], [(0, bytes([number]), 0)], bytes(1000))
        # Each looks again when it has written a tenth.
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 22_000


def test_writers_of_one_block_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in containers, where processes of several have one number."""
    replace, names = os.replace, []
    monkeypatch.setattr(os, "replace", lambda old, new: (names.append(old), replace(old, new)))
    for _ in range(2):
        write(StoredBlocks(tmp_path, None), [(0, b"a", 0)], bytes(10))
    assert len(set(names)) == 2


def test_a_quota_is_a_number(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="max_bytes=True is not"),
        engine(checkpoint("llama"), **only(storing(tmp_path, max_bytes=True))),
    ):
        pass


def test_a_folder_that_this_engine_can_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that killed writers left there do not keep it from starting."""
    key = (0, b"a", 0)
    blocks = StoredBlocks(tmp_path, None)
    write(blocks, [key], bytes(10))
    os.utime(blocks.stage([key], bytes(10)), (1, 1))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert StoredBlocks(tmp_path, None).read(key, 10) == bytes(10)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"shared_storage_path: .*Read-only"):
        StoredBlocks(tmp_path / "new", None)


def test_a_folder_in_which_nothing_can_be_stored(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so once, not for each block. A folder that was removed is made again."""
    monkeypatch.setattr(logger, "_logged_once", set(), raising=False)
    with engine(checkpoint("llama"), **only(storing(tmp_path))) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", lambda *_, **__: os.stat("/none/folder"))
            shutil.rmtree(tmp_path / "blocks")
            llm.generate(PROMPTS[:2], greedy(1), use_tqdm=False)
        assert caplog.text.count("blocks are not stored: No such file or directory") == 1
        (tmp_path / "blocks").mkdir()
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)  # found in the pool
        forget(llm)
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
        assert len([*(tmp_path / "blocks").rglob("*.block")]) >= FOUND[0] // 16


KEY = (3, b"abc", 7)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, 7)


def _take_from_another_name(path: Path) -> None:
    other = StoredBlocks(path.parent, None)
    write(other, [(3, b"abd", 7)], b"x" * 100)
    path.write_bytes(other.path((3, b"abd", 7)).read_bytes())


def _take_from_another_folder(path: Path) -> None:
    other = StoredBlocks(path.parent / "other", None)
    write(other, [KEY], b"x" * 100)
    path.write_bytes(other.path(KEY).read_bytes())


def _make_longer(path: Path) -> None:
    path.unlink()
    write(StoredBlocks(path.parent, None), [KEY], b"x" * 101)


def _say_nothing(path: Path) -> None:
    path.write_bytes(hashlib.blake2b(digest_size=16).digest())


def _say_something_else(path: Path) -> None:
    rest = (2).to_bytes(4, "little") + b"[]" + b"x" * 100
    path.write_bytes(hashlib.blake2b(rest, digest_size=16).digest() + rest)


@pytest.mark.parametrize(
    "change",
    [
        _flip,
        _cut,
        _say_nothing,
        _say_something_else,
        _take_from_another_name,
        _take_from_another_folder,
        _make_longer,
    ],
)
def test_a_block_that_was_changed_is_not_read(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    blocks = StoredBlocks(tmp_path, None)
    write(blocks, [(3, b"ab", 7), KEY], b"x" * 100)
    assert blocks.read(KEY, 100) == blocks.read((3, b"ab", 7), 100) == b"x" * 100
    change(blocks.path(KEY))
    with pytest.raises(DamagedBlockError):
        blocks.read(KEY, 100)
    assert not blocks.path(KEY).exists()


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


def _make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [_make_pipe, _make_huge, Path.mkdir])
def test_what_is_no_block_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe would wait for ever, a huge file take all memory."""
    blocks = StoredBlocks(tmp_path, None)
    make(blocks.path(KEY))
    is_huge = make is _make_huge
    assert blocks.has(KEY) is is_huge
    error = DamagedBlockError if is_huge else OSError
    with pytest.raises(error, match=r"not a regular file|has more than|Is a directory"):
        blocks.read(KEY, 100)
    assert not blocks.has(KEY)


def _write_for_ever(folder: Path) -> None:
    blocks = StoredBlocks(folder, None)
    number = 0
    while True:
        number += 1
        write(blocks, [(0, number.to_bytes(4, "big"), 0)], os.urandom(1 << 20))


def test_killed_writers_leave_nothing_that_can_be_read(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        writer = context.Process(target=_write_for_ever, args=(tmp_path,))
        writer.start()
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("*.block"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    blocks = StoredBlocks(tmp_path, None)
    names = sorted(tmp_path.glob("*.block"))
    assert names
    for path in names:
        group, digest, index = path.stem.split("-")
        key = int(group), bytes.fromhex(digest), int(index)
        assert len(blocks.read(key, 1 << 20)) == 1 << 20

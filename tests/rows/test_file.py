"""The file on its own: what is written is what safetensors reads, or nothing is there."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.layout import TensorForm
from vllm.v1.rows.file import HiddenStatesFile


def write(path: Path, rows: torch.Tensor, chunks: list[int]) -> list[int]:
    form = TensorForm(rows.dtype, (rows.shape[1], rows.shape[2]))
    file = HiddenStatesFile(str(path), form, {"model": "m"})
    for chunk in rows.split(chunks):
        file.append(ExtractedRows({"hidden_states": chunk}))
    token_ids = [7 * n + 2**33 for n in range(len(rows))]
    file.finish(token_ids)
    return token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((1, 1, 1), [1]), ((17, 3, 5), [4, 1, 12]), ((9, 2, 64), [9]), ((1001, 1, 3), [1000, 1])],
)
def test_round_trip(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int, int], chunks: list[int]
) -> None:
    rows = torch.randn(shape).to(dtype)
    path = tmp_path / "a.safetensors"
    token_ids = write(path, rows, chunks)

    for tensors in (load_file(path), load_hidden_states(path)):
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert torch.equal(tensors["hidden_states"], rows)
        assert tensors["token_ids"].tolist() == token_ids
        assert tensors["token_ids"].dtype == torch.int64
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["model"] == "m"
        assert file.metadata()["dtype"] == str(dtype).removeprefix("torch.")
        assert torch.equal(file.get_slice("hidden_states")[0:1], rows[:1])
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_data_are_aligned_and_nothing_follows_them(tmp_path: Path) -> None:
    rows = torch.randn(5, 2, 8)
    path = tmp_path / "a.safetensors"
    write(path, rows, [5])
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    assert (8 + header_bytes) % 8 == 0
    assert header["hidden_states"]["data_offsets"] == [0, 5 * 2 * 8 * 4]
    assert len(raw) == 8 + header_bytes + header["token_ids"]["data_offsets"][1]


def test_short_writes_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:13], offset))
    rows = torch.randn(6, 3, 5)
    write(tmp_path / "a.safetensors", rows, [2, 4])
    assert torch.equal(load_hidden_states(tmp_path / "a.safetensors")["hidden_states"], rows)


def test_rows_longer_than_one_write_come_back_whole(tmp_path: Path) -> None:
    rows = torch.randn(701, 3, 251)  # 2.1 MB, of no even size
    write(tmp_path / "a.safetensors", rows, [700, 1])
    assert torch.equal(load_hidden_states(tmp_path / "a.safetensors")["hidden_states"], rows)


@pytest.mark.parametrize("name", ["hidden_states", "token_ids"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, torch.randn(4, 2, 8), [4])
    raw = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    begin, end = json.loads(raw[8 : 8 + header_bytes])[name]["data_offsets"]
    raw[8 + header_bytes + (begin + end) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load_hidden_states(path)


def test_a_file_of_another_writer_needs_no_checksum(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    rows = torch.randn(2, 1, 4)
    save_file({"hidden_states": rows}, tmp_path / "b.safetensors")
    assert torch.equal(load_hidden_states(tmp_path / "b.safetensors")["hidden_states"], rows)


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 240 + ".safetensors")
    file = HiddenStatesFile(str(path), TensorForm(torch.float32, (1, 4)), {})
    file.append(ExtractedRows({"hidden_states": torch.randn(3, 1, 4)}))
    assert [name[0] for name in os.listdir(tmp_path)] == ["."]
    file.discard()
    file.discard()
    assert os.listdir(tmp_path) == []


def test_rows_and_tokens_must_agree(tmp_path: Path) -> None:
    file = HiddenStatesFile(str(tmp_path / "a"), TensorForm(torch.float32, (1, 4)), {})
    file.append(ExtractedRows({"hidden_states": torch.randn(3, 1, 4)}))
    with pytest.raises(ValueError, match="3 rows of hidden states were computed for 4 tokens"):
        file.finish([1, 2, 3, 4])
    file.discard()


def test_cleanup_removes_file_and_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, torch.randn(1, 1, 4), [1])
    (tmp_path / "a.safetensors.lock").touch()
    lock = Path(f"{path}.lock")
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert (Path(path).exists(), lock.exists()) == (True, False)
    lock.touch()
    cleanup_hidden_states(path)
    cleanup_hidden_states(path)
    assert os.listdir(tmp_path) == []

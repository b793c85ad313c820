"""Samples are read as they were written, in every format and dtype."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.hidden_states.sample_data import (
    HIDDEN_SIZE,
    LAYER_IDS,
    folder_bytes,
    make_samples,
    make_settings,
    write_dataset,
)
from vllm.hidden_states import HiddenStatesDataset, HiddenStatesError
from vllm.hidden_states.manifest import start_dataset
from vllm.hidden_states.metadata import read_unit_records
from vllm.hidden_states.names import FORMATS, DatasetFormat
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import open_unit_writer, plan_units
from vllm.hidden_states.verify import verify_dataset
from vllm.v1.rows.fields.fp8 import FP8, dequantize_rows, quantize_rows
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES
from vllm.v1.rows.file import read_hidden_states


def assert_same(read: HiddenStatesSample, written: HiddenStatesSample, dtype: str) -> None:
    assert read.index == written.index
    assert read.record == 100 + written.index
    assert torch.equal(read.token_ids, written.token_ids)
    assert torch.equal(read.positions, written.positions)
    assert read.layer_ids == LAYER_IDS
    expected = written.hidden_states
    if dtype == "fp8":
        expected = dequantize_rows(*quantize_rows(expected), torch.bfloat16)
    assert torch.equal(read.hidden_states, expected)
    assert read.scales is None


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from(FORMATS),
    st.sampled_from(sorted(STORAGE_DTYPES)),
    st.integers(1, 5),
    st.integers(1, 20000),
)
def test_samples_come_back(
    lengths: list[int], fmt: DatasetFormat, dtype: str, every: int, shard_bytes: int
) -> None:
    if fmt == "speculators" and every > 1:
        every = 1
    stored = torch.float32 if dtype == "fp8" else STORAGE_DTYPES[dtype]
    samples = make_samples(lengths, stored, every)
    positions = "all" if every == 1 else f"every:{every}"
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "d", samples, fmt, dtype, shard_bytes, positions)
        assert list(verify_dataset(str(path))) == []
        dataset = HiddenStatesDataset(path, verify="first_read")
        assert len(dataset) == len(samples)
        assert (dataset.layer_ids, dataset.hidden_size) == (LAYER_IDS, HIDDEN_SIZE)
        for read, written in zip(dataset, samples, strict=True):
            assert_same(read, written, dtype)
        assert sorted(p.name for p in path.iterdir() if p.name.startswith(".")) == []
        assert not (path / "units").exists()


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_units_hold_every_sample_once_and_stay_small(sizes: list[int], limit: int) -> None:
    units = list(plan_units(sizes, limit))
    assert [sample for unit in units for sample in unit] == list(range(len(sizes)))
    for unit in units:
        assert len(unit) == 1 or sum(sizes[i] for i in unit) <= limit
    for unit, after in itertools.pairwise(units):
        assert sum(sizes[i] for i in [*unit, after[0]]) > limit


def test_any_reader_of_safetensors_reads_a_shard(tmp_path: Path) -> None:
    samples = make_samples([4, 2, 7], every=3)
    path = write_dataset(tmp_path / "d", samples, shard_bytes=10**6, positions="every:3")
    tensors = load_file(path / "shard-00000.safetensors")
    assert torch.equal(tensors["hidden_states"], torch.cat([s.hidden_states for s in samples]))
    assert tensors["row_offsets"].tolist() == [0, 2, 3, 6]
    assert tensors["token_offsets"].tolist() == [0, 4, 6, 13]
    assert tensors["positions"].tolist() == [0, 3, 0, 0, 3, 6]
    assert torch.equal(tensors["token_ids"], torch.cat([s.token_ids for s in samples]))
    assert tensors["sample_index"].tolist() == [0, 1, 2]
    assert tensors["record_index"].tolist() == [100, 101, 102]


@pytest.mark.parametrize("fmt", ["files", "speculators"])
def test_the_files_are_those_of_the_connector(tmp_path: Path, fmt: DatasetFormat) -> None:
    samples = make_samples([4, 2])
    path = write_dataset(tmp_path / "d", samples, fmt)
    names = ["00000000", "00000001"] if fmt == "files" else ["hs_100", "hs_101"]
    assert sorted(p.stem for p in path.glob("*.safetensors")) == names
    for name, sample in zip(names, samples, strict=True):
        tensors = read_hidden_states(str(path / f"{name}.safetensors"))
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert torch.equal(tensors["hidden_states"], sample.hidden_states)
        assert torch.equal(tensors["token_ids"], sample.token_ids)


def test_names_of_files(tmp_path: Path) -> None:
    samples = make_samples([2, 3])
    header = make_settings(samples, "files")
    start_dataset(str(tmp_path), header)
    with open_unit_writer(str(tmp_path), 0, header) as writer:
        writer.append(samples[0], 0, 0, "doc.7")
        writer.append(samples[1], 1, 1, "../a b")
        with pytest.raises(ValueError, match=r"two samples have the name doc\.7"):
            writer.append(samples[1], 1, 1, "doc.7")
        record = writer.commit()
    assert record.files[0].name == "doc.7.safetensors"
    assert record.files[1].name.startswith("__a_b-")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_raw_fp8_and_other_dtypes(tmp_path: Path) -> None:
    samples = make_samples([5, 3], torch.float32)
    path = write_dataset(tmp_path / "d", samples, dtype="fp8")
    values, scales = quantize_rows(samples[1].hidden_states)
    raw = HiddenStatesDataset(path, dtype=FP8)[1]
    assert raw.scales is not None
    assert torch.equal(raw.hidden_states.float(), values.float())
    assert torch.equal(raw.scales, scales)
    assert raw.rows().dtype == torch.bfloat16
    with pytest.raises(ValueError, match="mean nothing without their scales"):
        raw.rows(FP8)
    exact = HiddenStatesDataset(path, dtype=torch.float32)[1]
    assert torch.equal(exact.hidden_states, dequantize_rows(values, scales))
    with pytest.raises(ValueError, match=r"holds torch\.bfloat16"):
        HiddenStatesDataset(write_dataset(tmp_path / "b", make_samples([3])), dtype=FP8)


@pytest.mark.parametrize("fmt", ["sharded", "files"])
@pytest.mark.parametrize("hidden_size", [256, 1024])
def test_fp8_takes_half(tmp_path: Path, fmt: DatasetFormat, hidden_size: int) -> None:
    lengths = [300, 128, 500]
    sizes = {}
    for dtype in ("bfloat16", "fp8"):
        samples = make_samples(lengths, torch.bfloat16, hidden_size=hidden_size)
        path = write_dataset(tmp_path / dtype, samples, fmt, dtype, 10**9)
        sizes[dtype] = sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert sizes["fp8"] <= 0.52 * sizes["bfloat16"]


def test_norms_and_errors_in_the_manifest(tmp_path: Path) -> None:
    samples = make_samples([5, 30, 11], torch.float32)
    path = write_dataset(tmp_path / "d", samples, dtype="fp8")
    manifest = HiddenStatesDataset(path).manifest
    assert manifest is not None
    rows = torch.cat([s.hidden_states for s in samples]).double()
    back = torch.cat([s.rows(torch.float64) for s in HiddenStatesDataset(path, FP8)])
    errors = (back - rows).norm(dim=-1) / rows.norm(dim=-1)
    totals = manifest["totals"]
    assert totals["row_norms"] == pytest.approx(back.norm(dim=-1).mean(0).tolist(), rel=1e-5)
    assert totals["fp8_errors"] == pytest.approx(errors.mean(0).tolist(), rel=1e-3)
    assert (totals["samples"], totals["tokens"], totals["rows"]) == (3, 46, 46)
    assert totals["bytes"] == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert manifest["shards"][0]["checksum"].startswith("xxh3_128:")


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_same_bytes_wherever_and_whenever(tmp_path: Path, fmt: DatasetFormat) -> None:
    samples = make_samples([5, 1, 9, 12])
    first = write_dataset(tmp_path / "a", samples, fmt)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        second = write_dataset(tmp_path / "elsewhere", samples, fmt)
    finally:
        torch.set_num_threads(threads)
    assert folder_bytes(first) == folder_bytes(second)


def test_skipped_samples_leave_a_gap(tmp_path: Path) -> None:
    samples = make_samples([4, 2, 3])
    settings = make_settings(samples, shard_bytes=10**6)
    start_dataset(str(tmp_path), settings)
    with open_unit_writer(str(tmp_path), 0, settings) as writer:
        writer.append(samples[0], 0, 10)
        writer.skip(1, 11, "not finite")
        writer.append(samples[2], 2, 12)
        record = writer.commit()
    assert [(s.sample, s.record, s.reason) for s in record.skipped] == [(1, 11, "not finite")]
    assert (record.first_sample, record.last_sample, record.num_samples) == (0, 2, 2)
    dataset = HiddenStatesDataset(tmp_path, allow_incomplete=True)
    assert [(s.index, s.record) for s in dataset] == [(0, 10), (2, 12)]
    assert read_unit_records(str(tmp_path)) == [record]


def broken(kind: str) -> HiddenStatesSample:
    (sample,) = make_samples([4])
    if kind == "not finite":
        sample.hidden_states[2, 1, 7] = torch.nan
    elif kind == "all zero":
        sample.hidden_states[3, 2] = 0
    elif kind == "rows of shape":
        sample = sample.with_tensors(hidden_states=sample.hidden_states[:3])
    else:
        sample = dataclasses.replace(sample, positions=torch.tensor([0, 2, 1, 3]))
    return sample


@pytest.mark.parametrize("kind", ["not finite", "all zero", "rows of shape", "ascending positions"])
@pytest.mark.parametrize("fmt", ["sharded", "files"])
def test_wrong_rows_are_never_written(tmp_path: Path, fmt: DatasetFormat, kind: str) -> None:
    good = make_samples([4, 4])
    settings = make_settings(good, fmt, shard_bytes=10**6)
    start_dataset(str(tmp_path), settings)
    with open_unit_writer(str(tmp_path), 0, settings) as writer:
        writer.append(good[0], 0, 0)
        with pytest.raises(HiddenStatesError, match=kind):
            writer.append(broken(kind), 1, 1)
        writer.append(good[1], 1, 1)
        writer.commit()
    dataset = HiddenStatesDataset(tmp_path, allow_incomplete=True)
    assert [torch.equal(a.hidden_states, b.hidden_states) for a, b in zip(dataset, good)] == [
        True,
        True,
    ]


def test_huge_but_finite_rows_are_fine(tmp_path: Path) -> None:
    """The square of 1e30 is no float32."""
    (sample,) = make_samples([4], torch.float32)
    sample.hidden_states.fill_(1e30)
    path = write_dataset(tmp_path / "d", [sample], dtype="float32")
    manifest = HiddenStatesDataset(path).manifest
    assert manifest is not None
    assert manifest["totals"]["row_norms"] == pytest.approx([1e30 * HIDDEN_SIZE**0.5] * 3, rel=1e-6)

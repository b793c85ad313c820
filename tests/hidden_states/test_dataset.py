"""Reading: any order, any process, any format, the same values."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.hidden_states.sample_data import (
    make_samples,
    make_settings,
    write_dataset,
    write_missing,
)
from vllm.hidden_states import HiddenStatesDataset, pack_samples, pad_samples
from vllm.hidden_states import dataset as dataset_module
from vllm.hidden_states.names import FORMATS, DatasetFormat
from vllm.hidden_states.tensor_file import TensorFile
from vllm.hidden_states.verify import verify_dataset
from vllm.training import ActivationBuffer
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.file import write_hidden_states

LENGTHS = [5, 1, 9, 12, 3, 7, 2]


@pytest.mark.parametrize("fmt", FORMATS)
def test_indices_and_slices(tmp_path: Path, fmt: DatasetFormat) -> None:
    samples = make_samples(LENGTHS)
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", samples, fmt))
    for index in (0, 6, -1, -7, 3):
        assert torch.equal(dataset[index].hidden_states, samples[index].hidden_states)
        assert dataset[index].index == samples[index].index
        assert dataset.num_rows(index) == dataset.num_tokens(index) == LENGTHS[index]
    for index in (7, -8):
        with pytest.raises(IndexError, match=f"sample {index} of 7"):
            _ = dataset[index]
    for part in (slice(2, 5), slice(None, None, -2), slice(-3, None), slice(5, 2)):
        assert [s.index for s in dataset[part]] == list(range(7))[part]
    assert [s.index for s in dataset[1:][1:][::2]] == [2, 4, 6]
    for numbers in ([4, 0, -1], (4, 0, 6), torch.tensor([4, 0, 6]), np.array([4, 0, 6])):
        assert [s.index for s in dataset[numbers]] == [4, 0, 6]
    assert [s.index for s in dataset[2:][[1, -1]][1:]] == [6]
    assert len(dataset[[]]) == 0
    assert dataset[torch.tensor(3)].index == dataset[np.int64(3)].index == 3
    with pytest.raises(IndexError, match="sample 7 of 7"):
        _ = dataset[[1, 7]]
    for wrong in (1.5, [1.5], [[1]], None, [True] * 7):
        with pytest.raises(TypeError, match=r"use numbers, a slice, or a column's name"):
            _ = dataset[wrong]  # type: ignore[call-overload]
    with pytest.raises(KeyError, match=r"d has no column 'label'; no columns were kept"):
        _ = dataset["label"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("batch_size", [1, 4, 13, 100])
def test_batches_of_rows(tmp_path: Path, fmt: DatasetFormat, batch_size: int) -> None:
    every = 1 if fmt == "speculators" else 2
    positions = "all" if every == 1 else "every:2"
    samples = make_samples(LENGTHS, every=every)
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", samples, fmt, positions=positions))
    for order in (None, [4, 0, 6, 2]):
        chosen = samples if order is None else [samples[i] for i in order]
        batches = list(dataset.iter_rows(batch_size, order))
        assert {len(batch.rows) for batch in batches[:-1]} <= {batch_size}
        assert 0 < len(batches[-1].rows) <= batch_size
        for column, expected in {
            "rows": [s.hidden_states for s in chosen],
            "token_ids": [s.token_ids[s.positions] for s in chosen],
            "positions": [s.positions for s in chosen],
            "samples": [torch.full((len(s.positions),), s.index) for s in chosen],
        }.items():
            found = torch.cat([getattr(batch, column) for batch in batches])
            assert torch.equal(found, torch.cat(expected)), column
    for wrong in (0, 2.5, "4"):
        with pytest.raises(ValueError, match=f"batch_size={wrong!r}: use at least 1"):
            dataset.iter_rows(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 4, 13])
@pytest.mark.parametrize("waiting", [1, 3, 17, 1000])
def test_batches_of_shuffled_rows(tmp_path: Path, batch_size: int, waiting: int) -> None:
    """Every row once, with its token, position, sample and columns; the seed decides the order."""
    lengths = [(7 * i) % 23 + 1 for i in range(40)]
    samples = [
        dataclasses.replace(sample, columns={"number": sample.index})
        for sample in make_samples(lengths)
    ]
    settings = make_settings(samples)
    settings = dataclasses.replace(settings, options={"keep_columns": '["number"]'})
    write_missing(tmp_path / "d", samples, settings)
    dataset = HiddenStatesDataset(tmp_path / "d")

    def read(**options: Any) -> list[Any]:
        return list(dataset.iter_rows(batch_size, **options))

    batches = read(shuffle_rows=waiting)
    total = sum(lengths)
    sizes = [len(batch.rows) for batch in batches]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1) and sum(sizes) == total
    seen = set()
    for batch in batches:
        assert batch.columns["number"] == batch.samples.tolist()
        for row, token, position, index in zip(*batch[:4], strict=True):
            sample = samples[index]
            assert torch.equal(row, sample.hidden_states[position])
            assert token == sample.token_ids[position]
            seen.add((int(index), int(position)))
    assert len(seen) == total

    def order_of(batches: list[Any]) -> list[tuple[int, int]]:
        return [
            (int(index), int(position))
            for batch in batches
            for index, position in zip(batch.samples, batch.positions, strict=True)
        ]

    plain, shuffled = order_of(read()), order_of(batches)
    assert order_of(read(shuffle_rows=waiting, seed=0)) == shuffled
    if waiting > 3:
        assert shuffled != plain and order_of(read(shuffle_rows=waiting, seed=1)) != shuffled
    # A row leaves no earlier than the rows that wait allow.
    assert all(plain.index(one) < place + 2 * max(waiting, batch_size) + batch_size
               for place, one in enumerate(shuffled))  # fmt: skip
    for wrong in (-1, 2.5):
        with pytest.raises(ValueError, match=f"shuffle_rows={wrong}: use at least 1, or 0"):
            dataset.iter_rows(4, shuffle_rows=wrong)  # type: ignore[arg-type]


def test_a_column_of_all_samples(tmp_path: Path) -> None:
    for fmt in ("sharded", "files"):
        samples = [
            dataclasses.replace(sample, columns={"label": sample.index % 3, "other": None})
            for sample in make_samples(LENGTHS)
        ]
        settings = make_settings(samples, fmt)  # type: ignore[arg-type]
        settings = dataclasses.replace(settings, options={"keep_columns": "[]"})
        write_missing(tmp_path / fmt, samples, settings)
        dataset = HiddenStatesDataset(tmp_path / fmt)
        assert dataset["label"] == [i % 3 for i in range(7)]
        assert dataset[[5, 2]]["label"] == dataset[-2::-3]["label"][:2] == [2, 2]
        with pytest.raises(KeyError, match="no column 'lable'; it has label, other"):
            _ = dataset["lable"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_own_collation_names_ours(dataset: Path, num_workers: int) -> None:
    loader = DataLoader(HiddenStatesDataset(dataset), batch_size=2, num_workers=num_workers)
    with pytest.raises(TypeError, match="collate_fn=pad_samples"):
        next(iter(loader))


@pytest.mark.parametrize("fmt", ["sharded", "files"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_samples_without_rows(tmp_path: Path, fmt: DatasetFormat, dtype: str) -> None:
    """A mask may select nothing."""
    samples = [
        sample.take_rows(slice(0)) if sample.index != 2 else sample
        for sample in make_samples([4, 3, 5, 2])
    ]
    for path, chosen in ((tmp_path / "a", samples), (tmp_path / "b", samples[:2])):
        write_dataset(path, chosen, fmt, dtype, positions="mask")
        assert list(verify_dataset(str(path))) == []
        dataset = HiddenStatesDataset(path)
        for read, written in zip(dataset, chosen, strict=True):
            assert torch.equal(read.token_ids, written.token_ids)
            assert read.hidden_states.shape == written.hidden_states.shape
        assert sum(len(batch.rows) for batch in dataset.iter_rows(2)) == sum(
            len(sample.positions) for sample in chosen
        )


def test_views_are_not_copies_and_cannot_change_the_file(dataset: Path) -> None:
    opened = HiddenStatesDataset(dataset)
    first, again = opened[2], opened[2]
    assert first.hidden_states.data_ptr() == again.hidden_states.data_ptr()
    # Its storage ends where the rows end: another process is sent no more than them.
    assert first.hidden_states.untyped_storage().nbytes() == first.hidden_states.nbytes
    first.hidden_states.zero_()
    assert HiddenStatesDataset(dataset, verify="first_read")[2].hidden_states.any()


@pytest.mark.parametrize(
    ("context", "dtype"), [("fork", "bfloat16"), ("fork", "fp8"), ("spawn", "bfloat16")]
)
def test_data_loader_with_workers(tmp_path: Path, context: str, dtype: str) -> None:
    samples = make_samples(LENGTHS)
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", samples, dtype=dtype))
    alone = [sample.hidden_states for sample in dataset]  # mapped before the workers start
    loader = DataLoader(
        dataset, batch_size=3, shuffle=True, num_workers=2 if context == "fork" else 1,
        collate_fn=list, generator=torch.Generator().manual_seed(1),
        multiprocessing_context=context,
    )  # fmt: skip
    seen = [sample for batch in loader for sample in batch]
    assert sorted(sample.index for sample in seen) == list(range(7))
    assert [sample.index for sample in seen] != list(range(7))
    for sample in seen:
        assert torch.equal(sample.hidden_states, alone[sample.index])


def test_data_loader_without_batches(dataset: Path) -> None:
    opened = HiddenStatesDataset(dataset)
    for read, expected in zip(DataLoader(opened, batch_size=None), opened, strict=True):
        assert torch.equal(read.hidden_states, expected.hidden_states)


def test_a_folder_whose_name_is_not_utf_8(dataset: Path, tmp_path: Path) -> None:
    other = shutil.copytree(dataset, tmp_path / os.fsdecode(b"rows\xff"))
    for found, right in zip(HiddenStatesDataset(other), HiddenStatesDataset(dataset), strict=True):
        assert torch.equal(found.hidden_states, right.hidden_states)
    assert not list(verify_dataset(str(other)))


def test_it_can_be_pickled(dataset: Path) -> None:
    opened = HiddenStatesDataset(dataset, dtype=torch.float32)[2:]
    expected = opened[0].hidden_states
    again = pickle.loads(pickle.dumps(opened))
    assert len(again) == 5
    assert torch.equal(again[0].hidden_states, expected)
    assert expected.dtype == torch.float32


def test_few_files_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_MAPPED_FILES", 3)
    path = write_dataset(tmp_path / "d", make_samples([2] * 20), "files")
    dataset = HiddenStatesDataset(path)
    for _ in dataset:
        pass
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())  # names may be no UTF-8
    mapped = {line.split()[-1] for line in maps.splitlines()}
    assert sum(name.startswith(str(path)) for name in mapped) == 3


def test_a_plain_folder_of_the_connectors_files(tmp_path: Path) -> None:
    samples, names = make_samples([3, 6, 2, 4]), ["hs_0", "hs_2", "hs_10", "hs_11²3"]
    for sample, name in zip(samples, names, strict=True):
        write_hidden_states(
            str(tmp_path / f"{name}.safetensors"),
            {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids},
            {"model": "m", "layer_ids": "[0, 3, 8]"},
        )
        (tmp_path / f"{name}.safetensors.lock").touch()
    dataset = HiddenStatesDataset(tmp_path, verify="first_read")
    assert (dataset.manifest, dataset.layer_ids, dataset.hidden_size) == (None, (0, 3, 8), 48)
    for read, written in zip(dataset, samples, strict=True):
        assert torch.equal(read.hidden_states, written.hidden_states)
        assert torch.equal(read.token_ids, written.token_ids)
        assert read.index == written.index
    assert [s.request_id for s in dataset] == names
    assert [s.record for s in dataset] == [0, 2, 10, None]
    last = {"hidden_states": samples[0].hidden_states, "token_ids": samples[0].token_ids}
    write_hidden_states(str(tmp_path / "z.safetensors"), last, {"layer_ids": "[0, 3, 7]"})
    with pytest.raises(ValueError, match=r"z.safetensors has rows of layers \[0, 3, 7\], the"):
        list(HiddenStatesDataset(tmp_path))


def test_files_of_the_fp8_connector(tmp_path: Path) -> None:
    """hs_connectors writes one scale for each token, [tokens, 1, 1]."""
    values, scales = torch.randn(4, 3, 8).to(FP8), torch.rand(4, 1, 1)
    file = TensorFile(
        str(tmp_path / "a.safetensors"), "hidden_states", (3, 8), FP8,
        2, {},
    )  # fmt: skip
    file.append(values)
    file.complete({"hidden_states_scales": scales, "token_ids": torch.arange(4)})
    file.close()
    read = HiddenStatesDataset(tmp_path, dtype=torch.float32)[0]
    assert torch.equal(read.hidden_states, values.float() * scales)
    assert read.layer_ids == ()
    assert list(verify_dataset(str(tmp_path))) == []


def test_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no dataset and no \*.safetensors"):
        HiddenStatesDataset(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        HiddenStatesDataset(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="verify='always': use 'none' or 'first_read'"):
        HiddenStatesDataset(tmp_path, verify="always")  # type: ignore[arg-type]
    for dtype in ("float32", torch.int32):
        with pytest.raises(ValueError, match=rf"dtype='?{dtype}'?: use a torch dtype, such as"):
            HiddenStatesDataset(tmp_path, dtype=dtype)  # type: ignore[arg-type]
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings.json cannot be read"):
        HiddenStatesDataset(tmp_path)


@pytest.mark.parametrize("stored", ["bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_values_beyond_the_range_of_a_dtype_are_an_error(
    tmp_path: Path, stored: str, dtype: torch.dtype
) -> None:
    samples = make_samples([3, 4])
    samples[1].hidden_states[2, 1, 5] = 7e4
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", samples, dtype=stored), dtype)
    assert dataset[0].hidden_states.dtype == dtype
    with pytest.raises(ValueError, match="sample 1: rows have values beyond the range of float"):
        dataset[1]
    with pytest.raises(ValueError, match="sample 1: rows have values beyond the range of float"):
        list(dataset.iter_rows(2))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_batches_that_are_padded_and_packed(tmp_path: Path, dtype: str) -> None:
    dataset = HiddenStatesDataset(write_dataset(tmp_path / "d", make_samples(LENGTHS), dtype=dtype))
    assert repr(dataset) == (
        f"HiddenStatesDataset({str(tmp_path / 'd')!r}: 7 samples, layers [0, 3, 8], hidden size 48)"
    )
    samples = list(dataset)
    (packed,) = DataLoader(dataset, batch_size=7, collate_fn=pack_samples)
    for column, whole in zip(packed[:4], next(dataset.iter_rows(1000))[:4], strict=True):
        assert torch.equal(column, whole)
    assert (packed.tensors, packed.columns) == ({}, {})
    for collate in (pack_samples, pad_samples):
        with pytest.raises(ValueError, match=r"samples=\[\]"):
            collate([])
    first, second = DataLoader(dataset, batch_size=4, collate_fn=pad_samples)
    assert first.rows.shape == (4, 12, 3, 48)
    for batch, chosen in ((first, samples[:4]), (second, samples[4:])):
        assert batch.samples.tolist() == [sample.index for sample in chosen]
        for line, sample in enumerate(chosen):
            n = len(sample.token_ids)
            assert batch.mask[line].tolist() == [True] * n + [False] * (batch.mask.shape[1] - n)
            assert torch.equal(batch.rows[line, :n], sample.rows())
            assert not batch.rows[line, n:].any()
            assert torch.equal(batch.token_ids[line, :n], sample.token_ids)
            assert torch.equal(batch.positions[line, :n], sample.positions)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtypes", itertools.product(DTYPES, repeat=2))
def test_batches_of_several_dtypes_keep_all_values(dtypes: tuple[torch.dtype, ...]) -> None:
    samples = []
    for dtype in dtypes:
        (one,) = make_samples([3 + len(samples)], torch.float32)
        rows = one.hidden_states.clamp(-1000, 1000).to(dtype)
        scores = torch.linspace(0, 1, len(rows)).to(dtype)
        samples.append(one.with_tensors(hidden_states=rows, scores=scores))
    padded, packed = pad_samples(samples), pack_samples(samples)
    start = 0
    for place, sample in enumerate(samples):
        count = len(sample.positions)
        for name, tensor in sample.tensors.items():
            is_rows = name == "hidden_states"
            beside = padded.rows if is_rows else padded.tensors[name]
            joined = packed.rows if is_rows else packed.tensors[name]
            assert torch.equal(beside[place, :count].double(), tensor.double())
            assert torch.equal(joined[start : start + count].double(), tensor.double())
            assert not beside[place, count:].any()
        start += count


@pytest.mark.parametrize("collate", [pack_samples, pad_samples])
def test_a_batch_has_rows_of_the_same_layers(collate: Callable[..., Any]) -> None:
    one, other, last = make_samples([3, 4, 2])
    samples = [one, other, dataclasses.replace(last, layer_ids=(8, 3, 0))]
    with pytest.raises(ValueError, match=r"samples 0 and 2 have the layers \[0, 3, 8\] and \[8, 3"):
        collate(samples)


def test_numbers_of_a_plain_folder_are_read_as_what_they_are(tmp_path: Path) -> None:
    """Masks of numbers would be taken for the places of rows."""
    samples, mask = make_samples([4, 4, 4]), torch.tensor([True, False, False, True])
    for sample, number in zip(samples, (torch.uint8, torch.int32, torch.int64), strict=True):
        tensors = {
            "hidden_states": sample.hidden_states,
            "token_ids": torch.tensor([7, 3, 5, 4], dtype=torch.int32),
            "positions": torch.arange(4, dtype=torch.int32),
            "loss_mask": mask.to(number),
        }
        write_hidden_states(
            str(tmp_path / f"{sample.index}.safetensors"),
            tensors,
            {"layer_ids": "[0, 3, 8]", "row_tensors": '["loss_mask"]'},
        )
    dataset = HiddenStatesDataset(tmp_path)
    for read, sample in zip(dataset, samples, strict=True):
        assert read.token_ids.dtype == read.positions.dtype == torch.int64
        assert read.token_ids.tolist() == [7, 3, 5, 4]
        assert read.loss_mask is not None
        assert torch.equal(read.hidden_states[read.loss_mask], sample.hidden_states[[0, 3]])
    (batch,) = ActivationBuffer(dataset, 6, 100, layers=3, only_masked=True, epochs=1)
    rows = torch.cat([sample.hidden_states[[0, 3], 1] for sample in samples])
    assert sorted(batch.float().tolist()) == sorted(rows.float().tolist())


def test_a_file_with_other_slots_than_the_first(tmp_path: Path) -> None:
    """Files that name no layers have rows of one shape, too."""
    for name, shape in (("a", (3, 2, 5)), ("b", (4, 3, 5))):
        tensors = {"hidden_states": torch.ones(shape), "token_ids": torch.arange(shape[0])}
        write_hidden_states(str(tmp_path / f"{name}.safetensors"), tensors, {})
    dataset = HiddenStatesDataset(tmp_path)
    assert dataset[0].hidden_states.shape == (3, 2, 5)
    problem = r"b\.safetensors has rows of shape \[3, 5\], the files before it have \[2, 5\]"
    with pytest.raises(ValueError, match=problem):
        dataset[1]
    assert re.search(problem, "\n".join(verify_dataset(str(tmp_path))))

"""Random samples, and datasets made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vllm.hidden_states.manifest import merge_units, start_dataset
from vllm.hidden_states.metadata import (
    STORAGE_DTYPES,
    DatasetSettings,
)
from vllm.hidden_states.names import DatasetFormat
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import open_unit_writer, plan_units

LAYER_IDS = (0, 3, 8)
HIDDEN_SIZE = 48


def make_samples(
    lengths: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    every: int = 1,
    hidden_size: int = HIDDEN_SIZE,
    seed: int = 0,
) -> list[HiddenStatesSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        positions = torch.arange(0, length, every)
        shape = (len(positions), len(LAYER_IDS), hidden_size)
        exponents = torch.randn((*shape[:2], 1), generator=generator).clamp(max=3)  # for float16
        rows = torch.randn(shape, generator=generator) * 10**exponents
        samples.append(
            HiddenStatesSample(
                index=index,
                request_id=f"r{index}",
                token_ids=torch.randint(0, 2**40, (length,), generator=generator),
                positions=positions,
                tensors={"hidden_states": rows.to(dtype)},
                layer_ids=LAYER_IDS,
            )
        )
    return samples


def make_settings(
    samples: Sequence[HiddenStatesSample],
    fmt: DatasetFormat = "sharded",
    dtype: str = "bfloat16",
    shard_bytes: int = 4000,
    positions: str = "all",
) -> DatasetSettings:
    hidden_size = samples[0].hidden_states.shape[-1]
    units = plan_units(_row_bytes(samples, dtype), shard_bytes)
    return DatasetSettings(
        model="tiny",
        layer_ids=LAYER_IDS,
        num_hidden_layers=LAYER_IDS[-1],
        hidden_size=hidden_size,
        dtype=dtype,
        positions=positions,
        format=fmt,
        shard_bytes=shard_bytes,
        num_units=len(list(units)),
        num_samples=len(samples),
        input_digest="xxh3_128:0",
    )


def _row_bytes(samples: Sequence[HiddenStatesSample], dtype: str) -> list[int]:
    return [s.hidden_states.numel() * STORAGE_DTYPES[dtype].itemsize for s in samples]


def write_missing(
    path: Path, samples: Sequence[HiddenStatesSample], settings: DatasetSettings
) -> None:
    """Do what a job does: write every unit that is not committed, then merge."""
    committed = {unit.unit for unit in start_dataset(str(path), settings)}
    sizes = _row_bytes(samples, settings.dtype)
    for unit, numbers in enumerate(plan_units(sizes, settings.shard_bytes)):
        if unit in committed:
            continue
        with open_unit_writer(str(path), unit, settings) as writer:
            for number in numbers:
                writer.append(samples[number], number, 100 + number)
            writer.commit()
    merge_units(str(path))


def write_dataset(
    path: Path,
    samples: Sequence[HiddenStatesSample],
    fmt: DatasetFormat = "sharded",
    dtype: str = "bfloat16",
    shard_bytes: int = 4000,
    positions: str = "all",
) -> Path:
    write_missing(path, samples, make_settings(samples, fmt, dtype, shard_bytes, positions))
    return path


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }

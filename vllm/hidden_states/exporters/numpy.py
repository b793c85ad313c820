"""Arrays that ``numpy.load(path, mmap_mode="r")`` maps, and a JSON file beside them.

shard-00000.hidden_states.npy   [rows, layers, hidden], the samples one after another
shard-00000.token_ids.npy       int64 [tokens]
shard-00000.positions.npy       int64 [rows]
shard-00000.NAME.npy            [rows, ...], each other tensor of a row
shard-00000.json                layers, and the place of each sample
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch

from vllm.hidden_states.export import Exporter as _Exporter
from vllm.hidden_states.export import host_array
from vllm.hidden_states.metadata import DatasetSettings, UnitRecord, json_bytes
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import fields_of


class Exporter(_Exporter):
    """A writer of arrays that grow."""

    has_shards = True
    dtypes = ("float32", "float16")

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        super().__init__(directory, unit, settings)
        self._stem = f"shard-{unit:05d}"
        self._arrays: dict[str, _GrowingArray] = {}
        self._listed: list[dict[str, Any]] = []
        self._constants: Mapping[str, list[int]] = {}

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        tensors, constants = fields_of(stored, self._settings)
        self._constants = {name: value.tolist() for name, value in constants.items()}
        own = {name: getattr(stored, name) for name in ("hidden_states", "token_ids", "positions")}
        starts = self._lengths()
        for array, tensor in (own | tensors).items():
            self._grow(array, tensor)
        ends = self._lengths()
        self._listed.append(
            {
                "sample": stored.index,
                "record": stored.record,
                "rows": [starts[0], ends[0]],
                "tokens": [starts[1], ends[1]],
                **({"columns": dict(stored.columns)} if self._settings.has_columns else {}),
            }
        )

    def _lengths(self) -> list[int]:
        """Return the numbers of rows and of tokens."""
        names = ("hidden_states", "token_ids")
        return [self._arrays[name].length if name in self._arrays else 0 for name in names]

    def _grow(self, name: str, tensor: torch.Tensor) -> None:
        values = host_array(tensor)
        if name not in self._arrays:
            path = self._add_file(f"{self._stem}.{name}.npy")
            file = self._resources.enter_context(open(path, "xb"))  # noqa: SIM115  closed at the end
            self._arrays[name] = _GrowingArray(file, values)
        self._arrays[name].append(values)

    def commit(self) -> UnitRecord:
        for array in self._arrays.values():
            array.complete()
        about = {
            "layer_ids": self._settings.layer_ids,
            "layer_convention": self._settings.convention,
            "arrays": {name: f"{self._stem}.{name}.npy" for name in self._arrays},
            **self._constants,
            "samples": self._listed,
        }
        with open(self._add_file(f"{self._stem}.json"), "xb") as file:
            file.write(json_bytes(about))
        return super().commit()


class _GrowingArray:
    """A .npy file whose first dimension grows. Its header has room for any length."""

    def __init__(self, file: IO[bytes], like: np.ndarray[Any, Any]) -> None:
        self.length = 0
        self._file = file
        self._like = like[:0]
        self._write_header()

    def append(self, values: np.ndarray[Any, Any]) -> None:
        form = values.dtype, values.shape[1:]
        assert form == (self._like.dtype, self._like.shape[1:]), f"{form} in {self._file.name}"
        self._file.write(values.data if values.size else b"")
        self.length += len(values)

    def complete(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        header = np.lib.format.header_data_from_array_1_0(self._like)
        shape = (self.length, *self._like.shape[1:])
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": shape})

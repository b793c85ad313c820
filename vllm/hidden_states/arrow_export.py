"""The folder of a Hugging Face dataset, as ``datasets.load_from_disk`` reads it.

    data-00000.arrow    an Arrow stream; a record batch is a sample
    dataset_info.json   the features
    state.json          the list of the files

It is written with pyarrow alone. Features are stated in the schema, as the package does.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from vllm.hidden_states.export import Exporter, host_array
from vllm.hidden_states.metadata import DatasetSettings, UnitRecord
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import checksum

_INFO_KEY = b"huggingface"


class Column(NamedTuple):
    """The value of a sample in one column."""

    values: pa.Array
    """An array of length 1."""
    feature: dict[str, Any]
    metadata: Mapping[str, str] | None = None
    """Metadata of the field, such as the name of an extension type."""


class ArrowExporter(Exporter):
    """A writer of one Arrow file per unit."""

    has_shards = True
    dtypes = ("float32", "float16")

    suffix: ClassVar[str] = "arrow"

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        super().__init__(directory, unit, settings)
        self._name = f"data-{unit:05d}.{self.suffix}"
        self._stream: Any = None

    def _open(self, file: pa.NativeFile, schema: pa.Schema) -> Any:
        """Return a context manager that writes record batches to a new file."""
        return pa.ipc.new_stream(file, schema)

    def _refusal(self, stored: HiddenStatesSample) -> str | None:
        names = self._settings.stored_names.tensors
        is_whole = all(name in stored.tensors for name in names)
        return None if is_whole else "it has no rows, and so lacks columns"

    @abstractmethod
    def _columns(self, stored: HiddenStatesSample) -> dict[str, Column]:
        """Return the columns of a sample; all samples have the same ones."""

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        columns = self._columns(stored)
        fields = [
            pa.field(name, one.values.type, metadata=one.metadata) for name, one in columns.items()
        ]
        features = {name: one.feature for name, one in columns.items()}
        info = json.dumps({"info": {"features": features}})
        schema = pa.schema(fields, metadata={_INFO_KEY: info})
        if self._stream is None:
            path = self._add_file(self._name)
            file = self._resources.enter_context(pa.OSFile(path, "wb"))
            self._stream = self._resources.enter_context(self._open(file, schema))
        arrays = [one.values for one in columns.values()]
        self._stream.write_batch(pa.record_batch(arrays, schema=schema))

    @classmethod
    def describe(
        cls, directory: str, settings: DatasetSettings, units: Sequence[UnitRecord]
    ) -> dict[str, bytes]:
        filled = [one for one in units if one.num_samples]
        features = {}
        for unit in filled[:1]:
            with pa.ipc.open_stream(os.path.join(directory, unit.files[0].name)) as stream:
                features = json.loads(stream.schema.metadata[_INFO_KEY])["info"]["features"]
        names = [{"filename": one.files[0].name} for one in filled]
        sums = "".join(one.files[0].checksum for one in filled)
        state: dict[str, Any] = {
            "_data_files": names,
            "_fingerprint": checksum(sums.encode())[-16:],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        info = {"citation": "", "description": "", "features": features}
        info |= {"homepage": "", "license": ""}
        return {
            "dataset_info.json": json.dumps(info, indent=2).encode(),
            "state.json": json.dumps(state, indent=2).encode(),
        }


def nested(tensor: torch.Tensor) -> Column:
    """Return a tensor [n, ...] as a list of lists; only the first dimension may vary."""
    array = host_array(tensor)
    values = pa.array(array.reshape(-1))
    feature: dict[str, Any] = {"dtype": array.dtype.name, "_type": "Value"}
    for size in array.shape[:0:-1]:
        values = pa.FixedSizeListArray.from_arrays(values, size)
        feature = {"feature": feature, "length": size, "_type": "Sequence"}
    values = pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), values)
    return Column(values, {"feature": feature, "_type": "Sequence"})


def matrix(tensor: torch.Tensor) -> Column:
    """Return a tensor of two dimensions, the same in all samples, as an ``Array2D``."""
    array = host_array(tensor)
    offsets = pa.array(np.arange(len(array) + 1, dtype=np.int32) * array.shape[1])
    rows = pa.ListArray.from_arrays(offsets, pa.array(array.reshape(-1)))
    values = pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), rows)
    form = [[*array.shape], array.dtype.name]
    extension = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps(form),
    }
    feature = {"shape": form[0], "dtype": form[1], "_type": "Array2D"}
    return Column(values, feature, extension)


def window(tensor: torch.Tensor) -> Column:
    """Return a tensor of one dimension, as long in all samples."""
    array = host_array(tensor)
    values = pa.FixedSizeListArray.from_arrays(pa.array(array), len(array))
    value = {"dtype": array.dtype.name, "_type": "Value"}
    return Column(values, {"feature": value, "length": len(array), "_type": "Sequence"})


def scalar(value: int | str | None, kind: pa.DataType) -> Column:
    """Return a number or a text."""
    return Column(pa.array([value], kind), {"dtype": str(kind), "_type": "Value"})

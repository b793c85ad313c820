"""Tar files that webdataset reads: ``shard-00000.tar``.

A sample is KEY.hidden_states.npy, KEY.token_ids.npy, KEY.positions.npy, KEY.NAME.npy for each other
tensor of a row, and KEY.json; KEY is the number of the sample.
"""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np

from vllm.hidden_states.export import Exporter as _Exporter
from vllm.hidden_states.export import host_array
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import fields_of


class Exporter(_Exporter):
    """A writer of a tar file per unit, without times and owners."""

    has_shards = True
    dtypes = ("float32", "float16")

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        super().__init__(directory, unit, settings)
        path = self._add_file(f"shard-{unit:05d}.tar")
        tar = tarfile.open(path, "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115  closed at the end
        self._tar = self._resources.enter_context(tar)

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        tensors, constants = fields_of(stored, self._settings)
        about = {
            "sample": stored.index,
            "record": stored.record,
            "layer_ids": stored.layer_ids,
            **{name: value.tolist() for name, value in constants.items()},
            **({"columns": dict(stored.columns)} if self._settings.has_columns else {}),
        }
        own = {name: getattr(stored, name) for name in ("hidden_states", "token_ids", "positions")}
        self._add(stored, "json", json.dumps(about).encode())
        for array, tensor in (own | tensors).items():
            buffer = io.BytesIO()
            np.save(buffer, host_array(tensor))
            # In a key, webdataset takes everything after the first dot for the name.
            self._add(stored, f"{array}.npy", buffer.getvalue())

    def _add(self, stored: HiddenStatesSample, suffix: str, content: bytes) -> None:
        entry = tarfile.TarInfo(f"{stored.index:08d}.{suffix}")
        entry.size = len(content)
        self._tar.addfile(entry, io.BytesIO(content))

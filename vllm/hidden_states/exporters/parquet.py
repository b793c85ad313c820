"""Parquet files: ``datasets.load_dataset("parquet", data_files="FOLDER/*.parquet")``.

Columns are those of the format ``huggingface``. Features are stated in the schema, where the
package looks for them; others read lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from vllm.hidden_states.exporters.huggingface import Exporter as _Exporter
from vllm.hidden_states.metadata import DatasetSettings, UnitRecord

_GROUP_BYTES = 16 << 20
"""Bytes of samples that wait for their row group."""


class Exporter(_Exporter):
    """A writer of one Parquet file per unit."""

    suffix = "parquet"

    def _open(self, file: pa.NativeFile, schema: pa.Schema) -> Any:
        return _RowGroups(file, schema)

    @classmethod
    def describe(
        cls, directory: str, settings: DatasetSettings, units: Sequence[UnitRecord]
    ) -> dict[str, bytes]:
        return {}


class _RowGroups:
    """Writes samples in row groups: one of each would make a large footer of small samples."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        # Rows are nearly random bits, which neither compress nor repeat.
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        self._writer = pq.ParquetWriter(file, schema, write_statistics=False, **options)
        self._waiting: list[pa.RecordBatch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        if sum(one.nbytes for one in self._waiting) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting.clear()

"""A Hugging Face dataset with a row per sample: ``datasets.load_from_disk(FOLDER)``.

Columns: sample, record, token_ids, positions, hidden_states [rows, layers, hidden] if there are
layers, the other tensors of a row (such as loss_mask), and columns that were kept, as one text of
JSON.
"""

from __future__ import annotations

import json

import pyarrow as pa

from vllm.hidden_states.arrow_export import ArrowExporter, Column, nested, scalar
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import fields_of


class Exporter(ArrowExporter):
    """A writer of lists."""

    def _columns(self, stored: HiddenStatesSample) -> dict[str, Column]:
        tensors, constants = fields_of(stored, self._settings)
        # Arrow has no lists of the length 0.
        rows = {"hidden_states": stored.hidden_states} if stored.layer_ids else {}
        others = {name: nested(one) for name, one in (rows | tensors | constants).items()}
        if self._settings.has_columns:
            others["columns"] = scalar(json.dumps(dict(stored.columns)), pa.string())
        return {
            "sample": scalar(stored.index, pa.int64()),
            "record": scalar(stored.record, pa.int64()),
            "token_ids": nested(stored.token_ids),
            "positions": nested(stored.positions),
            **others,
        }

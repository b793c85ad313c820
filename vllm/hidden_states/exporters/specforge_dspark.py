"""Offline features of DSpark in SpecForge: those of DFlash, and the last state after the final norm
(SpecForge 0.2.0)."""

from __future__ import annotations

from typing import Any

from vllm.hidden_states.exporters import specforge_dflash
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.utils.boundaries import NORM


class Exporter(specforge_dflash.Exporter):
    """A writer that adds the last state."""

    needs = usual_state = (NORM,)

    def _content(self, stored: HiddenStatesSample) -> dict[str, Any]:
        last = self._layer_of(stored, NORM)
        return {**super()._content(stored), "target_last_hidden_states": last}

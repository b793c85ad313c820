"""Offline features of EAGLE-3 in SpecForge: ``NAME.ckpt`` (SpecForge 0.2.0).

Its target head has no norm, so the last state is the one after the final norm.
"""

from __future__ import annotations

from typing import Any

from vllm.hidden_states.export import TorchFiles, mask_of
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.utils.boundaries import NORM


class Exporter(TorchFiles):
    """A writer of the three draft inputs side by side, and of the last state."""

    suffix = ".ckpt"
    needs = usual_state = (NORM,)
    preset = "specforge-eagle3"
    num_inputs = 3

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        super().check(settings)
        inputs = cls.inputs(settings)
        if ",".join(map(str, [*inputs, NORM])) == cls.needed_layers(settings):
            return None
        numbers = [one - 1 for one in inputs if isinstance(one, int)]
        return f"train with model.aux_hidden_state_layer_ids: {numbers}"

    def _content(self, stored: HiddenStatesSample) -> dict[str, Any]:
        return {
            "input_ids": stored.token_ids.clone(),
            "loss_mask": mask_of(stored),
            "aux_hidden_state": self._inputs_of(stored)[None],
            "hidden_state": self._layer_of(stored, NORM)[None],
        }

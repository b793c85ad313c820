"""``NAME.pt`` for the offline training of NVIDIA Model-Optimizer (0.47).

Its loader takes ``hidden_states`` for the state after the final norm, unless the file says that it
is the one before. Only its DFlash reads that, so the state after the norm is written if there is
one.
"""

from __future__ import annotations

from typing import Any

from vllm.hidden_states.export import TorchFiles, mask_of, refusal
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.utils.boundaries import NORM


class Exporter(TorchFiles):
    """A writer of the last state and the draft's inputs side by side."""

    suffix = ".pt"
    preset = "specforge-eagle3"
    usual_state = (NORM,)

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        super().check(settings)
        if NORM in settings.layer_ids:
            return None
        if settings.num_hidden_layers in settings.layer_ids:
            return (
                "the last state is the one before the final norm, and hidden_states_prenorm says "
                "so, which only DFlash reads; for other heads extract the layer norm"
            )
        problem = f"layers {list(settings.layer_ids)}, and it needs norm, too"
        raise ValueError(refusal(settings, problem, cls.needed_layers(settings)))

    def _content(self, stored: HiddenStatesSample) -> dict[str, Any]:
        is_normed = NORM in stored.layer_ids
        last = NORM if is_normed else self._settings.num_hidden_layers
        mask = {"loss_mask": mask_of(stored)} if self._settings.has_loss_mask else {}
        return {
            "input_ids": stored.token_ids.clone(),
            "hidden_states": self._layer_of(stored, last),
            "aux_hidden_states": self._inputs_of(stored),
            "hidden_states_prenorm": not is_normed,
            **mask,
        }

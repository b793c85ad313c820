"""Offline features of DFlash in SpecForge: ``NAME.ckpt`` (SpecForge 0.2.0)."""

from __future__ import annotations

from typing import Any

from vllm.hidden_states.export import TorchFiles, mask_of
from vllm.hidden_states.sample import HiddenStatesSample


class Exporter(TorchFiles):
    """A writer of the draft's inputs side by side."""

    suffix = ".ckpt"
    preset = "dflash"

    def _refusal(self, stored: HiddenStatesSample) -> str | None:
        mask = mask_of(stored).bool()
        if (mask[1:] & mask[:-1]).any():
            return None
        return "its reader needs two consecutive tokens that the loss mask selects"

    def _content(self, stored: HiddenStatesSample) -> dict[str, Any]:
        return {
            "input_ids": stored.token_ids.clone(),
            "loss_mask": mask_of(stored),
            "hidden_states": self._inputs_of(stored),
        }

"""Cached activations of SAELens 6: a Hugging Face dataset with a window of tokens in each row.

A column is named by a hook point of TransformerLens, [context, d_in]; ``token_ids`` has the
window's tokens. Layer id i is blocks.{i - 1}.hook_resid_post, and 0 is blocks.0.hook_resid_pre.
"""

from __future__ import annotations

import json

import torch

from vllm.hidden_states.arrow_export import ArrowExporter, Column, matrix, window
from vllm.hidden_states.export import refusal
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.utils.boundaries import LayerId


class Exporter(ArrowExporter):
    """A writer of windows of one length, those of ``--pack``."""

    stores_fields = False
    stores_hooks = True

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        super().check(settings)
        layer_ids, problem = settings.layer_ids, None
        if "pack" not in settings.options:
            problem = (
                "samples of any length, and it reads windows of one; rows depend on all tokens "
                "before them, so rows of single texts are not those of texts that are joined"
            )
        elif settings.selection != "all":
            problem = f"positions={settings.selection}, and it reads whole windows"
        elif not all(isinstance(one, int) for one in layer_ids):
            problem = "the layer norm, which is not a hook point"
        elif len(set(layer_ids)) < len(layer_ids):
            problem = f"layers {[*layer_ids]}, and its columns need different names"
        if problem is None:
            return None
        layers = dict.fromkeys(str(one) for one in layer_ids if isinstance(one, int))
        length = settings.options.get("pack", "1024")
        listed = ",".join(layers) or "IDS"
        raise ValueError(refusal(settings, problem, listed, f"--pack {length}"))

    def _refusal(self, stored: HiddenStatesSample) -> str | None:
        length = int(self._settings.options["pack"])
        if len(stored.token_ids) != length:
            return f"it has {len(stored.token_ids)} tokens, and a window has {length}"
        options = self._settings.options
        texts = stored.columns["texts"] if "pack_last" in options else []
        end = max((one["end"] for one in texts), default=length)
        has_separators = options.get("pack_separator") != json.dumps("none")
        if length - end <= has_separators:  # a separator may be at its end
            return None
        return f"only {end} of its {length} tokens are of texts"

    def _columns(self, stored: HiddenStatesSample) -> dict[str, Column]:
        rows = stored.hidden_states
        columns = {hook_of(one): matrix(rows[:, n]) for n, one in enumerate(stored.layer_ids)}
        hooks = {name: matrix(one) for name, one in stored.activations.items()}
        return columns | hooks | {"token_ids": window(stored.token_ids.to(torch.int32))}


def hook_of(layer_id: LayerId) -> str:
    """Return TransformerLens' name for the stream at a layer id."""
    assert isinstance(layer_id, int), f"{layer_id} is not a hook point"
    return f"blocks.{layer_id - 1}.hook_resid_post" if layer_id else "blocks.0.hook_resid_pre"

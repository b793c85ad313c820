"""``hs_{i}.safetensors`` beside row i of the dataset that speculators prepared (speculators 0.9).

It trains on all tokens. The last slot is the verifier's final state before the final norm, the
others go to the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.hidden_states.layer_ids import resolve_layer_ids
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.units import FileWriter
from vllm.utils.boundaries import LayerId


class Exporter(FileWriter):
    """A writer of one file per record."""

    takes_names = False
    has_default_layers = True
    stores_loss_mask = False  # the prepared dataset has its own

    @classmethod
    def default_layers(cls, num_hidden_layers: int) -> Sequence[LayerId]:
        return resolve_layer_ids("speculators-eagle3", num_hidden_layers)

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        for option in {"pack", "split_turns"} & {*settings.options}:
            raise ValueError(
                f"the dataset is made with {option}, so a sample is not a record, and the file "
                "that speculators looks for cannot be named; use files or sharded"
            )
        layers, last = list(settings.layer_ids), settings.num_hidden_layers
        if settings.selection != "all":
            raise ValueError(
                f"format=speculators with positions={settings.selection}: speculators trains on "
                "every token of a sample; use positions=all, or another format"
            )
        if settings.dtype == "fp8":
            raise ValueError(
                "format=speculators with dtype=fp8: speculators' loader does not read scales; use "
                "bfloat16, float16 or float32, or another format"
            )
        if len(layers) < 2 or layers[-1] != last:
            raise ValueError(
                f"format=speculators with layers {layers}: speculators takes the last slot for "
                f"the model's final state; end the list with {last} ('last')"
            )
        inputs = layers[:-1]
        if len(set(inputs)) != len(inputs):
            raise ValueError(
                f"format=speculators with layers {layers}: speculators needs different layers "
                "before the last slot"
            )
        try:
            expected = list(resolve_layer_ids("eagle3", last))[:-1]
        except ValueError:
            expected = []
        numbers = " ".join(str(layer_id) for layer_id in inputs)
        return None if inputs == expected else f"train with --target-layer-ids {numbers}"

    def _stem(self, stored: HiddenStatesSample, name: str | None) -> str:
        return f"hs_{stored.record}"

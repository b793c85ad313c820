"""The layers of one pipeline stage."""

from __future__ import annotations

from typing import NamedTuple


class PipelineStage(NamedTuple):
    """The layers of a stage."""

    first_layer: int
    end_layer: int
    """One more than the last layer."""
    num_layers: int
    """Layers of all stages."""

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    @property
    def is_whole(self) -> bool:
        """True if there are no other stages."""
        return self.is_first and self.is_last

    def takes_part(self, num_layers_to_run: int | None) -> bool:
        """Return whether a step that runs so many layers (None: all) needs this stage.

        The stream at a boundary between two stages is kept by the later one.
        """
        return self.is_first or num_layers_to_run is None or num_layers_to_run >= self.first_layer

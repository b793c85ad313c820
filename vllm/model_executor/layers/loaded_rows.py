"""Rows of a weight while it loads: as they are, or as panels at once, so that values are written
once."""

from __future__ import annotations

import torch
from torch import nn

from vllm.ops.linear import (
    PANEL_COLUMNS,
    empty_panels,
    make_panels,
    panels_into,
    prefers_panels,
    weight_of_panels,
)


class LoadedRows:
    """Of a parameter [m, n], or of one with a weight for each expert [experts, m, n]."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._become_panels = False
        self._panels: torch.Tensor | None = None

    def become_panels(self) -> None:
        """What is put from now on becomes panels, where products read those.

        The parameter has no memory meanwhile; whoever reads it finds no number.
        """
        if prefers_panels(self._parameter.device):
            self._become_panels = True
            nothing = self._parameter.data.new_full((), torch.nan)
            self._parameter.data = nothing.expand(self._parameter.shape)

    def put(self, row: int, rows: torch.Tensor, expert: int | None = None) -> None:
        """Keep ``rows`` [k, n], of any dtype, from ``row`` on."""
        if row % PANEL_COLUMNS:  # they begin inside of a panel
            self.lay_plain()
        if self._become_panels:
            if self._panels is None:
                self._panels = empty_panels(self._parameter)
            panels = self._panels if expert is None else self._panels[expert]
            first = row // PANEL_COLUMNS
            panels_into(panels[first : first - (-len(rows) // PANEL_COLUMNS)], rows)
        else:
            weight = self._parameter.data if expert is None else self._parameter.data[expert]
            weight[row : row + len(rows)].copy_(rows)

    def lay_plain(self) -> None:
        """The parameter holds what is there so far, and what comes."""
        if not self._become_panels:
            return
        plain = torch.empty(self._parameter.shape, dtype=self._parameter.dtype)
        if self._panels is not None:
            plain.copy_(weight_of_panels(self._panels, *plain.shape[-2:]))
        self._parameter.data, self._panels = plain, None
        self._become_panels = False

    def panels(self) -> torch.Tensor:
        """Those of all rows, which are there."""
        return make_panels(self._parameter.data) if self._panels is None else self._panels

"""Offline features of Domino in SpecForge, which reads those of DFlash (SpecForge 0.2.0)."""

from __future__ import annotations

from vllm.hidden_states.exporters import specforge_dflash


class Exporter(specforge_dflash.Exporter):
    """A writer of the same files."""

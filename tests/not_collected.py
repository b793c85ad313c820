"""Leaves out tests that only another machine can run; the last lines of the log count them.

A skip then means that something is missing here that could be there.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from vllm.ops.native import isas_of_this_cpu

COUNTS = "not_collected"
"""Key under which a process of pytest-xdist reports its counts."""


def why_not_here(item: pytest.Item) -> str | None:
    """Return the part that this machine lacks for the test; None: it lacks nothing."""
    isas = {marker.args[0] for marker in item.iter_markers("isa")}
    if missing := isas - set(isas_of_this_cpu()):
        return f"need {min(missing)}"
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "need a GPU"
    if item.get_closest_marker("no_gpu") and torch.cuda.is_available():
        return "are for machines without a GPU"
    return None


class NotCollected:
    """Takes tests that cannot run here out of the collection, after ``-m`` and ``-k``."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        reasons = [why_not_here(item) for item in items]
        self.counts.update(reason for reason in reasons if reason is not None)
        config.hook.pytest_deselected(
            items=[item for item, reason in zip(items, reasons) if reason is not None]
        )
        items[:] = [item for item, reason in zip(items, reasons) if reason is None]
        if hasattr(config, "workeroutput"):
            config.workeroutput[COUNTS] = dict(self.counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Each process of pytest-xdist collects everything, so one report is enough."""
        self.counts = Counter(getattr(node, "workeroutput", {}).get(COUNTS, self.counts))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            parts = [f"{count} {reason}" for reason, count in sorted(self.counts.items())]
            terminalreporter.write_line(f"not collected on this machine: {', '.join(parts)}")

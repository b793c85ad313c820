"""One line of the table of targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A target and what was measured."""

    name: str
    work: str
    against: str
    target: str
    """``>= x`` or ``<= x``."""
    measured: float
    rounds: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """True if the figure is on the right side of the limit."""
        sign, limit = self.target.split()
        return self.measured >= float(limit) if sign == ">=" else self.measured <= float(limit)

    def as_json(self) -> dict[str, Any]:
        """Return the entry of a results file."""
        return {
            "name": self.name,
            "work": self.work,
            "against": self.against,
            "target": self.target,
            "measured": self.measured,
            "is_met": self.is_met,
            "rounds": self.rounds,
            "details": self.details,
        }

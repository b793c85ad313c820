"""Methods and functions that tests call with workers."""

from __future__ import annotations

from typing import Any


class Extension:
    """Methods for ``worker_extension_cls``."""

    def add(self, a: int, b: int = 1) -> int:
        return a + b

    def fail(self, kind: str) -> None:
        raise {"value": ValueError, "other": KeyError}[kind]("on purpose")


class Taken:
    """A method that workers have already."""

    def load_model(self) -> None: ...


def count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def device_of(worker: Any) -> str:
    return str(worker.device)

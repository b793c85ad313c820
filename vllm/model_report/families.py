"""The families that can run: classes of this engine, and the modules of transformers.

The first paragraph of a class's docstring names the models that it runs. The command
``vllm models`` and the table in docs/supported_models.md are made from these paragraphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm.model_classes import ModelRegistry
from vllm.model_executor.transformers_modules.choice import (
    transformers_architectures as transformers_architectures,
)
from vllm.plugins import load_general_plugins


class NativeFamily(NamedTuple):
    """An architecture with its own class, and the models that the class says it runs."""

    architecture: str
    models: str


def native_families(*, with_plugins: bool = False) -> list[NativeFamily]:
    """Return the families of this engine by name, with those of installed plugins on request."""
    if with_plugins:
        load_general_plugins()
    names = sorted(ModelRegistry.get_supported_archs(), key=str.lower)
    return [NativeFamily(name, ModelRegistry.describe(name)) for name in names]


def markdown_table(families: Iterable[NativeFamily]) -> str:
    """Return the table of docs/supported_models.md."""
    rows = [f"| `{name}` | {models} |" for name, models in families]
    return "\n".join(["| architecture in `config.json` | models |", "|---|---|", *rows, ""])

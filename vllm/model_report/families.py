"""The families that can run: classes of this engine, and the modules of transformers.

The first paragraph of a class's docstring names the models that it runs. The command
``vllm models`` and the table in docs/supported_models.md are made from these paragraphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm.model_classes import ModelRegistry
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


def transformers_architectures() -> list[str]:
    """Return, by name, the causal models of the installed transformers without a class of ours,
    including those that read more than text.

    They run as transformers' own module if that turns out to be possible when they are loaded, or
    by a class of ours for their text model if there is one.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    names: set[str] = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for found in mapping.values():
            names.update([found] if isinstance(found, str) else found)
    return sorted(names - set(ModelRegistry.get_supported_archs()), key=str.lower)


def markdown_table(families: Iterable[NativeFamily]) -> str:
    """Return the table of docs/supported_models.md."""
    rows = [f"| `{name}` | {models} |" for name, models in families]
    return "\n".join(["| architecture in `config.json` | models |", "|---|---|", *rows, ""])

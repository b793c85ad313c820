"""Exporters: writers of the layouts that other programs read, one module for each.

The name of a format is that of its module, with hyphens. The module has a class ``Exporter``, a
:class:`vllm.hidden_states.units.UnitWriter`. To add a format, add a module.
"""

from __future__ import annotations

import importlib
import pkgutil

from vllm.hidden_states.names import FORMATS


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, those of datasets first; imports none of them."""
    modules = (module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))
    return (*FORMATS, *sorted(set(modules) - {*FORMATS}))


def find_exporter(name: str) -> object:
    """Return the class that writes a format; raises ValueError if there is none."""
    if name not in format_names():
        raise ValueError(f"format={name!r}: use {', '.join(format_names())}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").Exporter

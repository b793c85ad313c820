"""What transformers makes of a config: a causal model, or one that reads more than text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def names_in_transformers(config: Any) -> list[str]:
    """Of the classes that :func:`auto_class` would make of such a config."""
    return [name for _, names in _known(config) for name in names]


def auto_class(config: Any) -> Any:
    """AutoModelForCausalLM, also for configs that only code beside them knows; of a model with
    encoders for something else the class that holds them too."""
    from transformers import AutoModelForCausalLM

    known = list(_known(config))
    stated = set(config.architectures or ())
    named = [one for one, names in known if stated & set(names)]
    return [*named, *(one for one, _ in known), AutoModelForCausalLM][0]


def _known(config: Any) -> Iterator[tuple[Any, list[str]]]:
    """Auto classes that know the config, and the names of what they make of it."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    for one in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        mapping: Any = one._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found if isinstance(found, tuple | list) else (found,)
            yield one, [model_class.__name__ for model_class in found]

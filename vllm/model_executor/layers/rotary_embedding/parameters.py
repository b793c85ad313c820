"""The entries of ``rope_parameters`` that transformers' model of a family reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding.frequencies import rope_type_of

logger = init_logger(__name__)

_PART = "partial_rotary_factor"


def read_rope_parameters(config: Any, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``parameters``, of ``config`` or of one kind of its layers, without entries that
    transformers does not read.

    Some families' modules in transformers do not read ``partial_rotary_factor``: without scaling
    they rotate whole heads. Scaled rotations are common code, which does read it. That code reads
    yarn's ``truncate`` next to the kinds of layers, never inside a kind.

    ValueError: there is no ``rope_theta``. Most configs of transformers have one for such a case.
    """
    read = dict(parameters or {})
    if read and "rope_theta" not in read:
        raise ValueError(f"config.json: rope_parameters has no rope_theta in {read}")
    whole = config.rope_parameters or {}
    if "truncate" in read and any(parameters is of_kind for of_kind in whole.values()):
        read["truncate"] = whole.get("truncate", True)
    part = read.get(_PART, 1.0)
    if part == 1.0 or rope_type_of(read) != "default" or _reads_part(type(config).__module__):
        return read
    logger.warning_once(
        "config.json: %s=%g is not read by transformers' %s models: whole heads are rotated",
        _PART,
        part,
        config.model_type,
    )
    del read[_PART]
    return read


@lru_cache
def _reads_part(config_module: str) -> bool:
    """Return whether the models of a config module read it; also True for unknown models."""
    if not config_module.startswith("transformers.models."):
        return True
    spec = find_spec(config_module.replace(".configuration_", ".modeling_"))
    if spec is None or spec.origin is None:
        return True
    return _PART in Path(spec.origin).read_text(encoding="utf-8")

"""SpeculativeConfig: hidden-state extraction, requested through the same option as upstream."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm.config.model_facts import config_value
from vllm.utils.boundaries import NORM, LayerId
from vllm.utils.checked import config
from vllm.utils.text import did_you_mean

EXTRACT_HIDDEN_STATES = "extract_hidden_states"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYER_IDS_OPTION = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"


def _as_object(value: object) -> object:
    """Turn a dict into an object with its entries as attributes; return any other object as is."""
    return SimpleNamespace(**value) if isinstance(value, Mapping) else value


@config("speculative_config.draft_model_config")
class DraftModelConfig:
    """The "draft model" of an extraction: a config that names layers, without weights."""

    hf_config: Annotated[Any, BeforeValidator(_as_object)]
    """Object (or dict) whose ``eagle_aux_hidden_state_layer_ids`` are the layers to extract."""


def _as_draft_model_config(value: object) -> object:
    if isinstance(value, Mapping):
        return DraftModelConfig(**value)
    if value is None or isinstance(value, DraftModelConfig):
        return value
    hf_config = config_value(value, ("hf_config",))
    if hf_config is None:
        raise ValueError(
            f"speculative_config.draft_model_config={value!r} has no hf_config; give a dict "
            f"{{'hf_config': {{'{LAYER_IDS_KEY}': [...]}}}}"
        )
    return DraftModelConfig(hf_config=hf_config)


@config("speculative_config")
class SpeculativeConfig:
    """``method="extract_hidden_states"`` with the layers to extract; it never drafts."""

    method: str | None = None
    """Only "extract_hidden_states" is supported."""
    num_speculative_tokens: int = 1
    """Must be 0 or 1, with the same effect: nothing is drafted."""
    draft_model_config: Annotated[
        DraftModelConfig | None, BeforeValidator(_as_draft_model_config)
    ] = None
    """Names the layers: ``{"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}``."""
    model: str | None = None
    """Must be left out or be the name of the method: extraction has no draft model."""

    def __post_init__(self) -> None:
        if self.method != EXTRACT_HIDDEN_STATES:
            raise ValueError(
                f"speculative_config.method={self.method!r} is not supported; "
                f"supported: {EXTRACT_HIDDEN_STATES!r}"
            )
        if self.num_speculative_tokens not in (0, 1):
            raise ValueError(
                f"speculative_config.num_speculative_tokens={self.num_speculative_tokens} is not "
                f"valid: {EXTRACT_HIDDEN_STATES} drafts nothing; use 1 (or 0)"
            )
        if self.model not in (None, EXTRACT_HIDDEN_STATES):
            raise ValueError(
                f"speculative_config.model={self.model!r} is not valid: {EXTRACT_HIDDEN_STATES} "
                "has no draft model; leave it out"
            )
        _check_layer_ids(self.draft_model_config)

    @property
    def hidden_state_layer_ids(self) -> tuple[LayerId, ...]:
        """Layers to extract, in the order given, with duplicates."""
        assert self.draft_model_config is not None, "checked when the object was made"
        ids = getattr(self.draft_model_config.hf_config, LAYER_IDS_KEY)
        return tuple(one if one == NORM else int(one) for one in ids)


def _check_layer_ids(draft: DraftModelConfig | None) -> None:
    """Raise ValueError unless the draft config holds a list of whole numbers."""
    hf_config = None if draft is None else draft.hf_config
    ids = config_value(hf_config, (LAYER_IDS_KEY,))
    if ids is None:
        raise ValueError(
            f"{LAYER_IDS_OPTION} is missing{_near_miss(hf_config)}; give the list of layers to "
            "extract"
        )
    if not isinstance(ids, list | tuple | range) or not ids:
        raise ValueError(f"{LAYER_IDS_OPTION}={ids!r} is not a list of at least one layer id")
    for layer_id in ids:
        is_number = isinstance(layer_id, Integral) and not isinstance(layer_id, bool)
        if not is_number and layer_id != NORM:
            raise ValueError(
                f"{LAYER_IDS_OPTION}={ids!r} holds {layer_id!r}; use whole numbers and {NORM!r}"
            )


def _near_miss(hf_config: object) -> str:
    """Part of a message that names an attribute whose name may be a misspelt LAYER_IDS_KEY."""
    try:
        names = list(vars(hf_config))
    except TypeError:  # None, or an object without a __dict__
        return ""
    if LAYER_IDS_KEY in names:  # present, but None
        return ""
    near = next((name for name in names if did_you_mean(name, [LAYER_IDS_KEY])), None)
    return f" (there is {near!r}: a misspelling?)" if near else ""

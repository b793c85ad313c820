"""Facts about a model's shape, read from its transformers config.

Configs of different families have different names for the same thing; only this module lists the
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.transformers_utils.config_entries import WHOLE_NUMBERS, check_number, check_rotation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
)
LATENT_SIZE_NAMES = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""Sizes of latent attention; other models may state 0."""
_LAYERS_NAMES = {"longcat_flash": "num_layers", "xlstm": "num_blocks"}
"""Name of the number of layers, by model type, for configs whose ``num_hidden_layers`` counts
something else (LongCat's attentions, two per layer) or is an overridden default (xLSTM)."""
KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
STREAMS_NAMES = ("altup_num_inputs", "hc_mult", "hc_count")
"""Names of the number of residual streams per token that layers hand on."""
LAYER_KINDS_NAMES = ("layer_types", "layers_block_type")
RECURRENT_KINDS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "hybrid", "conv"})
SLIDING_KINDS = frozenset({"sliding_attention", "hybrid_sliding", "chunked_attention"})
FULL_KINDS = frozenset({"full_attention", "attention"})
_WITHOUT_LM_HEAD = ("Model", "ForSequenceClassification", "ForTokenClassification")
"""Ends of the names of classes that have the same layers as a causal model, and another head or
none."""


class LengthLimit(NamedTuple):
    """The longest sequence that a model was made for, and the source of that number."""

    num_tokens: int
    source: str


_ONE_A_LAYER = "AmbiguousGlobalPerLayerAttributeError"
"""transformers' error for a value that each layer has for itself; only newer releases have it."""


def config_value(config: object, names: tuple[str, ...]) -> Any:
    """The value of the first of ``names`` that the config states; None if it states none."""
    for name in names:
        value = _stated(config, name)
        if value is not None:
            return value
    return None


def _stated(config: PretrainedConfig, name: str) -> Any:
    """The value of ``name``; None if there is none, or if each layer has its own."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:
        if type(error).__name__ == _ONE_A_LAYER:
            return None
        raise


def required_value(config: PretrainedConfig, names: tuple[str, ...]) -> Any:
    """Like :func:`config_value`, but ValueError if the config has none of ``names``."""
    value = config_value(config, names)
    if value is None:
        raise ValueError(f"the model's config.json has no {' / '.join(names)}")
    return value


def causal_architectures(config: PretrainedConfig) -> list[str]:
    """The config's architectures; for those without an LM head, the causal ones of its type."""
    names = list(config.architectures or [])
    if not any(name.endswith(_WITHOUT_LM_HEAD) for name in names):
        return names
    from transformers.models.auto import modeling_auto as auto

    model_type = config.model_type
    others: tuple[Mapping[str, Any], ...] = (
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )
    causal: list[Mapping[str, str]] = [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    causal.insert(
        int(config.get_text_config(decoder=True) is config),
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    found = next((known[model_type] for known in causal if model_type in known), None)
    headless = {known.get(model_type) for known in others}
    return [found if found and name in headless else name for name in names]


def check_sizes(text_config: PretrainedConfig) -> None:
    """Raise ValueError if a size or a count that the config states is not a valid one."""
    for names, which, least in WHOLE_NUMBERS:
        check_whole(text_config, names, which, least)
    check_rotation(config_value(text_config, ("rope_parameters",)) or {}, "rope_parameters")


def check_whole(
    text_config: PretrainedConfig, names: tuple[str, ...], which: str = "above 0", least: int = 1
) -> None:
    """Raise ValueError if the config states anything but such a whole number under ``names``."""
    for name in names:
        value = _stated(text_config, name)
        check_number(text_config.attribute_map.get(name, name), value, which, least)


def num_decoder_layers(text_config: PretrainedConfig) -> int:
    """Decoder layers of the whole model."""
    model_type = config_value(text_config, ("model_type",))
    name = _LAYERS_NAMES.get(model_type, "num_hidden_layers")
    return int(required_value(text_config, (name,)))


def length_limit(text_config: PretrainedConfig) -> LengthLimit | None:
    """The smallest length the config states, stretched by its rotary scaling; None: no limit."""
    values = {name: config_value(text_config, (name,)) for name in _LENGTH_NAMES}
    stated = {name: int(value) for name, value in values.items() if value is not None}
    if not stated:
        return None
    name = min(stated, key=stated.__getitem__)
    return _stretched(
        LengthLimit(stated[name], name), config_value(text_config, ("rope_parameters",))
    )


def longrope_limit(text_config: PretrainedConfig) -> int | None:
    """Longest sequence that longrope rotates by its factors for short ones; None: no longrope.

    All tokens of a longer sequence are rotated by the factors for long ones. ValueError: kinds of
    layers have different limits.
    """
    rope = config_value(text_config, ("rope_parameters",)) or {}
    is_by_kind = rope and all(isinstance(value, Mapping) for value in rope.values())
    limits = set()
    for scaling in rope.values() if is_by_kind else (rope,):
        if scaling.get("rope_type", scaling.get("type")) == "longrope":
            limit = scaling.get("original_max_position_embeddings")
            limits.add(int(limit or required_value(text_config, ("max_position_embeddings",))))
    if len(limits) > 1:
        raise ValueError(
            f"config.json: original_max_position_embeddings of longrope is {sorted(limits)} in "
            "layers of several kinds; one is supported"
        )
    return limits.pop() if limits else None


def _stretched(limit: LengthLimit, rope: dict[str, Any] | None) -> LengthLimit:
    """``limit`` times the factor of rotary scalings whose config states the unscaled length.

    yarn: factor times ``original_max_position_embeddings``, or the stated length if that is
    longer; linear: factor times the stated length; llama3, and one scaling per kind of layer:
    the stated length already is the scaled one.
    """
    kind = (rope or {}).get("rope_type")
    if rope is None or kind not in ("yarn", "linear"):
        return limit
    base = limit.num_tokens
    if kind == "yarn":
        base = rope.get("original_max_position_embeddings") or base
    factor = rope.get("factor") or 1.0
    if base * factor <= limit.num_tokens:
        return limit
    return LengthLimit(int(base * factor), f"{limit.source} with {kind} rope scaling x{factor:g}")

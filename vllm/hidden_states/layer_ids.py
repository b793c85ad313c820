"""Layer ids as people write them.

Id i in [0, n], with n = ``num_hidden_layers``, is the residual stream after i layers: 0 is the
embedding output, n the last layer's output before the final norm. "norm" is the state after the
final norm, as the LM head reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple

from vllm.utils.boundaries import NORM, LayerId
from vllm.utils.text import brief

CONVENTION = (
    "layer id i is the residual stream after i decoder layers: 0 is the embedding output, "
    "num_hidden_layers the last layer's output before the final norm; slots are in the order "
    "of layer_ids"
)
_NORM_CONVENTION = "; 'norm' is the state after the final norm, as the LM head reads it"
Layers = str | int | Sequence[int | str]
"""The forms that :func:`resolve_layer_ids` takes."""
MAX_LAYER_IDS = 1024
"""Most ids of one request, with duplicates."""
_DFLASH_DRAFT_LAYERS = 5


def convention_of(layer_ids: Sequence[LayerId]) -> str:
    """Return the text that files of these layers carry, so that they explain themselves."""
    return CONVENTION + _NORM_CONVENTION if NORM in layer_ids else CONVENTION


def _early_middle_late(last: int) -> list[int]:
    return [2, last // 2, last - 3]


def _evenly_spaced(last: int) -> list[int]:
    """Return five layers, counted from 0, from the second to the third from the end."""
    steps = _DFLASH_DRAFT_LAYERS - 1
    return [round(1 + step * (last - 4) / steps) for step in range(steps + 1)]


class Preset(NamedTuple):
    """The layers that a type of draft model reads, in the convention of one project."""

    convention: str
    inputs: Callable[[int], list[int]]
    """Number of the model's layers -> ids, without the last layer, which follows them."""


PRESETS = {
    "speculators-eagle3": Preset(
        "default of speculators' trainer: ids as here (used for DFlash, too)",
        _early_middle_late,
    ),
    "specforge-eagle3": Preset(
        "default of SpecForge: the outputs of layers 1, n // 2 - 1 and n - 4, counted from 0",
        _early_middle_late,
    ),
    "modelopt-eagle3": Preset(
        "Model-Optimizer's compute_hidden_states_vllm.py --aux-layers eagle: 1, n // 2 - 1 and "
        "n - 4 as ids, so each is one boundary before EAGLE-3's own",
        lambda last: [layer_id - 1 for layer_id in _early_middle_late(last)],
    ),
    "dflash": Preset(
        "DFlash's own rule for five draft layers: outputs of layers counted from 0",
        lambda last: [layer + 1 for layer in _evenly_spaced(last)],
    ),
    "modelopt-dflash": Preset(
        "Model-Optimizer's compute_hidden_states_vllm.py --aux-layers dflash: the numbers of "
        "DFlash's rule as ids, so each is one boundary before DFlash's own",
        _evenly_spaced,
    ),
}
"""Presets by name; ``eagle3`` without a project is ``speculators-eagle3``."""
_NAMES = ("embed", "last", NORM, "eagle3", *PRESETS)


def resolve_layer_ids(spec: Layers, num_hidden_layers: int) -> tuple[LayerId, ...]:
    """Return the ids in the order requested, with duplicates.

    ``spec`` is one item, a list of items, or text with commas between them. Items: ids; negative
    ids from the end (-1 is the last); ranges as in Python (``0:24:4``, the end excluded, ``:`` for
    all); ``embed``; ``last``; ``norm``; names of ``PRESETS``, the layers that a draft model is
    trained from, followed by the last one. Raises ValueError that names what is wrong.
    """
    layer_ids = [
        layer_id
        for item in layer_items(spec)
        for layer_id in _resolve_item(item, num_hidden_layers)
    ]
    if len(layer_ids) > MAX_LAYER_IDS:
        raise ValueError(f"layers={brief(spec)} names more than {MAX_LAYER_IDS} ids; name fewer")
    if not layer_ids:
        raise ValueError(
            f"layers={brief(spec)} names no layer; use ids from 0 to {num_hidden_layers}"
        )
    return tuple(layer_ids)


def preset_layer_ids(num_hidden_layers: int) -> dict[str, tuple[LayerId, ...] | None]:
    """Return the ids of each preset; None if the model has too few layers for it."""
    presets: dict[str, tuple[LayerId, ...] | None] = dict.fromkeys(PRESETS)
    for name in presets:
        with suppress(ValueError):
            presets[name] = resolve_layer_ids(name, num_hidden_layers)
    return presets


def layer_items(spec: Layers | Iterable[int | str]) -> tuple[int | str, ...]:
    """Return the items of ``spec``, which can be hashed, as numbers and texts of Python's own
    classes."""
    if isinstance(spec, str):
        return tuple(spec.split(","))
    try:
        items: tuple[Any, ...] = (
            tuple(islice(spec, MAX_LAYER_IDS + 1)) if isinstance(spec, Iterable) else (spec,)
        )
    except TypeError:  # a 0-d tensor
        items = (spec,)
    for item in items:  # a cache of results would take True for 1, and keep other classes alive
        if isinstance(item, bool) or not isinstance(item, Integral | str):
            raise ValueError(
                f"layers: {brief(item)} is not a layer id; use whole numbers from 0 up"
            )
    return tuple(str(item) if isinstance(item, str) else int(item) for item in items)


def _resolve_item(item: int | str, last: int) -> Sequence[LayerId]:
    text = str(item).strip()
    if text == "eagle3" or text in PRESETS:
        return _draft_layer_ids(text, last)
    if text == NORM:
        return (NORM,)
    if text in ("embed", "last"):
        return (0 if text == "embed" else last,)
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        if len(parts) == 1 and parts[0] is not None:
            return (range(last + 1)[parts[0]],)
        return _resolve_range(parts, last)
    except (ValueError, IndexError):
        raise ValueError(
            f"layers: {brief(text)} does not exist in a model of {last} layers; use ids from 0 to "
            f"{last} (or -{last + 1} to -1), ranges like 0:{last + 1}:4, {', '.join(_NAMES)}"
        ) from None


def _resolve_range(parts: Sequence[int | None], last: int) -> Sequence[int]:
    """Return the ids of a range; raises ValueError if an end does not exist or it is empty."""
    ends_exist = all(end is None or -last - 1 <= end <= last + 1 for end in parts[:2])
    if len(parts) in (2, 3) and ends_exist and (ids := range(last + 1)[slice(*parts)]):
        return ids
    raise ValueError(parts)


def _draft_layer_ids(name: str, last: int) -> Sequence[int]:
    """Return the inputs of a draft model, then the last layer, which is its training target."""
    preset = PRESETS["speculators-eagle3" if name == "eagle3" else name]
    inputs = preset.inputs(last)
    if len(set(inputs)) != len(inputs) or min(inputs) < 0 or max(inputs) >= last:
        raise ValueError(
            f"layers={name} means {inputs} and the last layer, which are not different ids of a "
            f"model of {last} layers; list the ids instead"
        )
    return (*inputs, last)

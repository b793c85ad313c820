"""Layer ids as people write them.

Id i in [0, n], n = ``num_hidden_layers``, is the residual stream after i layers: 0 is the
embedding output, n the last layer's output before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

CONVENTION = (
    "layer id i is the residual stream after i decoder layers: 0 is the embedding output, "
    "num_hidden_layers the last layer's output before the final norm; slots are in the order "
    "of layer_ids"
)
_DFLASH_DRAFT_LAYERS = 5


def resolve_layer_ids(spec: str | Sequence[int | str], num_hidden_layers: int) -> tuple[int, ...]:
    """The ids in the order asked; what is asked twice is there twice.

    ``spec`` is a list, or text with commas, of: ids; negative ids from the end (-1 is the last);
    ranges as Python's (``0:24:4``, the end excluded, ``:`` for all); ``embed``; ``last``;
    ``eagle3`` and ``dflash``, the layers that those drafts are trained from, with the last one.
    ValueError names what is wrong.
    """
    items = spec.split(",") if isinstance(spec, str) else list(spec)
    layer_ids = [layer_id for item in items for layer_id in _resolve_item(item, num_hidden_layers)]
    if not layer_ids:
        raise ValueError(f"layers={spec!r} names no layer; use ids from 0 to {num_hidden_layers}")
    return tuple(layer_ids)


def _resolve_item(item: int | str, last: int) -> Sequence[int]:
    if isinstance(item, bool) or not isinstance(item, int | str):
        raise ValueError(f"layers: {item!r} is no layer id; use ids from 0 to {last}")
    text = str(item).strip()
    if text in ("eagle3", "dflash"):
        return _draft_layer_ids(text, last)
    if text in ("embed", "last"):
        return (0 if text == "embed" else last,)
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        if len(parts) == 1 and parts[0] is not None:
            return (range(last + 1)[parts[0]],)
        return _resolve_range(parts, last)
    except (ValueError, IndexError):
        raise ValueError(
            f"layers: {text!r} does not fit a model of {last} layers; use ids from 0 to {last} "
            f"(or -{last + 1} to -1), ranges like 0:{last + 1}:4, embed, last, eagle3, dflash"
        ) from None


def _resolve_range(parts: Sequence[int | None], last: int) -> Sequence[int]:
    """Unlike a slice of a list, ends that do not exist are an error, and so is an empty range."""
    ends_exist = all(end is None or -last - 1 <= end <= last + 1 for end in parts[:2])
    if len(parts) in (2, 3) and ends_exist and (ids := range(last + 1)[slice(*parts)]):
        return ids
    raise ValueError(parts)


def _draft_layer_ids(draft: str, last: int) -> Sequence[int]:
    """The inputs of a draft model, then the last layer, which its training compares with.

    eagle3: what speculators' trainer takes unless told otherwise. dflash: DFlash's own rule
    (arXiv:2602.06036) for its five draft layers, layers evenly spaced from the second to the
    third from the end; it counts layers from 0 and reads what leaves them, which is one id more.
    """
    if draft == "eagle3":
        inputs = [2, last // 2, last - 3]
    else:
        steps = _DFLASH_DRAFT_LAYERS - 1
        inputs = [round(1 + step * (last - 4) / steps) + 1 for step in range(steps + 1)]
    if len(set(inputs)) != len(inputs) or min(inputs) < 0 or max(inputs) >= last:
        raise ValueError(
            f"layers={draft} is {inputs} and the last layer, which a model of {last} layers does "
            "not have as different ids; name the ids"
        )
    return (*inputs, last)

"""Finds the attention and the masks that a module asks for, by a pass over a few tokens.

The pass runs with an attention function and a mask function of ours, registered with transformers.
The mask function does not make masks. It evaluates what a mask would hide at chosen positions, up
to the longest request, and returns the mask's number instead; the attention function reads that
number. So the reach of every layer is known exactly, whatever its config calls it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.model_executor.transformers_modules.boundaries import Boundaries, NotServableError

SURVEYED = "vllm_survey"
"""``attn_implementation`` of the pass over a few tokens, which describes masks."""
POOLED = "vllm_pool"
"""``attn_implementation`` of every other pass, which has no masks."""

_HARMLESS = frozenset(
    {"dropout", "is_causal", "use_cache", "position_ids", "deterministic", "output_attentions"}
)
"""Arguments of attention functions that change nothing in causal inference."""


Tensor = torch.Tensor
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
"""Attends for a module: query [1, heads, tokens, key_size]; key, value [1, kv_heads, tokens, ...];
mask; options -> [1, tokens, heads, value_size]."""
DescribeMask = Callable[..., Tensor]


class _Local(threading.local):
    functions: tuple[Attend | None, DescribeMask | None] = (None, None)


_local = _Local()


@contextmanager
def attention_by(attend: Attend, describe_mask: DescribeMask | None = None) -> Iterator[None]:
    """Let these do the work of the attention functions inside the block, on this thread."""
    before, _local.functions = _local.functions, (attend, describe_mask)
    try:
        yield
    finally:
        _local.functions = before


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attend, _ = _local.functions
    assert attend is not None, "attention outside of a pass"
    return attend(module, query, key, value, attention_mask, options), None


def _describe_mask(**options: Any) -> torch.Tensor:
    _, describe_mask = _local.functions
    assert describe_mask is not None
    return describe_mask(**options)


def register_functions() -> None:
    """Register the two functions with transformers; doing so again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SURVEYED, _attention)
    ALL_ATTENTION_FUNCTIONS.register(POOLED, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SURVEYED, _describe_mask)


def asks_for_attention(model: Any) -> bool:
    """Return whether the model looks up its attention function by a name in its config."""
    return model._can_set_attn_implementation() or _looks_up(model)


def set_attention(model: Any, name: str) -> None:
    """Attend by that function, if the model looks one up at all. Code of a checkpoint may do so in
    a way that transformers no longer knows; then the configs name the function."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
        return
    for module in model.modules() if _looks_up(model) else ():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def attending_by(name: str, model: Any) -> Iterator[None]:
    """Let the model attend by that function inside the block."""
    before = model.config._attn_implementation
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def _looks_up(model: Any) -> bool:
    try:
        code = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS[" in code


class AttentionCall(NamedTuple):
    """One call of the attention function, which a layer of ours will replace."""

    module: nn.Module
    layer: int
    """Index of the decoder layer."""
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None
    window: int | None


class Survey:
    """Records the attention calls of a pass over a few tokens, without attending to anything.

    max_model_len: tokens of the longest request, up to which masks are evaluated.
    """

    def __init__(self, boundaries: Boundaries, max_model_len: int) -> None:
        self.calls: list[AttentionCall] = []
        self._boundaries = boundaries
        self._max_model_len = max_model_len
        self._windows: list[int | None] = []
        """Reach of each mask that was asked for, by its number."""

    def describe_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., torch.Tensor],
        device: torch.device,
        **options: Any,
    ) -> torch.Tensor:
        """Describe a mask; return its number, from 1 on, in the shape of a mask."""
        self._windows.append(window_of_mask(mask_function, self._max_model_len, device))
        number = torch.tensor(float(len(self._windows)), device=device)
        return number.expand(1, 1, q_length, kv_length)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = self._boundaries.current_layer
        if layer is None:
            raise NotServableError("it attends outside of its decoder layers")
        _check_shapes(module, query, key, value)
        unknown = [n for n in options if n not in _HARMLESS | _KNOWN and options[n] is not None]
        if unknown:
            raise NotServableError(
                f"{type(module).__name__} gives attention more than queries, keys, values and a "
                f"mask: {', '.join(sorted(unknown))}"
            )
        is_causal = options.get("is_causal")
        if mask is None and not (
            getattr(module, "is_causal", True) if is_causal is None else is_causal
        ):
            raise NotServableError(f"{type(module).__name__} reads tokens that come later")
        size = query.shape[3]
        sinks = options.get("s_aux")
        scale = options.get("scaling")
        self.calls.append(
            AttentionCall(
                module,
                layer,
                query.shape[1],
                key.shape[1],
                size,
                value.shape[3],
                size**-0.5 if scale is None else float(scale),
                options.get("softcap"),
                None if sinks is None else sinks.reshape(-1),
                self._window(module, mask, options.get("sliding_window")),
            )
        )
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def _window(self, module: nn.Module, mask: torch.Tensor | None, stated: Any) -> int | None:
        """The window by the mask, or without a mask by the call's own argument."""
        if mask is None:
            is_window = stated is not None and 0 < int(stated) < self._max_model_len
            return int(stated) if is_window else None
        number = float(mask.flatten()[0])
        is_whole = bool((mask == number).all()) and number in range(1, len(self._windows) + 1)
        if not is_whole:
            raise NotServableError(f"{type(module).__name__} changes the attention mask")
        return self._windows[int(number) - 1]


_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


def _check_shapes(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    is_plain = (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0] == 1
        and query.shape[2] == key.shape[2] == value.shape[2]
        and key.shape[1] == value.shape[1]
        and query.shape[3] == key.shape[3]
        and query.shape[1] % key.shape[1] == 0
    )
    if not is_plain:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise NotServableError(
            f"{type(module).__name__} attends with shapes {shapes}: no key and value for each token"
        )


def window_of_mask(
    mask_function: Callable[..., torch.Tensor], max_model_len: int, device: torch.device
) -> int | None:
    """Number of tokens that a query reads under the mask, its own included; None: all before it.

    NotServableError: the mask is not such a window at every position that was evaluated.
    """
    last = max_model_len - 1
    try:
        reach = int(_visible(mask_function, last, max_model_len, device).sum())
        near = {p + d for p in (reach, 2 * reach, last // 2, last // 3) for d in (-1, 0, 1)}
        for position in sorted({0, 1, 2, 3, last, *near} & set(range(max_model_len))):
            seen = _visible(mask_function, position, max_model_len, device)
            expected = torch.zeros_like(seen)
            expected[max(0, position - reach + 1) : position + 1] = True
            if not torch.equal(seen, expected):
                raise NotServableError(
                    f"its mask is no window over earlier tokens: at position {position} it shows "
                    f"{int(seen.sum())} tokens, {int(seen[position + 1 :].sum())} of them later"
                )
    except (IndexError, RuntimeError, TypeError) as error:
        raise NotServableError(f"its mask cannot be evaluated: {error}") from error
    return reach if reach < max_model_len else None


def _visible(
    mask_function: Callable[..., torch.Tensor], position: int, num_keys: int, device: torch.device
) -> torch.Tensor:
    """bool [num_keys]: True for keys that the query at ``position`` reads."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(num_keys, device=device)
    seen = mask_function(zero, zero, torch.full_like(keys, position), keys)
    return torch.as_tensor(seen, device=device).expand(num_keys).bool()


def check_keeps_nothing(module: nn.Module, run: Callable[[torch.Tensor], None], num: int) -> None:
    """Run two passes over ``num`` different tokens, [1, num], and refuse tensors that differ.

    Tables that depend only on positions are equal after both.
    """
    device = next(module.parameters()).device
    run(torch.zeros(1, num, dtype=torch.int64, device=device))
    before = {name: tensor.clone() for name, tensor in _kept_tensors(module)}
    run(torch.ones(1, num, dtype=torch.int64, device=device))
    changed = [
        name
        for name, tensor in _kept_tensors(module)
        if name not in before or not _are_same(before[name], tensor)
    ]
    if changed:
        raise NotServableError(f"it keeps what it computed of a pass in {', '.join(changed[:4])}")


def _kept_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes and buffers of all modules; parameters do not count."""
    for path, each in module.named_modules():
        for name, value in (*vars(each).items(), *each._buffers.items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | (a != a) & (b != b)).all())
    )

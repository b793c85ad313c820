"""Hook points: places inside decoder layers whose values requests can ask for.

A block declares its places (``DeclaresHooks``), and a model of transformers those of its modules.
A point has several names: those of TransformerLens ("blocks.3.hook_attn_out") and the path of its
module ("model.layers.3.self_attn"). The part of a path before the layer's number does not matter.
Hooks are on modules only during passes that need them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from vllm.distributed.parallel_state import tensor_model_parallel_all_gather
from vllm.forward_context import RowSink, current_row_sink
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.shared_tokens import all_tokens
from vllm.v1.rows.fields.activations import (
    HOOKS,
    Activation,
    HookForm,
    Place,
    StreamActivation,
    layer_of,
    place_of,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Part = Literal["output", "input", "sum"]
"""The part of a call that is kept. "sum" of a norm: the stream that it norms."""


class BlockHook(NamedTuple):
    """A point in a block, as the block declares it."""

    names: tuple[str, ...]
    """Names within the block, such as "hook_attn_out"."""
    module: nn.Module
    width: int
    part: Part = "output"
    path_of: nn.Module | None = None
    """The module whose path names the point, too."""
    dtype: torch.dtype | None = None
    """None: the model's."""
    is_share: bool = False
    """True if each rank has the values of its own tokens, where ranks share them."""


@runtime_checkable
class DeclaresHooks(Protocol):
    """A decoder layer, or a part of one, with hook points."""

    def hook_points(self) -> Iterable[BlockHook]:
        """Return its points."""
        ...


@runtime_checkable
class OwnsHookPoints(Protocol):
    """A model that finds its hook points itself."""

    def find_hook_points(self, dtype: torch.dtype) -> HookPoints:
        """Return its points; values without a dtype have this one."""
        ...


@dataclass(frozen=True)
class HookPoint:
    """A point of a model."""

    names: tuple[str, ...]
    """All of its names; the first is unique."""
    depth: int
    """Decoder layers that have to run for it."""
    form: HookForm
    module: nn.Module | None = None
    """None: it is the stream at the boundary ``depth``."""
    part: Part = "output"
    is_cut: bool = False
    """True if each rank has a part of the values: all of them gather it in passes that need it."""
    is_share: bool = False
    """True if each rank has the values of its own tokens: in passes in which ranks share them."""
    is_scattered: bool = False
    """True if each rank has a part of the values, and only their module knows the order."""

    @property
    def is_gathered(self) -> bool:
        """True if the ranks may have to gather the values."""
        return self.is_cut or self.is_share

    def field(self, name: str, stored: torch.dtype | None) -> Activation:
        """Make the field that keeps its values under ``name``; stored: dtype on the host."""
        field_class = Activation if self.module is not None else StreamActivation
        return field_class(name, self.names[0], self.depth, self.form, stored or self.form.dtype)


class HookPoints:
    """The points of a model; ``get_sink`` returns the sink of the pass under way."""

    def __init__(
        self,
        points: Iterable[HookPoint],
        get_sink: Callable[[], RowSink | None] = current_row_sink,
    ) -> None:
        self.points = list(points)
        self._by_place: dict[Place, HookPoint] = {}
        for point in self.points:
            for name in point.names:
                self._by_place.setdefault(place_of(name), point)
        self._get_sink = get_sink

    def find(self, name: str) -> HookPoint:
        """Return the point of this name. ValueError: there is none."""
        point = self._by_place.get(place_of(name))
        if point is None:
            names = [name for point in self.points for name in point.names]
            nearest = difflib.get_close_matches(name, names, 5, 0.3)
            listed = f"the nearest are {', '.join(nearest)}" if nearest else "there are none"
            raise ValueError(
                f"hooks: this model has no hook point {name!r}; {listed} (all: "
                "vllm models MODEL --hooks)"
            )
        return point

    @contextmanager
    def watch(self, names: Iterable[str]) -> Iterator[None]:
        """Hand the values at the points of these first names to the sink inside the block."""
        handles = []
        try:
            for name in sorted(names):  # ranks gather in the same order
                point = self._by_place[place_of(name)]
                if point.module is None:
                    continue
                hand_over = partial(self._hand_over, point)
                if point.part == "input":
                    handle = point.module.register_forward_pre_hook(hand_over)
                else:
                    handle = point.module.register_forward_hook(hand_over)
                handles.append(handle)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hand_over(
        self, point: HookPoint, module: nn.Module, inputs: tuple[Any, ...], output: Any = None
    ) -> None:
        if point.part == "sum":  # a norm returns the sum if it was given two summands
            value = output[1] if isinstance(output, tuple) else inputs[0]
        else:
            value = inputs[0] if point.part == "input" else first_tensor(output)
        if point.is_cut:
            value = tensor_model_parallel_all_gather(value)
        if point.is_share:
            value = all_tokens(value)
        sink = self._get_sink()
        if sink is None or (point.is_gathered and point.names[0] not in sink.indexes_of(HOOKS)):
            return
        rows = value.reshape(-1, point.form.width)
        sink.put(HOOKS, point.names[0], rows.to(point.form.dtype))


def first_tensor(output: Any) -> Any:
    """Return what a module returned, or the first of several values."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output


def find_hook_points(
    model: nn.Module, model_config: ModelConfig, *, are_shares: bool = False
) -> HookPoints:
    """Find all hook points of a model: those of its layers, and the stream between them.

    are_shares: ranks have values of their own tokens inside of branches, too.
    """
    if isinstance(model, OwnsHookPoints):
        return model.find_hook_points(model_config.dtype)
    points = []
    paths = {module: path for path, module in model.named_modules()}
    for path, block in model.named_modules():
        layer = layer_of(path)
        if layer is None or not isinstance(block, DeclaresHooks):
            continue
        for hook in block.hook_points():
            names = [f"blocks.{layer}.{name}" for name in hook.names]
            if hook.path_of is not None and hook.names[0] not in _without_path(model):
                own = paths[hook.path_of]
                names += dict.fromkeys([_published_path(model, hook.path_of, own), own])
            form = HookForm(hook.width, hook.dtype or model_config.dtype)
            row_layer = hook.module if hook.part == "input" else None
            is_cut = isinstance(row_layer, RowParallelLinear) and row_layer.tp_size > 1
            place = (hook.module, hook.part, is_cut, hook.is_share or are_shares)
            points.append(HookPoint(tuple(names), layer + 1, form, *place))
    return HookPoints(with_stream(points, model_config))


def with_stream(points: Iterable[HookPoint], model_config: ModelConfig) -> list[HookPoint]:
    """Return these points and, by TransformerLens' names, those between layers; layer by layer."""
    form = HookForm(model_config.get_row_size(), model_config.dtype)
    layers = range(model_config.get_total_num_hidden_layers())

    def stream(depth: int, *names: str) -> list[HookPoint]:
        named = [tuple(f"blocks.{layer}.{name}" for name in names) for layer in layers]
        return [HookPoint(each, layer + depth, form) for layer, each in enumerate(named)]

    before = stream(0, "hook_resid_pre", "hook_in")
    after = stream(1, "hook_resid_post", "hook_out")
    return sorted([*before, *points, *after], key=lambda point: place_of(point.names[0])[0])


@runtime_checkable
class _SpellsNames(Protocol):
    hooks_without_path: frozenset[str]

    def published_path(self, path: str) -> str: ...


def _published_path(model: nn.Module, module: nn.Module, path: str) -> str:
    """Return a module's path in checkpoints, by the names of its children's parameters."""
    if not isinstance(model, _SpellsNames):
        return path
    inner = (name for name, _ in module.named_parameters() if name.count(".") == 1)
    if (name := next(inner, None)) is not None:
        published = model.published_path(f"{path}.{name}").rsplit(".", 2)[0]
        if place_of(published)[1]:
            return published
    return model.published_path(path)


def _without_path(model: nn.Module) -> frozenset[str]:
    return model.hooks_without_path if isinstance(model, _SpellsNames) else frozenset()

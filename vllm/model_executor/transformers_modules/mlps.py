"""Runs MLPs of transformers' modules by the shared operations, if these compute the same.

An MLP is not judged by its name: in one call its products are replaced by given numbers, and what
it computes between them is compared with every shared operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn, get_act_fn
from vllm.model_executor.transformers_modules.parts import PanelLinear, dense_rows, unit_of

_GATES = ("silu", "gelu", "gelu_pytorch_tanh")
_PLAIN = ("relu", "gelu", "gelu_pytorch_tanh", "relu2")
_SIZES = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""Scales of the trial rows: a clamp or a bend shows at some of them."""
_SIZES_OF_HALVES = tuple(min(size, 100.0) for size in _SIZES)
"""Scales whose squares float16 can hold."""


def replace_mlps(model: nn.Module) -> int:
    """Run every MLP by the shared operations if they give the same; return how many do.

    Modules keep their places, names, parameters and hooks; only ``forward`` is replaced.
    """
    count = 0
    for module in model.modules():
        ours = _mlp_like(module)
        if ours is not None:
            module.forward = ours
            count += 1
    return count


class SharedMLP:
    """``forward`` of an MLP: ``down(activation(products of x, side by side))``."""

    def __init__(
        self,
        module: nn.Module,
        inner: tuple[PanelLinear, ...],
        activation: nn.Module,
        down: PanelLinear,
    ) -> None:
        self._plain = module.forward
        self._modules = list(module.modules())[1:]
        self.inner, self._activation, self.down = inner, activation, down
        self._dtype = down.rows.parameter.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """[..., hidden] -> the same shape."""
        x = args[0] if len(args) == 1 and not kwargs else None
        # Hooks on its parts have to see their calls.
        is_watched = any(m._forward_hooks or m._forward_pre_hooks for m in self._modules)
        if x is None or x.dtype is not self._dtype or is_watched:
            return self._plain(*args, **kwargs)
        rows = dense_rows(x)
        wide = rows.new_empty((len(rows), sum(linear.out_features for linear in self.inner)))
        start = 0
        for linear in self.inner:
            end = start + linear.out_features
            linear.rows.multiply_into(rows, linear.bias, wide[:, start:end])
            start = end
        output: torch.Tensor = self.down(self._activation(wide))
        return output.view(*x.shape[:-1], output.shape[-1])


def shared_activation(
    function: Callable[[torch.Tensor], torch.Tensor], size: int, is_gate: bool, like: torch.Tensor
) -> nn.Module | None:
    """Find the shared operation that computes ``function`` of [rows, size]; None: there is none.

    like: a weight, in the model's dtype and on its device.
    """
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(len(_SIZES), size, generator=generator, dtype=torch.float32)
    rows = [
        (drawn * drawn.new_tensor(sizes)[:, None]).to(like.device, dtype)
        for dtype, sizes in (
            (torch.float32, _SIZES),  # in float32 similar functions differ
            (like.dtype, _SIZES_OF_HALVES if like.dtype is torch.float16 else _SIZES),
        )
    ]
    for name in _GATES if is_gate else _PLAIN:
        ours = get_act_and_mul_fn(name) if is_gate else get_act_fn(name)
        if all(_agree(ours, function, some) for some in rows):
            return ours
    return None


def _agree(
    ours: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> bool:
    found, expected = ours(rows).float(), function(rows)
    if expected.dtype is not rows.dtype or expected.shape != found.shape:
        return False
    # The result is a share of all of x, or of gate times up.
    whole = rows.float().abs()
    if found.shape != whole.shape:
        whole = whole.chunk(2, dim=-1)[0] * whole.chunk(2, dim=-1)[1]
    limit = unit_of(rows.dtype) * (expected.float().abs() + whole) + 1e-6
    return bool(((found - expected.float()).abs() <= limit).all())


class _Arrangement(NamedTuple):
    """The products that read the MLP's input, in the order of their results, and the last one."""

    inner: tuple[PanelLinear, ...]
    down: PanelLinear

    @property
    def size(self) -> int:
        return sum(linear.out_features for linear in self.inner)

    @property
    def is_gate(self) -> bool:
        return self.size == 2 * self.down.in_features


def _mlp_like(module: nn.Module) -> SharedMLP | None:
    products = [child for child in module.children() if type(child) is PanelLinear]
    own = [p for m in module.modules() if m not in products for p in m.parameters(recurse=False)]
    if own or len(products) not in (2, 3) or "forward" in vars(module):
        return None
    weights = [product.rows.parameter for product in products]
    if len({weight.dtype for weight in weights}) != 1:
        return None
    for arrangement in _arrangements(products):
        between = _Between(module, arrangement)
        try:
            ours = shared_activation(between, arrangement.size, arrangement.is_gate, weights[0])
        except Exception:  # raised by a module that is not such an MLP
            continue
        if ours is not None:
            return SharedMLP(module, arrangement.inner, ours, arrangement.down)
    return None


def _arrangements(products: list[PanelLinear]) -> Iterator[_Arrangement]:
    for *inner, down in permutations(products):
        one = _Arrangement(tuple(inner), down)
        reads_alike = len({linear.in_features for linear in inner}) == 1
        is_even = len({linear.out_features for linear in inner}) == 1
        is_plain = len(inner) == 1 and one.size == down.in_features
        if reads_alike and is_even and (is_plain or one.is_gate):
            yield one


class _Between:
    """The function that a module computes between its products."""

    def __init__(self, module: nn.Module, arrangement: _Arrangement) -> None:
        self._module = module
        self._inner, self._down = arrangement

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, size of all inner products] -> input of the last product. ValueError: the module
        does not return that product's result."""
        shape = (1, len(rows), self._inner[0].in_features)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(rows)
        result = x.new_full((1, len(rows), self._down.out_features), 0.75)
        given: list[torch.Tensor] = []

        def give(part: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            def forward(read: torch.Tensor) -> torch.Tensor:
                if not torch.equal(read, x):
                    raise ValueError("it reads something else than the input")
                return part[None].clone()

            return forward

        def take(read: torch.Tensor) -> torch.Tensor:
            given.append(read)
            return result.clone()

        parts = rows.chunk(len(self._inner), dim=1)  # all have one size
        stubs = {linear: give(part) for linear, part in zip(self._inner, parts, strict=True)}
        with torch.no_grad(), _forwards({**stubs, self._down: take}):
            output = self._module(x.clone())
        if not (torch.is_tensor(output) and torch.equal(output, result) and len(given) == 1):
            raise ValueError("it gives something else than its last product")
        return given[0][0]


@contextmanager
def _forwards(stubs: dict[PanelLinear, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """Replace the forward methods of modules inside the block."""
    try:
        for module, stub in stubs.items():
            vars(module)["forward"] = stub
        yield
    finally:
        for module in stubs:
            del vars(module)["forward"]

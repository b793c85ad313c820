"""Applies rotary embeddings of transformers' modules by the shared operation.

Modules call a function of their file with queries, keys, cosines and sines. The function is not
judged by its name: it is tried on some numbers. If it gives the same as the shared operation, the
module gets its own ``forward`` with that function replaced.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.model_executor.transformers_modules.parts import unit_of
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.rotary import rotary_embedding

_ARGUMENTS = ["q", "k", "cos", "sin"]
_TOKENS, _SIZE = 7, 12
_MOST_TABLES = 4
"""Number of tables that are kept, because layers of several kinds take turns."""


class _Form(NamedTuple):
    """The way in which a function pairs elements of a head and reads cosines."""

    interleaved: bool
    repeats: bool
    """True if an angle's two cosines lie side by side; otherwise all cosines come twice."""
    leaves_rest: bool
    """True if elements beyond the cosines stay as they are."""


def replace_rotations(model: nn.Module) -> int:
    """Let modules rotate by the shared operation if it gives the same; return how many do."""
    made: dict[Any, SharedRotation | None] = {}
    count = 0
    for module in model.modules():
        forward: Any = type(module).forward
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        for name in forward.__code__.co_names:
            function = forward.__globals__.get(name)
            if not isinstance(function, FunctionType):
                continue
            if list(inspect.signature(function).parameters)[:4] != _ARGUMENTS:
                continue
            if function not in made:
                form = _form_of(function)
                made[function] = None if form is None else SharedRotation(function, form)
            ours = made[function]
            if ours is not None:
                own = _with_global(forward, name, ours)
                module.forward = MethodType(own, module)
                count += 1
    return count


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Copy a function and give it another value for the global ``name``."""
    its_globals = {**function.__globals__, name: value}
    made = FunctionType(
        function.__code__,
        its_globals,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class SharedRotation:
    """Replaces ``function(q, k, cos, sin)``, which it calls in unusual cases."""

    def __init__(self, function: FunctionType, form: _Form) -> None:
        self._function, self._form = function, form
        self._tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """q, k: [1, heads, tokens, n]; cos, sin: [1, tokens, up to n] -> q and k, rotated."""
        if len(args) == len(_ARGUMENTS) and not kwargs and self._is_plain(*args):
            q, k, cos, sin = args
            table = self._table(cos, sin)
            if table is not None:
                return self._rotate(q, k, table)
        return self._function(*args, **kwargs)

    def _is_plain(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> bool:
        tokens, size = cos.shape[-2:]
        return (
            q.device.type == "cpu"
            and q.dtype is k.dtype
            and q.dtype in KERNEL_DTYPES
            and cos.shape == sin.shape == (1, tokens, size)
            and q.dim() == k.dim() == 4
            and q.shape[0] == k.shape[0] == 1
            and q.shape[2] == k.shape[2] == tokens
            and q.shape[3] == k.shape[3]
            and (size == q.shape[3] or (self._form.leaves_rest and size < q.shape[3]))
        )

    def _table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
        """float32 [tokens, size]: cosines, then sines; None: elements of a pair differ in angle."""
        for known_cos, known_sin, table in self._tables:
            if known_cos is cos and known_sin is sin:
                return table
        parts = [_angles(x[0], self._form.repeats) for x in (cos, sin)]
        made = None
        if parts[0] is not None and parts[1] is not None:
            made = torch.cat((parts[0], parts[1]), dim=1).float()
        self._tables = [(cos, sin, made), *self._tables[: _MOST_TABLES - 1]]
        return made

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # [tokens, heads, n]: copies, because the module may still use its tensors.
        queries, keys = (
            torch.empty((x.shape[2], x.shape[1], x.shape[3]), dtype=x.dtype).copy_(
                x[0].transpose(0, 1)
            )
            for x in (q, k)
        )
        with torch._C.DisableTorchFunction():  # not a function that the module calls
            positions = torch.arange(len(table))
        rotary_embedding(positions, queries, keys, table, self._form.interleaved)
        return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]


def _angles(x: torch.Tensor, repeats: bool) -> torch.Tensor | None:
    """[tokens, n] -> the half that is there twice; None: the halves differ."""
    if x.shape[1] % 2:
        return None
    one, other = (x[:, ::2], x[:, 1::2]) if repeats else x.chunk(2, dim=1)
    return one if torch.equal(one, other) else None


def _form_of(function: FunctionType) -> _Form | None:
    """Find the form in which the function rotates; None: in another way."""
    for repeats in (False, True):
        for interleaved in (False, True):
            form = _Form(interleaved, repeats, leaves_rest=False)
            if _is_like(function, form, _SIZE):
                partial = form._replace(leaves_rest=True)
                return partial if _is_like(function, partial, 2 * _SIZE) else form
    return None


def _is_like(function: FunctionType, form: _Form, size: int) -> bool:
    """Return whether heads of ``size`` elements, of which the first few rotate, come out alike."""
    generator, dtype = torch.Generator().manual_seed(0), torch.float32
    q, k = (
        torch.randn(1, heads, _TOKENS, size, generator=generator, dtype=dtype) for heads in (6, 2)
    )
    angles = 6 * torch.rand(1, _TOKENS, _SIZE // 2, generator=generator, dtype=dtype)
    angles = angles.repeat_interleave(2, 2) if form.repeats else torch.cat((angles, angles), 2)
    cos, sin = 1.5 * angles.cos(), 1.5 * angles.sin()
    try:
        expected = function(q.clone(), k.clone(), cos, sin)
    except Exception:  # raised by a function that takes something else
        return False
    if not isinstance(expected, tuple) or len(expected) != 2:
        return False
    found = SharedRotation(function, form)(q, k, cos, sin)
    return all(
        torch.is_tensor(one)
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=unit_of(one.dtype), atol=1e-5)
        for one, other in zip(found, expected, strict=True)
    )

"""Operations: declared once, and overridden by devices that can do better.

An operation is a function over torch tensors that writes its results into given tensors, so that
a call allocates nothing::

    @operation
    def scaled_add(x: torch.Tensor, y: torch.Tensor, factor: float, out: Written) -> None:
        '''out = x + factor * y. x, y, out: [tokens, n]; out dense.'''
        out.copy_(x.float() + factor * y.float())

    @scaled_add.contract
    def _(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape == y.shape == out.shape and out.is_contiguous()

The body is the reference for the tests, and runs on devices without an override. The source of a
device (``vllm.ops.sources``) finds overrides: a C++ operator of the same name and arguments
(``csrc/cpu``), or a function marked ``@scaled_add.override("cuda")``. The contract takes the
arguments that it names. It is checked before each call of any implementation, and structs of
tensors check themselves. A broken contract is our error, never a user's. Repeated calls whose
contracts held need not check them again (:func:`contracts_held`).

Rules for all operations: the first argument is a tensor on the device that computes. Tensors may be
strided, but their last dimension is dense. *Tokens* are those of all requests of a step, one
request after another (the *flat batch*). Arithmetic is float32 inside, whatever the dtype (float32,
bfloat16, float16) of the tensors. The result of a token does not depend on other requests, nor on
where a chunk starts (docs/design.md, "Bit-identity"). Every output is written completely.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, Generic, ParamSpec, get_args, get_type_hints

import torch

P = ParamSpec("P")

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the tensors that operations compute with."""

Written = Annotated[torch.Tensor, "written"]
"""An argument that an operation writes."""


class TensorStruct:
    """Arguments that belong together; a C++ operator takes the tensors one by one."""

    operator_tensors: tuple[str, ...]
    """Fields that a C++ operator takes, of type ``torch.Tensor`` or ``torch.Tensor | None``."""

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """The values of these fields, in order; cached for all layers of a step."""
        return tuple(getattr(self, name) for name in self.operator_tensors)

    def check(self) -> None:
        """Assert what holds of the struct; part of the contract of operations that take it."""


class Source:
    """Provides a device's implementations of operations; this class provides only the bodies."""

    name = "plain"
    reads_panels = False
    """True if products are faster with weights in panels (vllm.ops.linear)."""
    keeps_pending = False
    """True if the delta rule keeps tokens besides the state (vllm.ops.recurrent)."""
    multiplies_pairs = False
    """True if pairs of bfloat16 are multiplied at once; then Mamba-2 keeps tokens, too
    (vllm.ops.state_space)."""

    def find(self, operation: Operation[Any]) -> Callable[..., None] | None:
        """The implementation of the operation; None: its body."""
        return None


_operations: dict[str, Operation[Any]] = {}
_find_source: Callable[[str], Source]


def use_sources(find_source: Callable[[str], Source]) -> None:
    """From now on, take implementations from ``find_source(device type)``."""
    global _find_source
    _find_source = find_source
    for each in _operations.values():
        each.forget()


def source_of(device_type: str) -> Source:
    """The source of implementations for a type of device."""
    return _find_source(device_type)


def all_operations() -> dict[str, Operation[Any]]:
    """Every operation of the imported modules, by name."""
    return dict(_operations)


class Operation(Generic[P]):
    """A function decorated with ``@operation``; it is called like the function."""

    def __init__(self, body: Callable[P, None]) -> None:
        self.body = body
        self.name = body.__name__
        self.__doc__ = body.__doc__
        self.overrides: dict[str, Callable[P, None]] = {}
        self._check: Callable[[Sequence[Any]], None] = _no_contract
        self._by_device = _ByDevice(self)
        assert self.name not in _operations, f"two operations are called {self.name}"
        _operations[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        positional: tuple[Any, ...] = self._positional(*args, **kwargs) if kwargs else args
        if not _checking.is_off:
            self._check(positional)
        self._by_device[positional[0].device](*positional)

    def contract(self, check: Callable[..., None]) -> Callable[..., None]:
        """Decorator: ``check`` asserts what holds in every call for the arguments that it names."""
        names = list(inspect.signature(self.body).parameters)
        checked = [names.index(name) for name in inspect.signature(check).parameters]
        structs = self.struct_positions()

        def check_call(args: Sequence[Any]) -> None:
            for position in structs:
                args[position].check()
            check(*[args[position] for position in checked])

        self._check = check_call if __debug__ else _no_contract
        return check

    def override(self, device_type: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
        """Decorator: the function replaces the body on devices of that type."""

        def register(function: Callable[P, None]) -> Callable[P, None]:
            self.overrides[device_type] = function
            return function

        return register

    def is_overridden(self, device: str | torch.device) -> bool:
        """Return whether something other than the body runs on the device."""
        resolved = torch.device(device) if isinstance(device, str) else device
        return self._by_device[resolved] is not self.body

    def run(self, implementation: Callable[..., None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Check the contract, then call one implementation."""
        positional = self._positional(*args, **kwargs)
        self._check(positional)
        implementation(*positional)

    def forget(self) -> None:
        """Forget the implementations found so far; the next call looks for them again."""
        self._by_device.clear()

    def schema(self) -> str:
        """The operator's declaration, for torch."""
        aliases = iter("abcdefghijklmnop")
        hints = get_type_hints(self.body, include_extras=True)
        parameters = inspect.signature(self.body).parameters
        declared = [part for name in parameters for part in _declare(name, hints[name], aliases)]
        return f"{self.name}({', '.join(declared)}) -> ()"

    def struct_positions(self) -> list[int]:
        """Positions of the arguments that are a :class:`TensorStruct`."""
        hints = get_type_hints(self.body)
        names = inspect.signature(self.body).parameters
        return [position for position, name in enumerate(names) if _is_struct(hints[name])]

    def _positional(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = inspect.signature(self.body).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args


def operation(body: Callable[P, None]) -> Operation[P]:
    """Decorator: declare an operation by its plain body."""
    return Operation(body)


class _ByDevice(dict[torch.device, Callable[..., None]]):
    """The implementation for each device, found on first use."""

    def __init__(self, owner: Operation[Any]) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, device: torch.device) -> Callable[..., None]:
        found = _find_source(device.type).find(self._owner) or self._owner.body
        self[device] = found
        return found


def _no_contract(args: Sequence[Any]) -> None:
    pass


class _Checking(threading.local):
    is_off = False


_checking = _Checking()


@contextmanager
def contracts_held() -> Iterator[None]:
    """Skip contract checks in this thread: they held for earlier calls with the same kinds of
    tensors. Checking all calls of a step of one token takes a quarter of the time between its
    kernels.
    """
    before, _checking.is_off = _checking.is_off, True
    try:
        yield
    finally:
        _checking.is_off = before


_SCALARS: dict[Any, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    int | None: "int?",
    float | None: "float?",
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
}


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, TensorStruct)


def _declare(name: str, hint: Any, aliases: Iterator[str]) -> Iterator[str]:
    """The declaration of an argument in torch's schema."""
    if hint == Written:
        yield f"Tensor({next(aliases)}!) {name}"
    elif hint == Sequence[Written]:
        yield f"Tensor({next(aliases)}!)[] {name}"
    elif _is_struct(hint):
        fields = get_type_hints(hint)
        for field in hint.operator_tensors:
            yield f"{_SCALARS[fields[field]]} {field}"
    elif hint in _SCALARS:
        yield f"{_SCALARS[hint]} {name}"
    else:
        raise TypeError(f"no operator takes {name}: {hint}, of {get_args(hint)}")

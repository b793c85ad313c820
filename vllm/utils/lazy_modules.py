"""Leaves modules that are not needed out of imports of transformers."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from vllm.utils.gc_utils import without_garbage_collection


@contextmanager
def only_what_configs_need() -> Iterator[None]:
    """Import modules of transformers' configs without its sharding and without the compiler.

    This is for reading a config from a file, and for loading one that another process has pickled.
    """
    with (
        without_garbage_collection(),
        without_compiler(),
        imported_later("transformers.distributed"),
    ):
        yield


@contextmanager
def imported_later(package: str) -> Iterator[None]:
    """Put off imports of modules of ``package`` that are not loaded yet.

    A name that is imported from one of them is a stand-in, which works in calls, attributes,
    ``isinstance``, subclasses and ``|``. Configs of transformers import its sharding, which
    imports torch's and sympy: 48 MiB of memory.
    """
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.stop()


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."
        self._made: list[ModuleType] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._made.append(_EmptyModule(spec.name, self))
        return self._made[-1]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""

    def stop(self) -> None:
        """Import everything from now on. A second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for module in self._made:
            parent, _, name = module.__name__.rpartition(".")
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            vars(sys.modules[parent]).pop(name, None)
        self._made.clear()


class _EmptyModule(ModuleType):
    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name, self._finder)


class _Later:
    """A stand-in for a class or function of a module."""

    def __init__(self, module: str, name: str, finder: _Finder) -> None:
        self._place = module, name, finder

    def _find(self) -> Any:
        module, name, finder = self._place
        finder.stop()
        return getattr(importlib.import_module(module), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._find()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._find())

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (self._find(),)

    def __or__(self, other: Any) -> Any:
        return self._find() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._find()


_disable: Callable[..., Any] = torch.compiler.disable


@contextmanager
def without_compiler() -> Iterator[None]:
    """Put off ``torch.compiler.disable`` of a function until the function's first call.

    Configs of transformers import modules that disable some functions, and the first such call
    imports the compiler and Triton: 90 MiB of memory, and half of the time of reading a config.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    torch.compiler.disable = _disable_later
    try:
        yield
    finally:
        torch.compiler.disable = _disable


def _disable_later(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Take the arguments of ``torch.compiler.disable`` and return what it returns."""
    if fn is None:
        return functools.partial(_disable_later, recursive=recursive, reason=reason)
    if not inspect.isfunction(fn):
        return _disable(fn, recursive, reason=reason)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disabled.append(_disable(fn, recursive, reason=reason))
        return disabled[0](*args, **kwargs)

    return call

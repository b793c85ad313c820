"""Digests of code from elsewhere: registered classes, plug-ins, and what they import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial, partialmethod
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from vllm.utils import random_uuid

_WITHOUT_CODE = ("vllm", "torch", "builtins")
"""Packages whose code is not digested, because the version of this package stands for it."""
_LARGE = ("transformers",)
"""Packages of which only the files of a class and its bases are digested."""
_PLAIN = (int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device)
"""Classes of values whose ``repr`` says all."""


def code_of(one: type) -> str:
    """A digest of the source files of a class, its bases, and the modules that these import, also
    when a function runs; and of what was set on the class afterwards.

    A class without a source file never has the same digest twice.
    """
    files: set[Path] = set()
    attributes: list[str] = []
    for base in one.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _WITHOUT_CODE:
            continue
        try:
            files.add(Path(inspect.getfile(base)))
        except (OSError, TypeError):  # made in an interactive session
            return random_uuid()
        if package not in _LARGE:
            files |= _files_used_by(base.__module__)
            for module in _attributes(base, attributes):
                files |= _files_of_value(module, package)
    return digest_of_files(files, attributes)


def _attributes(one: type, said: list[str]) -> Iterator[str]:
    """Add what is set on a class to ``said``, except functions that were written in it; yield the
    modules of code in that."""
    for name, value in sorted(vars(one).items()):
        is_function = isinstance(value, FunctionType)
        if (is_function and _is_written_in(value, one)) or (
            name.startswith("__") and not is_function
        ):
            continue
        modules: list[str] = []
        said.append(f"{one.__qualname__}.{name}={_described(value, modules)}")
        yield from modules


def _is_written_in(function: FunctionType, one: type) -> bool:
    """Tell where its code is from: a wrapper takes over the name of the function that it calls."""
    is_inside = function.__code__.co_qualname.startswith(f"{one.__qualname__}.")
    return is_inside and function.__globals__.get("__name__") == one.__module__


def _described(value: Any, modules: list[str], above: tuple[object, ...] = ()) -> str:
    """Return a text that is the same in every process, and another for another value; the modules
    of functions and classes in it are added to ``modules``.

    Only the class counts of an object that is neither in ``_PLAIN`` nor in ``_PARTS``.
    """
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if any(value is one for one in above):
        return "itself"
    if isinstance(value, ModuleType):
        modules.append(value.__name__)
        return value.__name__
    if isinstance(value, type):
        modules.append(value.__module__)
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, FunctionType):
        modules.append(value.__globals__.get("__name__") or "")
    parts_of = next((found for kinds, found in _PARTS if isinstance(value, kinds)), _other_parts)
    parts = [_described(part, modules, (*above, value)) for part in parts_of(value)]
    if isinstance(value, set | frozenset):
        parts.sort()
    return f"{type(value).__qualname__}({', '.join(parts)})"


def _function_parts(function: FunctionType) -> Iterator[Any]:
    """Yield where a function was written, and the values that it was made with."""
    code, package = function.__code__, str(function.__globals__.get("__name__")).partition(".")[0]
    yield code.co_qualname
    if package not in (*_WITHOUT_CODE, *_LARGE):
        yield code.co_firstlineno if Path(code.co_filename).is_file() else code
    yield from (function.__defaults__, function.__kwdefaults__)
    yield from (one.cell_contents for one in function.__closure__ or () if one != CellType())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _other_parts(value: Any) -> Iterable[Any]:
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    inside = inspect.unwrap(value)  # of static methods, class methods and caches
    return () if inside is value else (inside,)


_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (list | tuple | set | frozenset, iter),
    (Mapping, lambda one: one.items()),
    (np.ndarray, lambda one: (one.dtype.str, one.shape, one.tobytes())),
    (torch.Tensor, lambda one: (one.dtype, one.shape, _bytes_of(one))),
    (FunctionType, _function_parts),
    (CodeType, lambda one: (one.co_code, one.co_names, one.co_consts)),
    (property, lambda one: (one.fget, one.fset, one.fdel)),
    (partial | partialmethod, lambda one: (one.func, one.args, one.keywords)),
    (cached_property, lambda one: (one.func,)),
    (MethodType, lambda one: (one.__func__, one.__self__)),
)
"""Classes of values, and functions from a value to what it consists of."""


def files_of_plugin(module: str) -> set[Path]:
    """All files of the outermost package of a module, because functions import when they run; and
    what the module imports."""
    package, file = module.partition(".")[0], sys.modules[module].__file__
    spec = None if package in _WITHOUT_CODE else sys.modules[package].__spec__
    folders = (spec and spec.submodule_search_locations) or ()
    found = {path for folder in folders for path in Path(folder).rglob("*.py")}
    return found | _files_used_by(module) or ({Path(file)} if file else set())


def _files_used_by(module: str) -> set[Path]:
    """The files of modules that a module imports, directly or through others, and of those whose
    classes and functions it has.

    Installed packages are left out, except the module's own.
    """
    own, files, seen, todo = module.partition(".")[0], set(), set(), [module]
    while todo:
        name = todo.pop()
        package = name.partition(".")[0]
        if name in seen or package in _WITHOUT_CODE or package in sys.stdlib_module_names:
            continue
        seen.add(name)
        if package not in (own, name) and _is_installed(_file_of(package)):
            continue
        file = _file_of(name)
        if file is None or (package != own and _is_installed(file)):
            continue
        files.add(file)
        todo += _imports_of(name, file)
        for value in list(vars(sys.modules.get(name) or ModuleType(name)).values()):
            if isinstance(value, ModuleType):
                todo.append(value.__name__)
            elif isinstance(value, type | FunctionType):
                todo.append(value.__module__)
    return files


def _files_of_value(module: str, package: str) -> set[Path]:
    """The files that count of a module with a value of a class in ``package``: of another installed
    package only the module's own, because all that it imports takes half a minute to find."""
    other, file = module.partition(".")[0], _file_of(module)
    if other == package or not (other in _LARGE or _is_installed(file)):
        return _files_used_by(module)
    return {file} if file is not None and other not in _WITHOUT_CODE else set()


def _is_installed(file: Path | None) -> bool:
    return file is not None and "site-packages" in file.parts


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing anything: importing would run it."""
    found = sys.modules.get(module)
    if found is not None:
        file = vars(found).get("__file__")
        return Path(file) if file else None
    parent, _, name = module.rpartition(".")
    if not parent:
        spec = _spec_of(module)
        return Path(spec.origin) if spec and spec.has_location and spec.origin else None
    places = [path for folder in _folders_of(parent) for path in _places_of(folder / name)]
    return next(filter(Path.is_file, places), None)


def _places_of(path: Path) -> tuple[Path, Path]:
    return path / "__init__.py", path.with_name(f"{path.name}.py")


def _folders_of(package: str) -> list[Path]:
    """The folders of a package's modules, found likewise; none: it is no package."""
    found = sys.modules.get(package)
    if found is not None:
        return [Path(folder) for folder in vars(found).get("__path__", ())]
    parent, _, name = package.rpartition(".")
    if parent:
        return [path for f in _folders_of(parent) if (path := f / name).is_dir()]
    spec = _spec_of(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _spec_of(package: str) -> ModuleSpec | None:
    with suppress(ImportError, ValueError):  # nothing of that name, or one without a spec
        return importlib.util.find_spec(package)
    return None


def _imports_of(module: str, file: Path) -> Iterator[str]:
    """Names of modules, and of what may be one, in the imports of a file."""
    if file.suffix != ".py":
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        parsed = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # nothing has run it; its content counts all the same
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # the line cannot run
                    continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def digest_of_files(files: Iterable[Path], others: Iterable[str] = ()) -> str:
    """A digest of the names and the content of files, and of other texts."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    for text in others:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()[:32]

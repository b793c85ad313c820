"""Digests of code from elsewhere: registered classes, plug-ins, and what they import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType

from vllm.utils import random_uuid

_WITHOUT_CODE = ("vllm", "torch", "builtins")
"""Packages whose code is not digested, because the version of this package stands for it."""
_LARGE = ("transformers",)
"""Packages of which only the files of a class and its bases are digested."""


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
            for function in _attributes(base, attributes):
                files |= _files_used_by(function.__module__)
    return digest_of_files(files, attributes)


def _attributes(one: type, said: list[str]) -> Iterator[FunctionType]:
    """Add plain values of a class to ``said``, and functions that were not written in it; yield the
    latter."""
    for name, value in sorted(vars(one).items()):
        if isinstance(value, FunctionType):
            if not value.__qualname__.startswith(f"{one.__qualname__}."):
                line = value.__code__.co_firstlineno
                said.append(f"{one.__qualname__}.{name}={value.__qualname__} of line {line}")
                yield value
        elif not name.startswith("__") and isinstance(value, int | float | str | tuple | None):
            said.append(f"{one.__qualname__}.{name}={value!r}")


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

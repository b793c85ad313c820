"""Packages import in the directions that docs/design.md allows, in no circles, and probe nothing.

The graph is read from the source. Imports inside functions count like those of modules. Imports
for the type checker may go in any direction, but not in circles either, with the exceptions below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PROBED = {
    "vllm.config.model_facts": "configs of transformers and of users",
    "vllm.entrypoints.extract.recompute": "classes of transformers",
    "vllm.model_executor.model_loader.weight_utils": "parameters of models from elsewhere",
    "vllm.model_executor.models.interfaces": "models from elsewhere",
    **{
        f"vllm.model_executor.transformers_modules.{name}": "modules of transformers"
        for name in (
            *("boundaries", "cached", "choice", "cuts", "experts", "positions"),
            *("row_by_row", "survey"),
        )
    },
    "vllm.model_executor.utils": "parameters of models from elsewhere",
    "vllm.ops.native": "what this version of torch has",
    "vllm.steering.lens": "steering vectors of another package",
    "vllm.transformers_utils.config": "configs of transformers",
    "vllm.utils.cpu_utils": "what this system has",
    "vllm.utils.host_memory": "what this system has",
    "vllm.v1.executor.uniproc_executor": "methods of workers that callers name",
    "vllm.v1.worker.recorded_steps": "what this version of torch has",
}
"""Modules that ask foreign objects what they have."""


CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CIRCLES_OF_TYPES = {
    ("vllm.config.capabilities", "vllm.config.vllm"): "it checks the whole that calls it",
    ("vllm.config.capabilities", CONNECTOR): "the config asks a class that it finds by name",
    ("vllm.config.connectors", CONNECTOR): "the same",
    ("vllm.v1.core.sched.output", CONNECTOR): "a step carries the connector's metadata",
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", CONNECTOR): "a connector has its own",
}
"""(importer, imported) for the type checker alone, although the imported module knows the importer.

A connector's methods have upstream's signatures, with the config, the pool and the step in them.
"""


class Edge(NamedTuple):
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) -> {self.imported}"


class Layer(NamedTuple):
    """A row of the table in docs/design.md."""

    name: str
    modules: list[str]
    may_import: list[str]


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its syntax."""
    found = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(name: str, with_types: bool = False) -> Iterator[Edge]:
    """Imports of modules of this package, and of ``torch``, anywhere in the module ``name``.

    with_types: those for the type checker, too.
    """
    todo: list[ast.AST] = [trees()[name]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.body * with_types + node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (Edge(name, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full in trees() or full == "torch.nn"
                yield Edge(name, full if is_module else str(node.module), node.lineno)


@cache
def edges() -> list[Edge]:
    """Every import of one module of this package by another."""
    return [e for name in trees() for e in imports_of(name) if e.imported in trees()]


def with_packages(edge: Edge) -> Iterator[Edge]:
    """``edge``, and the imports of the packages in which the imported module is."""
    yield edge
    package = edge.imported.rpartition(".")[0]
    while package and not f"{edge.importer}.".startswith(f"{package}."):
        if trees()[package].body:  # many are empty
            yield edge._replace(imported=package)
        package = package.rpartition(".")[0]


@cache
def layers() -> list[Layer]:
    """The table, from the bottom up."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    text = text.partition("## 11. Who imports whom")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (`.*?) \|(.*)\|$", text, re.MULTILINE)
    return [Layer(name, re.findall("`(.+?)`", modules), may.split()) for name, modules, may in rows]


def layer_of(module: str) -> Layer:
    """The layer whose modules have the longest beginning of the name in common."""
    is_package = any(name.startswith(f"{module}.") for name in trees())
    name = (f"{module}.__init__" if is_package else module).removeprefix("vllm.")
    fitting = [
        (len(prefix), layer)
        for layer in layers()
        for prefix in layer.modules
        if f"{name}.".startswith(f"{prefix}.")
    ]
    assert fitting, f"{module}: docs/design.md does not say what it may import"
    return max(fitting)[1]


def test_the_table_is_an_order() -> None:
    known: set[str] = set()
    for layer in layers():
        assert set(layer.may_import) <= known, f"{layer.name} imports what stands below it"
        known.add(layer.name)
    assert len(known) == len(layers()) > 15


def test_imports_go_in_the_allowed_directions() -> None:
    wrong = []
    for edge in edges():
        importer, imported = layer_of(edge.importer), layer_of(edge.imported)
        if imported.name not in (importer.name, *importer.may_import):
            wrong.append(f"{edge}: {importer.name} -> {imported.name}")
    assert not wrong, "imports that docs/design.md does not allow:\n" + "\n".join(wrong)


def test_no_circles() -> None:
    following: dict[str, list[Edge]] = {name: [] for name in trees()}
    for edge in chain.from_iterable(map(with_packages, edges())):
        following[edge.importer].append(edge)
    for name in trees():
        circle = way_back(name, following)
        assert not circle, "a circle of imports:\n" + "\n".join(map(str, circle))


def way_back(start: str, following: dict[str, list[Edge]]) -> list[Edge]:
    """The imports that lead from ``start`` to itself; empty: none do."""
    reached: dict[str, list[Edge]] = {start: []}
    todo = [start]
    while todo:
        way = reached[todo[-1]]
        for edge in following[todo.pop()]:
            if edge.imported == start:
                return [*way, edge]
            if edge.imported not in reached:
                reached[edge.imported] = [*way, edge]
                todo.append(edge.imported)
    return []


def test_no_circles_of_types() -> None:
    following: dict[str, list[Edge]] = {}
    for name in trees():
        found = [edge for edge in imports_of(name, with_types=True) if edge.imported in trees()]
        following[name] = [edge for edge in found if edge[:2] not in CIRCLES_OF_TYPES]
    for name in trees():
        circle = way_back(name, following)
        assert not circle, "a circle of imports:\n" + "\n".join(map(str, circle))
    for importer, imported in CIRCLES_OF_TYPES:
        exception = Edge(importer, imported, 0)
        with_it = {**following, importer: [*following[importer], exception]}
        assert way_back(importer, with_it), f"{exception} makes no circle any more: take it out"


def test_the_scheduler_knows_no_tensors() -> None:
    core = [name for name in trees() if name.startswith("vllm.v1.core.")]
    found = [edge for name in core for edge in imports_of(name)]
    assert core and found
    assert not [str(edge) for edge in found if edge.imported.startswith("torch.nn")]


def test_objects_are_asked_what_they_have_only_where_they_are_foreign() -> None:
    probing: dict[str, list[int]] = {}
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called, num_arguments = node.func.id, len(node.args)
                if called == "hasattr" or (called == "getattr" and num_arguments == 3):
                    probing.setdefault(name, []).append(node.lineno)
    new = {name: lines for name, lines in probing.items() if name not in PROBED}
    assert not new, f"declare what the object can do instead: {new}"
    assert probing.keys() == PROBED.keys(), "take what probes no more out of PROBED"

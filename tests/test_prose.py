"""Docstrings answer for themselves: none goes on with a sentence that its name begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vllm", "tests", "benchmarks", "examples")
FRAGMENTS = ("Of", "What", "Where", "Whether", "Which", "Who", "Whose", "How", "Those")
"""First words of docstrings that leave their subject, or their question, to the name above."""
ALLOWED: dict[str, set[str]] = {}
"""Path of a module -> docstrings that begin so all the same, each with a reason beside it."""


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``(line, text)`` of each docstring, those of attributes too."""
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_have_a_subject() -> None:
    wrong = []
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in paths:
        module = path.relative_to(ROOT).as_posix()
        found = {
            text: line
            for line, text in docstrings_of(ast.parse(path.read_text(encoding="utf-8")))
            if text.split(" ", 1)[0] in FRAGMENTS
        }
        allowed = ALLOWED.get(module, set())
        wrong += [f"{module}:{found[text]}: {text}" for text in found.keys() - allowed]
        assert allowed <= found.keys(), f"ALLOWED names docstrings that {module} has no more"
    assert not wrong, "give these docstrings a subject, or a verb:\n" + "\n".join(wrong)

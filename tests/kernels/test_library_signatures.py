"""Optional libraries take what they are called with: their signatures, read from their wheels.

Nothing is installed or imported: ``make test-libraries`` downloads the wheels, and names their
folder in ``LIBRARY_WHEELS``.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import zipfile
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_pools import AttentionPool, int32, make_layout
from test_flashinfer_attention import DecodeWrapper, Wrapper, flashinfer_kernels
from test_triton_recurrent import LONG_SNAPSHOTS, LONG_STEP, RecurrentLayer, _check_step
from test_triton_recurrent import _chunk_gated_delta_rule as delta_rule_of_library
from triton_device import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from vllm.ops.cuda import fla_recurrent


def source_of(library: str, path: str) -> ast.Module:
    """A module of a library that lies there as a wheel; skips the test when none does."""
    folder = os.environ.get("LIBRARY_WHEELS")
    if folder is None:
        pytest.skip("LIBRARY_WHEELS names no folder; make test-libraries downloads the wheels")
    wheels = sorted(Path(folder).glob(f"{library}-*.whl"))
    if not wheels:
        pytest.skip(f"LIBRARY_WHEELS={folder} has no wheel of {library}")
    return ast.parse(zipfile.ZipFile(wheels[-1]).read(path))


def signatures_of(function: str, body: list[ast.stmt]) -> list[Signature]:
    """Signatures of the definitions of this name, including the typed overloads."""
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = node.args
            given = [None] * (len(names.args) - len(names.defaults))
            kind = Parameter.POSITIONAL_OR_KEYWORD
            positional = zip(names.args, [*given, *names.defaults], strict=True)
            parameters = [_parameter(one.arg, kind, default) for one, default in positional]
            if names.vararg:
                parameters.append(Parameter(names.vararg.arg, Parameter.VAR_POSITIONAL))
            keywords = zip(names.kwonlyargs, names.kw_defaults, strict=True)
            parameters += [_parameter(one.arg, Parameter.KEYWORD_ONLY, d) for one, d in keywords]
            if names.kwarg:
                parameters.append(Parameter(names.kwarg.arg, Parameter.VAR_KEYWORD))
            found.append(Signature(parameters))
    assert found, f"there is no {function}"
    return found


def _parameter(name: str, kind: Any, default: ast.expr | None) -> Parameter:
    stands_for = Parameter.empty if default is None else ast.unparse(default)
    return Parameter(name, kind, default=stands_for)


def class_body(module: ast.Module, name: str) -> list[ast.stmt]:
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    (found,) = [one for one in classes if one.name == name]
    return found.body


def binding(stand_in: type, body: list[ast.stmt]) -> tuple[type, list[str]]:
    """The stand-in, with every call held against the library's method; the names of the called."""
    called: list[str] = []

    def checked(name: str) -> Callable[..., Any]:
        method = getattr(stand_in, name)
        signature = signatures_of(name, body)[-1]

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            signature.bind(self, *arguments, **keywords)
            called.append(name)
            return method(self, *arguments, **keywords)

        return call

    methods = {name: checked(name) for name in ("__init__", "plan", "run")}
    return type(stand_in.__name__, (stand_in,), methods), called


@pytest.mark.parametrize("tokens", [20, 1], ids=["prompt", "decoding"])
def test_flashinfer(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, file, stand_in = (
        ("BatchPrefillWithPagedKVCacheWrapper", "prefill", Wrapper)
        if tokens > 1
        else ("BatchDecodeWithPagedKVCacheWrapper", "decode", DecodeWrapper)
    )
    body = class_body(source_of("flashinfer_python", f"flashinfer/{file}.py"), name)
    checked, called = binding(stand_in, body)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**{name: checked}))
    pool = AttentionPool(torch.bfloat16, 1, 64, 3, num_blocks=4)
    pool.pool.zero_()
    query, table = torch.randn(tokens, 2, 64).bfloat16(), int32([1]).view(1, 1)
    layout = make_layout([tokens], [0])
    flashinfer_kernels().paged_attention(query, pool.kv_cache, table, layout, 1.0, 7, 30.0)
    assert called == ["__init__", "plan", "run"]
    # Not named by us: on Hopper it chooses kernels of the third FlashAttention for prompts.
    assert signatures_of("__init__", body)[0].parameters["backend"].default == "'auto'"


@pytest.mark.usefixtures("card_or_interpreter")
def test_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module = source_of("fla_core", "fla/ops/gated_delta_rule/chunk.py")
    (signature,) = signatures_of("chunk_gated_delta_rule", module.body)
    assert "chunk_indices" in signature.parameters  # what _chunk_function looks for
    called = []

    def checked(*arguments: Any, **keywords: Any) -> Any:
        called.append(signature.bind(*arguments, **keywords))
        assert keywords.keys() <= signature.parameters.keys()  # it takes any others too
        return delta_rule_of_library(*arguments, **keywords)

    monkeypatch.setenv("VLLM_GDN_BACKEND", "FLA")
    monkeypatch.setattr(fla_recurrent, "_chunk_function", lambda: checked)
    layer = RecurrentLayer(torch.bfloat16, 1, 1, 16, 16)
    step, snapshots = LONG_STEP[1:2], LONG_SNAPSHOTS[1:2]
    _check_step(layer, layer.inputs(64), step, snapshots)
    assert called


def test_a_name_that_a_library_lost_is_noticed() -> None:
    (signature,) = signatures_of("plan", ast.parse("def plan(a, b=1, *, c=2): ...").body)
    signature.bind(1, c=3)
    for arguments, keywords in (((), {}), ((1, 2, 3), {}), ((1,), {"d": 4})):
        with pytest.raises(TypeError):
            inspect.Signature.bind(signature, *arguments, **keywords)

"""The CUDA kernels compile, in all forms that are launched; no card is needed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compiled_limits import MOST_NARROW_LOADS, faults
from triton_device import HAS_TRITON

import vllm
from tests.grids import at_night

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

TRITON_VERSION = os.environ.get("TRITON_VERSION")
"""The release that has to compile, as ``make cuda-lint`` names it."""


def run_script(*arguments: str, cache: Path) -> list[dict[str, Any]]:
    """The forms that ``compile_kernels.py`` prints."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for name in ("TRITON_INTERPRET", "VLLM_GDN_BACKEND"):
        environment.pop(name, None)
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    forms = [json.loads(line) for line in result.stdout.splitlines()]
    releases = {form["triton"] for form in forms}
    if TRITON_VERSION is not None:
        assert all(f"{release}.".startswith(f"{TRITON_VERSION}.") for release in releases)
    return forms


def run_in_parts(*arguments: str, cache: Path) -> list[dict[str, Any]]:
    """Return what ``run_script`` does, from a process for each core unless pytest has its own."""
    cores = min(len(os.sched_getaffinity(0)), 8)
    parts = 1 if "PYTEST_XDIST_WORKER" in os.environ else cores
    with ThreadPoolExecutor(parts) as pool:
        shares = [
            pool.submit(run_script, *arguments, f"{part}/{parts}", cache=cache)
            for part in range(parts)
        ]
    return [form for share in shares for form in share.result()]


def launched_kernels() -> set[str]:
    """Names of the ``@triton.jit`` functions that the package launches: ``kernel[grid](...)``."""
    compiled: Counter[str] = Counter()
    launched = set()
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "triton" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                decorators = map(ast.unparse, node.decorator_list)
                if any(decorator.startswith("triton.jit") for decorator in decorators):
                    compiled[node.name] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    kernels = compiled.keys() & launched
    assert all(compiled[name] == 1 for name in kernels), "two kernels have one name"
    return kernels


@pytest.mark.exhaustive
def test_every_kernel_that_is_launched_is_in_the_list(tmp_path: Path) -> None:
    launched = launched_kernels()
    assert {"_attention_kernel", "step_kernel", "_copy_kernel"} <= launched
    forms = run_script("forms", cache=tmp_path)
    assert {form["kernel"] for form in forms} == launched
    for kernel, parts in (
        ("_attention_kernel", ["tile_rows=64", "tile_rows=128", "partials=None", "partials:*fp32"]),
        ("_attention_kernel", ["query:*bf16", "query:*fp16", "query:*fp32"]),
        ("_attention_kernel", [f"main_size={size} " for size in (64, 80, 96, 128, 256, 512)]),
        ("_attention_kernel", ["has_window=True", "has_chunks=True"]),
        (
            "_attention_kernel",
            ["has_cap=True", "sinks:*bf16"],
        ),
        ("_attention_kernel", ["tail_size=64 padded_tail=64 shares_values=True"]),
        ("step_kernel", ["chunk=64 ", "chunk=1073741824 ", "after_chunks=True"]),
        ("_conv_kernel", ["tile_tokens=1 ", "tile_tokens=32 ", "has_bias=True"]),
        ("prepare_kernel", ["qkv:*bf16", "qkv:*fp16"]),
        ("scan_kernel", ["qkv:*fp16", "columns=64 ", "columns=128 "]),
    ):
        texts = [form["form"] for form in forms if form["kernel"] == kernel]
        for part in parts:
            assert any(part in text for text in texts), f"{kernel} is not compiled with {part}"


def test_the_size_of_a_batch_compiles_nothing_anew(tmp_path: Path) -> None:
    """But for what the launchers choose among: few or many rows, keys in parts, chunks."""
    counts = Counter(form["kernel"] for form in run_script("sizes", cache=tmp_path))
    several = {"_attention_kernel": 4, "_conv_kernel": 2, "step_kernel": 3}
    assert counts == dict.fromkeys(launched_kernels(), 1) | several


@pytest.mark.exhaustive
def test_requests_bring_about_no_form_that_the_start_did_not(tmp_path: Path) -> None:
    """A form that is met later is compiled then: the first requests would wait for seconds."""
    first, second, load = (
        {(form["kernel"], form["form"]) for form in run_script(*arguments, cache=tmp_path)}
        for arguments in (("warm", "90", "0/2"), ("warm", "90", "1/2"), ("load",))
    )
    assert first and second and first.isdisjoint(second)
    assert load and load <= first | second


@pytest.mark.exhaustive
def test_forms_that_serve_the_same_row_compute_alike(tmp_path: Path) -> None:
    """In batches of other sizes: what four warps do is the same, and what one element is made of.

    Counted are operations, so that another order of as many is not noticed. Those of fewer keys at
    a time, of keys that warps divide and of a walk with wider columns are.
    """
    compiled = run_script("alike", cache=tmp_path)
    agreed: dict[str, Any] = {}
    for kernel, warps in (("scan_kernel", [4, 8]), ("_attention_kernel", [4, 4, 8, 8])):
        forms = [form for form in compiled if form["kernel"] == kernel]
        assert sorted(form["form"].split()[-2] for form in forms) == [f"warps={n}" for n in warps]
        loops = [form["arithmetic_of_loops"] for form in forms]
        assert all(found == loops[0] for found in loops) and "HGMMA" in loops[0][0]
        agreed[kernel] = loops[0]
    walks = [form for form in compiled if form["kernel"] == "step_kernel"]
    alone, before, after = sorted((form["arithmetic_of_loops"] for form in walks), key=len)
    assert alone == before and len(alone) == 1  # a token walks in the same way wherever it stands
    assert alone[0] in after and len(after) == 2  # the other one brings snapshots to their tokens
    agreed["step_kernel"] = alone
    tiles = [form for form in compiled if form["kernel"] == "_conv_kernel"]
    one, several = (of_each_token(form) for form in tiles)
    assert one == several and one["FFMA"] > 0
    others = [form for form in run_script("reordered", cache=tmp_path) if form["kernel"] in agreed]
    assert sorted(form["kernel"] for form in others) == ["_attention_kernel"] * 2 + ["step_kernel"]
    assert all(form["arithmetic_of_loops"] != agreed[form["kernel"]] for form in others)


def of_each_token(form: dict[str, Any]) -> dict[str, float]:
    """Operations of a thread, of a kernel that takes tiles of tokens."""
    size = re.search(r"\btile_tokens=(\d+)", form["form"])
    assert size is not None
    return {name: count / int(size[1]) for name, count in form["arithmetic"].items()}


@pytest.mark.parametrize(
    ("forms", "capability"),
    [
        ("few", 90),
        *(at_night("few", capability) for capability in (80, 89, 100, 120)),
        at_night("all", 90),
        at_night("all", 80),
        at_night("all", 100),
        at_night("tiles", 89),
        at_night("tiles", 120),
    ],
)
def test_kernels_compile(forms: str, capability: int, tmp_path: Path) -> None:
    compiled = run_in_parts(forms, str(capability), cache=tmp_path)
    kernels = {form["kernel"] for form in compiled}
    assert kernels == launched_kernels() if forms != "tiles" else "_attention_kernel" in kernels
    found = {f"{form['kernel']} {form['form']}": faults(form, capability) for form in compiled}
    assert not {form: texts for form, texts in found.items() if texts}


@pytest.mark.exhaustive
def test_costs_that_are_planted_are_noticed(tmp_path: Path) -> None:
    """Rows that begin at odd elements are read one by one, and products wait for them; tiles twice
    as large fill registers."""
    compiled = run_script("faults", cache=tmp_path)
    found = {(form["kernel"], text.split()[1]) for form in compiled for text in faults(form, 90)}
    assert found == {
        ("_rms_norm_kernel", "narrow_loads,"),
        ("_rms_norm_kernel", "wide_loads,"),
        ("_attention_kernel", "narrow_loads,"),
        ("step_kernel", "programs_at_once,"),
        ("_conv_kernel", "programs_at_once,"),
    }


def test_loads_of_every_kernel_have_a_limit() -> None:
    assert MOST_NARROW_LOADS.keys() == launched_kernels()

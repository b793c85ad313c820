"""``vllm collect-env``: the facts that a report of a fault needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from vllm import envs
from vllm.utils.build_info import version_line

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pyarrow",
    "fastapi", "uvicorn", "triton", "flashinfer-python", "ray")  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def build_collect_env_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vllm collect-env``."""
    return argparse.ArgumentParser(
        prog="vllm collect-env",
        description="Print versions, CPU, kernels, memory, GPUs and the variables VLLM_* for a "
        "report of a fault. Keys and tokens are not shown.",
    )


def collect_env(arguments: Sequence[str]) -> int:
    """Run ``vllm collect-env``; returns the exit status."""
    build_collect_env_parser().parse_args(arguments)
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "engine", version_line()
    yield "Python", f"{sys.version.split()[0]} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    for package in _PACKAGES:
        yield package, _version(package)
    machine: dict[str, Callable[[], str]] = {
        "CPU": _cpu,
        "kernels": _kernels,
        "threads": _threads,
        "memory": _memory,
        "GPU": _gpus,
    }
    for name, describe in machine.items():
        try:
            yield name, describe()
        except Exception as error:  # a broken installation is what is to be reported
            yield name, f"{type(error).__name__}: {error}"
    for name in sorted({*envs.VARIABLES, *filter(_is_ours, os.environ)} & set(os.environ)):
        yield name, "set, not shown" if _SECRET.search(name) else os.environ[name]


def _is_ours(variable: str) -> bool:
    return variable.startswith("VLLM_")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    from vllm.ops.native import isas_of_this_cpu
    from vllm.utils.cpu_utils import cpu_name

    return f"{cpu_name()}; instruction sets: {', '.join(isas_of_this_cpu())}"


def _kernels() -> str:
    from vllm.ops.sources import kernels_of

    return kernels_of("cpu")


def _threads() -> str:
    from vllm.platforms import get_platform
    from vllm.utils.cpu_utils import usable_core_count

    return (
        f"{get_platform('cpu').set_num_threads()} for computing; {usable_core_count()} cores by "
        f"affinity and quota, {os.cpu_count()} logical CPUs"
    )


def _memory() -> str:
    import psutil

    from vllm.utils.mem_utils import available_memory_bytes, format_bytes, total_memory_bytes

    return (
        f"{format_bytes(available_memory_bytes())} available of "
        f"{format_bytes(total_memory_bytes())} that the limits allow; the machine has "
        f"{format_bytes(psutil.virtual_memory().total)}"
    )


def _gpus() -> str:
    import torch

    from vllm.utils.mem_utils import format_bytes

    if not torch.cuda.is_available():
        return f"none that torch can use (torch was built for CUDA {torch.version.cuda})"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = "; ".join(f"{gpu.name}, {format_bytes(gpu.total_memory)}" for gpu in found)
    return f"{names} (CUDA {torch.version.cuda})"

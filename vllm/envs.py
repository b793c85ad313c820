"""Every environment variable that this package reads.

``vllm.envs.VLLM_LOGGING_LEVEL`` parses the variable on each access, so a test or a
program may set it after importing the package. A value that cannot be parsed raises a
``ValueError`` that names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

AttentionBackend = Literal["FLASHINFER", "TRITON_ATTN", "CPU_ATTN"]

VLLM_LOGGING_LEVEL: str
VLLM_LOG_FORMAT: Literal["text", "json"]
VLLM_CPU_THREADS: int | None
OMP_NUM_THREADS: int | None
VLLM_CPU_OMP_THREADS_BIND: tuple[frozenset[int], ...] | None
VLLM_CPU_NUM_OF_RESERVED_CPU: int
VLLM_PP_LAYER_PARTITION: tuple[int, ...] | None
VLLM_NODE_KEY: str
VLLM_DP_RANK: int
VLLM_DP_RANK_LOCAL: int | None
VLLM_DP_SIZE: int
VLLM_DP_MASTER_IP: str
VLLM_DP_MASTER_PORT: int
VLLM_CPU_KVCACHE_SPACE: float | None
VLLM_CPU_ISA: str | None
VLLM_KERNELS: str
VLLM_ATTENTION_BACKEND: str | None
VLLM_GDN_BACKEND: str | None
VLLM_PLUGINS: tuple[str, ...] | None
VLLM_API_KEY: str | None
VLLM_ALLOW_RUNTIME_LORA_UPDATING: bool
VLLM_SERVER_DEV_MODE: bool


class Variable(NamedTuple):
    """One environment variable."""

    default: Any
    """Value when the variable is unset or empty."""
    parse: Callable[[str], Any]
    doc: str


def _one_of(*allowed: str) -> Callable[[str], str]:
    """A parser that accepts one of ``allowed``, in upper or lower case."""

    def parse(text: str) -> str:
        for value in allowed:
            if text.lower() == value.lower():
                return value
        raise ValueError(f"use one of {', '.join(allowed)}")

    return parse


MOST_THREADS = 4096
_LAST_CPU = 65535
"""No Linux has a CPU of a higher number."""


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"use a whole number of at least {least}")
    return int(text)


def _threads(text: str) -> int:
    count = _count(text)
    if count > MOST_THREADS:  # OpenMP ends the process when the system has no room for them
        raise ValueError(f"use at most {MOST_THREADS:,}")
    return count


def _first_threads(text: str) -> int:
    """The first number of an OpenMP list such as ``4,2`` (one entry for each nesting level)."""
    return _threads(text.split(",")[0].strip())


def _count_or_none(text: str) -> int:
    return _count(text, least=0)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError("use a number above 0")
    return number


def _cpu_lists(text: str) -> tuple[frozenset[int], ...] | None:
    """Parse lists of CPUs such as ``0-2,5|3``, one for each rank."""
    if text.lower() in ("auto", "nobind"):
        return None
    lists = []
    for part in text.split("|"):
        cpus: set[int] = set()
        for item in part.split(","):
            first, dash, last = (bound.strip() for bound in item.partition("-"))
            bounds = (first, last) if dash else (first, first)
            if not all(map(str.isdecimal, bounds)) or int(bounds[0]) > int(bounds[1]):
                raise ValueError("use auto, nobind, or a list for each rank such as 0-31|32-63")
            if int(bounds[1]) > _LAST_CPU:  # before a set is made of them
                raise ValueError(f"use numbers of CPUs up to {_LAST_CPU:,}")
            cpus.update(range(int(bounds[0]), int(bounds[1]) + 1))
        lists.append(frozenset(cpus))
    return tuple(lists)


def _layer_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of layers, one for each pipeline stage."""
    parts = [part.strip() for part in text.split(",")]
    if not all(map(str.isdecimal, parts)):
        raise ValueError("use a number of layers for each stage, such as 10,12,10")
    return tuple(map(int, parts))


def _switch(text: str) -> bool:
    return _one_of("0", "false", "1", "true")(text) in ("1", "true")


def is_header_value(text: str) -> bool:
    """True if a header can carry the text; spaces at its ends are lost on the way."""
    return text == text.strip() and not any(mark in text for mark in "\r\n\0")


def _key(text: str) -> str:
    if not is_header_value(text):
        raise ValueError("use a key that a header can carry, without white space at its ends")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


VARIABLES: dict[str, Variable] = {
    "VLLM_LOGGING_LEVEL": Variable(
        "INFO",
        _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        "Least severe level that the 'vllm' logger lets through.",
    ),
    "VLLM_LOG_FORMAT": Variable(
        "text", _one_of("text", "json"), "Format of the log; --log-format overrides it."
    ),
    "VLLM_CPU_THREADS": Variable(
        None,
        _threads,
        "Threads for computing on the CPU; unset: OMP_NUM_THREADS, else every usable core.",
    ),
    "OMP_NUM_THREADS": Variable(
        None, _first_threads, "OpenMP's own variable; used when VLLM_CPU_THREADS is unset."
    ),
    "VLLM_CPU_OMP_THREADS_BIND": Variable(
        None,
        _cpu_lists,
        "CPUs of each rank, such as '0-31|32-63'; each has as many threads as CPUs, unless their "
        "number is set. 'auto', 'nobind' or unset: ranks are not bound.",
    ),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": Variable(
        0, _count_or_none, "Cores that are left free when no number of threads is set."
    ),
    "VLLM_PP_LAYER_PARTITION": Variable(
        None, _layer_counts, "Layers of each pipeline stage, such as '10,12,10'."
    ),
    "VLLM_DP_RANK": Variable(
        0, _count_or_none, "Number of this process's `LLM` among VLLM_DP_SIZE that a program makes."
    ),
    "VLLM_DP_RANK_LOCAL": Variable(
        None, _count_or_none, "The same among those on this machine; unset: all are on it."
    ),
    "VLLM_DP_SIZE": Variable(1, _count, "Number of processes that each make an `LLM`."),
    "VLLM_DP_MASTER_IP": Variable("", str, "Without effect: these engines do not meet."),
    "VLLM_DP_MASTER_PORT": Variable(0, _count_or_none, "Without effect, like VLLM_DP_MASTER_IP."),
    "VLLM_NODE_KEY": Variable(
        "", str, "Secret that the nodes of an engine have to share; unset: none is asked for."
    ),
    "VLLM_CPU_KVCACHE_SPACE": Variable(
        None,
        _positive,
        "GiB of the KV pool of each rank on a CPU; --kv-cache-memory-bytes overrides it.",
    ),
    "VLLM_CPU_ISA": Variable(
        None, str.lower, "SIMD path of the native CPU kernels; unset: the best this CPU has."
    ),
    "VLLM_KERNELS": Variable(
        "auto",
        _one_of("auto", "plain", "native"),
        "Kernels to use: 'native' fails when they are not built, 'plain' is torch only.",
    ),
    "VLLM_ATTENTION_BACKEND": Variable(
        None,
        _one_of(*get_args(AttentionBackend)),
        "Attention kernels; --attention-backend overrides it; unset: the device's preferred ones.",
    ),
    "VLLM_GDN_BACKEND": Variable(
        None,
        _one_of("TRITON", "FLA"),
        "Chunked gated delta rule on CUDA; unset: TRITON (our own kernel; its states are closer "
        "to exact ones). FLA: flash-linear-attention, for 16-bit models.",
    ),
    "VLLM_PLUGINS": Variable(
        None,
        _names,
        "Comma-separated names of the general plugins to load; unset: all that are installed.",
    ),
    "VLLM_API_KEY": Variable(
        None, _key, "Key that clients of `vllm serve` must send; --api-key overrides it."
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": Variable(
        False, _switch, "Let clients of `vllm serve` load and unload adapters: 1 or 0."
    ),
    "VLLM_SERVER_DEV_MODE": Variable(
        False,
        _switch,
        "Let clients of `vllm serve` put it to sleep, pause it, call methods of its worker and "
        "replace its weights: 1 or 0.",
    ),
}


def __getattr__(name: str) -> Any:
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    text = os.environ.get(name, "")
    if name == "VLLM_PLUGINS" and name in os.environ:
        return _names(text)  # set but empty: no plugins at all
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r}: {error}") from None


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(VARIABLES))

"""A profile of the time of a run, by parts of the engine.

Operations and methods of the engine's objects are replaced by timed ones for one run and
restored afterwards, so an engine that is not profiled pays nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from vllm.ops.operation import Operation, Source, use_sources
from vllm.ops.sources import find_source

if TYPE_CHECKING:
    from vllm import LLM

PARTS = {
    "linear": "linear layers, LM head",
    "recurrent": "recurrent layers",
    "attention": "attention, rotary, keys and values",
    "norms": "norms, activations, gates",
    "capture": "capture of rows",
    "write": "rows to the host and to the writers",
    "model": "model, outside the kernels",
    "sampling": "sampling",
    "scheduling": "scheduling, tensors of a batch",
    "other": "front end and the rest",
}
"""Part -> its label in the table. The parts exclude each other."""

OPERATION_PARTS = {
    name: part
    for part, names in {
        "linear": ("linear", "packed_linear", "expert_linear"),
        "recurrent": (
            "channel_delta_rule", "linear_recurrence", "mlstm", "recurrent",
            "selective_scan", "state_space", "wkv",
        ),
        "attention": ("attention", "rotary"),
        "norms": ("activations", "experts", "gelu", "norms"),
        "capture": ("capture_rows",),
        "write": ("gather_rows", "find_bad_cells"),
        "sampling": ("sampling",),
    }.items()
    for name in names
}  # fmt: skip
"""The parts of operations (vllm.ops), by their own names or their modules' names."""

_CONNECTOR_PARTS = dict.fromkeys(
    ("bind_connector_metadata", "start_load_kv", "save_kv_layer", "wait_for_save", "get_finished"),
    "write",
)
_SCHEDULER_PARTS = dict.fromkeys(("add_request", "schedule", "update_from_output"), "scheduling")


@dataclass(frozen=True)
class Profile:
    """Seconds of the engine's thread by part, and of the writer threads, which run in parallel."""

    seconds: dict[str, float]
    writer_seconds: float

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        return {part: seconds / self.total_seconds for part, seconds in self.seconds.items()}


class Stopwatch:
    """Sums, by part, the time inside watched methods without the watched ones they call.

    The methods must be called from one thread. ``settle`` is called before each reading of
    the clock, for devices that continue to work after a call returns.
    """

    def __init__(self, settle: Callable[[], object] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._settle = settle
        self._inner_seconds: list[float] = []  # one entry for each watched call in progress

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its time counted for ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner_seconds.append(0.0)
            start = self._now()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = self._now() - start
                self.seconds[part] += elapsed - self._inner_seconds.pop()
                if self._inner_seconds:
                    self._inner_seconds[-1] += elapsed

        return run

    def _now(self) -> float:
        if self._settle is not None:
            self._settle()
        return perf_counter()

    @contextmanager
    def watch(self, target: object, parts: Mapping[str, str]) -> Iterator[None]:
        """Time methods of one object inside the block: method name -> part."""
        timed = {name: self.timed(part, getattr(target, name)) for name, part in parts.items()}
        try:
            for name, method in timed.items():
                setattr(target, name, method)  # on the object, where it hides the class's method
            yield
        finally:
            for name in timed.keys() & vars(target).keys():
                delattr(target, name)


def part_of(operation: Operation[Any]) -> str:
    """Return the part of an operation, a key of ``PARTS``."""
    module = operation.body.__module__.rpartition(".")[2]
    return OPERATION_PARTS.get(operation.name, OPERATION_PARTS.get(module, "other"))


class _TimedSource(Source):
    """Implementations of another source, timed."""

    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self.name = source.name
        self.reads_panels = source.reads_panels
        self.keeps_pending = source.keeps_pending
        self.multiplies_pairs = source.multiplies_pairs
        self._source = source
        self._watch = watch

    def find(self, operation: Operation[Any]) -> Callable[..., None]:
        return self._watch.timed(part_of(operation), self._source.find(operation) or operation.body)


@contextmanager
def timed_operations(watch: Stopwatch) -> Iterator[None]:
    """Time every operation inside the block, wherever it is called."""
    use_sources(lambda device_type: _TimedSource(find_source(device_type), watch))
    try:
        yield
    finally:
        use_sources(find_source)


def profile_run(llm: LLM, run: Callable[[], object]) -> Profile:
    """Call ``run``, which uses ``llm``, and return the profile of its time.

    The engine and its worker must be in this process, as they are for ``LLM``.
    """
    core: Any = llm.llm_engine.engine_core
    runner = core.executor.worker.model_runner
    device = runner.device.type
    watch = Stopwatch(None if device == "cpu" else torch.accelerator.synchronize)
    written_before = core.stats().write_seconds
    with ExitStack() as stack:
        for target, parts in (
            (runner.model, {"forward": "model", "compute_logits": "sampling"}),
            (runner.row_transport, {"inspect": "write"}),
            (runner.sampler, {"sample": "sampling"}),
            (runner, {"execute_model": "scheduling"}),
            (core.scheduler, _SCHEDULER_PARTS),
            *([] if runner.connector is None else [(runner.connector.connector, _CONNECTOR_PARTS)]),
        ):
            stack.enter_context(watch.watch(target, parts))
        stack.enter_context(timed_operations(watch))
        watch.timed("other", run)()
    seconds = {part: watch.seconds[part] for part in PARTS}
    return Profile(seconds, core.stats().write_seconds - written_before)

"""A worker's adapters: those in memory, and those of the tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from vllm.config import LoRAConfig
from vllm.distributed.parallel_state import values_of_all_ranks
from vllm.lora.request import LoRARequest
from vllm.model_executor.adapters import check_takes_adapters, load_adapter
from vllm.model_executor.layers.low_rank import Adapter, AdapterRows
from vllm.v1.worker.input_batch import RequestState, StepBatch


class AdapterStore:
    """Adapters of one model, the least recently used first."""

    def __init__(self, model: nn.Module, config: LoRAConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self._loaded: dict[LoRARequest, Adapter] = {}
        self._digests: dict[LoRARequest, str] = {}  # of what was read first, also if it has left
        self._waiting: dict[str, Adapter] = {}  # of requests that have not begun
        self._fitting: WeakSet[Adapter] = WeakSet()  # whose tables are those of the weights
        if config.enable_lora:
            check_takes_adapters(model)

    def has(self, lora_request: LoRARequest) -> bool:
        """Return whether an adapter is in memory."""
        return lora_request in self._loaded

    def choose(self, request_id: str, lora_request: LoRARequest) -> str:
        """Let a request that will begin have an adapter that is in memory; returns the digest of
        its content."""
        adapter = self._loaded[lora_request] = self._loaded.pop(lora_request)
        self._waiting[request_id] = adapter
        return adapter.digest

    def add(self, lora_request: LoRARequest) -> None:
        """Do what :meth:`load` does, whatever its files held when they were read before."""
        if not self.has(lora_request):
            self._digests.pop(lora_request, None)
        self.load(lora_request)

    def load(self, lora_request: LoRARequest) -> None:
        """Load an adapter that is not in memory, on all ranks or on none; all of them call this.

        ValueError: it cannot be used, or its files are not those that were read first: requests of
        one name would have different adapters.
        """
        adapter = self._loaded.pop(lora_request, None)
        if adapter is None:
            adapter = self._read(lora_request)
        self._loaded[lora_request] = adapter
        while len(self._loaded) > self._config.max_loras:  # requests still hold theirs
            del self._loaded[next(iter(self._loaded))]

    def _read(self, lora_request: LoRARequest) -> Adapter:
        path, limit = lora_request.lora_path, self._config.max_lora_rank
        read: Adapter | str
        try:
            read = load_adapter(self._model, Path(path).expanduser(), limit, self._device)
        except (ValueError, OSError) as error:
            read = str(error)
        except Exception as error:  # memory, most of all; every rank has to learn of it
            read = f"{type(error).__name__}: {error}"
        digest = read.digest if isinstance(read, Adapter) else ""
        outcomes = values_of_all_ranks((digest, read if isinstance(read, str) else None))
        problem = next((one for _, one in outcomes if one is not None), None)
        if problem is None and len({one for one, _ in outcomes}) > 1:
            problem = "its files changed while ranks read them"
        if problem is None and self._digests.setdefault(lora_request, digest) != digest:
            problem = "its files have changed since they were read first; load it as another one"
        if problem is None and isinstance(read, Adapter):
            self._fitting.add(read)
            return read
        raise ValueError(f"adapter {lora_request.lora_name!r} (lora_path={path!r}): {problem}")

    def forget(self, lora_int_id: int) -> bool:
        """Free an adapter; requests that chose it keep it. Returns whether it was in memory."""
        for one in [one for one in self._digests if one.lora_int_id == lora_int_id]:
            del self._digests[one]
        return self.retire(lora_int_id)

    def retire(self, lora_int_id: int) -> bool:
        """Do what :meth:`forget` does; requests that still come need the same files."""
        found = [one for one in self._loaded if one.lora_int_id == lora_int_id]
        for one in found:
            del self._loaded[one]
        return bool(found)

    def note_new_weights(self) -> None:
        """Free adapters that have tables, which are compared with the model's when they load."""
        self._loaded = {key: one for key, one in self._loaded.items() if not one.has_tables}
        self._fitting.clear()

    def outdated(self, begun: Mapping[str, RequestState]) -> list[str]:
        """Return requests whose adapters have tables that were compared with earlier weights.

        begun: those that took their adapters, by id.
        """
        chosen = {name: state.adapter for name, state in begun.items()} | self._waiting
        return [
            name
            for name, one in chosen.items()
            if one is not None and one.has_tables and one not in self._fitting
        ]

    def take(self, request_id: str) -> Adapter | None:
        """Return the adapter of a request that begins, or ends before it has begun."""
        return self._waiting.pop(request_id, None)


def adapter_rows(batch: StepBatch, device: torch.device) -> AdapterRows | None:
    """Return the adapters of a step's tokens; None: no token has one."""
    states = batch.states
    adapters = list({id(s.adapter): s.adapter for s in states if s.adapter is not None}.values())
    if not adapters:
        return None
    numbers = {id(adapter): number for number, adapter in enumerate(adapters)}
    of_request = np.array([numbers.get(id(state.adapter), -1) for state in states])
    index = torch.from_numpy(of_request[batch.request_of_token])
    return AdapterRows(adapters, index, device)

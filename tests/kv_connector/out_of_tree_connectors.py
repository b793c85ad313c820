"""Connectors as other packages write them, against the documented surface only."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file

from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


class HalvingConnector(example.ExampleHiddenStatesConnector):
    """Stores something else than it is given, as a quantising connector does."""

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock_fd: int) -> None:
        try:
            assert isinstance(lock_fd, int)
            event.synchronize()
            halves = tensors["hidden_states"] / 2
            scales = torch.full((len(halves), 1, 1), 2.0)
            save_file({**tensors, "hidden_states": halves, "scales": scales}, filename)
        finally:
            os.close(lock_fd)


class BreakingConnector(example.ExampleHiddenStatesConnector):
    """Its writer raises, and leaves the lock to us."""

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock_fd: int | None) -> None:
        with open(filename, "w") as file:
            file.write("half a file")
        raise RuntimeError("quantiser out of order")


class LateConnector(example.ExampleHiddenStatesConnector):
    """Moves rows in its own way, so it may want their blocks later."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return super().get_finished(finished_req_ids)


@dataclass
class Pending:
    req_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class StoreMetadata(KVConnectorMetadata):
    pending: list[Pending] = field(default_factory=list)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Reads the whole block table once the request has ended, on a thread of its own."""

    stored: dict[str, torch.Tensor] = {}  # noqa: RUF012 - the "remote" store

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._group = next(
            index
            for index, group in enumerate(groups)
            if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
        )
        self._layer = groups[self._group].layer_names[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._handle = self._kv_transfer_config.get_from_extra_config("handle", "store:")
        self._pending: dict[str, Pending] = {}
        self._executor = ThreadPoolExecutor(1)
        self._futures: dict[str, Future[None]] = {}
        self._ended: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._cache = kv_caches[self._layer]

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def _store(self, pending: Pending) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        rows = example.extract_from_kv_cache(self._cache, slots, len(pending.token_ids))
        self.stored[pending.req_id] = rows

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, StoreMetadata)
            for pending in metadata.pending:
                self._futures[pending.req_id] = self._executor.submit(self._store, pending)
        self._ended |= finished_req_ids
        done = {r for r in self._ended if r not in self._futures or self._futures[r].done()}
        self._ended -= done
        return done or None, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        pending = StoreMetadata(list(self._pending.values()))
        self._pending.clear()
        return pending

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        token_ids = list(request.prompt_token_ids)
        self._pending[request.request_id] = Pending(request.request_id, token_ids, block_ids)
        return True, {"handle": self._handle + request.request_id}

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        return self.request_finished(request, block_ids[self._group])

    def shutdown(self) -> None:
        self._executor.shutdown()


class PlainConnector(KVConnectorBase_V1):
    """Knows one block table only."""

    start_load_kv = wait_for_layer_load = save_kv_layer = StoreConnector.start_load_kv
    wait_for_save = StoreConnector.wait_for_save
    get_num_new_matched_tokens = StoreConnector.get_num_new_matched_tokens
    update_state_after_alloc = StoreConnector.update_state_after_alloc
    build_connector_meta = StoreConnector.build_connector_meta


class BrokenEndConnector(StoreConnector):
    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        raise RuntimeError("out of order")


class NotAConnector:
    """Only has the name of one."""

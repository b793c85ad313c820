"""A connector of another package: keys and values of a prompt, layer by layer, by their slots.

Knows one group of attention layers. ``faults`` says what goes wrong, ``calls`` what was called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

PAGE = 16

Store = dict[tuple[tuple[int, ...], str], torch.Tensor]
store: Store = {}
"""(tokens, layer) -> [tokens, heads, K | V]"""
faults: set[str] = set()
calls: list[str] = []
TOKENS = 48
"""Number of tokens that are kept of every prompt."""


@dataclass
class Job:
    request_id: str
    tokens: tuple[int, ...]
    block_ids: list[int]


@dataclass
class SlotMetadata(KVConnectorMetadata):
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    port: int


class SlotConnector(KVConnectorBase_V1):
    """Loads before the step, or with the option ``in_background`` between steps."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._in_background = self._kv_transfer_config.get_from_extra_config("in_background", False)
        self._loads: list[Job] = []
        self._saves: dict[str, Job] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._known: dict[str, tuple[int, ...]] = {}

    def _call(self, name: str) -> None:
        if not calls or calls[-1] != name:
            calls.append(name)
        if name in faults:
            raise RuntimeError(f"{name} is out of order")

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._call("register_kv_caches")
        self._caches = kv_caches

    def register_kv_cache_references(self, references: Any) -> None:
        self._call("register_kv_cache_references")
        (allocation,) = references.tensors
        assert allocation.tensor.dtype is torch.int8
        (group,) = references.group_data_refs
        assert [reference.layer for reference in group] == list(self._caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._call("set_host_xfer_buffer_ops")
        hosts = {name: torch.empty_like(cache[:2]) for name, cache in self._caches.items()}
        copy_operation(self._caches, hosts, [1], [0], "d2h")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        self._call("get_handshake_metadata")
        return Address(4711)

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:  # type: ignore[override]
        assert isinstance(preempted_req_ids, set)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._call("start_load_kv")
        for job in self._step().loads:
            self._received.add(job.request_id)
            lost = job.block_ids[1:] if "half" in faults else []
            for name, cache in self._caches.items():
                content = store[job.tokens, name]
                for index, block in enumerate(job.block_ids):
                    if block not in lost:
                        pages = content[index * PAGE : (index + 1) * PAGE]
                        cache[block, 0, : len(pages)] = pages
            self._invalid.update(lost)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call("wait_for_layer_load")

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._call("save_kv_layer")
        for job in self._step().saves:
            content = kv_layer[job.block_ids, 0].flatten(0, 1)[: len(job.tokens)]
            store.setdefault((job.tokens, layer_name), content.clone())

    def wait_for_save(self) -> None:
        self._call("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received if self._in_background else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _step(self) -> SlotMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SlotMetadata)
        return metadata

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._call("set_xfer_handshake_metadata")
        assert metadata == {0: Address(4711)}

    def on_new_request(self, request: Any) -> None:
        self._call("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._call("get_num_new_matched_tokens")
        if "too much" in faults:
            return 10_000, False
        tokens = tuple(request.prompt_token_ids[:TOKENS])
        has_it = any(known == tokens for known, _ in store)
        num = TOKENS - num_computed_tokens if has_it else 0
        return (num, self._in_background) if num > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._call("update_state_after_alloc")
        (ids,) = blocks.get_block_ids()
        assert all(not block.is_null and block.block_id for block in blocks.blocks[0])
        tokens = tuple(request.prompt_token_ids[:TOKENS])
        job = Job(request.request_id, tokens, ids[: len(tokens) // PAGE])
        if num_external_tokens:
            self._loads.append(job)
        elif len(tokens) == TOKENS:
            self._known[request.request_id] = tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._call("build_connector_meta")
        loads, self._loads = self._loads, []
        saves = []
        for new in scheduler_output.scheduled_new_reqs:
            tokens = self._known.pop(new.req_id, None)
            whole = scheduler_output.num_scheduled_tokens[new.req_id] + new.num_computed_tokens
            if tokens is not None and whole >= TOKENS:
                saves.append(Job(new.req_id, tokens, new.block_ids[0][: TOKENS // PAGE]))
        return SlotMetadata(loads, saves)

    def take_events(self) -> tuple[()]:
        self._call("take_events")
        return ()


class WantsTransferResults(SlotConnector):
    """A connector of a release with another set of hooks."""

    def get_transfer_results(self) -> None: ...


class WantsAnotherOrder(SlotConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "BLHNC"


class WantsHeadsFirst(SlotConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND"

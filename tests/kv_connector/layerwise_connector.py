"""A connector of another package that moves each layer in its own turn of the forward pass.

It knows every group. Blocks are kept in this process by the hash of their prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import PrefixConnector
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    PrefixTracker,
    SavedContent,
)
from vllm.v1.core.block_pool import BlockKey, BlockPool
from vllm.v1.kv_offload.block_copies import BlockCopy

store: dict[BlockKey, dict[str, list[torch.Tensor]]] = {}
"""Name of a block -> layer -> its data."""
calls: list[tuple[str, str]] = []
faults: set[str] = set()
"""Hooks that raise, as "hook" or "hook of layer"."""
MOST_GROUPS = 64


class Index(BlockPool):
    """The store by numbers; a state has one for each of its groups."""

    def __init__(self, num_states: int) -> None:
        super().__init__(2)
        self.num_states = num_states
        self.keys: list[BlockKey] = []

    def find(self, key: BlockKey) -> int | None:
        if key not in store:
            return None
        if key not in self.keys:
            self.keys.append(key)
        return (self.keys.index(key) + 1) * MOST_GROUPS

    def bundle(self, block: int) -> list[int]:
        return list(range(block, block + self.num_states))


@dataclass
class LayerwiseMetadata(KVConnectorMetadata):
    loads: list[tuple[BlockKey, int, int]]
    """Name of a stored block, the block that it goes to, and the group of the latter."""
    saves: list[SavedContent]


class LayerwiseConnector(PrefixConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._recurrent = kv_cache_config.recurrent_group_ids
        self._group_of = {
            name: group_id
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        if role is KVConnectorRole.SCHEDULER:
            self._index = Index(len(self._recurrent))
            self._tracker = PrefixTracker(vllm_config, kv_cache_config, self._index)
            self._copies: list[BlockCopy] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def _call(self, hook: str, layer_name: str = "") -> None:
        calls.append((hook, layer_name))
        if hook in faults or f"{hook} of {layer_name}" in faults:
            raise RuntimeError(f"{hook} is out of order")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._call("start")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call("wait", layer_name)
        for key, block, group_id in self._step().loads:
            if group_id == self._group_of[layer_name]:
                views = _tensors(self._caches[layer_name])
                for view, content in zip(views, store[key][layer_name], strict=True):
                    view[block] = content

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._call("save", layer_name)
        group_id = self._group_of[layer_name]
        for content in self._step().saves:
            groups = self._recurrent if content.is_state else [content.keys[0][0]]
            if group_id in groups:
                block = content.blocks[groups.index(group_id)]
                copies = [view[block].clone() for view in _tensors(kv_layer)]
                for key in content.keys:
                    store.setdefault(key, {})[layer_name] = copies

    def wait_for_save(self) -> None:
        self._call("end")

    def _step(self) -> LayerwiseMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LayerwiseMetadata)
        return metadata

    # ---- scheduler side

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._copies += self._tracker.take_load(request, blocks, num_external_tokens).copies

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        copies, self._copies = self._copies, []
        loads = []
        for number, block in copies:
            key = self._index.keys[number // MOST_GROUPS - 1]
            is_state = key[0] in self._recurrent
            group_id = self._recurrent[number % MOST_GROUPS] if is_state else key[0]
            loads.append((key, block, group_id))
        return LayerwiseMetadata(loads, self.plan_saves(scheduler_output))


def _tensors(view: Any) -> tuple[torch.Tensor, ...]:
    return view if isinstance(view, tuple) else (view,)


class NeedsEagerSteps(LayerwiseConnector):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

"""A connector of another package that keeps prefixes in the checkpoint's terms: token by token, and
recurrent states as their specs read them. It knows nothing but what the base class hands it.

Options: ``folder``, a file a prefix; ``undecided``, answers of "ask again" before each one that
says something; ``background``, loads that are done so many steps later, in no order.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

GRAIN = 16
Tables = tuple[list[int], ...]


@dataclass
class Prefix:
    """Tokens [start, end) in the blocks of a request, with the state that stands behind them."""

    request_id: str
    name: str
    start: int
    end: int
    tables: Tables
    state: Sequence[int]
    """One block a recurrent group."""


@dataclass
class PrefixMetadata(KVConnectorMetadata):
    loads: list[Prefix] = field(default_factory=list)
    saves: list[Prefix] = field(default_factory=list)


class CheckpointConnector(KVConnectorBase_V1, SupportsHMA):
    loads_rows = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        self._folder = Path(option("folder", ""))
        self._undecided: int = option("undecided", 0)
        self._background: int = option("background", 0)
        self._plan = kv_cache_config
        self._asked: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, Tables] = {}
        self._found: dict[str, int] = {}
        self._loads: list[Prefix] = []
        self._under_way: list[tuple[int, Prefix]] = []
        self._num_steps = 0

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._num_steps += 1
        for prefix in self._step().loads:
            late = self._num_steps + self._background * (1 + len(self._under_way) % 3)
            self._under_way.insert(0, (late, prefix))
            if not self._background:
                self._load(prefix)

    def _load(self, prefix: Prefix) -> None:
        stored = torch.load(self._folder / prefix.name)
        for group_id, group in enumerate(self._plan.kv_cache_groups):
            for layer in group.layer_names:
                spec, table = self._plan.spec_of(layer), prefix.tables[group_id]
                if spec.is_recurrent:
                    spec.write_state(self._caches[layer], table[0], stored[layer])
                    again = spec.read_state(self._caches[layer], table[0])
                    assert all(map(torch.equal, again, stored[layer])), "bits were lost"
                    continue
                for token in range(prefix.start, prefix.end):
                    block = table[token // spec.block_size]
                    if block:
                        assert token in stored[layer], f"{layer} lacks token {token}"
                        self._cell(layer, block, token).copy_(stored[layer][token])

    def _cell(self, layer: str, block: int, token: int) -> torch.Tensor:
        cache: torch.Tensor = self._caches[layer]
        spec = self._plan.spec_of(layer)
        inside = token % spec.block_size
        if spec.holds_rows:
            return cache[block, :, inside]
        return cache[block, inside // GRAIN, inside % GRAIN]

    def wait_for_save(self) -> None:
        recurrent = self._plan.recurrent_group_ids
        for prefix in self._step().saves:
            stored: dict[str, Any] = {}
            for group_id, group in enumerate(self._plan.kv_cache_groups):
                for layer in group.layer_names:
                    spec, table = self._plan.spec_of(layer), prefix.tables[group_id]
                    if spec.is_recurrent:
                        block = prefix.state[recurrent.index(group_id)]
                        stored[layer] = spec.read_state(self._caches[layer], block)
                        continue
                    stored[layer] = {
                        token: self._cell(layer, table[token // spec.block_size], token).clone()
                        for token in range(prefix.end)
                        if table[token // spec.block_size]
                    }
            torch.save(stored, self._folder / f".{prefix.name}")
            (self._folder / f".{prefix.name}").rename(self._folder / prefix.name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self._background:
            return None, None
        due = [prefix for late, prefix in self._under_way if late <= self._num_steps]
        self._under_way = [one for one in self._under_way if one[0] > self._num_steps]
        for prefix in due:
            self._load(prefix)
        return None, {prefix.request_id for prefix in due}

    def _step(self) -> PrefixMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PrefixMetadata)
        return metadata

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        asked = self._asked.get(request.request_id, 0)
        self._asked[request.request_id] = asked + 1
        if asked % (1 + self._undecided) < self._undecided:
            return None, False
        longest = (request.num_tokens - 1) // GRAIN * GRAIN
        for end in range(longest, num_computed_tokens, -GRAIN):
            if (self._folder / _name(request, end)).exists():
                self._found[request.request_id] = end
                return end - num_computed_tokens, self._background > 0
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            end = self._found[request.request_id]
            name, tables = _name(request, end), blocks.get_block_ids()
            start = end - num_external_tokens
            self._loads.append(Prefix(request.request_id, name, start, end, tables, ()))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        step = scheduler_output
        begins = {}
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            begins[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, added, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if added is not None and request_id in cached.resumed_req_ids:
                self._tables[request_id] = tuple(list(ids) for ids in added)
            elif added is not None:
                for table, ids in zip(self._tables[request_id], added, strict=True):
                    table += ids
            begins[request_id] = start
        saves = []
        for request_id, start in begins.items():
            request, end = self._requests[request_id], start + step.num_scheduled_tokens[request_id]
            positions: list[tuple[int, Sequence[int]]] = [
                (start + kept.num_tokens, kept.block_ids)
                for kept in step.state_snapshots.get(request_id, ())
            ]
            if not self._plan.recurrent_group_ids and start < request.num_prompt_tokens <= end:
                positions = [(request.num_prompt_tokens // GRAIN * GRAIN, ())]
            for position, state in positions:
                name = _name(request, position)
                if position and not (self._folder / name).exists():
                    tables = self._tables[request_id]
                    saves.append(Prefix(request_id, name, 0, position, tables, state))
        return PrefixMetadata(loads, saves)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        for known in (self._requests, self._tables, self._found, self._asked):
            known.pop(request.request_id, None)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))


def checkpoint_connector(folder: Path, **options: Any) -> dict[str, Any]:
    """One connector's config; the folder is made."""
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "CheckpointConnector",
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"folder": str(folder), **options},
    }


def _name(request: Any, end: int) -> str:
    return hashlib.sha256(array("q", request.all_token_ids[:end]).tobytes()).hexdigest() + ".pt"

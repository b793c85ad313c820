"""A connector for the fake worker: prefixes that some store has, and what can go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

from tests.core.fake_worker import FakeWorker, prefix_ids
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


@dataclass
class Load:
    """A load that is to be written into the blocks of a request."""

    request_id: str
    tokens: list[int]
    start: int
    block_ids: tuple[list[int], ...]
    steps_left: int
    is_broken: bool


class LoadingConnector(Mock):
    """Offers ``offers[request id]`` tokens in all, in the background after ``delays`` steps."""

    reply_when_saved = False
    rows_leave_each_step = False
    sends_rows_on = False
    loads_rows = True

    def prepare(self, grain: int = 1) -> None:
        self.grain = grain
        self.offers: dict[str, int] = {}
        self.delays: dict[str, int] = {}
        self.undecided: dict[str, int] = {}
        self.broken: set[str] = set()
        self.raises_in: dict[str, str] = {}
        self.loads: dict[str, Load] = {}
        self.num_loaded = 0
        self.ended: list[str] = []

    def get_num_new_matched_tokens(self, request: Request, num: int) -> tuple[int | None, bool]:
        name = request.request_id
        if self.raises_in.get(name) == "ask":
            raise RuntimeError("no answer")
        if self.undecided.get(name, 0):
            self.undecided[name] -= 1
            return None, False
        total = min(self.offers.get(name, 0), request.num_tokens) // self.grain * self.grain
        return max(0, total - num), name in self.delays

    def update_state_after_alloc(self, request: Request, blocks: Any, count: int) -> None:
        name = request.request_id
        if self.raises_in.get(name) == "alloc":
            raise RuntimeError("no blocks")
        if not count:
            return
        total = min(self.offers[name], request.num_tokens) // self.grain * self.grain
        ids = blocks.get_block_ids()
        delay = self.delays.get(name, 0)
        tokens = list(request.all_token_ids[:total])
        broken = name in self.broken
        self.loads[name] = Load(name, tokens, total - count, ids, delay, broken)

    def build_connector_meta(self, scheduled: SchedulerOutput) -> None:
        return None

    def request_finished_all_groups(self, request: Request, blocks: Any) -> tuple[bool, None]:
        self.ended.append(request.request_id)
        return False, None

    request_finished = request_finished_all_groups

    def take_events(self) -> tuple[()]:
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    # ---- what its worker side would do

    def work(self, plan: KVCacheConfig, worker: FakeWorker) -> KVConnectorOutput:
        """Load what is due, before the forward pass."""
        output = KVConnectorOutput()
        for name, load in list(self.loads.items()):
            if load.steps_left:
                load.steps_left -= 1
                continue
            del self.loads[name]
            if name in self.delays:
                output.finished_recving.add(name)
            self._write(load, plan, worker, output)
            self.num_loaded += len(load.tokens) - load.start
        return output

    def _write(
        self, load: Load, plan: KVCacheConfig, worker: FakeWorker, output: KVConnectorOutput
    ) -> None:
        ids = prefix_ids(load.tokens)
        for group_id, group in enumerate(plan.kv_cache_groups):
            spec, table = group.kv_cache_spec, load.block_ids[group_id]
            if isinstance(spec, MambaSpec):
                worker._write(group_id, table[0], "state", ids[-1])
                continue
            size = spec.block_size
            end = len(ids) - (len(ids) // 3 if load.is_broken else 0)
            for position in range(load.start, len(ids)):
                block = table[position // size]
                if position >= end:
                    output.invalid_block_ids.add(block)
                elif block:
                    worker._write(group_id, block, position % size, ids[position])
            has_rows = isinstance(spec, HiddenStateCacheSpec)
            assert not has_rows or all(table), "rows of every token have a place"

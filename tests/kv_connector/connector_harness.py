"""A stand-in for the engine around a connector: block tables, a poisoned pool, steps.

It keeps the promises that the scheduler and the runner make to a connector, and takes
back what they may take back: memory that a connector should no longer look at holds NaN.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.exceptions import Failure
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

LAYER_NAME = "cache_only_layers.3"
PATIENCE_S = 60


@dataclass
class Tracked:
    """A request, as scheduler and runner keep it."""

    request: Request
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    known_to_workers: bool = False
    preempted: bool = False


class Harness:
    """One connector in both roles, and a pool whose group 1 holds the rows."""

    def __init__(
        self,
        transfer_config: KVTransferConfig,
        layer_ids: tuple[int, ...] = (0, 3, 5),
        hidden_size: int = 7,
        rows_per_block: int = 5,
        num_blocks: int = 200,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layer_ids, self.hidden_size, self.dtype = layer_ids, hidden_size, dtype
        self.rows_per_block = rows_per_block
        config = cast(
            VllmConfig,
            SimpleNamespace(
                kv_transfer_config=transfer_config,
                speculative_config=SimpleNamespace(
                    method="extract_hidden_states", hidden_state_layer_ids=layer_ids
                ),
                model_config=SimpleNamespace(model="tiny-model"),
                parallel_config=ParallelConfig(),
            ),
        )
        cache_config = self._cache_config(num_blocks)
        make = KVConnectorFactory.create_connector
        self.scheduler = make(config, KVConnectorRole.SCHEDULER, cache_config)
        self.worker = make(config, KVConnectorRole.WORKER, cache_config)

        # Strided like the pool of a hybrid: blocks are wider than the rows in them.
        num_layers = len(layer_ids)
        row_size = num_layers * hidden_size
        self.pool = torch.full((num_blocks, rows_per_block * row_size + 24), float("nan")).to(dtype)
        strides = (self.pool.stride(0), row_size, hidden_size, 1)
        shape = (num_blocks, rows_per_block, num_layers, hidden_size)
        self.row_cache = torch.as_strided(self.pool, shape, strides, storage_offset=8)
        self.worker.register_kv_caches({LAYER_NAME: self.row_cache.permute(0, 2, 1, 3)})

        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.requests: dict[str, Tracked] = {}
        self.finished_ids: set[str] = set()
        self.held_blocks: dict[str, list[int]] = {}
        self.done: set[str] = set()
        self.failures: dict[str, str] = {}

    def _cache_config(self, num_blocks: int) -> KVCacheConfig:
        attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=self.dtype)
        rows = HiddenStateCacheSpec(
            block_size=self.rows_per_block,
            num_kv_heads=len(self.layer_ids),
            head_size=self.hidden_size,
            dtype=self.dtype,
        )
        groups = [
            KVCacheGroupSpec(layer_names=["model.layers.0.self_attn"], kv_cache_spec=attention),
            KVCacheGroupSpec(layer_names=[LAYER_NAME], kv_cache_spec=rows),
        ]
        return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def rows(self, request_id: str, num_tokens: int) -> torch.Tensor:
        """Rows that the model computes for a request, [tokens, layers, hidden]."""
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        generator = torch.Generator().manual_seed(seed)
        shape = (4096, len(self.layer_ids), self.hidden_size)
        return torch.randn(shape, generator=generator)[:num_tokens].to(self.dtype)

    # ---- what the scheduler does

    def add(
        self, request_id: str, num_prompt_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Request:
        extra = None if params is None else {"kv_transfer_params": dict(params)}
        request = Request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(range(100, 100 + num_prompt_tokens)),
                sampling_params=SamplingParams(max_tokens=64, extra_args=extra),
                arrival_time=0.0,
            )
        )
        self.scheduler.check_request(request)
        self.requests[request_id] = Tracked(request)
        return request

    def preempt(self, request_id: str) -> None:
        tracked = self.requests[request_id]
        self._release(tracked.table)
        tracked.table, tracked.num_computed, tracked.preempted = [], 0, True

    def finish(
        self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> dict[str, Any] | None:
        """End a request; returns the params of its reply."""
        tracked = self.requests.pop(request_id)
        tracked.request.status = status
        assert isinstance(self.scheduler, SupportsHMA)
        works_on, params = self.scheduler.request_finished_all_groups(
            tracked.request, ([], list(tracked.table))
        )
        if works_on and not self.scheduler.rows_leave_each_step:
            self.held_blocks[request_id] = tracked.table
        else:
            self._release(tracked.table)
        self.finished_ids.add(request_id)
        return params

    def abort_delivery(self, request: Request) -> None:
        """The client of an ended request goes away before its reply."""
        request.status = RequestStatus.FINISHED_ABORTED
        assert isinstance(self.scheduler, SupportsHMA)
        answer = self.scheduler.request_finished_all_groups(request, ([], []))
        assert answer == (False, None)

    def step(
        self, num_tokens: Mapping[str, int] | None = None, hits: Mapping[str, int] | None = None
    ) -> None:
        """One engine step. ``hits``: rows of a request that the prefix cache holds."""
        scheduled = dict(num_tokens or {})
        for request_id, num_hit in (hits or {}).items():
            self._grow(request_id, num_hit)
            self._compute(request_id, num_hit)
        output = self._scheduler_output(scheduled)
        self.finished_ids = set()
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)

        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        if scheduled:
            for request_id, count in scheduled.items():
                self._compute(request_id, count)
            self.worker.wait_for_save()
            if self.scheduler.rows_leave_each_step:
                for request_id in scheduled:
                    self._release_full_blocks(self.requests[request_id])
        done, _ = self.worker.get_finished(output.finished_req_ids)
        self._learn(done or set(), self.worker.take_failures())
        self.worker.clear_connector_metadata()

    def idle_until_done(self, *request_ids: str) -> None:
        """Steps with nothing scheduled until these are reported."""
        self._idle_until(lambda: self.done.issuperset(request_ids))

    def idle_until_failed(self, request_id: str) -> None:
        """Steps with nothing scheduled until a failure of this one is reported."""
        self._idle_until(lambda: request_id in self.failures)

    def _idle_until(self, is_reported: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_reported():
            assert time.monotonic() < deadline, f"done: {self.done}, failed: {self.failures}"
            self.step()

    def _scheduler_output(self, scheduled: dict[str, int]) -> SchedulerOutput:
        new, cached = [], CachedRequestData()
        for request_id, count in scheduled.items():
            tracked = self.requests[request_id]
            known_blocks = 0 if tracked.preempted else len(tracked.table)
            num_computed = tracked.num_computed
            if not tracked.known_to_workers:
                known_blocks = 0
            self._grow(request_id, num_computed + count)
            blocks = ([7], tracked.table[known_blocks:])
            if tracked.known_to_workers:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(blocks if blocks[1] else None)
                cached.num_computed_tokens.append(num_computed)
                if tracked.preempted:
                    cached.resumed_req_ids.add(request_id)
            else:
                request = tracked.request
                params = request.sampling_params
                new.append(
                    NewRequestData(
                        request_id, request.prompt_token_ids, params, blocks, num_computed
                    )
                )
            tracked.known_to_workers, tracked.preempted = True, False
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished_ids,
        )

    def _grow(self, request_id: str, num_tokens: int) -> None:
        table = self.requests[request_id].table
        while len(table) * self.rows_per_block < num_tokens:
            table.append(self.free_blocks.pop())

    def _compute(self, request_id: str, count: int) -> None:
        """Put rows into the pool, and a sampled token behind the last one known."""
        tracked = self.requests[request_id]
        start, end = tracked.num_computed, tracked.num_computed + count
        assert end <= tracked.request.num_tokens
        rows = self.rows(request_id, end)
        for token in range(start, end):
            block = tracked.table[token // self.rows_per_block]
            self.row_cache[block, token % self.rows_per_block] = rows[token]
        tracked.num_computed = end
        if end == tracked.request.num_tokens:
            tracked.request.append_output_token_ids([9000 + end])

    def _release_full_blocks(self, tracked: Tracked) -> None:
        num_full = tracked.num_computed // self.rows_per_block
        self._release(tracked.table[:num_full])
        tracked.table[:num_full] = [0] * num_full

    def _release(self, blocks: list[int]) -> None:
        held = [block for block in blocks if block]
        self.pool[held] = float("nan")
        self.free_blocks[:0] = held

    def _learn(self, done: set[str], failures: dict[str, Failure]) -> None:
        self.done |= done
        self.failures |= {name: failure.message for name, failure in failures.items()}
        for request_id in done:
            self._release(self.held_blocks.pop(request_id, []))


MakeHarness = Callable[..., Harness]
"""The fixture ``make_harness``: connector, module_path, options, and sizes of the harness."""

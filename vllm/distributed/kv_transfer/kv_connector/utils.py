"""Helpers for connectors: merging reports of workers, copying blocks, a step's requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput, SaveStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

EngineId = str
BlockIds = tuple[list[int], ...] | list[list[int]]
"""Block ids of one request, one list for each group."""


class KVOutputAggregator:
    """Merges the outputs of a step's workers.

    Sending, or receiving, of a request is done when ``expected_finished_count`` workers have
    reported it, in this step or in earlier ones.
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = expected_finished_count
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> KVOutputAggregator:
        """Expect the connector's ``get_finished_count`` reports, by default one of each worker."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """Return the output of worker ``output_rank``, with the reports of all connectors."""
        reports = [
            output.kv_connector_output
            for output in outputs
            if output is not None and output.kv_connector_output is not None
        ]
        chosen = outputs[output_rank]
        merged = self.merge(reports)
        return None if chosen is None else replace(chosen, kv_connector_output=merged)

    def async_aggregate(
        self, futures: Sequence[Future[ModelRunnerOutput | None]], output_rank: int = 0
    ) -> Future[ModelRunnerOutput | None]:
        """Do the same for outputs that come later; an exception of one becomes the result's."""
        result: Future[ModelRunnerOutput | None] = Future()
        left, counting = set(futures), threading.Lock()

        def take(future: Future[ModelRunnerOutput | None]) -> None:
            with counting:
                left.discard(future)
                is_last = not left
            if result.done():
                return
            try:
                future.result()
                if is_last:
                    result.set_result(self.aggregate([f.result() for f in futures], output_rank))
            except BaseException as error:  # includes CancelledError
                result.set_exception(error)

        for future in futures:
            future.add_done_callback(take)
        return result

    def merge(self, reports: Sequence[KVConnectorOutput]) -> KVConnectorOutput | None:
        """Merge reports that the workers' connectors made since the last call; None: no reports.

        If parts of them cannot be aggregated, nothing is taken in.
        """
        if not reports:
            return None
        merged = KVConnectorOutput(
            kv_connector_stats=_aggregate([report.kv_connector_stats for report in reports]),
            kv_connector_worker_meta=_aggregate([r.kv_connector_worker_meta for r in reports]),
            kv_cache_events=_merge_events([report.kv_cache_events for report in reports]),
        )
        for report in reports:
            self._sent.update(report.finished_sending or ())
            self._received.update(report.finished_recving or ())
            merged.failures |= report.failures
            merged.completed_params |= report.completed_params
            merged.invalid_block_ids |= report.invalid_block_ids
            merged.void_req_ids |= report.void_req_ids
            merged.late_req_ids |= report.late_req_ids
            merged.load_error = merged.load_error or report.load_error
            if report.save_stats is not None:
                merged.save_stats = (merged.save_stats or SaveStats()) + report.save_stats
        merged.finished_sending = self._take_done(self._sent)
        merged.finished_recving = self._take_done(self._received)
        return merged

    def _take_done(self, counts: Counter[str]) -> set[str]:
        done = {request_id for request_id, count in counts.items() if count >= self._expected}
        for request_id in done:
            del counts[request_id]
        return done


def _aggregate(parts: Sequence[Any]) -> Any:
    """Aggregate the parts that are not None; None: there are none."""
    found = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.aggregate(other), found) if found else None


def _merge_events(parts: Sequence[Any]) -> Any:
    """Merge the events of all workers; the result counts its workers. A worker with several
    connectors has a list with the events of each."""
    found = [part for part in parts if part is not None]
    if found and isinstance(found[0], list):
        return [_merge_events(of_connector) for of_connector in zip(*found, strict=True)]
    for part in found[1:]:
        found[0].add_events(part.get_all_events())
        found[0].increment_workers(part.get_number_of_workers())
    return found[0] if found else None


def copy_kv_blocks(
    sources: dict[str, torch.Tensor],
    destinations: dict[str, torch.Tensor],
    source_blocks: list[int],
    destination_blocks: list[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copy blocks of every layer between views [blocks, ...] on the device and the host."""
    for name, source in sources.items():
        target = destinations[name]
        target[destination_blocks] = source[source_blocks].to(target.device)


def get_kv_connector_cache_layout() -> str:
    """Return the layout of attention caches, "NHD" or "HND", in the engine that is being built.

    RuntimeError: no engine is being built (outside of ``set_current_vllm_config``).
    """
    return get_current_vllm_config().cache_config.kv_cache_layout or "NHD"


def yield_req_data(
    scheduler_output: SchedulerOutput,
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool]]:
    """Yield for each request of a step its id, its new blocks, and whether they replace all earlier
    ones (the request was preempted)."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, block_ids, request_id in cached.resumed_req_ids

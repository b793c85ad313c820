"""Ended requests with something outstanding: a last output that waits for rows or a file, or
blocks that a connector still reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    StillReadingError,
    call_request_finished,
    supports_hma,
)
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler_connector import ConnectorCalls
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import ExtractedRows, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Deliveries:
    """The outputs of a step, and the last outputs that cannot go out yet.

    ``requests``: the scheduler's own; a request leaves it when nothing is outstanding.
    """

    def __init__(
        self,
        requests: dict[str, Request],
        kv_cache_manager: KVCacheManager,
        num_groups: int,
        calls: ConnectorCalls | None,
    ) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self._requests = requests
        self._manager = kv_cache_manager
        self._calls = calls
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self._held_outputs: dict[str, EngineCoreOutput] = {}
        self._held_blocks: dict[str, Request] = {}
        self._held_loads: dict[str, Request] = {}  # blocks that a load may still write
        # Requests that wait for rows, and requests that wait for the connector, since when.
        self._awaits_rows: set[str] = set()
        self._awaited_since: dict[str, float] = {}

    def take_outputs(self) -> list[EngineCoreOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def begin(
        self,
        request: Request,
        output: EngineCoreOutput,
        *,
        was_told: bool,
        is_loading: bool = False,
    ) -> None:
        """Take in a request that ended with this last output; free its blocks or hold them.

        was_told: the connector knows the request; is_loading: it may still write the blocks.
        """
        is_delayed = waits_for_file = False
        # The connector has nothing to deliver for a request that never began.
        if self._calls is not None and (was_told or is_loading):
            block_ids = self._manager.block_ids(request.request_id)
            try:
                is_delayed, output.kv_transfer_params = self._tell_end(request, block_ids)
                waits_for_file = is_delayed and self._calls.connector.reply_when_saved
            except FailureError as error:  # nothing has begun: the blocks are given back
                is_delayed = isinstance(error.__cause__, StillReadingError)
                self._fail_end(request, output, error.failure)
            if is_delayed and not self._calls.connector.rows_leave_each_step:
                self._held_blocks[request.request_id] = request
        if is_loading:
            self._held_loads[request.request_id] = request
        self._free_unless_held(request)
        waits_for_rows = request.extraction is not None and output.finish_reason in _GOOD_ENDS
        if not (waits_for_file or waits_for_rows):
            self._hand_out(request.request_id, output)
            return
        self._held_outputs[request.request_id] = output
        if waits_for_file:
            self._awaited_since[request.request_id] = time.monotonic()
        if waits_for_rows:
            self._awaits_rows.add(request.request_id)

    def _tell_end(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the connector that a request ended; return its answer. FailureError: it failed."""
        if self._calls is None:
            return False, None
        connector = self._calls.connector
        all_groups = supports_hma(connector)
        hook = "request_finished_all_groups" if all_groups else "request_finished"
        return self._calls.call(hook, lambda: call_request_finished(connector, request, block_ids))

    def _report_cancelled(self, request: Request) -> None:
        if self._calls is not None and self._calls.connector.reply_when_saved:
            with suppress(FailureError):
                self._tell_end(request, self._no_blocks)

    def _fail_end(self, request: Request, output: EngineCoreOutput, failure: Failure) -> None:
        """Fail a request at whose end the connector failed; what it has saved is not wanted."""
        if output.finish_reason not in _GOOD_ENDS:  # not wanted in any case
            return
        request.status = RequestStatus.FINISHED_ERROR
        output.end(FinishReason.ERROR, None, failure)
        self._report_cancelled(request)

    def _free_unless_held(self, request: Request) -> None:
        request_id = request.request_id
        if request_id not in self._held_blocks and request_id not in self._held_loads:
            self._manager.free(request)

    def take_load(self, request_id: str) -> None:
        """Take in the report of a background load whose request has ended."""
        request = self._held_loads.pop(request_id, None)
        if request is not None:
            self._free_unless_held(request)
            if request_id not in self._held_outputs:
                self._forget(request_id)

    def drop(self, request: Request) -> None:
        """Abort an ended request whose data are still on their way."""
        output = self._held_outputs.get(request.request_id)
        if output is None:
            return
        request.status = RequestStatus.FINISHED_ABORTED
        self._report_cancelled(request)
        output.finish_reason = FinishReason.ABORT
        output.kv_transfer_params = None
        self._release(request.request_id)

    def fail(self, request: Request, failure: Failure) -> None:
        """Fail an ended request whose data cannot be delivered."""
        held = self._held_outputs.get(request.request_id)
        if held is None:
            return
        held.end(FinishReason.ERROR, None, failure)
        held.kv_transfer_params = None
        self._awaits_rows.discard(request.request_id)
        self._release_if_ready(request.request_id)

    def fail_overdue(self) -> None:
        """Fail replies for which the connector took too long, and tell it that they are dropped."""
        timeout = None if self._calls is None else self._calls.timeout_seconds
        for request_id, since in list(self._awaited_since.items()):
            if timeout is not None and time.monotonic() - since > timeout:
                self.drop(self._requests[request_id])
                message = f"the connector delivered nothing within kv_timeout_seconds={timeout:g}"
                failure = Failure(FailureKind.CONNECTOR_FAILED, message)
                self.outputs[-1].end(FinishReason.ERROR, None, failure)

    def fail_lost(self, request_ids: Iterable[str], failure: Failure) -> None:
        """Fail requests whose end the worker side will not hear of: their data cannot come."""
        for request_id in request_ids:
            held = self._held_outputs.get(request_id)
            request = self._requests.get(request_id)
            if held is None or request is None or request_id not in self._awaited_since:
                continue
            self._held_blocks.pop(request_id, None)
            self._free_unless_held(request)
            self.drop(request)
            held.end(FinishReason.ERROR, None, failure)

    def take_rows(self, extracted: Mapping[str, ExtractedRows]) -> None:
        """Take in the rows for callers of requests whose rows are complete."""
        for request_id, rows in extracted.items():
            if request_id in self._awaits_rows:
                self._awaits_rows.discard(request_id)
                self._held_outputs[request_id].extracted = rows
                self._release_if_ready(request_id)

    def take_parts(
        self, parts: Mapping[str, ExtractedRows], requests: Mapping[str, Request], step_number: int
    ) -> None:
        """Hand out rows of requests under way, unless they are computed again after the step."""
        for request_id, rows in parts.items():
            request = requests.get(request_id)
            if request is not None and step_number > request.void_steps:
                self.outputs.append(EngineCoreOutput(request_id=request_id, extracted=rows))

    def take_saves(self, report: KVConnectorOutput) -> None:
        for request_id in report.finished_sending:
            holder = self._held_blocks.pop(request_id, None)
            if holder is not None:
                self._free_unless_held(holder)
            held = self._held_outputs.get(request_id)
            params = report.completed_params.get(request_id)
            if held is not None and held.kv_transfer_params is not None and params:
                held.kv_transfer_params.update(params)
            if held is not None:
                self._awaited_since.pop(request_id, None)
                self._release_if_ready(request_id)
            elif holder is not None:
                self._forget(request_id)

    def _release_if_ready(self, request_id: str) -> None:
        if request_id not in self._awaits_rows and request_id not in self._awaited_since:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        """Hand out a last output that waits for nothing more."""
        self._awaits_rows.discard(request_id)
        self._awaited_since.pop(request_id, None)
        self._hand_out(request_id, self._held_outputs.pop(request_id))

    def _hand_out(self, request_id: str, output: EngineCoreOutput) -> None:
        self.outputs.append(output)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if request_id not in self._held_blocks and request_id not in self._held_loads:
            del self._requests[request_id]

    def check_integrity(self, alive: set[str], have_blocks: set[str]) -> None:
        """Assert that every request is alive or outstanding, and that no others have blocks."""
        held_blocks = self._held_blocks.keys() | self._held_loads.keys()
        assert set(self._requests) == alive | held_blocks | set(self._held_outputs)
        for manager in self._manager.coordinator.token_managers:
            assert set(manager.tables) <= have_blocks | held_blocks

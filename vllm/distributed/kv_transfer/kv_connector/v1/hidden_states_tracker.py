"""Scheduler side of the hidden-states connector: plans which rows leave in which step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.logger import init_logger
from vllm.utils.text import brief, did_you_mean
from vllm.v1.core.block_pool import NULL_BLOCK
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

TRANSFER_PARAMS = ("hidden_states_path", "include_output_tokens")
"""Keys of ``kv_transfer_params`` that have an effect."""


@dataclass(frozen=True)
class RowRange:
    """Rows of one request that exist after this step and have not left yet."""

    request_id: str
    path: str
    start: int
    end: int
    block_ids: list[int]
    """Blocks of rows ``start // rows_per_block`` to ``(end - 1) // rows_per_block``."""
    num_rows_known: int
    """Rows that the request will have, without those of output tokens, which may be added."""

    def __len__(self) -> int:
        return self.end - self.start

    def part(self, start: int, end: int, rows_per_block: int) -> RowRange:
        """Return the rows ``start .. end - 1`` of these."""
        if (start, end) == (self.start, self.end):
            return self
        first = self.start // rows_per_block
        blocks = slice(start // rows_per_block - first, (end - 1) // rows_per_block - first + 1)
        return replace(self, start=start, end=end, block_ids=self.block_ids[blocks])


@dataclass
class HiddenStatesMetadata(KVConnectorMetadata):
    """One step's work for the worker side."""

    rows: list[RowRange] = field(default_factory=list)
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Token ids of requests whose file is to be completed, by request id."""
    discarded: list[str] = field(default_factory=list)
    """Requests whose data are to be removed."""
    taken: set[str] = field(default_factory=set)
    """Requests whose report was taken in: their data stay."""
    nothing_scheduled: bool = False
    """True if this step has no forward pass, so there is time to wait for the disk."""


@dataclass
class _Progress:
    """The state of a request between its first and its last step."""

    path: str
    num_prompt_rows: int
    num_rows_wanted: int | None
    """Rows to send; None: every row that is computed."""
    num_rows_sent: int = 0
    num_rows_before: int = 0
    """Rows that were sent before the request last began to run."""
    first_block: int = 0
    """Table position of ``block_ids[0]``, the first block with rows that are still to be sent."""
    block_ids: list[int] = field(default_factory=list)
    table_length: int = 0
    """Number of table positions known so far; less than ``first_block`` while rows that were sent
    are computed again."""

    def add_blocks(self, block_ids: list[int]) -> None:
        """Extend the table with these blocks; blocks of rows already sent are not kept."""
        if self.num_rows_sent != self.num_rows_wanted:
            self.block_ids += block_ids[max(0, self.first_block - self.table_length) :]
        self.table_length += len(block_ids)

    def replace_blocks(self, block_ids: list[int]) -> None:
        """Start again with another table."""
        self.num_rows_before = self.num_rows_sent
        self.block_ids = []
        self.table_length = 0
        self.add_blocks(block_ids)

    def take_blocks(self, end: int, rows_per_block: int) -> list[int]:
        """Return the blocks of the unsent rows before ``end``, and count these rows as sent."""
        num_blocks = (end - 1) // rows_per_block - self.first_block + 1
        taken = self.block_ids[:num_blocks]
        assert len(taken) == num_blocks, f"no block for row {end - 1}"
        assert NULL_BLOCK not in taken, f"rows before {end} were freed before they were sent"
        self.num_rows_sent = end
        still_needed = end // rows_per_block
        del self.block_ids[: still_needed - self.first_block]
        self.first_block = still_needed
        if end == self.num_rows_wanted:
            self.block_ids = []
        return taken


class RowTracker:
    """Follows the scheduler's decisions by token counts and block ids; it has no tensors."""

    def __init__(self, options: HiddenStatesOptions, group_id: int, rows_per_block: int) -> None:
        self._options = options
        self._group_id = group_id
        self._rows_per_block = rows_per_block
        self._requests: dict[str, _Progress] = {}
        # Waiting and running requests that chose their path.
        self._custom_paths: weakref.WeakValueDictionary[str, Request] = (
            weakref.WeakValueDictionary()
        )
        self._finished: dict[str, list[int]] = {}
        self._discarded: list[str] = []
        self._taken: set[str] = set()

    def check(self, request: Request) -> None:
        """Raise ValueError for ``kv_transfer_params`` that cannot be served."""
        params = request.kv_transfer_params
        if params is None:
            return
        if not isinstance(params, Mapping):
            raise ValueError(f"kv_transfer_params={brief(params)} must be an object")
        _check_spelling(params)
        include_output = params.get("include_output_tokens", False)
        if not isinstance(include_output, bool):
            raise ValueError(f"include_output_tokens={brief(include_output)} must be true or false")
        custom = params.get("hidden_states_path")
        if custom is None:
            return
        if not self._options.allow_custom_save_path:
            logger.warning_once(
                "a request sets its own hidden_states_path, which is ignored: "
                "set allow_custom_save_path in kv_connector_extra_config to honour it"
            )
            return
        if not isinstance(custom, str):
            raise ValueError(f"hidden_states_path={brief(custom)} must be a string")
        path = self._options.save_path(request.request_id, params)
        self._options.check_save_path(path)
        real_path = os.path.realpath(path)  # one file has many spellings
        other = self._custom_paths.get(real_path)
        if other is not None and not other.is_finished():
            raise ValueError(
                f"hidden_states_path={brief(path)} is being written by another request "
                f"({other.request_id}); give each request its own path"
            )
        self._custom_paths[real_path] = request

    def plan_step(self, step: SchedulerOutput) -> HiddenStatesMetadata:
        """Return the rows that leave in ``step``, and the requests that ended before it."""
        metadata = HiddenStatesMetadata(
            finished=self._finished,
            discarded=self._discarded,
            taken=self._taken,
            nothing_scheduled=step.total_num_scheduled_tokens == 0,
        )
        self._finished, self._discarded, self._taken = {}, [], set()
        scheduled = step.num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            if (progress := self._begin(new)) is None:
                continue
            progress = self._requests.setdefault(new.req_id, progress)
            progress.replace_blocks(new.block_ids[self._group_id])
            num_computed = new.num_computed_tokens + scheduled[new.req_id]
            self._send(metadata, new.req_id, progress, num_computed)

        cached = step.scheduled_cached_reqs
        for request_id, new_blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            progress = self._requests.get(request_id)
            if progress is None:  # no file is wanted
                continue
            block_ids = new_blocks[self._group_id] if new_blocks is not None else []
            if request_id in cached.resumed_req_ids:
                progress.replace_blocks(block_ids)
            else:
                progress.add_blocks(block_ids)
            self._send(metadata, request_id, progress, num_computed + scheduled[request_id])
        return metadata

    def take_rows_back(self, request_id: str) -> None:
        """Send the rows again that were sent since the request last began to run."""
        progress = self._requests.get(request_id)
        if progress is not None:
            progress.num_rows_sent = progress.num_rows_before
            progress.first_block = progress.num_rows_before // self._rows_per_block

    def take_report(self, finished_req_ids: set[str]) -> None:
        """Note that requests whose data are complete cannot be discarded any more."""
        self._taken |= finished_req_ids

    def finish(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request: the next step completes or removes its file.

        May be called again with an aborted request, while the file is being completed.
        """
        progress = self._requests.pop(request.request_id, None)
        if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            self._discarded.append(request.request_id)
            return False, None
        if progress is None:  # never scheduled, or no file is wanted
            return False, None
        token_ids = request.all_token_ids[: request.num_prompt_tokens]
        if progress.num_rows_wanted is None and request.num_output_tokens:
            # The last token was sampled, but never went through the model.
            token_ids = request.all_token_ids[:-1]
        self._finished[request.request_id] = token_ids
        return True, {"hidden_states_path": progress.path}

    def _begin(self, new: NewRequestData) -> _Progress | None:
        """Return the state of a new request; None if no file is wanted."""
        extra = new.sampling_params.extra_args or {}
        params = extra.get("kv_transfer_params")
        if not self._options.writes_file(params):
            return None
        params = params or {}
        all_rows = params.get("include_output_tokens", False)
        return _Progress(
            path=self._options.save_path(new.req_id, params),
            num_prompt_rows=len(new.prompt_token_ids),
            num_rows_wanted=None if all_rows else len(new.prompt_token_ids),
        )

    def _send(
        self,
        metadata: HiddenStatesMetadata,
        request_id: str,
        progress: _Progress,
        num_computed: int,
    ) -> None:
        """Send the rows before ``num_computed``, and forget the blocks that they fill."""
        start = progress.num_rows_sent
        end = num_computed
        if progress.num_rows_wanted is not None:
            end = min(end, progress.num_rows_wanted)
        if end <= start:  # all sent, or computed again after a preemption
            return
        block_ids = progress.take_blocks(end, self._rows_per_block)
        metadata.rows.append(
            RowRange(request_id, progress.path, start, end, block_ids, progress.num_prompt_rows)
        )


def _check_spelling(params: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that is almost a known one; other keys may be for other code."""
    for key in params:
        near = "" if key in TRANSFER_PARAMS else did_you_mean(str(key), TRANSFER_PARAMS)
        if near:
            raise ValueError(f"kv_transfer_params has no key {brief(key)}{near}")

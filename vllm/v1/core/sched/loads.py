"""Tokens whose cache a connector brings: its offers, and the loads under way.

A load happens before the forward pass of the step that continues from it, or in the background:
then its request waits with its blocks until the connector reports the load. A connector's answers
are checked here; an offer that cannot be used is not taken, and the tokens are computed.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import checked_pair
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefix_hash import extend_prefix_hashes
from vllm.v1.core.sched.scheduler_connector import ConnectorCalls
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

LoadFailurePolicy = Literal["recompute", "fail"]


class Offer(NamedTuple):
    """Tokens that can be loaded beyond those in the pool."""

    num_tokens: int = 0
    in_background: bool = False


NOTHING = Offer()


class LostLoad(NamedTuple):
    """A load that failed, and what its request has done with it."""

    reason: str = "blocks that were to be loaded did not come"
    has_run: bool = False
    """True if the request was computed from what did not come."""
    in_time: bool = False
    """True if the rows computed from it were still there when the failure was noticed."""


class Loads:
    """Offers and loads of one connector. ``has_rows``: hidden states are in the pool."""

    def __init__(
        self,
        calls: ConnectorCalls,
        manager: KVCacheManager,
        policy: LoadFailurePolicy,
        *,
        has_rows: bool,
    ) -> None:
        self.connector = calls.connector
        self.policy = policy
        self.under_way: dict[str, Request] = {}
        """Requests that wait for a load in the background; they hold its blocks."""
        self.arrived: dict[str, Request] = {}
        """Requests that wait to run, with loaded content in their blocks."""
        self._calls = calls
        self._manager = manager
        self._has_rows = has_rows
        self._lost: set[str] = set()  # requests under way with blocks that did not come
        self._began: dict[str, float] = {}  # time by request under way
        self._undecided: dict[str, float] = {}  # since when the connector has not known

    @property
    def holders(self) -> set[str]:
        """Requests that have blocks and do not run."""
        return self.under_way.keys() | self.arrived.keys()

    def ask(self, request: Request, num_found: int) -> Offer | None:
        """Ask what can be loaded after ``num_found`` tokens; None: the connector cannot say yet.

        FailureError: the connector raised or did not answer, and the policy is to fail.
        """
        extend_prefix_hashes(request, request.num_tokens)
        try:
            num_tokens, in_background = self._calls.call(
                "get_num_new_matched_tokens", lambda: self._answer(request, num_found)
            )
        except FailureError:
            if self.policy == "fail":
                raise
            return NOTHING
        if not num_tokens:
            return None if num_tokens is None else NOTHING
        problem = self._why_not(request, num_found, num_tokens)
        if problem is not None:
            name = type(self.connector).__name__
            logger.warning_once("an offer of %s is not taken: %s", name, problem)
            return NOTHING
        return Offer(num_tokens, in_background)

    def _answer(self, request: Request, num_found: int) -> tuple[int | None, bool]:
        """Return the connector's answer. TimeoutError: it has been undecided for too long.

        TypeError: it is not a number of tokens and a flag.
        """
        answer = self.connector.get_num_new_matched_tokens(request, num_found)
        num_tokens, in_background = checked_pair(answer, "(tokens or None, in the background)")
        if isinstance(num_tokens, bool):
            raise TypeError(f"{num_tokens} is no number of tokens")
        if num_tokens is not None:
            num_tokens = operator.index(num_tokens)
        since = self._undecided.setdefault(request.request_id, time.monotonic())
        timeout = self._calls.timeout_seconds
        is_overdue = timeout is not None and time.monotonic() - since >= timeout
        if num_tokens is not None or is_overdue:
            del self._undecided[request.request_id]
        if num_tokens is None and is_overdue:
            raise TimeoutError(f"no answer within kv_timeout_seconds={timeout:g}")
        return num_tokens, bool(in_background)

    def _why_not(self, request: Request, num_found: int, num_tokens: int) -> str | None:
        """Return why tokens that are offered must be computed; None: they can be loaded."""
        total = num_found + num_tokens
        if num_tokens < 0 or total > request.num_tokens:
            return f"{num_tokens} tokens after {num_found} are not part of any request"
        if request.computes_all:
            return "its request loaded before, and the load failed"
        if request.sampling_params.prompt_logprobs is not None:
            return "log-probabilities of a prompt need all of it to be computed"
        if self._has_rows and not self.connector.loads_rows:
            return "the hidden states of loaded tokens would be missing"
        next_row = request.next_row_position
        if next_row is not None and total > next_row:
            return "the caller wants hidden states of these tokens"
        if self._manager.coordinator.has_recurrent_state and (
            total == request.num_tokens or total % self._manager.state_grain
        ):
            return (
                "a recurrent state has to stand before the last token, at a multiple of "
                f"{self._manager.state_grain}"
            )
        return None

    def tell_blocks(self, request: Request, num_tokens: int) -> None:
        """Tell the connector the blocks into which to load ``num_tokens`` tokens of the request.

        FailureError: the connector does not take them.
        """
        blocks, connector = self._manager.blocks(request.request_id), self.connector
        hook = "update_state_after_alloc"
        self._calls.call(
            hook, lambda: connector.update_state_after_alloc(request, blocks, num_tokens)
        )

    def begin(self, request: Request) -> None:
        """Let the request wait for a load that the connector does between steps."""
        self.under_way[request.request_id] = request
        self._began[request.request_id] = time.monotonic()

    def overdue(self) -> list[tuple[Request, Failure]]:
        """Requests whose load was not reported in time. Their blocks may still be written, so
        they are not computed in other blocks: they fail, and the blocks stay held."""
        timeout = self._calls.timeout_seconds
        if timeout is None:
            return []
        oldest = time.monotonic() - timeout
        message = f"a load was not reported within kv_timeout_seconds={timeout:g}"
        failure = Failure(FailureKind.CONNECTOR_FAILED, message)
        late = [name for name, began in self._began.items() if began < oldest]
        return [(self.under_way[name], failure) for name in late]

    def take_lost(
        self, report: KVConnectorOutput, loading: set[str], running: Iterable[Request]
    ) -> dict[str, LostLoad]:
        """Take in blocks that did not come; return the requests that use them already.

        loading: requests whose loads began with the reported step. Loads under way go on until
        they are reported.
        """
        blocks = report.invalid_block_ids
        self._manager.forget(blocks)
        running_ids = {request.request_id for request in running}
        users = running_ids | self.arrived.keys()
        lost = {r for r in users | self.under_way.keys() if self._manager.holds_any(r, blocks)}
        self._lost |= lost & self.under_way.keys()
        # Those that the workers name may have been preempted since.
        ran = report.void_req_ids | report.late_req_ids
        affected = lost & users | ran | (loading if report.load_error else set())
        reason = report.load_error or LostLoad().reason
        return {
            name: LostLoad(reason, name in running_ids | ran, name in report.void_req_ids)
            for name in affected
        }

    def why_not_again(self, request: Request, lost: LostLoad) -> Failure | None:
        """Return why a request whose load failed has to fail. None: it can be computed, and the
        connector expects the rows again that it dropped."""
        has_left = lost.has_run and self._has_rows and self.connector.sends_rows_on
        problem = None
        if self.policy == "fail":
            problem = " (kv_load_failure_policy='recompute' would compute them)"
        elif has_left and not (lost.in_time and self.connector.keeps_rows_back):
            problem = ", and hidden states that were computed from them have left"
        if problem is not None:
            return Failure(FailureKind.CONNECTOR_FAILED, f"{lost.reason}{problem}")
        if not (lost.in_time and self._has_rows):
            return None
        name, connector = request.request_id, self.connector
        try:
            self._calls.call("take_rows_back", lambda: connector.take_rows_back(name))
        except FailureError as error:
            return error.failure
        return None

    def give_up_last(self, request: Request) -> Request | None:
        """Take the last other request that has loaded and waits: it has to load once more."""
        others = [other for other in self.arrived.values() if other is not request]
        if not others:
            return None
        del self.arrived[others[-1].request_id]
        return others[-1]

    def finish(self, request_id: str) -> tuple[Request, bool] | None:
        """End a reported load; return its request and whether all came. None: nothing waits."""
        request = self.under_way.pop(request_id, None)
        self._began.pop(request_id, None)
        if request is None:
            return None
        is_whole = request_id not in self._lost
        self._lost.discard(request_id)
        if is_whole:
            self.arrived[request_id] = request
        return request, is_whole

    def lose_all(self) -> None:
        """Use nothing of the loads under way: their requests are treated as after failed loads."""
        self._lost |= self.under_way.keys()

    def forget(self, request_id: str) -> bool:
        """Forget a request that ended or restarts; return whether its load may still write."""
        self.arrived.pop(request_id, None)
        self._undecided.pop(request_id, None)
        self._lost.discard(request_id)
        self._began.pop(request_id, None)
        return self.under_way.pop(request_id, None) is not None

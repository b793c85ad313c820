"""Calls of the hooks of a connector's scheduler side.

A hook may raise, or not return within ``kv_timeout_seconds``. Each method says what such a failure
costs; nothing else is affected. ``loads`` calls the hooks of loads, ``deliveries`` those of ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    StillReadingError,
    hook_limit,
)
from vllm.exceptions import Failure, FailureError, FailureKind, kind_of
from vllm.logger import init_logger
from vllm.utils.text import error_text
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

T = TypeVar("T")


class ConnectorCalls:
    """Calls of one connector's hooks. ``timeout_seconds``: limit of one call; None: no limit."""

    def __init__(self, connector: KVConnectorBase_V1, timeout_seconds: float | None) -> None:
        self.connector = connector
        self.timeout_seconds = timeout_seconds
        self._stats: Any = None
        self._events: list[Any] = []
        self._has_warned = False

    def call(self, hook: str, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which calls the hook. FailureError: it failed."""
        try:
            with hook_limit(self.connector, hook, self.timeout_seconds):
                return function()
        except Exception as error:
            raise FailureError(self._note(hook, error)) from error

    def _note(self, hook: str, error: Exception) -> Failure:
        logger.exception("%s.%s failed", type(self.connector).__name__, hook, exc_info=error)
        return hook_failure(hook, error)

    def _try(self, hook: str, function: Callable[[], object]) -> Failure | None:
        try:
            self.call(hook, function)
        except FailureError as error:
            return error.failure
        return None

    def _ask(self, hook: str, function: Callable[[], T], otherwise: T) -> T:
        """Return the hook's answer; if it fails, log that once and return ``otherwise``.

        Such a failure costs no request.
        """
        try:
            with hook_limit(self.connector, hook, self.timeout_seconds):
                return function()
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                answers = "answers of the KV connector are dropped, for example that of %s"
                logger.warning(answers, hook, exc_info=True)
            return otherwise

    def check_request(self, request: Request) -> Failure | None:
        """Return why a new request fails at once; None: it does not.

        ValueError: the connector cannot serve it.
        """
        try:
            with hook_limit(self.connector, "check_request", self.timeout_seconds):
                self.connector.check_request(request)
        except ValueError:
            raise
        except Exception as error:
            return self._note("check_request", error)
        return self._try("on_new_request", lambda: self.connector.on_new_request(request))

    def reset_cache(self) -> bool:
        """Let the connector forget what it keeps; return whether it did."""
        return self._ask("reset_cache", lambda: self.connector.reset_cache() is True, False)

    def plan(self, step: SchedulerOutput) -> Failure | None:
        """Let the connector plan its part of a step; return why the step cannot run, or None."""

        def build() -> None:
            step.kv_connector_metadata = self.connector.build_connector_meta(step)

        return self._try("build_connector_meta", build)

    def take_report(self, report: KVConnectorOutput) -> None:
        """Pass on the worker side's report, once, even if the hook fails to take it in.

        That costs no request: the engine itself reads what requests wait for.
        """
        self._try("update_connector_output", lambda: self.connector.update_connector_output(report))
        stats = report.kv_connector_stats
        self._stats = self._ask("get_kv_connector_stats", lambda: self._all_stats(stats), None)
        self._events = self._ask("take_events", lambda: list(self.connector.take_events()), [])

    def _all_stats(self, stats: Any) -> Any:
        """Stats of both sides together; None: they counted nothing."""
        both = (stats, self.connector.get_kv_connector_stats())
        parts = [one for one in both if one is not None and not one.is_empty()]
        return parts[0].aggregate(parts[1]) if len(parts) == 2 else next(iter(parts), None)

    def put_news_into(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Put the connector's stats and events into a step's outputs, and return these."""
        if self._stats is not None:
            outputs.kv_connector_stats, self._stats = [self._stats], None
        outputs.kv_cache_events, self._events = self._events, []
        return outputs

    def has_pending_push_work(self) -> bool:
        """Return whether the connector wants steps without requests; False when it fails."""
        hook = "has_pending_push_work"
        return self._ask(hook, lambda: bool(self.connector.has_pending_push_work()), False)

    def shutdown(self) -> None:
        """Let the connector end what it has begun; the engine ends even if that fails."""
        self._try("shutdown", self.connector.shutdown)


def hook_failure(hook: str, error: Exception) -> Failure:
    """Return the failure of requests that are affected by a hook that raised."""
    cause = (isinstance(error, StillReadingError) and error.__cause__) or error
    kind = kind_of(cause, FailureKind.CONNECTOR_FAILED)
    return Failure(kind, f"the connector failed in {hook}: {error_text(cause)}")

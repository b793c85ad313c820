"""Hooks of a connector's scheduler side that belong to no load and to no end of a request.

Each may raise, or not come back within ``kv_timeout_seconds``: what that costs stands at each
method, and nothing else pays for it. Those of loads are in ``loads``, those of ends in
``deliveries``.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.hook_limit import hook_limit
from vllm.exceptions import Failure, FailureKind, kind_of
from vllm.logger import init_logger
from vllm.v1.core.sched.connector_news import ConnectorNews
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

logger = init_logger(__name__)


class ConnectorCalls:
    """Of one connector. ``timeout_seconds``: of a call; None: no limit."""

    def __init__(self, connector: KVConnectorBase_V1, timeout_seconds: float | None) -> None:
        self._connector = connector
        self._timeout_seconds = timeout_seconds
        self._news = ConnectorNews(timeout_seconds)
        self._has_warned = False

    def check_request(self, request: Request) -> Failure | None:
        """Why a new request fails at once; None: it does not.

        ValueError: the connector cannot serve it.
        """
        try:
            with hook_limit(self._connector, "check_request", self._timeout_seconds):
                self._connector.check_request(request)
        except ValueError:
            raise
        except Exception as error:
            return self._note("check_request", error)
        return self._try("on_new_request", lambda: self._connector.on_new_request(request))

    def plan(self, step: SchedulerOutput) -> Failure | None:
        """Let the connector plan its part of a step; why the step cannot run, None: it can."""

        def build() -> None:
            step.kv_connector_metadata = self._connector.build_connector_meta(step)

        return self._try("build_connector_meta", build)

    def take_report(self, report: KVConnectorOutput) -> None:
        """What its worker side reported. If it does not take it in, it is not told again: that
        costs no request, for what they wait for the engine reads itself."""
        self._try(
            "update_connector_output", lambda: self._connector.update_connector_output(report)
        )
        self._news.take(self._connector, report)

    def put_news_into(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Stats and events go with a step's outputs, which are returned."""
        return self._news.put_into(outputs)

    def has_pending_push_work(self) -> bool:
        """Whether it wants steps without requests; one that does not say gets none."""
        try:
            with hook_limit(self._connector, "has_pending_push_work", self._timeout_seconds):
                return self._connector.has_pending_push_work()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._note("has_pending_push_work", error)
            return False

    def shutdown(self) -> None:
        """Let it end what it has begun; whatever it does, the engine ends."""
        self._try("shutdown", self._connector.shutdown)

    def _try(self, hook: str, call: Callable[[], None]) -> Failure | None:
        try:
            with hook_limit(self._connector, hook, self._timeout_seconds):
                call()
        except Exception as error:
            return self._note(hook, error)
        return None

    def _note(self, hook: str, error: Exception) -> Failure:
        logger.exception("%s.%s failed", type(self._connector).__name__, hook, exc_info=error)
        kind = kind_of(error, FailureKind.CONNECTOR_FAILED)
        message = f"the connector failed in {hook}: {type(error).__name__}: {error}"
        return Failure(kind, message)

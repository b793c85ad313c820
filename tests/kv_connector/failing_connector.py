"""A connector that loads and saves, one of whose hooks raises or never comes back.

``fault``: the hook and how it fails, once: in the hooks that get a request for the one whose prompt
is ``PROMPT``, in others at the next call. The option ``fault`` sets it in another process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.engine.harness import random_prompts
from tests.kv_connector.slot_connector import SlotConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

PROMPTS = [p["prompt_token_ids"] for p in random_prompts(97, [60, 90, 70])]
"""The first one is to fail; each is longer than what the connector keeps."""


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


ODD_ERRORS: dict[str, Callable[[], BaseException]] = {
    "is silent": SilentError,
    "cannot be encoded": lambda: RuntimeError("half a character: \ud800"),
    "is long": lambda: RuntimeError("x" * 10**6),
    "was cancelled": asyncio.CancelledError,
    "ends a generator": GeneratorExit,
    "ends an iteration": StopIteration,
}


class Fault(NamedTuple):
    hook: str
    kind: str
    """ "hangs", "raises", or a key of ODD_ERRORS """
    role: str = ""
    """Name of the role that fails; of most hooks there is only one."""
    num_good: int = 0
    """Calls before it that go well."""


faults: list[Fault] = []


def fail_in(connector: Any, hook: str, request: Any = None) -> None:
    """Fail, if it is the turn of this hook."""
    if request is not None and list(request.prompt_token_ids) != PROMPTS[0]:
        return
    for fault in list(faults):
        if fault.hook == hook and fault.role in ("", connector.role.name):
            faults.remove(fault)
            if fault.num_good:
                faults.append(fault._replace(num_good=fault.num_good - 1))
                return
            if fault.kind in ODD_ERRORS:
                raise ODD_ERRORS[fault.kind]()
            if fault.kind == "raises":
                raise RuntimeError(f"{hook} is out of order")
            threading.Event().wait()


class UndecidedConnector(SlotConnector):
    """Never knows what it has of one prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if list(request.prompt_token_ids) == PROMPTS[0]:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class FailingConnector(SlotConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if told := self._kv_transfer_config.get_from_extra_config("fault", None):
            faults.append(Fault(*told))
        told = self._kv_transfer_config.get_from_extra_config("faults", [])
        if role is KVConnectorRole.SCHEDULER:  # once in their process
            faults.extend(Fault(*one) for one in told)

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:  # type: ignore[override]
        fail_in(self, "handle_preemptions")


OF_A_REQUEST = (
    "check_request",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
)
OF_A_STEP = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "build_connector_meta",
    "update_connector_output",
    "take_events",
    "get_kv_connector_stats",
    "get_finished",
    "get_block_ids_with_load_errors",
    "take_failures",
    "build_connector_worker_meta",
)
ELSEWHERE = ("has_pending_push_work", "shutdown")


def _failing(hook: str, *, gets_request: bool) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        fail_in(self, hook, args[0] if gets_request else None)
        return getattr(SlotConnector, hook)(self, *args)

    call.__name__ = hook
    return call


for name in OF_A_REQUEST + OF_A_STEP + ELSEWHERE:
    setattr(FailingConnector, name, _failing(name, gets_request=name in OF_A_REQUEST))


UNSENDABLE: list[Any] = [{"text": "\ud800"}, {"number": 2**80}, {"f": len}, {1: 2}]
UNSENDABLE[2]["itself"] = UNSENDABLE[2]


class UnsendableConnector(FailingConnector):
    """Then replies to that prompt which no other process can read, one after another."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._params = list(UNSENDABLE)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        answer = super().request_finished(request, block_ids)
        is_its_turn = list(request.prompt_token_ids) == PROMPTS[0] and self._params
        return (False, self._params.pop()) if is_its_turn else answer

    def take_events(self) -> Any:
        return ({"text": "\ud800"},)

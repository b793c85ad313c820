"""A connector that loads and saves, one of whose hooks raises or never comes back.

``fault``: the hook and how it fails, once: in the hooks that get a request for the one whose prompt
is ``PROMPT``, in others at the next call. The option ``fault`` sets it in another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.engine.harness import random_prompts
from tests.kv_connector.slot_connector import SlotConnector

PROMPTS = [p["prompt_token_ids"] for p in random_prompts(97, [60, 90, 70])]
"""The first one is to fail; each is longer than what the connector keeps."""


class Fault(NamedTuple):
    hook: str
    kind: str
    """ "hangs" or "raises" """
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

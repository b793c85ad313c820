"""The process of an engine core, with a core that does nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_messages import AbortRequests, AddRequest
from vllm.v1.engine.core_process import CoreProcess


def test_nothing_is_kept_of_an_aborted_request(monkeypatch: Any) -> None:
    """Neither where its last output never comes: the connector had it when the client left."""
    monkeypatch.setattr(CoreProcess, "_tokenizer", MagicMock())
    process = CoreProcess(MagicMock(), MagicMock())
    taken = {"kv_transfer_params": {"include_output_tokens": True}}
    params = SamplingParams(stop="end", extra_args=taken)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2], sampling_params=params, arrival_time=0.0
    )
    process.commands.put(AddRequest(request))
    process._take_commands()
    assert "r" in process._texts
    process.commands.put(AbortRequests(["r"]))
    process._take_commands()
    assert not process._texts

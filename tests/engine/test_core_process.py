"""The process of an engine core, with a core that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, core_process
from vllm.v1.engine.core_messages import AbortRequests, AddRequest, CoreReport
from vllm.v1.engine.core_process import CoreProcess, CoreSettings, _start_core, _watch_ranks


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


def test_a_folder_that_is_not_that_of_the_front_end(tmp_path: Path) -> None:
    """The front end, on another machine, makes a file in its folder, which is not in this one's."""
    mark = str(tmp_path / ".shared-x")
    config: Any = MagicMock()
    core, started = _start_core(CoreSettings(config, {}, {}, "text", mark=mark))
    assert core is None
    assert started.failure is not None
    assert f"shared_storage_path={str(tmp_path)!r} is another folder on" in started.failure.message


def test_a_stopped_rank_is_reported_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_process, "STOP_POLL_SECONDS", 0.0)
    states = iter([False, True, True, False, False, True])

    class Executor:
        has_stopped_rank = property(lambda self: next(states))

    executor: Any = Executor()
    reports: list[CoreReport] = []
    with pytest.raises(StopIteration):
        _watch_ranks(executor, reports.append)
    assert [report.has_stopped_rank for report in reports] == [True, False, True]

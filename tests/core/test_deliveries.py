"""Ended requests: the outputs that wait, for what, and when their blocks come back."""

from __future__ import annotations

import errno
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    StillReadingError,
)
from vllm.exceptions import Failure, FailureKind
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.deliveries import Deliveries
from vllm.v1.core.sched.scheduler_connector import ConnectorCalls
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, ExtractionSpec, FinishReason
from vllm.v1.outputs import ExtractedRows, KVConnectorOutput
from vllm.v1.request import Request


class Owing:
    """One request, ended with its last output by length, and who may keep its data."""

    def __init__(self, *, extracts: bool = False, connector: Mock | None = None) -> None:
        message = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=1),
            arrival_time=0.0,
            extraction=ExtractionSpec((1,)) if extracts else None,
        )
        self.request = Request(message)
        self.requests = {"r": self.request}
        self.manager = Mock(spec=KVCacheManager)
        self.manager.block_ids.return_value = ([4], [5])
        calls = None if connector is None else ConnectorCalls(connector, None)
        self.deliveries = Deliveries(self.requests, self.manager, 2, calls)
        last = EngineCoreOutput(
            request_id="r", new_token_ids=[7], finish_reason=FinishReason.LENGTH
        )
        self.deliveries.begin(self.request, last, was_told=True)

    @property
    def has_blocks(self) -> bool:
        return not self.manager.free.called

    def take(self) -> EngineCoreOutput | None:
        outputs = self.deliveries.take_outputs()
        assert len(outputs) <= 1
        return outputs[0] if outputs else None


def a_connector(*, reply_when_saved: bool, rows_leave_each_step: bool) -> Mock:
    """One that delivers later, and names a path."""
    connector = Mock(spec=KVConnectorBase_V1)
    connector.reply_when_saved = reply_when_saved
    connector.rows_leave_each_step = rows_leave_each_step
    connector.request_finished.side_effect = lambda *_: (True, {"path": "somewhere"})
    return connector


def failure(message: str) -> Failure:
    return Failure(FailureKind.CONNECTOR_FAILED, message)


def saved(**completed: Any) -> KVConnectorOutput:
    return KVConnectorOutput(finished_sending={"r"}, completed_params={"r": completed})


def test_nothing_is_owed() -> None:
    owing = Owing()
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.LENGTH
    assert not owing.has_blocks and not owing.requests


def test_rows_for_a_caller() -> None:
    owing = Owing(extracts=True)
    assert owing.take() is None and not owing.has_blocks and owing.requests
    rows = ExtractedRows({"hidden_states": torch.zeros(3, 1, 4)})
    owing.deliveries.take_rows({"r": rows, "another": rows})
    output = owing.take()
    assert output is not None and output.extracted is rows
    assert not owing.requests


def test_rows_for_a_caller_that_will_not_come() -> None:
    """A reply that nothing releases would be waited for without end."""
    owing = Owing(extracts=True)
    owing.deliveries.fail(owing.request, failure("row 2 is not finite"))
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.ERROR
    assert output.stop_reason == "row 2 is not finite"
    assert not owing.requests
    owing.deliveries.fail(owing.request, failure("once more"))
    assert owing.take() is None


@pytest.mark.parametrize("rows_leave_each_step", [False, True])
@pytest.mark.parametrize("reply_when_saved", [False, True])
def test_a_connector_that_delivers_later(
    reply_when_saved: bool, rows_leave_each_step: bool
) -> None:
    connector = a_connector(
        reply_when_saved=reply_when_saved, rows_leave_each_step=rows_leave_each_step
    )
    owing = Owing(connector=connector)
    output = owing.take()
    assert (output is None) is reply_when_saved
    assert owing.has_blocks is not rows_leave_each_step
    assert bool(owing.requests) is (reply_when_saved or not rows_leave_each_step)
    owing.deliveries.take_saves(saved(num_tokens=3))
    assert not owing.has_blocks and not owing.requests
    owing.manager.free.assert_called_once_with(owing.request)
    last = owing.take()
    if reply_when_saved:
        assert last is not None
        assert last.kv_transfer_params == {"path": "somewhere", "num_tokens": 3}
    else:
        assert last is None and output is not None
        assert output.kv_transfer_params == {"path": "somewhere"}


@pytest.mark.parametrize("rows_come_first", [False, True])
def test_rows_for_a_caller_beside_a_connector_that_delivers_later(rows_come_first: bool) -> None:
    """The reply waits for both, whichever comes first."""
    connector = a_connector(reply_when_saved=True, rows_leave_each_step=False)
    owing = Owing(extracts=True, connector=connector)
    rows = ExtractedRows({"hidden_states": torch.zeros(3, 1, 4)})
    take = [
        lambda: owing.deliveries.take_rows({"r": rows}),
        lambda: owing.deliveries.take_saves(saved(num_tokens=3)),
    ]
    take[not rows_come_first]()
    assert owing.take() is None and owing.requests
    take[rows_come_first]()
    output = owing.take()
    assert output is not None and output.extracted is rows
    assert output.kv_transfer_params == {"path": "somewhere", "num_tokens": 3}
    assert not owing.has_blocks and not owing.requests


def test_only_connectors_that_replies_wait_for_hear_that_nobody_does() -> None:
    connector = a_connector(reply_when_saved=False, rows_leave_each_step=True)
    owing = Owing(extracts=True, connector=connector)
    owing.deliveries.drop(owing.request)
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.ABORT
    connector.request_finished.assert_called_once()


def test_a_file_that_cannot_be_written() -> None:
    """The reply names no file, and goes out when the connector is done with the request."""
    connector = a_connector(reply_when_saved=True, rows_leave_each_step=False)
    owing = Owing(connector=connector)
    owing.deliveries.fail(owing.request, failure("disk full"))
    assert owing.take() is None and owing.has_blocks
    owing.deliveries.take_saves(saved(num_tokens=3))
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.ERROR
    assert output.stop_reason == "disk full" and output.kv_transfer_params is None
    assert not owing.has_blocks and not owing.requests


def test_a_file_that_nobody_wants_any_more() -> None:
    """The caller hears at once; blocks that the connector reads stay until it has."""
    connector = a_connector(reply_when_saved=True, rows_leave_each_step=False)
    owing = Owing(connector=connector)
    owing.deliveries.drop(owing.request)
    connector.request_finished.assert_called_with(owing.request, [])
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.ABORT
    assert output.kv_transfer_params is None
    assert owing.has_blocks and owing.requests
    owing.deliveries.take_saves(saved())
    assert not owing.has_blocks and not owing.requests
    assert owing.take() is None


def test_blocks_that_another_of_several_connectors_still_reads() -> None:
    """The caller hears at once that one failed."""
    connector = a_connector(reply_when_saved=True, rows_leave_each_step=False)
    failed = StillReadingError()
    failed.__cause__ = OSError(errno.ENOSPC, "no room")
    connector.request_finished.side_effect = failed
    owing = Owing(connector=connector)
    output = owing.take()
    assert output is not None and output.finish_reason is FinishReason.ERROR
    assert output.failure is not None and output.failure.kind is FailureKind.DISK_FULL
    assert output.failure.message.endswith(
        "failed in request_finished: OSError: [Errno 28] no room"
    )
    assert owing.has_blocks and owing.requests
    owing.deliveries.take_saves(saved())
    assert not owing.has_blocks and not owing.requests


def test_blocks_of_what_was_never_scheduled() -> None:
    """No connector is asked about it."""
    connector = a_connector(reply_when_saved=True, rows_leave_each_step=False)
    owing = Owing(connector=connector)
    owing.deliveries.take_saves(saved())
    connector.request_finished.reset_mock()
    owing.take()
    owing.requests["r"] = owing.request
    last = EngineCoreOutput(request_id="r", finish_reason=FinishReason.ABORT)
    owing.deliveries.begin(owing.request, last, was_told=False)
    assert owing.take() is last and not owing.requests
    connector.request_finished.assert_not_called()

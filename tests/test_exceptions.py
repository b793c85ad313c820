"""Kinds of failures: what tells them, how they travel, what becomes of each."""

from __future__ import annotations

import errno
import os
import pickle
from typing import Any

import msgspec
import pytest
import torch

from vllm.entrypoints.extract.worker import why_ended
from vllm.entrypoints.openai.errors import MEANT_FOR_CLIENTS, as_api_error, failed
from vllm.exceptions import (
    EXIT_STATUS,
    Failure,
    FailureError,
    FailureKind,
    VLLMValidationError,
    kind_of,
)
from vllm.hidden_states import HiddenStatesError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_messages import CoreReport, EngineStats, ReportDecoder, ReportEncoder
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.rows.fields.checks import find_bad_row

DISK_FULL = Failure(FailureKind.DISK_FULL, "no room")


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (os_error(errno.ENOSPC), FailureKind.DISK_FULL),
        (os_error(errno.EDQUOT), FailureKind.DISK_FULL),
        (os_error(errno.EACCES), FailureKind.NOT_PERMITTED),
        (os_error(errno.EROFS), FailureKind.NOT_PERMITTED),
        (os_error(errno.EFBIG), FailureKind.STEP_FAILED),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (EngineDeadError("gone"), FailureKind.ENGINE_DEAD),
        (HiddenStatesError(3, DISK_FULL), FailureKind.DISK_FULL),
        (RuntimeError("No space left on device"), FailureKind.STEP_FAILED),
    ],
)
def test_what_tells_the_kind(error: Exception, kind: FailureKind) -> None:
    assert kind_of(error, FailureKind.STEP_FAILED) is kind


def test_bad_rows_say_what_is_wrong_with_them() -> None:
    rows = torch.ones(2, 2, 4)
    assert find_bad_row(rows, [0, 1], [5, 6]) is None
    rows[1, 1] = 0
    assert find_bad_row(rows, [0, 1], [5, 6]) == Failure(
        FailureKind.ROWS_ALL_ZERO, "hidden states of token 6, layer 1 are all zero"
    )
    rows[0, 0, 2] = float("nan")
    assert find_bad_row(rows, [0, 1], [5, 6]) == Failure(
        FailureKind.ROWS_NOT_FINITE, "hidden states of token 5, layer 0 are not finite"
    )


def test_a_failure_crosses_processes() -> None:
    output = EngineCoreOutput(request_id="r")
    output.end(FinishReason.ERROR, None, DISK_FULL)
    sent = CoreReport(outputs=[output], rejected={"s": DISK_FULL}, stats=EngineStats())
    report = ReportDecoder().decode([bytes(part) for part in ReportEncoder().encode(sent)])
    (taken,) = report.outputs
    assert (taken.finish_reason, taken.stop_reason) == (FinishReason.ERROR, "no room")
    assert taken.failure == DISK_FULL and report.rejected == {"s": DISK_FULL}


@pytest.mark.parametrize(
    "error", [FailureError(DISK_FULL), HiddenStatesError(3, DISK_FULL), EngineDeadError("gone")]
)
def test_a_failure_that_is_raised_in_another_process(error: FailureError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.failure == error.failure


def test_every_kind_has_a_status() -> None:
    statuses = {kind: failed(Failure(kind, "why")).status for kind in FailureKind}
    assert statuses.pop(FailureKind.BAD_REQUEST) == 400
    assert statuses.pop(FailureKind.NOT_READY) == 503
    assert statuses.pop(FailureKind.ABORTED) == 503
    assert statuses.pop(FailureKind.FILE_GONE) == 404
    assert statuses.pop(FailureKind.FILE_DAMAGED) == 410
    assert statuses.pop(FailureKind.DISK_FULL) == 507
    assert set(statuses.values()) == {500}
    assert set(EXIT_STATUS) == set(FailureKind)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (VLLMValidationError("top_p=2: no", parameter="top_p"), (400, "top_p=2: no", "top_p")),
        (VLLMValidationError("top_k=-9: no", parameter="top_k"), (400, "top_k=-9: no", None)),
        (
            ValueError("top_p=2: said by somebody else"),
            (400, "top_p=2: said by somebody else", None),
        ),
        (EngineDeadError("status 9"), (500, "the engine is gone: status 9", None)),
        (FailureError(DISK_FULL), (507, "no room", None)),
    ],
)
def test_what_clients_are_told(error: Exception, told: tuple[Any, ...]) -> None:
    api_error = as_api_error(error)
    assert (api_error.status, api_error.message, api_error.param) == told
    assert isinstance(error, MEANT_FOR_CLIENTS)


def test_clients_are_told_nothing_of_bugs() -> None:
    error = KeyError("secret")
    assert not isinstance(error, MEANT_FOR_CLIENTS)
    api_error = as_api_error(error)
    assert api_error.status == 500 and "secret" not in api_error.message


def test_wrong_settings_name_themselves() -> None:
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(temperature=-1)
    assert caught.value.parameter == "temperature"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no such layer"), 2),
        (FailureError(Failure(FailureKind.BAD_REQUEST, "in a worker")), 2),
        (os_error(errno.ENOSPC), 1),
        (os_error(errno.EIO), 1),
        (FailureError(Failure(FailureKind.JOB_FAILED, "3 workers died")), 1),
        (RuntimeError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status_of_a_job(error: BaseException, status: int) -> None:
    failure = why_ended(error)
    assert EXIT_STATUS[failure.kind] == status
    assert failure.message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure

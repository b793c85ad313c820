"""Every hook of a connector may raise or never come back: who pays for it, and that the books stay
right. Those that load and save inside the forward pass: ``test_hanging_connector``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, rows_of
from tests.kv_connector import failing_connector, slot_connector
from tests.kv_connector.failing_connector import (
    ODD_ERRORS,
    OF_A_REQUEST,
    OF_A_STEP,
    PROMPTS,
    UNSENDABLE,
    FailingConnector,
    Fault,
    faults,
)
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.exceptions import Failure, FailureKind

Checkpoint = Callable[..., Path]
SECONDS = 0.3
KINDS = ("raises", "hangs")


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    faults.clear()
    slot_connector.store.clear()
    slot_connector.calls.clear()


def failing(policy: str = "recompute", **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "FailingConnector",
        "kv_connector_module_path": failing_connector.__name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_timeout_seconds": SECONDS,
        "kv_connector_extra_config": options,
    }


def results(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    core_of(llm).scheduler.check_integrity()
    return [output.outputs[0].failure or list(output.outputs[0].token_ids) for output in outputs]


def run(folder: Path, fault: Fault, policy: str = "recompute") -> tuple[list[Any], list[Any]]:
    """Return what is computed, and what becomes of prompts that are loaded, one after another, when
    the hook fails. Afterwards all is well again."""
    arguments: dict[str, Any] = {"block_size": 16, "max_num_seqs": 1}
    with engine(folder, kv_transfer_config=failing(policy), **arguments) as llm:
        expected = results(llm)
        llm.reset_prefix_cache()
        faults.append(fault)
        found = results(llm)
        assert not faults, "the hook was not called"
        llm.reset_prefix_cache()
        assert results(llm) == expected
    return expected, found


def check_failed(result: Any, fault: Fault) -> None:
    assert isinstance(result, Failure)
    assert result.kind is FailureKind.CONNECTOR_FAILED
    message = "is out of order"
    if fault.kind == "hangs":
        hook = f"FailingConnector.{fault.hook} (kv_timeout_seconds)"
        message = f"{hook} did not return within 0.3 seconds"
    assert message in result.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", OF_A_REQUEST)
def test_hooks_that_belong_to_one_request(hook: str, kind: str, checkpoint: Checkpoint) -> None:
    """It fails, or computes what it would have loaded; nobody else notices."""
    fault = Fault(hook, kind)
    expected, found = run(checkpoint("llama"), fault)
    assert found[1:] == expected[1:]
    if hook == "get_num_new_matched_tokens":
        assert found == expected
        _, found = run(checkpoint("llama"), fault, policy="fail")
        assert found[1:] == expected[1:]
    check_failed(found[0], fault)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_answer_that_never_comes(policy: str, checkpoint: Checkpoint) -> None:
    """Others run in the meantime."""
    with engine(checkpoint("llama"), block_size=16) as llm:
        expected = results(llm)
    config = failing(policy) | {"kv_connector": "UndecidedConnector"}
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        found = results(llm)
    assert found[1:] == expected[1:]
    if policy == "recompute":
        assert found == expected
    else:
        assert found[0].kind is FailureKind.CONNECTOR_FAILED
        assert "no answer within kv_timeout_seconds=0.3" in found[0].message


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_planned(kind: str, checkpoint: Checkpoint) -> None:
    fault = Fault("build_connector_meta", kind)
    expected, found = run(checkpoint("llama"), fault)
    check_failed(found[0], fault)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "hook",
    ["update_connector_output", "take_events", "get_kv_connector_stats", "has_pending_push_work"],
)
def test_hooks_that_cost_no_request(
    hook: str, kind: str, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    expected, found = run(checkpoint("llama"), Fault(hook, kind, "SCHEDULER"))
    assert found == expected
    assert "is out of order" in caplog.text or f"FailingConnector.{hook} (kv_t" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "hook",
    [
        "get_finished",
        "get_block_ids_with_load_errors",
        "take_failures",
        "get_kv_connector_stats",
        "build_connector_worker_meta",
    ],
)
def test_a_worker_side_that_does_not_report(hook: str, kind: str, checkpoint: Checkpoint) -> None:
    """The requests of the step fail."""
    fault = Fault(hook, kind, "WORKER")
    expected, found = run(checkpoint("llama"), fault)
    check_failed(found[0], fault)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize(
    ("role", "hook", "answer"),
    [
        ("SCHEDULER", "get_num_new_matched_tokens", ("7", False)),
        ("SCHEDULER", "get_num_new_matched_tokens", (5.5, False)),
        ("SCHEDULER", "get_num_new_matched_tokens", "ab"),
        ("SCHEDULER", "request_finished", "ab"),
        ("SCHEDULER", "request_finished", (False, [1])),
        ("WORKER", "get_finished", "ab"),
        ("WORKER", "get_finished", ("a", "b")),
        ("WORKER", "get_finished", ({3}, None)),
        ("WORKER", "get_block_ids_with_load_errors", [1]),
        ("WORKER", "get_block_ids_with_load_errors", {"a"}),
        ("WORKER", "take_failures", {"a": "text"}),
        ("WORKER", "take_completed_params", {"a": 1}),
        ("WORKER", "save_stats", 5),
    ],
)
def test_answers_of_a_wrong_type(
    role: str, hook: str, answer: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are failures of the hook, once, and the engine goes on."""
    own, answers = getattr(FailingConnector, hook), [answer]

    def call(self: Any, *args: Any) -> Any:
        right = own(self, *args)
        return answers.pop() if self.role.name == role and answers else right

    config = failing()
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = results(llm)
        llm.reset_prefix_cache()
        monkeypatch.setattr(FailingConnector, hook, call)
        found = results(llm)
        assert not answers
        monkeypatch.undo()
        llm.reset_prefix_cache()
        assert results(llm) == expected
    failed = [one for one in found if isinstance(one, Failure)]
    assert bool(failed) == (hook != "get_num_new_matched_tokens")
    for one, right in zip(found, expected, strict=True):
        assert one == right or one in failed
    for one in failed:
        assert one.kind is FailureKind.CONNECTOR_FAILED
        assert f"the connector failed in {hook}: TypeError: the answer" in one.message or (
            "kv_transfer_params=[1] has to be a dict" in one.message
        )


@pytest.mark.parametrize("kind", KINDS)
def test_preemptions_that_are_not_taken_in(kind: str, checkpoint: Checkpoint) -> None:
    """The step fails; requests that were preempted in it are computed again."""
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 256}
    prompts, params = [*PROMPTS, PROMPTS[0][::-1]], greedy(60)
    with engine(checkpoint("llama"), **sizes) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = [list(output.outputs[0].token_ids) for output in outputs]
    sizes["kv_cache_memory_bytes"] = 24 * 2**14
    with engine(checkpoint("llama"), kv_transfer_config=failing(), **sizes) as llm:
        faults.append(Fault("handle_preemptions", kind))
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        core_of(llm).scheduler.check_integrity()
        assert not faults
    failed = [output.failure for output in outputs if output.failure]
    assert 0 < len(failed) < 4
    for failure in failed:
        check_failed(failure, Fault("handle_preemptions", kind))
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.failure or list(output.token_ids) == tokens


def test_what_was_reported_before_it_failed_is_not_lost(checkpoint: Checkpoint) -> None:
    """A load in the background that is there, in a report that ends in the middle."""
    config = failing(in_background=True)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = results(llm)
        llm.reset_prefix_cache()
        faults.append(Fault("take_failures", "hangs"))
        assert results(llm) == expected


def in_company(folder: Path, *, fails_first: bool) -> dict[str, Any]:
    """Beside one that writes hidden states, and one that keeps blocks."""
    arguments = extraction_config([1, 2], folder, use_synchronization_lock=False)
    parts = [
        arguments["kv_transfer_config"],
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2**22},
        },
    ]
    parts.insert(0 if fails_first else 2, failing())
    arguments["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_timeout_seconds": SECONDS,
        "kv_connector_extra_config": {"connectors": parts},
    }
    return arguments


FAULTS = [
    *(Fault(hook, "raises") for hook in OF_A_REQUEST),
    *(Fault(hook, "raises", num_good=n) for hook in OF_A_STEP for n in (0, 1)),
    *(Fault("build_connector_meta", "raises", num_good=n) for n in (2, 3)),
    Fault("request_finished", "hangs"),
    Fault("bind_connector_metadata", "hangs", num_good=1),
    Fault("update_connector_output", "hangs", num_good=2),
    Fault("get_finished", "hangs", num_good=2),
]


@pytest.mark.parametrize("fails_first", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.hook}-{f.kind}-{f.num_good}")
def test_connectors_beside_one_that_fails(
    fault: Fault, fails_first: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """In a MultiConnector: a reply has the rows that are computed or says what failed, no file is
    there that no reply names, and what others keep is right."""
    params = [greedy(1), greedy(3), greedy(2)]
    with engine(checkpoint("llama"), **extraction_config([1, 2], tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        expected = [rows_of(output) for output in outputs]
    clear(tmp_path)
    slot_connector.store.clear()
    both = in_company(tmp_path, fails_first=fails_first)
    with engine(checkpoint("llama"), block_size=16, **both) as llm:
        faults.append(fault)
        named = set()
        for is_last in (False, True, True):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            scheduler = core_of(llm).scheduler
            scheduler.check_integrity()
            scheduler.connector._connectors[2 if fails_first else 1]._host.check_integrity()
            for output, rows in zip(outputs, expected, strict=True):
                failure = output.outputs[0].failure
                assert failure is None or not is_last
                if failure is None:
                    assert torch.equal(rows_of(output), rows)
                    named.add(output.kv_transfer_params["hidden_states_path"])
            assert not faults
            llm.reset_prefix_cache()
    assert {str(file) for file in tmp_path.iterdir()} == named


def test_a_file_that_was_reported_when_its_request_is_dropped(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed: no reply names it. The report may be on its way when a limit of time ends, or
    the client goes away."""
    with engine(checkpoint("llama"), **extraction_config([1, 2], tmp_path)) as llm:
        deliveries = core_of(llm).scheduler._deliveries
        take_saves = deliveries.take_saves

        def drop_first(report: Any) -> None:
            for request_id in report.finished_sending:
                deliveries.drop(deliveries._requests[request_id])
            take_saves(report)

        monkeypatch.setattr(deliveries, "take_saves", drop_first)
        (output,) = llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
        assert output.outputs[0].finish_reason == "abort"
        monkeypatch.undo()
        outputs = llm.generate(PROMPTS[1:], greedy(2), use_tqdm=False)
        files = {str(file) for file in tmp_path.glob("*.safetensors")}
        assert files == set(map(path_of, outputs))
        llm.generate(PROMPTS[1:], greedy(2), use_tqdm=False)
        saver = core_of(llm).executor.worker.model_runner.connector.connector._saver
        assert len(saver._reported) <= 2  # those of the last call


def path_of(output: Any) -> str:
    return str(output.kv_transfer_params["hidden_states_path"])


def multi_of(loader: Any, other: Any) -> MultiConnector:
    """A scheduler side whose first connector loads a request."""
    connector = MultiConnector.__new__(MultiConnector)
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")
    connector._kv_transfer_config = config
    connector._connectors, connector._loader = [loader, other], {"r": 0}
    connector._newly_awaited = {}
    return connector


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_loaded_for_a_request_that_another_connector_fails(fails: bool) -> None:
    """Its blocks are given back at once, so a load would overwrite what others compute."""
    loader, other, blocks = MagicMock(), MagicMock(), MagicMock()
    request, nothing = SimpleNamespace(request_id="r"), blocks.new_empty()
    if fails:
        other.update_state_after_alloc.side_effect = RuntimeError("out of order")
    with pytest.raises(RuntimeError) if fails else nullcontext():
        multi_of(loader, other).update_state_after_alloc(request, blocks, 32)  # type: ignore[arg-type]
    told = (request, nothing, 0) if fails else (request, blocks, 32)
    loader.update_state_after_alloc.assert_called_once_with(*told)
    other.update_state_after_alloc.assert_called_once_with(request, nothing, 0)


def test_all_plan_a_step_for_which_one_cannot() -> None:
    """No load of such a step begins later, when its blocks are given back."""
    broken, other = MagicMock(), MagicMock()
    broken.build_connector_meta.side_effect = RuntimeError("out of order")
    step = SimpleNamespace(preempted_req_ids=set())
    with pytest.raises(RuntimeError, match="out of order"):
        multi_of(broken, other).build_connector_meta(step)  # type: ignore[arg-type]
    other.build_connector_meta.assert_called_once_with(step)


def clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_an_engine_ends_whatever_its_connector_does(
    role: str, kind: str, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=failing()) as llm:
        runner = core_of(llm).executor.worker.model_runner
        faults.append(Fault("shutdown", kind, role))
    assert not faults
    assert runner.pool.numel() == 0
    assert "FailingConnector.shutdown failed" in caplog.text


@pytest.mark.parametrize("hook", ["request_finished", "take_failures"])
def test_errors_of_any_class(hook: str, checkpoint: Checkpoint) -> None:
    """They may have no text, a long one, or stand for the end of a coroutine."""
    arguments: dict[str, Any] = {"block_size": 16, "kv_transfer_config": failing()}
    with engine(checkpoint("llama"), **arguments) as llm:
        expected = results(llm)
        for kind in sorted(ODD_ERRORS.keys() - {"cannot be encoded"}):  # nor can the test's log
            faults.append(Fault(hook, kind))
            found = results(llm)
            assert not faults
            assert found[0].kind is FailureKind.CONNECTOR_FAILED, kind
            assert f"the connector failed in {hook}: " in found[0].message
            assert len(found[0].message.encode()) < 5000
            if hook in OF_A_REQUEST:
                assert found[1:] == expected[1:]
            assert results(llm) == expected


def test_replies_that_cannot_be_sent(checkpoint: Checkpoint) -> None:
    """As :func:`test_odd_faults_in_a_process_of_its_own`, in the caller's process."""
    config = failing() | {"kv_connector": "UnsendableConnector"}
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        for _ in UNSENDABLE:
            failed, *others = results(llm)
            assert "cannot be sent to another process" in failed.message
            assert all(isinstance(one, list) for one in others)
        assert all(isinstance(one, list) for one in results(llm))


def test_odd_faults_in_a_process_of_its_own(checkpoint: Checkpoint) -> None:
    """The engine goes on, whatever a connector raises or returns that no message can carry."""
    told = [["request_finished", kind] for kind in ODD_ERRORS]
    config = failing(faults=told) | {"kv_connector": "UnsendableConnector"}
    arguments: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**24}
    folder = str(checkpoint("llama"))
    args = AsyncEngineArgs(model=folder, kv_transfer_config=config, **arguments)

    async def serve() -> list[Any]:
        llm = AsyncLLM.from_engine_args(args)
        found = []
        for index in range(len(told) + len(UNSENDABLE) + 1):
            stream = llm.generate(PROMPTS[0], greedy(3), f"request {index}")
            (*_, last) = [output async for output in stream]
            found.append(last.outputs[0])
        await llm.shutdown()
        return found

    *failed, good = asyncio.run(serve())
    for one in failed:
        assert one.failure.kind is FailureKind.CONNECTOR_FAILED
        assert "the connector failed in request_finished: " in one.failure.message
    assert good.failure is None and len(good.token_ids) == 3


@pytest.mark.parametrize("hook", ["on_new_request", "request_finished"])
def test_in_a_process_of_its_own(hook: str, checkpoint: Checkpoint) -> None:
    """Requests of others are served, before and after; the process ends when it is told to."""
    arguments: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**24}
    config = failing(fault=[hook, "hangs"])
    folder = str(checkpoint("llama"))
    args = AsyncEngineArgs(model=folder, kv_transfer_config=config, **arguments)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    async def serve() -> list[Any]:
        llm = AsyncLLM.from_engine_args(args)

        async def one(index: int) -> Any:
            (*_, last) = [
                output async for output in llm.generate(PROMPTS[index], params, f"request {index}")
            ]
            return last.outputs[0]

        found = [await one(1), *(await asyncio.gather(one(0), one(2))), await one(1)]
        await llm.shutdown()
        return found

    start = time.monotonic()
    first, failed, other, again = asyncio.run(serve())
    assert time.monotonic() - start < 60
    check_failed(failed.failure, Fault(hook, "hangs"))
    assert first.token_ids == again.token_ids
    assert len(other.token_ids) == 3

"""Connectors that never come back: their requests fail or compute, the engine goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.kv_connector import slot_connector
from tests.kv_connector.slot_connector import SlotConnector
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.utils.time_limit import time_limit

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(97, [60, 90, 20])]
hangs: set[str] = set()


class HangingConnector(SlotConnector):
    def _call(self, name: str) -> None:
        super()._call(name)
        if name in hangs and self._kv_transfer_config.get_from_extra_config("polls", False):
            while True:
                time.sleep(0.01)
        if name in hangs:
            threading.Event().wait()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        if "get_finished" in hangs:
            return None, None
        return super().get_finished(finished_req_ids)


class SilentConnector(ExampleHiddenStatesConnector):
    """Writes files and says nothing."""

    reports: set[str]

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        done, _ = super().get_finished(finished_req_ids)
        self.reports = getattr(self, "reports", set()) | (done or set())
        if "get_finished" in hangs:
            return None, None
        done, self.reports = self.reports, set()
        return done, None


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    hangs.clear()
    slot_connector.store.clear()
    slot_connector.calls.clear()


def hanging(policy: str = "recompute", timeout: float | None = 0.3, **options: Any) -> Any:
    return {
        "kv_connector": "HangingConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_timeout_seconds": timeout,
        "kv_connector_extra_config": options,
    }


def tokens_of(llm: LLM, params: SamplingParams) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].failure or list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("hook", ["start_load_kv", "wait_for_layer_load"])
def test_a_load_that_never_ends(
    hook: str, policy: str, in_background: bool, checkpoint: Checkpoint
) -> None:
    if in_background and hook == "wait_for_layer_load":
        pytest.skip("nothing of the step is loaded then")
    config = hanging(policy, in_background=in_background)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = tokens_of(llm, greedy(4))
        llm.reset_prefix_cache()
        hangs.add(hook)
        # The alarm ends the first call; later ones must not hang for tokens to come.
        threading.Timer(0.2, hangs.clear).start()
        found = tokens_of(llm, greedy(4))
        core_of(llm).scheduler.check_integrity()
        if policy == "recompute":
            assert found == expected
        else:
            assert f"HangingConnector.{hook} (kv_timeout_seconds)" in str(found[0])
            assert found[2] == expected[2] or "kv_timeout_seconds" in str(found[2])
        assert tokens_of(llm, greedy(4)) == expected


def test_a_save_that_never_ends(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=hanging()) as llm:
        expected = tokens_of(llm, greedy(4))
        hangs.add("wait_for_save")
        threading.Timer(0.2, hangs.clear).start()
        found = tokens_of(llm, greedy(4))
        assert "HangingConnector.wait_for_save (kv_timeout_seconds)" in str(found[0])
        assert tokens_of(llm, greedy(4)) == expected


def test_a_load_in_the_background_that_is_never_reported(checkpoint: Checkpoint) -> None:
    """Its blocks may still be written: they stay held until it is."""
    config = hanging(in_background=True)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = tokens_of(llm, greedy(4))
        llm.reset_prefix_cache()
        hangs.add("get_finished")
        found = tokens_of(llm, greedy(4))
        assert all("kv_timeout_seconds=0.3" in str(one) for one in found[:2])
        assert found[2] == expected[2]
        scheduler = core_of(llm).scheduler
        scheduler.check_integrity()
        assert len(scheduler.requests) == 2
        hangs.clear()
        assert tokens_of(llm, greedy(4)) == expected
        assert not scheduler.requests


def test_without_a_limit_such_a_request_can_be_aborted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.engine.llm_engine.SETTLE_SECONDS", 0.1)
    config = hanging(in_background=True, timeout=None)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = tokens_of(llm, greedy(4))
        llm.reset_prefix_cache()
        hangs.add("get_finished")
        request = llm.llm_engine.add_request("one", PROMPTS[0], greedy(4))
        for _ in range(5):
            assert llm.llm_engine.step() == []
        llm.llm_engine.abort_request([request])
        llm.llm_engine.settle()  # comes back
        assert not llm.llm_engine.get_num_unfinished_requests()
        core_of(llm).scheduler.check_integrity()
        hangs.clear()
        assert tokens_of(llm, greedy(4)) == expected


def test_a_file_that_is_never_reported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments = extraction_config([1, 2], tmp_path)
    arguments["kv_transfer_config"] |= {
        "kv_connector": "SilentConnector",
        "kv_connector_module_path": __name__,
        "kv_timeout_seconds": 0.3,
    }
    with engine(checkpoint("llama"), **arguments) as llm:
        hangs.add("get_finished")
        found = tokens_of(llm, greedy(2))
        assert all("delivered nothing within kv_timeout_seconds=0.3" in str(one) for one in found)
        hangs.clear()
        (output,) = llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
        assert len(rows_of(output)) == 60


def test_limits_inside_of_others() -> None:
    late = pytest.raises(TimeoutError, match=r"outer did not return within 0\.2 seconds")
    with late, time_limit(0.2, "outer"), time_limit(30.0, "inner"):
        time.sleep(5)
    with time_limit(0.01, "done"):
        pass
    time.sleep(0.03)  # no alarm is left


def in_a_thread(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result(timeout=60)


def test_limits_in_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    def run(outer: float, inner: float, body: Callable[[], object]) -> None:
        with time_limit(outer, "outer"), time_limit(inner, "inner"):
            body()

    def poll() -> None:
        while True:
            time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"outer did not return within 0\.1 seconds"):
        in_a_thread(lambda: run(0.1, 30.0, poll))
    with pytest.raises(TimeoutError, match=r"inner did not return within 0\.1 seconds"):
        in_a_thread(lambda: run(30.0, 0.1, poll))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="inner"):  # what waits ends by itself, and is late
        in_a_thread(lambda: run(30.0, 0.1, lambda: time.sleep(0.4)))
    assert 0.4 <= time.monotonic() - began < 20
    assert "inner did not return within 0.1 seconds; it ends when it next runs" in caplog.text
    in_a_thread(lambda: [run(30.0, 0.05, lambda: None) for _ in range(3)])
    in_a_thread(lambda: time.sleep(0.1))  # nothing is left


@pytest.mark.parametrize("hook", ["start_load_kv", "get_num_new_matched_tokens", "wait_for_save"])
def test_hooks_that_hang_while_another_thread_drives(hook: str, checkpoint: Checkpoint) -> None:
    config = hanging(polls=True)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = in_a_thread(lambda: tokens_of(llm, greedy(4)))
        llm.reset_prefix_cache()
        hangs.add(hook)
        threading.Timer(0.2, hangs.clear).start()
        found = in_a_thread(lambda: tokens_of(llm, greedy(4)))
        if hook == "wait_for_save":
            assert "HangingConnector.wait_for_save (kv_timeout_seconds)" in str(found[0])
        else:
            assert found == expected
        core_of(llm).scheduler.check_integrity()
        assert in_a_thread(lambda: tokens_of(llm, greedy(4))) == expected


def test_the_option_is_checked(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="kv_timeout_seconds"):
        LLM(str(checkpoint("llama")), kv_transfer_config=hanging(timeout=0.0))

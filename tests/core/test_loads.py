"""Tokens that a connector brings, against a worker that checks every read: the pool's books stay
right and every request gets its own tokens, whatever the connector says or does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.core.loading_connector import LoadingConnector
from tests.core.test_scheduler import KINDS, Engine, expected, random_prompts
from tests.grids import at_night
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.exceptions import FailureKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput


def make(kind: str = "dense", **options: Any) -> tuple[LoadingConnector, LoadingEngine]:
    connector = LoadingConnector(spec=KVConnectorBase_V1)
    is_recurrent = any(spec.is_recurrent for spec in KINDS[kind])
    connector.prepare(grain=16 if is_recurrent else 1)
    options = {"hidden": "none", **options}
    return connector, LoadingEngine(kind, connector=connector, **options)


class LoadingEngine(Engine):
    """Steps in which the connector loads."""

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids)
        for request_id, num_tokens in scheduled.restarted_req_tokens.items():
            if request_id in self.worker.states:
                del self.worker.states[request_id].tokens[num_tokens:]
                self.worker.states[request_id].rows.clear()
        # Before anything is loaded.
        self.worker.copy_blocks(scheduled)
        report = self.scheduler.connector.work(self.plan, self.worker)  # type: ignore[union-attr]
        output = self.execute(scheduled, report.invalid_block_ids)
        output.kv_connector_output = report
        self.under_way.append((scheduled, output))
        while self.under_way:
            self._take(*self.under_way.popleft())

    def execute(self, scheduled: SchedulerOutput, lost: set[int]) -> ModelRunnerOutput:
        """Requests whose load failed compute rubbish: here they do not run."""
        broken = {
            new.req_id
            for new in scheduled.scheduled_new_reqs
            if any(set(table) & lost for table in new.block_ids)
        }
        cached = scheduled.scheduled_cached_reqs
        broken |= {
            request_id
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if blocks is not None and any(set(table) & lost for table in blocks)
        }
        counts = scheduled.num_scheduled_tokens
        kept = {r: n for r, n in counts.items() if r not in broken}
        scheduled.num_scheduled_tokens = kept
        output = self.worker.execute(scheduled)
        scheduled.num_scheduled_tokens = counts
        for request_id in broken:
            output.sampled_token_ids[request_id] = [10**6]
        return output


@pytest.mark.parametrize("hidden", ["none", "leaving"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, at_night(2), at_night(3)])
def test_random_loads_in_a_small_pool(kind: str, hidden: str, seed: int) -> None:
    """Loads at once and in the background, some broken, between prefix hits and preemptions."""
    rng = random.Random(seed)
    connector, engine = make(kind, hidden=hidden, num_blocks=rng.choice([90, 130, 400]))
    prompts = random_prompts(rng, 60)
    lengths = [rng.randint(0, 20) for _ in prompts]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        name = str(i)
        if rng.random() < 0.7:
            connector.offers[name] = rng.choice([len(prompt), rng.randint(0, len(prompt))])
        if rng.random() < 0.4:
            connector.delays[name] = rng.randint(0, 4)
        if rng.random() < 0.3:
            connector.undecided[name] = rng.randint(1, 5)
        if rng.random() < 0.2:
            connector.broken.add(name)
        engine.add(name, prompt, max_tokens=length)
        if rng.random() < 0.3:
            engine.step()
        if rng.random() < 0.1:
            engine.scheduler.finish_requests([str(rng.randint(0, i))], FinishReason.ABORT)
    engine.run()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if engine.ended[str(i)].finish_reason is not FinishReason.ABORT:
            assert engine.ended[str(i)].finish_reason is FinishReason.LENGTH, engine.ended[str(i)]
            assert engine.outputs.get(str(i), []) == expected(prompt, length)
    assert connector.num_loaded > 300


@pytest.mark.parametrize("kind", KINDS)
def test_loads_before_a_change_of_weights_are_not_used(kind: str) -> None:
    """Neither those that have arrived nor those under way."""
    rng = random.Random(kind)
    connector, engine = make(kind, num_blocks=150)
    prompts = random_prompts(rng, 40)
    for i, prompt in enumerate(prompts):
        name = str(i)
        connector.offers[name] = rng.randint(0, len(prompt))
        if rng.random() < 0.7:
            connector.delays[name] = rng.randint(0, 8)
        engine.add(name, prompt, max_tokens=i % 9)
        engine.step()
        if rng.random() < 0.4:
            engine.pause(changes_weights=True)
            for load in connector.loads.values():  # of the old weights
                load.tokens = [-1] * len(load.tokens)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.outputs.get(str(i), []) == expected(prompt, i % 9)
    assert connector.num_loaded > 100


PROMPT = [1, 2, 3, 4] * 25


@pytest.mark.parametrize("delay", [None, 2])
def test_loaded_tokens_are_not_computed_and_count_as_cached(delay: int | None) -> None:
    connector, engine = make()
    connector.offers["a"] = 77
    if delay is not None:
        connector.delays["a"] = delay
    engine.add("a", PROMPT, max_tokens=3)
    engine.run()
    assert engine.outputs["a"] == expected(PROMPT, 3)
    assert engine.ended["a"].num_cached_tokens == 77
    assert engine.worker.num_computed_tokens == 100 - 77 + 2


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_a_load_behind_a_hit_whose_block_later_tokens_do_not_read(kind: str) -> None:
    """The part of a block that was found takes no block; the pool has just room for the rest."""
    prompt = PROMPT + PROMPT[:20]
    connector, engine = make(kind, hidden="leaving", num_blocks=10)
    engine.add("a", [*prompt[:17], 9], max_tokens=0)
    engine.run()
    manager = engine.scheduler.kv_cache_manager
    assert [m.tokens_per_block for m in manager.coordinator.token_managers] == [80, 23]
    connector.offers["b"] = 115
    engine.add("b", prompt, max_tokens=0)
    engine.step()
    assert engine.ended["b"].num_cached_tokens == 115


def test_others_run_while_the_connector_makes_up_its_mind() -> None:
    connector, engine = make()
    connector.undecided["a"] = 10
    engine.add("a", PROMPT, max_tokens=1)
    engine.add("b", PROMPT[:50], max_tokens=1)
    engine.step()
    assert "b" in engine.ended
    engine.run()
    assert engine.outputs["a"] == expected(PROMPT, 1)


def test_of_an_offer_of_everything_the_last_token_is_computed() -> None:
    connector, engine = make()
    connector.offers["a"] = 100
    engine.add("a", PROMPT, max_tokens=2)
    engine.run()
    assert engine.outputs["a"] == expected(PROMPT, 2)
    assert engine.ended["a"].num_cached_tokens == 99


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("dense", (101, False)),
        ("dense", (-1, True)),
        ("hybrid", (100, False)),
        ("hybrid", (40, False)),
    ],
)
def test_an_offer_that_cannot_be_used_is_computed(kind: str, answer: tuple[int, bool]) -> None:
    connector, engine = make(kind)
    connector.get_num_new_matched_tokens = lambda request, num: answer  # type: ignore[method-assign]
    engine.add("a", PROMPT, max_tokens=2)
    engine.run()
    assert engine.outputs["a"] == expected(PROMPT, 2)
    assert engine.ended["a"].num_cached_tokens == 0


def test_rows_that_would_be_missing_are_computed() -> None:
    connector, engine = make(hidden="leaving")
    connector.loads_rows = False
    connector.offers["a"] = 96
    engine.add("a", PROMPT, max_tokens=2)
    engine.run()
    assert engine.ended["a"].num_cached_tokens == 0
    assert len(engine.worker.rows["a"]) == 101


@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_do_not_come(policy: str, delay: int | None) -> None:
    connector, engine = make(load_failure_policy=policy)
    connector.offers = {"a": 90, "c": 90}
    connector.broken = {"a"}
    if delay is not None:
        connector.delays["a"] = delay
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT[::-1], max_tokens=3)
    engine.add("c", PROMPT[1:], max_tokens=3)
    engine.run()
    assert engine.outputs["b"] == expected(PROMPT[::-1], 3)
    assert engine.outputs["c"] == expected(PROMPT[1:], 3)
    if policy == "recompute":
        assert engine.outputs["a"] == expected(PROMPT, 3)
        assert engine.ended["a"].num_cached_tokens < 90
    else:
        failure = engine.ended["a"].failure
        assert failure is not None
        assert failure.kind is FailureKind.CONNECTOR_FAILED
        assert "did not come" in failure.message
    # Nobody finds what was in the lost blocks.
    engine.add("again", PROMPT, max_tokens=3)
    engine.run()
    assert engine.outputs["again"] == expected(PROMPT, 3)


@pytest.mark.parametrize("where", ["ask", "alloc"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_connector_that_raises(where: str, policy: str) -> None:
    connector, engine = make("mixed", load_failure_policy=policy)
    connector.raises_in["a"] = where
    connector.offers["a"] = 50
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT, max_tokens=3)
    engine.run()
    assert engine.outputs["b"] == expected(PROMPT, 3)
    if policy == "recompute" and where == "ask":
        assert engine.outputs["a"] == expected(PROMPT, 3)
    else:
        failure = engine.ended["a"].failure
        assert failure is not None
        assert failure.kind is FailureKind.CONNECTOR_FAILED


def test_blocks_of_an_aborted_load_wait_for_its_report() -> None:
    connector, engine = make()
    connector.offers["a"], connector.delays["a"] = 90, 5
    engine.add("a", PROMPT, max_tokens=3)
    engine.step()
    engine.scheduler.finish_requests(["a"], FinishReason.ABORT)
    engine.step()
    assert engine.ended["a"].finish_reason is FinishReason.ABORT
    assert connector.ended == ["a"]
    pool = engine.scheduler.kv_cache_manager.pool
    assert pool.num_free_blocks < engine.plan.num_blocks - 1
    assert engine.scheduler.has_unfinished_requests()
    engine.run()
    assert pool.num_free_blocks == engine.plan.num_blocks - 1


def test_a_step_that_cannot_be_planned_ends_the_loads_that_begin_with_it() -> None:
    connector, engine = make()
    connector.offers["a"], connector.delays["a"] = 90, 0
    build = connector.build_connector_meta
    connector.build_connector_meta = raising_plan()  # type: ignore[method-assign]
    engine.add("a", PROMPT, max_tokens=3)
    scheduled = engine.scheduler.schedule()
    engine._take(scheduled, ModelRunnerOutput())
    connector.build_connector_meta = build  # type: ignore[method-assign]
    connector.loads.clear()
    engine.run()
    assert engine.ended["a"].finish_reason is FinishReason.ERROR


def raising_plan() -> Any:
    def raising(scheduled: object) -> None:
        raise RuntimeError("no plan")

    return raising

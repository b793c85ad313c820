"""The scheduler and the pool against a worker that checks every read and write."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.core.fake_worker import FakeWorker, next_token
from tests.grids import at_night
from vllm.config import CacheConfig, SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.exceptions import Failure, FailureKind
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager, snapshot_positions
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.core.sched.loads import LoadFailurePolicy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import HiddenStateManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, ExtractionSpec, FinishReason
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=21
)
CHUNKS = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32, attention_chunk_size=21
)
STATE = MambaSpec(
    block_size=64, shapes=((3, 24), (2, 16, 17)), dtypes=(torch.float32, torch.float32)
)
SMALL_STATE = MambaSpec(block_size=64, shapes=((2, 40),), dtypes=(torch.float32,))
KINDS: dict[str, list[KVCacheSpec]] = {
    "dense": [FULL, FULL],
    "sliding": [WINDOW],
    "mixed": [WINDOW, FULL, WINDOW],
    "chunked": [CHUNKS],
    "chunked+full": [CHUNKS, FULL, CHUNKS],
    "hybrid": [STATE, STATE, FULL, STATE],
    "recurrent": [STATE, STATE],
    "hybrid+window": [STATE, WINDOW, FULL],
    "two sizes of states": [STATE, SMALL_STATE, FULL, STATE, SMALL_STATE, STATE],
}


def make_plan(kind: str, hidden: str, num_blocks: int, cache: CacheConfig) -> KVCacheConfig:
    specs: dict[str, KVCacheSpec] = {f"layers.{i}": s for i, s in enumerate(KINDS[kind])}
    if hidden != "none":
        specs["hidden"] = HiddenStateCacheSpec(
            block_size=16,
            num_kv_heads=3,
            head_size=37,  # rows a block: no multiple of 16
            dtype=torch.float32,
            max_resident_tokens=64 if hidden == "leaving" else None,
        )
    layout = plan_layout(specs, cache)
    return layout.with_blocks(num_blocks)


class Engine:
    """Scheduler and fake worker; integrity is checked after every step."""

    def __init__(
        self,
        kind: str,
        *,
        hidden: str = "leaving",
        num_blocks: int = 400,
        caching: bool = True,
        cache: CacheConfig | None = None,
        max_model_len: int = 400,
        max_retained_snapshots: int = 1000,
        steps_ahead: int = 0,
        connector: Any = None,
        load_failure_policy: LoadFailurePolicy = "recompute",
        chunk_alignment: int = 1,
        longrope_limit: int | None = None,
        **scheduling: Any,
    ) -> None:
        scheduling = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": max_model_len,
            **scheduling,
        }
        self.plan = make_plan(kind, hidden, num_blocks, cache or CacheConfig())
        manager = KVCacheManager(
            self.plan,
            enable_caching=caching,
            snapshot_interval=32,
            max_retained_hidden_blocks=1000,
            max_retained_snapshots=max_retained_snapshots,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(**scheduling),
            self.plan,
            manager,
            max_model_len=max_model_len,
            chunk_alignment=chunk_alignment,
            longrope_limit=longrope_limit,
            connector=connector,
            load_failure_policy=load_failure_policy,
        )
        self.worker = FakeWorker(self.plan)
        self.worker.longrope_limit = longrope_limit
        self.steps_ahead = steps_ahead
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        manager.pool.on_recycle = self.worker.poison
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        self.num_preemptions = 0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        extraction: ExtractionSpec | None = None,
        **params: Any,
    ) -> None:
        params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params}
        message = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**params),
            arrival_time=0.0,
            extraction=extraction,
        )
        self.scheduler.add_request(Request(message))

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        assert scheduled.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        self.num_preemptions += len(scheduled.preempted_req_ids)
        self.under_way.append((scheduled, self.worker.execute(scheduled)))
        num_left = self.steps_ahead if scheduled.total_num_scheduled_tokens else 0
        while len(self.under_way) > num_left:
            self._take(*self.under_way.popleft())

    def _take(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        news = self.scheduler.update_from_output(scheduled, output)
        self.scheduler.check_integrity()
        for item in news.outputs:
            self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
            if item.finished:
                self.ended[item.request_id] = item

    def pause(self, *, changes_weights: bool) -> None:
        """Freeze the requests, and thaw them; new weights make all that the pool holds useless."""
        while self.under_way:
            self._take(*self.under_way.popleft())
        self.scheduler.is_frozen = True
        before = self.worker.num_computed_tokens
        for _ in range(3):
            self.step()
        assert self.worker.num_computed_tokens == before
        if changes_weights:
            self.scheduler.reset_prefix_cache()
            self.worker.content.clear()
            self.scheduler.starts_again = True
        self.scheduler.is_frozen = False

    def run(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.has_unfinished_requests() and not self.under_way:
                break
            self.step()
        else:
            raise AssertionError("there is work without an end")
        pool = self.scheduler.kv_cache_manager.pool
        assert pool.num_free_blocks == self.plan.num_blocks - 1, "leaked blocks"


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of 1 to 300 tokens; many share a prefix with an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(count):
        prompt: list[int] = []
        if prompts and rng.random() < 0.7:
            earlier = rng.choice(prompts)
            prompt = earlier[: rng.randint(0, len(earlier))]
        length = rng.choice([1, 2, 15, 16, 17, rng.randint(1, 100), rng.randint(1, 300)])
        prompt = (prompt + [rng.randrange(5) for _ in range(length)])[:300]
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("hidden", ["none", "leaving", "staying"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seed", "longrope_limit"),
    [(0, None), (3, 40), at_night(1, None), at_night(2, None), at_night(4, 100)],
)
def test_random_requests_in_a_small_pool(
    kind: str, hidden: str, seed: int, longrope_limit: int | None, steps_ahead: int
) -> None:
    """Queues, chunks, shared prefixes, preemptions, requests that become long ones to their model's
    rotation: every read finds the right content."""
    rng = random.Random(seed)
    longest = sum(
        cdiv(330, g.kv_cache_spec.block_size) if not isinstance(g.kv_cache_spec, MambaSpec) else 1
        for g in make_plan(kind, hidden, 2, CacheConfig()).kv_cache_groups
    )
    num_blocks = 1 + longest + rng.randint(0, 30)
    own: dict[str, Any] = {"steps_ahead": steps_ahead, "longrope_limit": longrope_limit}
    engine = Engine(kind, hidden=hidden, num_blocks=num_blocks, **own)
    prompts = random_prompts(rng, 60)
    lengths = [rng.randint(0, 30) for _ in prompts]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add(str(i), prompt, max_tokens=length)
        if rng.random() < 0.3:
            engine.step()
    engine.run()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert engine.outputs.get(str(i), []) == expected(prompt, length)
        assert engine.ended[str(i)].finish_reason is FinishReason.LENGTH
        if hidden != "none":
            # All but the last token went through the model; the prompt always did.
            assert len(engine.worker.rows[str(i)]) == len(prompt) + max(length - 1, 0)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("hidden", ["none", "leaving"])
@pytest.mark.parametrize("kind", KINDS)
def test_pauses_between_steps(kind: str, hidden: str, steps_ahead: int) -> None:
    """A frozen request goes on where it was, or from its tokens where nothing it had is valid."""
    rng = random.Random(kind)
    engine = Engine(kind, hidden=hidden, num_blocks=150, steps_ahead=steps_ahead)
    prompts = random_prompts(rng, 25)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, max_tokens=i % 20)
        engine.step()
        if rng.random() < 0.5:
            engine.pause(changes_weights=rng.random() < 0.5)
        if i % 7 == 3:
            engine.scheduler.is_frozen = True
            engine.scheduler.finish_requests([str(i)], FinishReason.ABORT)
            while engine.scheduler.has_unfinished_requests() or engine.under_way:
                engine.step()  # ends, because what is left is frozen
            engine.scheduler.is_frozen = False
    engine.run()
    for i, prompt in enumerate(prompts):
        is_aborted = engine.ended[str(i)].finish_reason is FinishReason.ABORT
        found, right = engine.outputs.get(str(i), []), expected(prompt, i % 20)
        assert found == (right[: len(found)] if is_aborted else right)
        assert i % 7 == 3 or not is_aborted


@pytest.mark.parametrize(
    ("params", "extraction", "num_steps", "is_lost"),
    [
        ({}, None, 1, False),
        ({}, ExtractionSpec((1,)), 1, False),
        ({}, ExtractionSpec((1,), in_parts=True), 0, False),
        ({}, ExtractionSpec((1,), in_parts=True), 1, True),
        ({"prompt_logprobs": 1}, None, 1, True),
        ({"prompt_logprobs": 1}, None, 3, False),
    ],
)
def test_values_that_left_before_a_change_of_weights(
    params: dict[str, Any], extraction: ExtractionSpec | None, num_steps: int, is_lost: bool
) -> None:
    """A request whose values have left in part cannot start again; others hand out all anew."""
    engine = Engine("dense", max_num_batched_tokens=16)
    prompt = list(range(5)) * 8
    engine.add("a", prompt, extraction=extraction, max_tokens=4, **params)
    for _ in range(num_steps):
        engine.step()
    engine.pause(changes_weights=True)
    restarted = engine.scheduler.schedule().restarted_req_tokens
    failed = engine.scheduler.requests.get("a") is None or is_lost
    assert failed == is_lost
    if is_lost:
        engine.step()
        failure = engine.ended["a"].failure
        assert failure is not None and "values of it were sent" in failure.message
        assert failure.kind is FailureKind.NOT_READY and not restarted
    else:
        assert restarted == ({"a": 40 + max(0, num_steps - 2)} if num_steps else {})


def test_a_small_pool_preempts() -> None:
    engine = Engine("hybrid", num_blocks=12)
    for i in range(10):
        engine.add(str(i), [i] * 140, max_tokens=60)
    engine.run()
    assert engine.num_preemptions > 0
    assert all(len(engine.outputs[str(i)]) == 60 for i in range(10))


@pytest.mark.parametrize("budget", [1, 7, 16, 33, 64, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size(kind: str, budget: int) -> None:
    engine = Engine(kind, max_num_batched_tokens=budget)
    prompts = random_prompts(random.Random(budget), 6)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.outputs[str(i)] == expected(prompt, 4)


@pytest.mark.parametrize("pack", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefix_is_computed_once(kind: str, pack: int | None) -> None:
    cache = CacheConfig(attn_pack_size=pack if "hybrid" in kind else None)
    engine = Engine(kind, num_blocks=2000, cache=cache, max_num_batched_tokens=512)
    shared = random.Random(1).choices(range(5), k=200)
    engine.add("a", shared + [1] * 50)
    engine.run()
    before = engine.worker.num_computed_tokens
    engine.add("b", shared + [2] * 60)
    engine.run()
    hit = engine.ended["b"].num_cached_tokens
    assert hit == 192
    assert engine.worker.num_computed_tokens - before == 260 + 3 - hit
    engine.add("c", shared + [1] * 50)
    engine.run()
    assert engine.ended["c"].num_cached_tokens == 240  # the last grain below 250


def test_caching_off_finds_nothing() -> None:
    engine = Engine("hybrid", caching=False)
    for name in "ab":
        engine.add(name, [3] * 100)
        engine.run()
    assert engine.ended["b"].num_cached_tokens == 0


def test_a_full_hybrid_pool_still_learns_shared_prefixes() -> None:
    """States are kept where others are overwritten; a branch seen once is kept exactly there."""
    rng = random.Random(9)
    engine = Engine("hybrid", num_blocks=100)
    for i in range(40):
        engine.add(f"other {i}", [rng.randrange(5) for _ in range(250)], max_tokens=2)
    engine.run()
    assert engine.scheduler.kv_cache_manager.pool.num_idle_blocks < 6
    shared = [rng.randrange(5) for _ in range(220)]
    for i in range(3):
        engine.add(f"shared {i}", shared + [i] * 60, max_tokens=2)
        engine.run()
    cached = [engine.ended[f"shared {i}"].num_cached_tokens for i in range(3)]
    assert cached == [0, 192, 208]


def test_a_long_prompt_keeps_the_beginning_of_its_rows() -> None:
    """Rows of a prompt beyond what may stay findable do not push out those before them."""
    engine = Engine("dense", num_blocks=200)
    rows = engine.scheduler.kv_cache_manager.coordinator.token_managers[-1]
    assert isinstance(rows, HiddenStateManager)
    rows.max_retained_blocks = 3
    for name in "ab":
        engine.add(name, [1, 2, 3] * 100, max_tokens=2)
        engine.run()
    kept = 3 * rows.tokens_per_block // 16 * 16
    assert engine.ended["b"].num_cached_tokens == kept


def test_what_is_cached_is_overwritten_from_the_end() -> None:
    """All groups are overwritten alike: a prompt that was overwritten in part is found in part."""
    engine = Engine("dense", num_blocks=40)
    engine.add("a", [1] * 250, max_tokens=2)
    engine.run()
    found = [engine_hit(engine, [1] * 250)]
    for i in range(30):
        engine.add(f"other {i}", [2, i % 7, i // 7] * 10, max_tokens=1)
        engine.run()
        found.append(engine_hit(engine, [1] * 250))
    assert found[0] == 240
    assert found[-1] == 0
    assert found == sorted(found, reverse=True)
    assert len(set(found)) >= 4


def engine_hit(engine: Engine, prompt: list[int]) -> int:
    """Tokens of a prompt that a request would find now."""
    message = EngineCoreRequest(
        request_id="probe",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        arrival_time=0.0,
    )
    hit = engine.scheduler.kv_cache_manager.find_prefix(Request(message))
    return hit.num_tokens if hit else 0


def test_depth_and_salt_keep_prefixes_apart() -> None:
    engine = Engine("dense")
    for name, salt, depth in [
        ("a", None, None),
        ("b", "x", None),
        ("c", None, 3),
        ("d", "x", None),
    ]:
        message = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1] * 64,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_time=0.0,
            cache_salt=salt,
        )
        request = Request(message)
        request.num_layers_to_run = depth
        engine.scheduler.add_request(request)
        engine.run()
    cached = [engine.ended[name].num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, 0, 48]


def test_prefill_without_tokens_runs_only_the_depth_it_needs() -> None:
    engine = Engine("dense")
    for name, depth in [("a", 2), ("b", 3)]:
        message = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1] * 20,
            sampling_params=SamplingParams(max_tokens=0),
            arrival_time=0.0,
        )
        request = Request(message)
        request.num_layers_to_run = depth
        engine.scheduler.add_request(request)
    assert engine.scheduler.schedule().num_layers_to_run == 3
    engine.add("c", [1] * 4)
    assert engine.scheduler.schedule().num_layers_to_run is None


def test_abort_frees_everything_at_any_moment() -> None:
    rng = random.Random(5)
    engine = Engine("hybrid", num_blocks=80)
    for i, prompt in enumerate(random_prompts(rng, 40)):
        engine.add(str(i), prompt, max_tokens=20)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        alive = list(engine.scheduler.requests)
        if alive and rng.random() < 0.4:
            engine.scheduler.finish_requests([rng.choice(alive)], FinishReason.ABORT)
            engine.scheduler.check_integrity()
    engine.run()
    reasons = {item.finish_reason for item in engine.ended.values()}
    assert reasons == {FinishReason.ABORT, FinishReason.LENGTH}
    assert len(engine.ended) == 40


def test_a_failed_step_ends_its_requests_only() -> None:
    engine = Engine("hybrid", max_num_batched_tokens=60)
    for name in "abc":
        engine.add(name, [ord(name)] * 50, max_tokens=2)
    scheduled = engine.scheduler.schedule()
    assert list(scheduled.num_scheduled_tokens) == ["a", "b"]
    failure = Failure(FailureKind.STEP_FAILED, "out of luck")
    engine.scheduler.fail_step(scheduled, FinishReason.ERROR, failure)
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.ended["a"].finish_reason is FinishReason.ERROR
    assert engine.ended["a"].stop_reason == "out of luck"
    assert engine.outputs["c"] == expected([ord("c")] * 50, 2)


def test_priority_policy() -> None:
    engine = Engine("dense", policy="priority", max_num_seqs=1)
    for name, priority in [("low", 5), ("high", -1), ("middle", 2)]:
        message = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_time=0.0,
            priority=priority,
        )
        engine.scheduler.add_request(Request(message))
    engine.run()
    assert list(engine.ended) == ["high", "middle", "low"]


def test_chunked_prefill_off_waits_for_room_for_the_whole_prompt() -> None:
    engine = Engine("dense", enable_chunked_prefill=False, max_num_batched_tokens=400)
    for name in "abc":
        engine.add(name, [ord(name)] * 150, max_tokens=5)
    assert list(engine.scheduler.schedule().num_scheduled_tokens.values()) == [150, 150]
    # It waited for budget, not for blocks: the next step has it, though nothing was freed.
    assert "c" in engine.scheduler.schedule().num_scheduled_tokens


def test_the_length_limit_ends_a_request() -> None:
    engine = Engine("dense", max_model_len=20)
    engine.add("a", [1] * 15, max_tokens=100)
    engine.run()
    assert engine.outputs["a"] == expected([1] * 15, 5)
    assert engine.ended["a"].finish_reason is FinishReason.LENGTH


def test_stop_tokens() -> None:
    engine = Engine("dense")
    tokens = expected([1, 2, 3], 30)
    stop = tokens[10]
    first = tokens.index(stop)
    engine.add("a", [1, 2, 3], max_tokens=30, stop_token_ids=[stop])
    engine.add("b", [1, 2, 3], max_tokens=30, stop_token_ids=[stop], min_tokens=first + 2)
    engine.run()
    assert engine.outputs["a"] == tokens[: first + 1]
    assert engine.ended["a"].finish_reason is FinishReason.STOP
    assert engine.ended["a"].stop_reason == stop
    assert len(engine.outputs["b"]) > first + 1


def test_snapshot_positions() -> None:
    assert snapshot_positions(0, 100, 32, 48) == [32, 48, 64, 96]
    assert snapshot_positions(32, 64, 32, 0) == [64]
    long = snapshot_positions(0, 100_000, 64, 99_984)
    assert long[-1] == 99_984
    assert len(long) < 16 + 8 * 11
    gaps = [b - a for a, b in itertools.pairwise(long)]
    assert all(gap <= max(64, end / 8) for gap, end in zip(gaps, long[1:], strict=True))
    # Chunks of any size keep the same positions.
    pieces = [snapshot_positions(a, min(a + 37, 5000), 64, 4992) for a in range(0, 5000, 37)]
    assert list(itertools.chain(*pieces)) == snapshot_positions(0, 5000, 64, 4992)


@pytest.mark.parametrize(("grain", "interval"), [(16, 32), (64, 48), (64, 16)])
def test_states_are_kept_where_tokens_are_decoded(grain: int, interval: int) -> None:
    """At the same positions as in a prompt, whatever does not divide what."""
    kept: dict[str, list[int]] = {}
    for name, prompt, max_tokens in (("decoded", 20, 130), ("prompt", 149, 1)):
        engine = Engine("recurrent", max_num_batched_tokens=256)
        manager = engine.scheduler.kv_cache_manager
        manager.state_grain, manager.snapshot_interval = grain, interval
        manager.overwriting_interval = interval
        engine.add("a", list(range(prompt)), max_tokens=max_tokens)
        positions = kept[name] = []
        while request := engine.scheduler.requests.get("a"):
            start = request.num_computed_tokens
            scheduled = engine.scheduler.schedule()
            planned = scheduled.state_snapshots.get("a", [])
            positions += [start + snapshot.num_tokens for snapshot in planned]
            engine._take(scheduled, engine.worker.execute(scheduled))
    wanted = {(prompt - 1) // grain * grain for prompt in (20, 149)}
    assert set(kept["decoded"]) - wanted == set(kept["prompt"]) - wanted
    assert set(range(interval, 149, interval)) <= set(kept["decoded"])


def test_priority_with_equal_keys_makes_progress() -> None:
    """The newest of equals gives way; otherwise two would evict each other forever."""
    engine = Engine(
        "dense", policy="priority", num_blocks=17, long_prefill_token_threshold=16, hidden="none"
    )
    for name in "abcd":
        engine.add(name, [ord(name)] * 200, max_tokens=2)
    for _ in range(400):
        engine.step()
    assert set(engine.ended) == set("abcd")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborting_a_long_queue(policy: str) -> None:
    engine = Engine("dense", policy=policy)
    for i in range(3000):
        engine.add(str(i), [1, 2, 3], max_tokens=1)
    engine.scheduler.finish_requests([str(i) for i in range(2999, 10, -1)], FinishReason.ABORT)
    engine.scheduler.check_integrity()
    engine.run()
    lengths = [i for i, item in engine.ended.items() if item.finish_reason is FinishReason.LENGTH]
    assert lengths == [str(i) for i in range(11)]


class BrokenConnector(Mock):
    """Raises while it plans the second step."""

    rows_leave_each_step = True
    reply_when_saved = False
    steps = 0

    def get_num_new_matched_tokens(self, request: Request, num: int) -> tuple[int, bool]:
        return 0, False

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def build_connector_meta(self, scheduled: object) -> None:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("no plan")

    def has_pending_push_work(self) -> bool:
        return False


def test_a_connector_that_raises_ends_the_requests_of_its_step() -> None:
    connector = BrokenConnector(spec=KVConnectorBase_V1)
    engine = Engine("dense", hidden="none", max_num_batched_tokens=40, connector=connector)
    for name in "abc":
        engine.add(name, [ord(name)] * 40, max_tokens=1)
    engine.run()
    assert engine.outputs["a"] == expected([ord("a")] * 40, 1)
    assert engine.ended["b"].finish_reason is FinishReason.ERROR
    reason = "the connector failed in build_connector_meta: RuntimeError: no plan"
    assert engine.ended["b"].stop_reason == reason
    assert engine.outputs["c"] == expected([ord("c")] * 40, 1)


class ReadingConnector(BrokenConnector):
    """May read every block of a request that has ended."""

    rows_leave_each_step = False

    def build_connector_meta(self, scheduled: object) -> None:
        return None


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("max_tokens", "num_steps"), [(0, 3), (1, 3), (3, 5)])
def test_the_last_step_of_a_request_is_known(max_tokens: int, num_steps: int, reads: bool) -> None:
    connector = ReadingConnector(spec=KVConnectorBase_V1) if reads else None
    engine = Engine("hybrid", hidden="none", max_num_batched_tokens=40, connector=connector)
    engine.add("a", [1] * 100, max_tokens=max_tokens)
    ends = []
    for _ in range(num_steps):
        scheduled = engine.scheduler.schedule()
        assert list(scheduled.num_scheduled_tokens) == ["a"]
        ends.append("a" in scheduled.ending_req_ids)
        engine.scheduler.update_from_output(scheduled, engine.worker.execute(scheduled))
    assert ends == [False] * (num_steps - 1) + [not reads]
    assert not engine.scheduler.requests


def test_chunks_of_recurrent_kernels_must_fit_the_budget() -> None:
    engine = Engine("hybrid")
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=64 .* at least 128"):
        Scheduler(
            engine.scheduler.config,
            engine.plan,
            engine.scheduler.kv_cache_manager,
            max_model_len=400,
            chunk_alignment=128,
        )


@pytest.mark.parametrize("budget", [70, 100, 64])
def test_chunk_alignment(budget: int) -> None:
    """All chunks but a request's last end at multiples of the alignment."""
    engine = Engine("hybrid", max_num_batched_tokens=budget, chunk_alignment=32)
    for name in "abc":
        engine.add(name, [ord(name)] * 150, max_tokens=2)
    for _ in range(100):
        if not engine.scheduler.has_unfinished_requests():
            break
        before = {i: r.num_computed_tokens for i, r in engine.scheduler.requests.items()}
        scheduled = engine.scheduler.schedule()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            end = before[request_id] + count
            assert end % 32 == 0 or end >= 150
        engine.scheduler.update_from_output(scheduled, engine.worker.execute(scheduled))
    assert not engine.scheduler.requests


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_after_a_reset(kind: str) -> None:
    """Not even what a request that was running at the reset computed afterwards."""
    engine = Engine(kind)
    prompt = [1, 2, 3, 4] * 75
    engine.add("a", prompt, max_tokens=2)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.add("b", prompt, max_tokens=2)
    engine.run()
    assert engine.ended["b"].num_cached_tokens == 0
    engine.add("c", prompt, max_tokens=2)
    engine.run()
    assert engine.ended["c"].num_cached_tokens == 288


def test_old_snapshots_make_room_for_new_ones() -> None:
    """Beyond the limit the longest unused are forgotten, and their blocks are used again."""
    engine = Engine("hybrid", num_blocks=3000, max_retained_snapshots=4, hidden="none")
    for i in range(30):
        engine.add(str(i), [i] * 100, max_tokens=1)
        engine.run()
    recurrent = engine.scheduler.kv_cache_manager.coordinator.recurrent
    assert len(recurrent._retained) == 4
    pool = engine.scheduler.kv_cache_manager.pool
    blocks_of_tokens = 30 * 7
    assert pool.num_blocks - pool.num_idle_blocks - 1 <= blocks_of_tokens + 4 * 3
    engine.add("again", [29] * 100, max_tokens=1)
    engine.run()
    assert engine.ended["again"].num_cached_tokens == 96

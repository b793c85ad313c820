"""A worker without tensors that knows what every slot of the pool holds, and checks each read.

The value of a token's slot is the identity of its whole prefix, so that a stale block, a
wrong slot or a state of another prefix is caught at the moment it would be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput

VOCABULARY = 7
NOTHING = -1
"""No prefix."""


def prefix_ids(tokens: Sequence[int], *, is_long: bool = False) -> list[int]:
    """One number for each prefix of ``tokens``; others where they are rotated as a long one."""
    ids, last = [], int(is_long)
    for token in tokens:
        last = hash((last, token))
        ids.append(last)
    return ids


def next_token(tokens: Sequence[int]) -> int:
    """The token that the fake model samples after ``tokens``."""
    return prefix_ids(tokens)[-1] % VOCABULARY


@dataclass
class FakeState:
    tokens: list[int]
    num_prompt: int
    max_tokens: int | None
    tables: list[list[int]]
    rows: dict[int, int] = field(default_factory=dict)


class FakeWorker:
    """Takes steps as the model runner does; ``rows`` are those a connector would have saved."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.content: dict[int, dict[object, int]] = {}
        self.owner: dict[int, int] = {}
        self.states: dict[str, FakeState] = {}
        self.rows: dict[str, dict[int, int]] = {}
        self.num_computed_tokens = 0
        self.longrope_limit: int | None = None

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.content.pop(block, None)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in scheduled.finished_req_ids:
            if request_id in self.states:
                self.rows[request_id] = self.states.pop(request_id).rows
        computed = self._take_requests(scheduled)
        self.copy_blocks(scheduled)
        output = ModelRunnerOutput()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._run(scheduled, request_id, computed[request_id], count)
            self.num_computed_tokens += count
            state = self.states[request_id]
            if computed[request_id] + count == len(state.tokens) and state.max_tokens != 0:
                token = next_token(state.tokens)
                state.tokens.append(token)
                output.sampled_token_ids[request_id] = [token]
        return output

    def copy_blocks(self, scheduled: SchedulerOutput) -> None:
        """Make the copies of a step, once."""
        for source, destination in scheduled.block_copies:
            self.content[destination] = dict(self.content[source])
            self.owner[destination] = self.owner[source]
        scheduled.block_copies = []

    def _take_requests(self, scheduled: SchedulerOutput) -> dict[str, int]:
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            tables = [list(ids) for ids in new.block_ids]
            self.states[new.req_id] = FakeState(
                list(new.prompt_token_ids),
                len(new.prompt_token_ids),
                new.sampling_params.max_tokens,
                tables,
            )
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, num in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[request_id] = num
            if blocks is None:
                continue
            state = self.states[request_id]
            if request_id in cached.resumed_req_ids:
                state.tables = [list(ids) for ids in blocks]
            else:
                for table, ids in zip(state.tables, blocks, strict=True):
                    table += ids
        return computed

    def _run(self, scheduled: SchedulerOutput, request_id: str, start: int, count: int) -> None:
        state = self.states[request_id]
        is_long = request_id in scheduled.long_req_ids
        ids = prefix_ids(state.tokens, is_long=is_long)
        end = start + count
        if self.longrope_limit is not None:
            assert end <= self.longrope_limit or is_long
            assert len(state.tokens) > self.longrope_limit or not is_long
        assert end <= len(state.tokens)
        snapshots = scheduled.state_snapshots.get(request_id, [])
        recurrent = self.config.recurrent_group_ids
        for gid, group in enumerate(self.config.kv_cache_groups):
            spec, table = group.kv_cache_spec, state.tables[gid]
            if isinstance(spec, MambaSpec):
                if start:
                    assert self._read(gid, table[0], "state") == ids[start - 1]
                is_lost = request_id in scheduled.ending_req_ids  # it need not be written
                self._write(gid, table[0], "state", NOTHING if is_lost else ids[end - 1])
                for snapshot in snapshots:
                    block = snapshot.block_ids[recurrent.index(gid)]
                    self._write(gid, block, "state", ids[start + snapshot.num_tokens - 1])
                continue
            size = spec.block_size
            for position in range(start, end):
                self._write(gid, table[position // size], position % size, ids[position])
            if isinstance(spec, HiddenStateCacheSpec):
                for position in range(len(state.rows), end):
                    row = self._read(gid, table[position // size], position % size)
                    assert row == ids[position]
                    state.rows[position] = row
                continue
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else end
            chunk = end
            if isinstance(spec, ChunkedLocalAttentionSpec):
                chunk = spec.attention_chunk_size
            for position in range(max(0, start - window + 1, start // chunk * chunk), end):
                found = self._read(gid, table[position // size], position % size)
                assert found == ids[position], (request_id, gid, position)

    def _read(self, group_id: int, block: int, slot: object) -> int:
        assert block != 0, "a read from the null block"
        assert self.owner[block] == group_id, "a read from another group's block"
        return self.content[block][slot]

    def _write(self, group_id: int, block: int, slot: object, value: int) -> None:
        assert block != 0, "a write to the null block"
        if self.owner.get(block) != group_id:
            self.content[block] = {}
            self.owner[block] = group_id
        self.content.setdefault(block, {})[slot] = value

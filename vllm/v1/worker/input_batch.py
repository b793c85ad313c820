"""A worker's state of each request, and the flat batch that it builds for a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from vllm.distributed.parallel_state import get_context_group
from vllm.ops.layout import HostStates, SequenceLayout, StatePlan
from vllm.sampling_params import SamplingParams
from vllm.utils.token_spread import TokenSpread
from vllm.utils.transfers import to_device
from vllm.v1.cache_kinds.base import KVCacheConfig, StepInputs
from vllm.v1.core.sched.output import StateSnapshot
from vllm.v1.sample.metadata import LogitEdits, takes_most_likely

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm.model_executor.layers.low_rank import Adapter
    from vllm.v1.rows.destinations import CallerTensors

Ints: TypeAlias = "npt.NDArray[np.int64]"


class IntVector:
    """A growing array of integers."""

    def __init__(self, values: Sequence[int]) -> None:
        self.length = len(values)
        self._data: Ints = np.empty(max(16, self.length + 16), dtype=np.int64)
        self._data[: self.length] = values

    def extend(self, values: Sequence[int]) -> None:
        end = self.length + len(values)
        if end > len(self._data):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[: self.length] = self.values
            self._data = grown
        self._data[self.length : end] = values
        self.length = end

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    @property
    def values(self) -> Ints:
        return self._data[: self.length]


class RequestState:
    """One request on a worker: its tokens and its block tables."""

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        generator: torch.Generator | None,
        block_ids: Sequence[Sequence[int]],
        rows: CallerTensors | None = None,
        prompt_embeds: torch.Tensor | None = None,
        token_after: int | None = None,
    ) -> None:
        self.token_after = token_after
        """The token that follows the prompt, of a request that generates nothing."""
        self.prompt_embeds = prompt_embeds
        """[prompt tokens, hidden] on the host, used instead of the embeddings of the ids."""
        self.req_id = req_id
        self.sampling_params = sampling_params
        self.takes_most_likely = takes_most_likely(sampling_params)
        self.generator = generator
        self.edits = LogitEdits(sampling_params)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_prompt_logprobs = 0
        """Prompt positions whose log-probabilities were reported."""
        self.tokens = IntVector(prompt_token_ids)
        self.steering_vectors: list[torch.Tensor] = []
        """Vectors of ``sampling_params.steering`` on the device."""
        self.adapter: Adapter | None = None
        self.rows = rows
        """Rows that the request hands to its caller, if it asked for some."""
        self.block_tables: list[IntVector] = []
        self.replace_blocks(block_ids)

    def replace_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Set new tables, as the request starts or starts again."""
        self.block_tables = [IntVector(ids) for ids in block_ids]
        self.first_blocks: Ints = np.array([ids[0] if ids else 0 for ids in block_ids], np.int64)
        """[groups]; in a recurrent layer's group it is the block of the state."""

    def tokens_after(self, positions: Ints) -> Ints:
        """int64: the token that follows each position; -1 if it is not known."""
        after = np.append(self.tokens.values, -1 if self.token_after is None else self.token_after)
        if self.prompt_embeds is not None:
            after[: self.num_prompt_tokens] = -1
        return after[positions + 1]

    def holds_any(self, block_ids: Collection[int]) -> bool:
        """Return whether one of these blocks is in a table of the request."""
        wanted = np.fromiter(block_ids, np.int64)
        return any(bool(np.isin(table.values, wanted).any()) for table in self.block_tables)

    def add_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        for group_id, (table, ids) in enumerate(zip(self.block_tables, block_ids, strict=True)):
            if ids:
                if not table.length:
                    self.first_blocks[group_id] = ids[0]
                table.extend(ids)


@dataclass(frozen=True)
class StepBatch:
    """The flat batch of a step: the scheduled tokens of every request, one after another."""

    states: list[RequestState]
    num_scheduled: Ints
    """[requests]"""
    num_computed: Ints
    """[requests], before this step."""
    query_start: Ints
    """[requests + 1]"""
    token_ids: Ints
    """[tokens]"""
    positions: Ints
    """[tokens], absolute."""
    request_of_token: Ints
    """[tokens]"""
    rotary_positions: Ints | None = None
    """[tokens], in the tables of longrope; None: the model has none."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def layout(self, device: torch.device) -> SequenceLayout:
        """Starts and lengths of the requests, for the kernels."""
        query_start = self.query_start.astype(np.int32)
        seq_lens = (self.num_computed + self.num_scheduled).astype(np.int32)
        return SequenceLayout(
            query_start=to_device(query_start, device),
            seq_lens=to_device(seq_lens, device),
            max_query_len=int(self.num_scheduled.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_host=torch.from_numpy(query_start),
            seq_lens_host=torch.from_numpy(seq_lens),
        )

    def block_table(self, group_id: int) -> Ints:
        """[requests, longest table]; positions after a request's last block hold 0."""
        tables = [state.block_tables[group_id].values for state in self.states]
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    def first_blocks(self, group_ids: Sequence[int]) -> Ints:
        """[groups, requests]: the first block of each request's tables."""
        return np.stack([state.first_blocks for state in self.states], axis=1)[group_ids]

    def slots(self, block_table: Ints, tokens_per_block: int) -> Ints:
        """[tokens]: ``block * tokens_per_block + offset`` of every token."""
        index, offset = np.divmod(self.positions, tokens_per_block)
        return block_table[self.request_of_token, index] * tokens_per_block + offset


def make_batch(
    states: list[RequestState],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
    rotary_offsets: Sequence[int] | None = None,
) -> StepBatch:
    """Lay the scheduled tokens of the requests out flat.

    rotary_offsets: the start of longrope's table for each request. RuntimeError: a request has
    fewer tokens than are scheduled, which kernels would read beyond.
    """
    computed = np.asarray(num_computed, dtype=np.int64)
    scheduled = np.asarray(num_scheduled, dtype=np.int64)
    query_start = np.concatenate(([0], np.cumsum(scheduled)))
    request_of_token = np.repeat(np.arange(len(states)), scheduled)
    offsets = np.arange(query_start[-1]) - query_start[request_of_token]
    token_ids = np.concatenate(
        [s.tokens.values[c : c + n] for s, c, n in zip(states, computed, scheduled, strict=True)]
    )
    if len(token_ids) != query_start[-1]:
        raise RuntimeError(
            f"{query_start[-1]} tokens are scheduled, and requests have {len(token_ids)} of them"
        )
    positions = computed[request_of_token] + offsets
    rotary_positions = None
    if rotary_offsets is not None:
        rotary_positions = positions + np.asarray(rotary_offsets)[request_of_token]
    return StepBatch(
        states=states,
        num_scheduled=scheduled,
        num_computed=computed,
        query_start=query_start,
        token_ids=token_ids,
        positions=positions,
        request_of_token=request_of_token,
        rotary_positions=rotary_positions,
    )


def own_slots(slots: Ints, spread: TokenSpread, rank: int) -> Ints:
    """Return the slots of a rank's tokens, and -1 for those of other ranks.

    slots: in blocks of the tokens of all ranks. A block has whole turns of the ranks.
    """
    return np.where(spread.rank_of(slots) == rank, spread.place_of(slots), -1)


class EagerInputs:
    """The :class:`vllm.v1.cache_kinds.base.StepInputs` of one batch, made when asked for.

    snapshots: states of requests to keep, in order; ending: requests that need no state any more.
    """

    def __init__(
        self,
        batch: StepBatch,
        config: KVCacheConfig,
        device: torch.device,
        snapshots: Mapping[str, Sequence[StateSnapshot]],
        ending: Collection[str],
    ) -> None:
        self._batch = batch
        self._config = config
        self._device = device
        self._snapshots = snapshots
        self._ending = ending
        self._table = cache(batch.block_table)
        self.layout = batch.layout(device)

    def block_table(self, group_id: int) -> torch.Tensor:
        return _int32(self._table(group_id), self._device)

    def slots(self, group_id: int) -> torch.Tensor:
        spec = self._config.kv_cache_groups[group_id].kv_cache_spec
        slots = self._batch.slots(self._table(group_id), spec.tokens_per_block)
        if not spec.spread.is_whole:
            slots = own_slots(slots, spec.spread, get_context_group().rank_in_group)
        return to_device(slots, self._device)

    def state_plan(self, group_id: int) -> StatePlan:
        return self._state_plans[group_id]

    @cached_property
    def _state_plans(self) -> dict[int, StatePlan]:
        """Plans of all recurrent groups at once, since each layer may have a group."""
        device, states = self._device, self._batch.states
        snapshots = [self._snapshots.get(state.req_id, ()) for state in states]
        ends = [state.req_id in self._ending for state in states]
        group_ids = self._config.recurrent_group_ids
        has_state = to_device(self._batch.num_computed > 0, device)
        is_final = to_device(np.array(ends, dtype=bool), device)
        counts = [len(planned) for planned in snapshots]
        start = _int32(np.concatenate(([0], np.cumsum(counts))), device)
        flat = [snapshot for planned in snapshots for snapshot in planned]
        tokens = _int32(np.array([s.num_tokens for s in flat], dtype=np.int64), device)
        blocks = self._batch.first_blocks(group_ids)
        kept = np.array([s.block_ids for s in flat], dtype=np.int64).reshape(-1, len(group_ids)).T
        plans = {}
        blocks_of = _int32(blocks, device), _int32(kept.copy(), device), blocks.tolist()
        by_group = zip(group_ids, *blocks_of, strict=True)
        for index, (group_id, ids, kept_ids, host_ids) in enumerate(by_group):
            kept_of = [[(s.num_tokens, s.block_ids[index]) for s in own] for own in snapshots]
            host = HostStates(host_ids, kept_of)
            plans[group_id] = StatePlan(ids, has_state, start, tokens, kept_ids, host, is_final)
        return plans


def layer_metadata(config: KVCacheConfig, inputs: StepInputs) -> dict[str, Any]:
    """Make the metadata that each layer reads in a forward pass, one object per group."""
    metadata: dict[str, Any] = {}
    for group_id, group in enumerate(config.kv_cache_groups):
        one = group.kv_cache_spec.make_metadata(inputs, group_id)
        metadata.update(dict.fromkeys(group.layer_names, one))
    return metadata


def _int32(values: Ints, device: torch.device) -> torch.Tensor:
    return to_device(values.astype(np.int32), device)

"""The scheduler's orders to the workers for one step. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import ExtractionSpec


class StateSnapshot(NamedTuple):
    """An order to keep the recurrent state after ``num_tokens`` tokens of a request's chunk."""

    num_tokens: int
    block_ids: tuple[int, ...]
    """Destination, one block for each recurrent group in group order."""


class BlockCopy(NamedTuple):
    """An order to copy one whole block of the pool before the forward pass."""

    source: int
    destination: int


class NewRequestData(msgspec.Struct):
    """A request that a worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    """Blocks of each group, in the order of the tokens; 0 where nothing is held."""
    num_computed_tokens: int
    extraction: ExtractionSpec | None = None
    prompt_embeds: bytes | None = None
    """[tokens, hidden] in the model's dtype, used instead of the embeddings of the ids."""


@dataclass(frozen=True)
class CachedRequestData:
    """Changes to requests that a worker knows, since their last step (parallel lists)."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Requests that were preempted: their block ids replace those that the worker had."""
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Reserved for pipeline stages that do not sample; empty otherwise."""
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass
class SchedulerOutput:
    """One step: which tokens of which requests run, and in which blocks."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of each request, in the order of the batch."""
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended since the last step: workers drop their state."""
    unbegun_req_ids: set[str] = field(default_factory=set)
    """Requests that ended since then and were never scheduled: workers drop their adapters."""
    preempted_req_ids: set[str] = field(default_factory=set)
    block_copies: list[BlockCopy] = field(default_factory=list)
    state_snapshots: dict[str, list[StateSnapshot]] = field(default_factory=dict)
    ending_req_ids: set[str] = field(default_factory=set)
    """Requests that are certain to end with this step, and whose blocks are not read later."""
    num_layers_to_run: int | None = None
    """Decoder layers this step needs; None: all, then the norm and the logits."""
    loading_req_ids: set[str] = field(default_factory=set)
    """Requests whose first tokens a connector loads, before this step or in the background."""
    restarted_req_tokens: dict[str, int] = field(default_factory=dict)
    """Requests that start again after a failed load, with their number of tokens: workers drop
    what they sampled since."""
    long_req_ids: set[str] = field(default_factory=set)
    """Requests whose tokens get the rotation for long sequences (longrope)."""
    step_number: int = 0
    """Distinguishes steps that are under way at the same time."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """Set last by the scheduler: connectors read the rest of this object to build it."""

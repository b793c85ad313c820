"""What the scheduler tells the workers about one step. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import ExtractionSpec


class StateSnapshot(NamedTuple):
    """Keep the recurrent state that stands after ``num_tokens`` tokens of a request."""

    num_tokens: int
    block_ids: tuple[int, ...]
    """Destination, one block for each recurrent group in group order."""


class BlockCopy(NamedTuple):
    """Copy one whole block of the pool before the forward pass."""

    source: int
    destination: int


@dataclass(frozen=True)
class NewRequestData:
    """A request that a worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    """Blocks of each group, in the order of the tokens; 0 where nothing is held."""
    num_computed_tokens: int
    extraction: ExtractionSpec | None = None
    prompt_embeds: bytes | None = None
    """[tokens, hidden] in the model's dtype, in place of what the ids would look up."""


@dataclass(frozen=True)
class CachedRequestData:
    """Requests that a worker knows: what changed since their last step (parallel lists)."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Preempted before: their block ids replace what the worker had."""
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
    """In the order in which the requests stand in the batch."""
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended since the last step: workers drop what they hold."""
    preempted_req_ids: set[str] = field(default_factory=set)
    block_copies: list[BlockCopy] = field(default_factory=list)
    state_snapshots: dict[str, list[StateSnapshot]] = field(default_factory=dict)
    ending_req_ids: set[str] = field(default_factory=set)
    """Requests that are certain to end with this step, and whose blocks nobody reads then."""
    num_layers_to_run: int | None = None
    """Decoder layers this step needs; None: all, then the norm and the logits."""
    loading_req_ids: set[str] = field(default_factory=set)
    """Requests whose first tokens a connector loads: before this step, or from it on in the
    background."""
    restarted_req_tokens: dict[str, int] = field(default_factory=dict)
    """Requests that start again after a load that failed, with the tokens they have: workers drop
    what they sampled since."""
    long_req_ids: set[str] = field(default_factory=set)
    """Requests whose tokens are rotated as those of a long sequence (longrope)."""
    step_number: int = 0
    """Tells steps that are under way at the same time apart."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """Set by the scheduler after the rest is decided: connectors read this object to build it."""

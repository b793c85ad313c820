"""The step that ``Scheduler.schedule`` assembles: its budgets, and the orders to the workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from vllm.v1.core.kv_cache_coordinator import PrefixHit
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.loads import Offer
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request


class Start(msgspec.Struct, frozen=True):
    """The point at which a waiting request can begin."""

    hit: PrefixHit | None
    offer: Offer
    num_tokens: int
    """Tokens that need not be computed."""

    @property
    def num_found(self) -> int:
        """Tokens that were found in the pool."""
        return self.hit.num_tokens if self.hit else 0


@dataclass
class StepPlan:
    """A step in the making: what is left of its budgets, and its requests in order."""

    manager: KVCacheManager
    token_budget: int
    cell_budget: int
    """Hidden states that can still go to callers, one per token and layer."""
    output: SchedulerOutput = field(default_factory=SchedulerOutput)

    def add_new(self, request: Request, count: int) -> None:
        """Put a request that the workers do not know into the step."""
        self.output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=self.manager.block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                extraction=request.extraction,
                prompt_embeds=request.prompt_embeds,
            )
        )
        self._take(request, count)

    def add_known(
        self, request: Request, count: int, new_blocks: tuple[list[int], ...] | None
    ) -> None:
        """Put a request that the workers know into the step, with blocks that they do not know."""
        cached = self.output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_blocks)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)
        self._take(request, count)

    def _take(self, request: Request, count: int) -> None:
        """Put the next ``count`` tokens of the request into the step."""
        self.output.num_scheduled_tokens[request.request_id] = count
        self.token_budget -= count
        if request.extraction is not None:
            self.cell_budget -= request.num_cells(count)

    def give_back(self, request: Request) -> None:
        """Remove a request that the workers know from the step, if it is there."""
        count = self.output.num_scheduled_tokens.pop(request.request_id, None)
        if count is None:
            return
        self.token_budget += count
        self.cell_budget += request.num_cells(count)
        cached = self.output.scheduled_cached_reqs
        index = cached.req_ids.index(request.request_id)
        for column in (
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
        ):
            del column[index]


def common_depth(requests: Iterable[Request]) -> int | None:
    """Return the number of layers that a step of these requests runs; None: all."""
    depths = {request.num_layers_to_run for request in requests}
    known = [depth for depth in depths if depth is not None]
    return max(known) if known and len(known) == len(depths) else None

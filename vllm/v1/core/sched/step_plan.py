"""A step that ``Scheduler.schedule`` puts together: its budgets, and what workers are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request


@dataclass
class StepPlan:
    """Requests of the step, in their order."""

    manager: KVCacheManager
    token_budget: int
    cell_budget: int
    """Hidden states for callers, one for each token and layer."""
    output: SchedulerOutput = field(default_factory=SchedulerOutput)

    def add_new(self, request: Request, count: int) -> None:
        """Put a request into the step of which the workers know nothing."""
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

    def add_known(self, request: Request, count: int, before: tuple[int, ...] | None) -> None:
        """Put a request that the workers know into the step; ``before`` None: all its blocks."""
        request_id = request.request_id
        changed = before is None or before != self.manager.block_counts(request_id)
        cached = self.output.scheduled_cached_reqs
        cached.req_ids.append(request_id)
        cached.new_block_ids.append(self.manager.block_ids(request_id, before) if changed else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)
        self._take(request, count)

    def _take(self, request: Request, count: int) -> None:
        """Put the next ``count`` tokens of the request into the step."""
        self.output.num_scheduled_tokens[request.request_id] = count
        self.token_budget -= count
        self.cell_budget -= request.num_cells(count)

    def give_back(self, request: Request) -> None:
        """Take a request that the workers know out again, if it is in the step."""
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
    """Layers that a step of these requests runs; None: all."""
    depths = [request.num_layers_to_run for request in requests]
    known = [depth for depth in depths if depth is not None]
    return max(known) if known and len(known) == len(depths) else None

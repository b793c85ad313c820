"""The engine as one object: requests in, outputs out, one step at a time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.inputs import PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.interrupts import hold_interrupts
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.engine.front_end import EngineFrontEnd
from vllm.v1.engine.input_processor import ProcessedInput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


SETTLE_SECONDS = 5.0
"""Longest wait for a connector's reports about requests that are gone."""


class LLMEngine(EngineFrontEnd):
    """Input processor, engine core (in this process) and output processor.

    The core is shut down by :meth:`shutdown`, when the engine is collected, or when the
    interpreter ends, whichever comes first.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        parallel = vllm_config.parallel_config
        size, is_one = parallel.data_parallel_size, len(parallel.engines_here) == 1
        if (size > 1 or not is_one) and not parallel.is_offline_engine:
            raise ValueError(
                f"data_parallel_size={size}: LLM has one engine; use AsyncLLM, vllm serve or vllm "
                "extract, or make an LLM in each of several processes (VLLM_DP_RANK, VLLM_DP_SIZE)"
            )
        self.engine_core = EngineCore(vllm_config)
        self._shutdown = weakref.finalize(self, self.engine_core.shutdown)
        self.input_processor = self._make_input_processor()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Make an engine for the arguments of the command line or of ``LLM``."""
        return cls(engine_args.create_engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Check and submit one request; returns its internal id. ValueError: nothing was done."""
        processed = self.input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            lora_request=lora_request,
        )
        self.submit(processed)
        return processed.request.request_id

    def submit(self, processed: ProcessedInput) -> None:
        """Hand a checked request to the core.

        ValueError: the core cannot serve it; nothing of it is kept. RuntimeError: the engine
        was shut down.
        """
        self._check_running()
        with hold_interrupts():
            children = self.output_processor.add_request(processed)
            try:
                for child in children:
                    self.engine_core.add_request(child)
            except BaseException:
                self.abort_request([processed.request.request_id])
                raise

    def step(self) -> list[RequestOutput]:
        """Run one step and return its outputs; there may be none.

        An interrupt (Ctrl-C) gets through between two steps, or inside the forward pass:
        then that step's requests are aborted, and the engine can go on.
        """
        self._check_running()
        with hold_interrupts():
            core_outputs = self.engine_core.step()
            step_stats = core_outputs.kv_connector_stats if self.on_connector_stats else ()
            stats = (msgspec.to_builtins(one.data) for one in step_stats)
            self._notify_listeners(stats, core_outputs.kv_cache_events)
            processed = self.output_processor.process_outputs(core_outputs.outputs)
            if processed.reqs_to_finish:
                self.engine_core.finish_requests(processed.reqs_to_finish)
        return processed.request_outputs

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Drop requests, by the user's ids or internal ones; unknown ids are ignored."""
        with hold_interrupts():
            core_ids = self.output_processor.abort_requests(request_ids)
            if core_ids:
                self.engine_core.abort_requests(core_ids)

    def settle(self) -> None:
        """Tell workers and connectors of aborted requests, once no other request is left.

        That removes their files. Does nothing while there are requests. A request that a
        connector does not report in time holds its blocks until it does, while others run.
        """
        end = time.monotonic() + SETTLE_SECONDS
        while self.has_unfinished_requests() and not self.get_num_unfinished_requests():
            self.step()
            if time.monotonic() > end:
                return

    def has_unfinished_requests(self) -> bool:
        """Return whether :meth:`step` has something to do."""
        return self.engine_core.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.get_num_unfinished_requests()

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Call every worker between two steps; returns their results."""
        self._check_running()
        return self.engine_core.collective_rpc(call)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; see :meth:`vllm.LLM.reset_prefix_cache`."""
        return self.engine_core.reset_prefix_cache(reset_connector=reset_connector)

    @property
    def is_running(self) -> bool:
        """True until the engine is shut down."""
        return self._shutdown.alive

    def shutdown(self) -> None:
        """Free threads, memory and files; may be called again."""
        with hold_interrupts():
            self._shutdown()

    def _check_running(self) -> None:
        if not self.is_running:
            raise RuntimeError("this engine was shut down: make a new one")

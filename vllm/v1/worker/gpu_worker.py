"""One worker: a device, a model runner, and the memory that its pool may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.weight import num_weight_bytes
from vllm.model_executor.models.interfaces import knows_reference
from vllm.ops.backends import attention_scratch_bytes
from vllm.utils.transfers import prepare_pinned_memory
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.rows.leaving import LARGEST_PIECE_BYTES
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.profile_run import profile_run, small_pool
from vllm.v1.worker.recorded_steps import record_cuda_graph
from vllm.v1.worker.self_check import check_against_reference
from vllm.v1.worker.weight_receiver import WeightReceiver
from vllm.v1.worker.weight_updates import Named, WeightUpdates

logger = init_logger(__name__)

KV_CACHE, WEIGHTS = "kv_cache", "weights"


class Worker:
    """The object that an executor drives, in this process or another."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device_config.device_type)
        self.platform = vllm_config.device_config.platform
        self.platform.prepare_process()
        parallel = vllm_config.parallel_config
        rank, self._num_ranks = parallel.place_on_machine
        self.platform.set_num_threads(rank, self._num_ranks, parallel.num_cpus)
        self.model_runner = GPUModelRunner(vllm_config, self.device)
        self._asleep: frozenset[str] = frozenset()  # tags of the memory that is freed

    def load_model(self) -> int:
        """Build the model, read its weights, and compare it with its reference if it knows one.

        Returns how many ways of running requests were given up; all ranks have to give up as many.
        """
        self.model_runner.load_model()
        if knows_reference(self.model_runner.model):
            check_against_reference(self.model_runner)
        model = self.model_runner.model
        self._weights = WeightUpdates(
            model, self.vllm_config, self.model_runner.adapters.note_new_weights
        )
        self.model_runner.shared_steps.not_ready_reason = lambda: self.not_ready_reason
        self._receiver = WeightReceiver(self._weights, self.device, num_weight_bytes(model))
        return self.give_up_ways(0)

    def give_up_ways(self, number: int) -> int:
        """Give up so many ways or more; returns how many. ValueError: there is no other way."""
        model = self.model_runner.model
        if not knows_reference(model):
            return 0
        while model.num_ways_given_up < number:
            model.fall_back("another rank gave it up")
            check_against_reference(self.model_runner)
        return model.num_ways_given_up

    def determine_available_memory(self) -> int:
        """Bytes that the pool may take, with the model loaded and beside the largest step.

        ValueError: ``kv_cache_memory_bytes`` is more than that.
        """
        cache_config = self.vllm_config.cache_config
        step_bytes, recorded_bytes = self._measure_steps()
        requested = cache_config.kv_cache_memory_bytes
        share = cache_config.gpu_memory_utilization if requested is None else 1.0
        budget = self.platform.kv_cache_budget_bytes(share / self._num_ranks)
        room = max(0, budget - step_bytes - recorded_bytes)
        if requested is None:
            return room
        if requested > room and not self.platform.is_cpu():
            raise ValueError(
                f"kv_cache_memory_bytes={requested} does not fit: {budget} bytes of "
                f"{self.platform.device_name} are free, of which a step takes {step_bytes} and "
                f"recorded decode steps {recorded_bytes}. kv_cache_memory_bytes={room} would fit; "
                "or lower max_num_batched_tokens or max_num_seqs, or set enforce_eager=True"
            )
        return requested

    def _measure_steps(self) -> tuple[int, int]:
        """Measure the bytes that the largest step takes, and those of recorded decode steps."""
        config, runner = self.vllm_config, self.model_runner
        recorded_bytes = 0
        if self.device.type == "cuda":
            prepare_pinned_memory(LARGEST_PIECE_BYTES)
        with small_pool(runner) as groups:  # it is gone before the pool is made
            step_bytes = self.platform.measure_peak_bytes(lambda: profile_run(runner, groups))
            if runner.records_cuda_graphs:
                recorded_bytes = self.platform.measure_held_bytes(
                    lambda: runner.record_decode_steps(record_cuda_graph())
                )
        step_bytes += attention_scratch_bytes(self.device.type, config.model_config.max_model_len)
        if runner.proposer is not None:  # rows leave through the pool
            token_bytes = runner.proposer.cache_layer.get_kv_cache_spec(config).token_bytes
            step_bytes += runner.row_transport.leaving_bytes(token_bytes)
        if step_bytes or recorded_bytes:
            logger.info(
                "beside the pool: %.0f MiB for the largest step, %.0f for recorded decode steps",
                step_bytes / 2**20,
                recorded_bytes / 2**20,
            )
        return step_bytes, recorded_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the pool. ValueError: it does not fit."""
        try:
            self.model_runner.initialize_kv_cache(kv_cache_config)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a KV pool of {kv_cache_config.num_blocks} blocks "
                f"({kv_cache_config.size_bytes} bytes) does not fit into the memory of "
                f"{self.platform.device_name}: lower num_gpu_blocks_override or "
                "gpu_memory_utilization"
            ) from error

    # ---- between steps, when no request is under way

    @property
    def not_ready_reason(self) -> str | None:
        """The reason why no step can run; None: one can."""
        if self._asleep:
            return "the engine sleeps: wake_up() first"
        problem = self._weights.problem
        return None if problem is None else f"{problem}: load a whole checkpoint first"

    @torch.no_grad()
    def reload_weights(self, weights_path: str | None = None) -> None:
        """Replace all weights by those of a checkpoint's folder; None: the engine's own.

        ValueError: they cannot be replaced, or do not fit.
        """
        self._check_weights_are_here()
        self._weights.load_folder(weights_path)

    def check_weights(self, weights_path: str | None = None) -> None:
        """Raise the ValueError of :meth:`reload_weights`, as far as names and shapes show it."""
        self._check_weights_are_here()
        self._weights.check_folder(weights_path)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, torch.Tensor] | Named) -> list[str]:
        """Replace some weights, named as in the checkpoint; returns the parameters' names.

        ValueError: they cannot be replaced, or do not fit.
        """
        self._check_weights_are_here()
        return self._weights.load(weights)

    @torch.no_grad()
    def transfer_weights(self, step: str, *args: Any) -> Any:
        """Call a method of the receiver of weights that a trainer sends (WeightReceiver).

        ValueError: as the method says.
        """
        if step in ("check", "receive"):
            self._check_weights_are_here()
        return getattr(self._receiver, step)(*args)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now. ValueError: it cannot be used."""
        self.model_runner.adapters.add(lora_request)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Free an adapter; requests that chose it keep it. Returns whether it was in memory."""
        return self.model_runner.adapters.forget(lora_int_id)

    def retire_lora(self, lora_int_id: int) -> bool:
        """Free an adapter whose number no other one gets; see :class:`.AdapterStore`."""
        return self.model_runner.adapters.retire(lora_int_id)

    def _check_weights_are_here(self) -> None:
        if WEIGHTS in self._asleep:
            raise ValueError('the engine sleeps without its weights: wake_up(["weights"]) first')

    def sleep(self, level: int = 1) -> None:
        """Free the pool and, on a device, the weights. 1: they wait in host memory; 2: they are
        discarded, on a CPU, too. ValueError: it sleeps, or cannot."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level={level!r}: use 1 or 2")
        if self._asleep:
            raise ValueError("sleep: the engine sleeps already")
        if self.vllm_config.connector_config is not None:  # on this rank or another
            raise ValueError("sleep: a KV connector reads the pool; make an engine without it")
        tags = {KV_CACHE}
        if level == 2 or not self.platform.is_cpu():
            self._weights.lend(keeps=level == 1)
            tags.add(WEIGHTS)
        self.model_runner.release_pool(keeps_requests=True)
        self._asleep = frozenset(tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what :meth:`sleep` freed; tags: only "weights" or "kv_cache"."""
        wanted = {KV_CACHE, WEIGHTS} if tags is None else set(tags)
        if unknown := wanted - {KV_CACHE, WEIGHTS}:
            raise ValueError(f"wake_up: tags={sorted(unknown)}: use {WEIGHTS!r} and {KV_CACHE!r}")
        if WEIGHTS in wanted & self._asleep:
            self._weights.take_back()
        if KV_CACHE in wanted & self._asleep:
            self.model_runner.restore_pool()
        self._asleep -= wanted

    def is_sleeping(self) -> bool:
        """Return whether memory is freed."""
        return bool(self._asleep)

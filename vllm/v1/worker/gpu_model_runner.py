"""Runs a scheduler's steps on any device: builds tensors, runs the model, and gets tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.capabilities import needs_eager_steps
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.rank_share import (
    has_connector,
    is_on_all_ranks,
    plan_of_rank,
)
from vllm.forward_context import (
    HIDDEN_STATES,
    CachedLayer,
    ForwardContext,
    RowSink,
    set_forward_context,
)
from vllm.inputs.prompt_embeds import unpack_prompt_embeds
from vllm.logger import init_logger
from vllm.model_executor.captures import make_fields
from vllm.model_executor.hook_points import HookPoints, find_hook_points
from vllm.model_executor.layers.attention import AttentionLayerBase
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.layer import settle_attributes
from vllm.model_executor.layers.weight import fix_weights
from vllm.model_executor.model_loader.loader import get_model
from vllm.model_executor.models.interfaces import (
    KnowsHeadInput,
    MayLackHead,
    MayNotBeSteered,
    check_shares_tokens,
    check_takes_embeds,
    supports_eagle3,
    supports_ranks,
    supports_row_capture,
)
from vllm.model_executor.utils import is_all_ours
from vllm.ops.experts import expert_linear
from vllm.ops.operation import KERNEL_DTYPES, contracts_held, source_of
from vllm.ops.row_transport import make_row_transport
from vllm.ops.rows import copy_blocks
from vllm.utils.boundaries import NORM, LayerId, in_order
from vllm.utils.host_memory import allocate_host_bytes
from vllm.utils.interrupts import allow_interrupts
from vllm.utils.mem_utils import return_freed_memory
from vllm.utils.transfers import to_device
from vllm.v1.cache_kinds.base import KVCacheConfig, KVCacheSpec
from vllm.v1.core.sched.output import BlockCopy, SchedulerOutput
from vllm.v1.engine import ExtractionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput, PendingOutput
from vllm.v1.rows.capture import RowCapture
from vllm.v1.rows.destinations import CallerTensors
from vllm.v1.rows.fields.activations import HOOKS
from vllm.v1.rows.fields.layout import Field
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.worker.input_batch import (
    EagerInputs,
    RequestState,
    StepBatch,
    layer_metadata,
    make_batch,
)
from vllm.v1.worker.pipeline import Pipeline
from vllm.v1.worker.recorded_steps import (
    Onlookers,
    Record,
    RecordedSteps,
    Recording,
    detached,
    record_cuda_graph,
)
from vllm.v1.worker.row_extractor import RowExtractor
from vllm.v1.worker.shared_steps import SharedSteps
from vllm.v1.worker.step_adapters import AdapterStore, adapter_rows
from vllm.v1.worker.step_sampler import SampledTokens, StepSampler
from vllm.v1.worker.step_steering import steering_of, vectors_of
from vllm.v1.worker.worker_connector import WorkerConnector

logger = init_logger(__name__)


class _Pass(NamedTuple):
    """A forward pass that is about to run."""

    context: ForwardContext
    run: Callable[[], torch.Tensor]
    is_recorded: bool


class GPUModelRunner:
    """Owns the model, the pool and the worker side of the connector."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.requests: dict[str, RequestState] = {}
        self.row_transport = make_row_transport(device)
        self.seeds = np.random.default_rng(vllm_config.model_config.seed)
        self.proposer: ExtractHiddenStatesProposer | None = None
        self.connector: WorkerConnector | None = None
        self._layers_in_pass: dict[str, CachedLayer] = {}  # for the connector
        self.sampler: StepSampler
        self.model: Any  # an nn.Module with the methods of models.interfaces
        self.adapters: AdapterStore
        self.shared_steps: SharedSteps
        self._onlookers: Onlookers
        self._is_all_ours = False
        self._checked_batches: set[int] = set()
        """Sizes of decode steps in which every operation's contract held."""
        self.kv_cache_config: KVCacheConfig
        self.pool = torch.empty(0, dtype=torch.int8)
        self._published: dict[str, Any] = {}
        self.recorded_steps: RecordedSteps | None = None
        self._collects_aux = False
        self._metadata_may_be_kept = False
        self._aux_layer_ids: frozenset[LayerId] = frozenset()
        model_config = vllm_config.model_config
        self._is_driver = vllm_config.parallel_config.is_driver
        self.pipeline = Pipeline(vllm_config)
        self.extractor = RowExtractor(
            self.row_transport,
            model_config.get_row_size(),
            model_config.dtype,
            device,
            model_config.get_vocab_size(),
            lambda name: self.hook_points.find(name),
        )

    def load_model(self) -> None:
        """Build the model with its weights, and the proposer when hidden states are extracted."""
        with set_current_vllm_config(self.vllm_config):
            self.model = get_model(vllm_config=self.vllm_config)
            if self.vllm_config.model_config.enable_prompt_embeds:
                check_takes_embeds(self.model)
            fields: tuple[Field, ...] = ()
            if self._is_driver or self.pipeline.relays:
                fields = make_fields(self.model, self.vllm_config.model_config)
            self.extractor.fields = fields
            if self.vllm_config.speculative_config is not None:
                self.proposer = ExtractHiddenStatesProposer(
                    self.vllm_config, self.device, self, fields
                )
        self.shared_steps = SharedSteps(self.model, self.vllm_config.model_config.dtype)
        self.adapters = AdapterStore(self.model, self.vllm_config.lora_config, self.device)
        return_freed_memory()  # weights in the form that they had before they were finished
        self._is_all_ours = is_all_ours(self.model)
        if self._is_all_ours:
            settle_attributes(self.model)
        elif (
            num_ranks := self.vllm_config.parallel_config.tensor_parallel_size
        ) > 1 and not supports_ranks(self.model):
            raise ValueError(
                f"tensor_parallel_size={num_ranks}: {type(self.model).__name__} has modules of "
                "other packages, which are not cut over ranks; use 1"
            )
        mode, parallel = (
            self.vllm_config.model_config.logprobs_mode,
            self.vllm_config.parallel_config,
        )
        self._check_spread()
        if parallel.shares_tokens:
            check_shares_tokens(self.model, parallel.option_to_share)
        self.sampler = StepSampler(
            self.model.compute_logits,
            self.device,
            fails_for_logits=self.proposer is None,
            reports_processed=mode == "processed_logprobs",
            pipeline=self.pipeline if parallel.pipeline_parallel_size > 1 else None,
        )
        captures = supports_row_capture(self.model)
        self._collects_aux = not captures and supports_eagle3(self.model)
        if self.proposer is not None and not captures and not self._collects_aux:
            raise ValueError(
                f"{type(self.model).__name__} cannot hand out hidden states: it has to run its "
                "layers through run_decoder_layers, or to implement SupportsEagle3"
            )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Spec of each layer's cache; block sizes are read now, not when the layer was made."""
        return {
            name: layer.get_kv_cache_spec(self.vllm_config)
            for name, layer in self._cache_layers.items()
        }

    def _check_spread(self) -> None:
        """Raise ValueError if tokens are to be spread over ranks and no layer can do that."""
        size = self.vllm_config.parallel_config.decode_context_parallel_size
        specs = self.get_kv_cache_spec().values()
        if size > 1 and all(spec.spread.is_whole for spec in specs):
            kinds = ", ".join(dict.fromkeys(spec.kind for spec in specs if not spec.holds_rows))
            raise ValueError(
                f"decode_context_parallel_size={size}: only attention layers that read all earlier "
                "tokens, and do not select some, spread them over ranks; none of this model's "
                f"layers ({kinds}) does; use 1"
            )

    @property
    def _cache_layers(self) -> dict[str, AttentionLayerBase]:
        """Every layer with a place in the pool, by name."""
        return self.vllm_config.compilation_config.static_forward_context

    def restore_pool(self) -> None:
        """Allocate the pool again after :meth:`release_pool`."""
        self._published = self.bind_pool(self.kv_cache_config)
        if self.records_cuda_graphs:
            self.record_decode_steps(record_cuda_graph())

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool, give every layer its view, start the connector."""
        self.kv_cache_config = config
        self.restore_pool()
        if self.records_cuda_graphs and self.vllm_config.attention_backend == "FLASHINFER":
            logger.info(  # it plans on the host
                "attention_backend=FLASHINFER: recorded decode steps attend through TRITON_ATTN, "
                "all others through FlashInfer; enforce_eager records none"
            )
        if has_connector(self.vllm_config):
            self._start_connector(config)
        called = () if self.connector is None else self.connector.modules.values()
        self._onlookers = Onlookers(self.model, called)

    def _start_connector(self, config: KVCacheConfig) -> None:
        """Make the connector's worker side, with the caches that this rank fills. ValueError: it
        needs others."""
        transfer = self.vllm_config.connector_config
        assert transfer is not None
        share = plan_of_rank(self.vllm_config, config)
        own = {name for group in share.kv_cache_groups for name in group.layer_names}
        views = {name: view for name, view in self._published.items() if name in own}
        try:
            connector = KVConnectorFactory.create_connector(
                self.vllm_config, KVConnectorRole.WORKER, share
            )
            self.connector = WorkerConnector(
                connector, transfer.kv_timeout_seconds, is_on_all_ranks(self.vllm_config)
            )
            self.connector.register(views, self._cache_layers, share, self.pool)
        except Exception as error:
            if self._is_driver or self.proposer is None:
                raise
            raise ValueError(
                f"kv_connector={transfer.kv_connector!r} does not work on rank "
                f"{self.vllm_config.parallel_config.rank} ({type(error).__name__}: {error}): "
                "hidden states are on the first rank of the last stage alone; a connector that "
                "reads nothing else has to declare takes_rows_only = True, or use one rank"
            ) from error
        self._layers_in_pass = {name: CachedLayer(view) for name, view in views.items()}
        self._metadata_may_be_kept = connector.reads_metadata_later
        if connector.outlives_engine:
            name = type(connector).__name__
            fix_weights(self.model, f"{name} shares what they compute with other engines")

    def bind_pool(self, config: KVCacheConfig) -> dict[str, Any]:
        """Allocate the pool and give every layer its view; returns the views for connectors."""
        self.kv_cache_config = config
        self._checked_batches.clear()
        self.pool = _allocate_pool(config, self.device)
        views = config.layer_views(self.pool)
        transfer = self.vllm_config.kv_transfer_config
        as_kept = transfer is not None and transfer.rows_before_layers
        published: dict[str, Any] = {}  # in the order of the layers
        for name, layer in self._cache_layers.items():
            view = layer.kv_cache = views[name]
            published[name] = view if as_kept else config.spec_of(name).published_view(view)
        if self.proposer is not None:
            rows = views[self.proposer.layer_name]
            assert isinstance(rows, torch.Tensor)
            self.proposer.initialize_kv_cache(config, rows)
        return published

    @property
    def records_cuda_graphs(self) -> bool:
        """True if decode steps are recorded, all of them at the start."""
        # Kernels in plain torch look at values.
        if self.device.type != "cuda" or source_of("cuda").name == "plain":
            return False
        model_config = self.vllm_config.model_config
        # A field that no kernel captures is captured with the host's help.
        needs_host = any(one.cells.dtype not in KERNEL_DTYPES for one in self.extractor.fields)
        must_be_eager = (
            model_config.enforce_eager
            or needs_host
            or needs_eager_steps(self.vllm_config.kv_transfer_config)
        )
        # The number of tokens of each expert is read on the host.
        has_experts = any(isinstance(module, Experts) for module in self.model.modules())
        # A model that collects rows itself may look at values on the host, as third-party ones may.
        reads_values = self._collects_aux or (
            has_experts and not expert_linear.is_overridden("cuda")
        )
        return not (must_be_eager or reads_values) and is_all_ours(self.model)

    @torch.inference_mode()
    def record_decode_steps(self, record: Record) -> None:
        """Record the forward pass of decode steps, which is repeated from now on."""
        self.recorded_steps = RecordedSteps(
            self.vllm_config, self.kv_cache_config, self.device, self.forward, self.proposer, record
        )

    def release_pool(self, *, keeps_requests: bool = False) -> None:
        """Release the pool and everything in it. keeps_requests: they start again later."""
        if not keeps_requests:
            self.requests.clear()
        self.recorded_steps = None
        self._published, self._layers_in_pass = {}, {}
        for layer in self._cache_layers.values():
            layer.kv_cache = None
        if self.proposer is not None:
            self.proposer.release_kv_cache()
        self.pool = torch.empty(0, dtype=torch.int8)

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Start a step. With no tokens, only the connector and the requests' states are updated."""
        self.extractor.drop_step()
        # First: it carries changes of earlier requests, which a step that fails must not lose.
        try:
            if self.connector is not None:
                self.connector.begin_step(scheduled)
        finally:
            self._update_states(scheduled)
        self._copy_blocks(scheduled.block_copies)
        output = ModelRunnerOutput()
        sampled: SampledTokens | None = None
        states: list[RequestState] = []
        context = ForwardContext(attn_metadata={}, no_compile_layers=self._layers_in_pass)
        if scheduled.total_num_scheduled_tokens:
            batch = self._make_batch(scheduled)
            states = batch.states
            context, forward, is_recorded = self._prepare_forward(batch, scheduled)
            connector: AbstractContextManager[None] = nullcontext()
            if self.connector is not None:
                connector = self.connector.calls_of_pass(context, states, is_recorded=is_recorded)
            shared = self.shared_steps.step(batch.num_tokens, context.num_layers_to_run)
            with connector, allow_interrupts(), shared:
                hidden = forward()
            with nullcontext() if context.adapters is None else set_forward_context(context):
                if context.num_layers_to_run is None:
                    sampled = self.sampler.sample(batch, hidden)
                if context.row_sink is not None and not is_recorded:
                    after = None if sampled is None else partial(sampled.after, batch)
                    context.row_sink.take_logits(hidden, self.model.compute_logits, after)
        else:
            self.take_part()
            if self.connector is not None:  # loads in the background begin
                self.connector.load(context)
        rows = self.extractor.end_step()
        if self.connector is not None:
            output.kv_connector_output = self.connector.end_step(scheduled, states)
        parts = [part.read for part in (sampled, rows) if part is not None]
        return PendingOutput(output, parts)

    @torch.inference_mode()
    def take_part(self) -> None:
        """Bring no tokens to a step of the engines that share experts."""
        with self.shared_steps.step():
            pass

    @torch.inference_mode()
    def skip_step(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        """Take in which requests begin and end with a step whose pass does not run; returns the
        connector's report."""
        self.extractor.drop_step()
        try:
            if self.connector is not None:
                self.connector.begin_step(scheduled)
        finally:
            self._update_states(scheduled)
        if self.connector is None:
            return None
        self.connector.load(ForwardContext({}, no_compile_layers=self._layers_in_pass))
        return self.connector.end_step(scheduled, [])

    def handshake_metadata(self) -> Any:
        """Return the data by which others reach the connector's worker side; None: none."""
        return None if self.connector is None else self.connector.connector.get_handshake_metadata()

    def _update_states(self, scheduled: SchedulerOutput) -> None:
        if self.pipeline.knows_kept:
            self.pipeline.kept.update(scheduled, lambda: self.hook_points)
        for req_id in scheduled.finished_req_ids | scheduled.unbegun_req_ids:
            self.adapters.take(req_id)
        for req_id in scheduled.finished_req_ids:
            state = self.requests.pop(req_id, None)
            if state is not None and state.rows is not None:
                self.extractor.end_request(req_id, state.rows)
        for req_id, num_tokens in scheduled.restarted_req_tokens.items():
            self._drop_tokens(req_id, num_tokens)
        model_config = self.vllm_config.model_config
        for new in scheduled.scheduled_new_reqs:
            rows = None
            if new.extraction is not None:
                rows = self._make_rows(new.extraction, len(new.prompt_token_ids))
            token_ids, embeds = new.prompt_token_ids, None
            if new.prompt_embeds is not None:
                token_ids = [0] * len(token_ids)
                embeds = unpack_prompt_embeds(
                    new.prompt_embeds, model_config.get_hidden_size(), model_config.dtype
                )
            self.requests[new.req_id] = RequestState(
                new.req_id,
                token_ids,
                new.sampling_params,
                self._make_generator(new.sampling_params.seed, new.sampling_params.temperature),
                new.block_ids,
                rows,
                embeds,
                None if new.extraction is None else new.extraction.token_after,
            )
            vectors = vectors_of(new.sampling_params.steering_specs, self.device)
            self.requests[new.req_id].steering_vectors = vectors
            self.requests[new.req_id].adapter = self.adapters.take(new.req_id)
        cached = scheduled.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is None:
                continue
            state = self.requests[req_id]
            if req_id in cached.resumed_req_ids:
                state.replace_blocks(block_ids)
            else:
                state.add_blocks(block_ids)

    def _make_rows(self, spec: ExtractionSpec, num_tokens: int) -> CallerTensors | None:
        """Make room for a request's rows. Ranks other than the first keep none, but all of them
        compute logits together."""
        if not self._is_driver:
            if not (spec.top_logprobs and self.pipeline.stage.is_last):
                return None
            spec = msgspec.structs.replace(spec, layer_ids=(), hooks=())
        return self.extractor.make_rows(spec, num_tokens)

    def _drop_tokens(self, req_id: str, num_tokens: int) -> None:
        """Drop what a request that starts again sampled after ``num_tokens`` tokens, and its rows.

        Rows of earlier steps may still be on their way to the tensors that are dropped.
        """
        state = self.requests.get(req_id)
        if state is None:
            return
        if state.rows is not None:
            state.rows = state.rows.fresh()
        state.tokens.truncate(num_tokens)
        if num_tokens == state.num_prompt_tokens:
            params = state.sampling_params
            state.generator = self._make_generator(params.seed, params.temperature)

    def _make_generator(self, seed: int | None, temperature: float) -> torch.Generator | None:
        """Make a request's own generator, so that its tokens do not depend on the batch."""
        if temperature == 0.0:
            return None
        if seed is None:
            seed = int(self.seeds.integers(2**63))
        return torch.Generator(self.device).manual_seed(seed)

    def _copy_blocks(self, copies: list[BlockCopy]) -> None:
        if copies:
            sources, destinations = to_device(np.array(copies).T.copy(), self.device)
            copy_blocks(sources, destinations, self.pool)

    def _make_batch(self, scheduled: SchedulerOutput) -> StepBatch:
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((n.req_id, n.num_computed_tokens) for n in scheduled.scheduled_new_reqs)
        req_ids = list(scheduled.num_scheduled_tokens)
        limit, offsets = self.vllm_config.model_config.longrope_limit, None
        if limit is not None:
            offsets = [limit * (req_id in scheduled.long_req_ids) for req_id in req_ids]
        return make_batch(
            [self.requests[req_id] for req_id in req_ids],
            [computed[req_id] for req_id in req_ids],
            list(scheduled.num_scheduled_tokens.values()),
            offsets,
        )

    def _make_context(self, batch: StepBatch, scheduled: SchedulerOutput) -> ForwardContext:
        """Make the context of a step, with one object of metadata per group."""
        inputs = EagerInputs(
            batch,
            self.kv_cache_config,
            self.device,
            scheduled.state_snapshots,
            scheduled.ending_req_ids,
        )
        metadata = layer_metadata(self.kv_cache_config, inputs)
        targets = self.extractor.begin_step(batch)
        if self.proposer is not None and self._is_driver:
            slots = metadata[self.proposer.layer_name].slot_mapping
            targets.append(self.proposer.target(slots))
        capture: RowSink | None = RowCapture(targets) if targets else None
        if self.pipeline.relays:
            capture = self.pipeline.kept.sink(batch)
        depth = scheduled.num_layers_to_run
        rotary = batch.rotary_positions
        shares = self.vllm_config.parallel_config.shares_tokens
        return ForwardContext(
            metadata,
            capture,
            depth,
            self._layers_in_pass,
            steering_of(batch, self.device),
            None if rotary is None else to_device(rotary, self.device),
            adapter_rows(batch, self.device),
            self.pipeline.kept.gathered_hooks(batch),
            batch.num_tokens if shares else 0,
            self.pipeline.kept.boundaries(batch) if shares else frozenset(),
        )

    def _prepare_forward(self, batch: StepBatch, scheduled: SchedulerOutput) -> _Pass:
        """Prepare a step's forward pass, eager or recorded."""
        recording = self._recording(batch, scheduled)
        if recording is not None:

            def replay() -> torch.Tensor:
                recording.replay()
                return recording.hidden[: batch.num_tokens]

            context = recording.context
            if self._layers_in_pass:
                context = replace(context, no_compile_layers=self._layers_in_pass)
            context = detached(context) if self._metadata_may_be_kept else context
            return _Pass(context, replay, is_recorded=True)
        context = self._make_context(batch, scheduled)
        token_ids = to_device(batch.token_ids, self.device)
        self.sampler.fill_in(batch, token_ids)
        positions = to_device(batch.positions, self.device)

        def run() -> torch.Tensor:
            embeds = None
            if self.pipeline.reads_embeddings(self.model):
                with set_forward_context(context):  # adapters change looked-up rows
                    embeds = self._input_embeds(batch, token_ids)
            with self._contracts(batch, scheduled):
                return self.forward(token_ids, positions, context, embeds)

        return _Pass(context, run, is_recorded=False)

    @contextmanager
    def _contracts(self, batch: StepBatch, scheduled: SchedulerOutput) -> Iterator[None]:
        """Check contracts in the forward pass inside, unless a decode step with as many tokens
        kept all of them before."""
        size = batch.num_tokens
        if not self._only_decodes(batch, scheduled):
            yield
        elif size in self._checked_batches:
            with contracts_held():
                yield
        else:
            yield
            self._checked_batches.add(size)

    def _only_decodes(self, batch: StepBatch, scheduled: SchedulerOutput) -> bool:
        """Return whether shapes, strides and dtypes in a pass follow from its number of tokens.

        False in the first step of a request: a model that was changed is checked again.
        """
        return (
            self._is_all_ours
            and batch.num_tokens == len(batch.states)
            and not scheduled.scheduled_new_reqs
            and not self._needs_more(batch, scheduled)
            and not self._onlookers.are_there()
        )

    def _input_embeds(self, batch: StepBatch, token_ids: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] for a step with prompts given as embeddings; None for any other."""
        embeds: torch.Tensor | None = None
        for index, state in enumerate(batch.states):
            start, begin = int(batch.num_computed[index]), int(batch.query_start[index])
            prompt = state.prompt_embeds
            if prompt is None or start >= len(prompt):
                continue
            rows = prompt[start : start + int(batch.num_scheduled[index])]
            if embeds is None:
                embeds = self.model.embed_input_ids(token_ids)
            embeds[begin : begin + len(rows)].copy_(rows)
        return embeds

    def _recording(self, batch: StepBatch, scheduled: SchedulerOutput) -> Recording | None:
        """Return the recording of this step, its inputs in place; None: it has to run eagerly."""
        recorded = self.recorded_steps
        if recorded is None or not recorded.can_run(batch) or self._needs_more(batch, scheduled):
            return None
        if self._onlookers.are_there():
            return None
        return recorded.prepare(batch, self.sampler.fill_in)

    def _needs_more(self, batch: StepBatch, scheduled: SchedulerOutput) -> bool:
        """Return whether a step does more than decode: keep states, hand out rows, steer, use
        adapters, or stop early."""
        keeps_states = any(state.req_id in scheduled.state_snapshots for state in batch.states)
        hands_out_rows = any(state.rows is not None for state in batch.states)
        is_changed = any(state.steering_vectors or state.adapter for state in batch.states)
        has_embeds = any(state.prompt_embeds is not None for state in batch.states)
        is_shorter = scheduled.num_layers_to_run is not None
        return keeps_states or hands_out_rows or has_embeds or is_changed or is_shorter

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model. Returns hidden states [tokens, hidden], normed unless the step stops
        below the norm."""
        sink = context.row_sink
        layer_ids: frozenset[LayerId] = frozenset()
        if sink is not None and self._collects_aux:
            layer_ids = sink.layer_ids - {NORM}
        if layer_ids != self._aux_layer_ids:
            self.model.set_aux_hidden_state_layers(tuple(in_order(layer_ids)))
            self._aux_layer_ids = layer_ids
        with set_forward_context(context), self._hooks(context):
            # Third-party models may take no more than two arguments.
            options = {} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
            hidden = self.pipeline.run(self.model, token_ids, positions, options)
        if self._aux_layer_ids:
            assert sink is not None
            if not isinstance(hidden, tuple):
                raise RuntimeError(
                    f"{type(self.model).__name__} returned no auxiliary hidden states for the "
                    f"layer ids {in_order(self._aux_layer_ids)}, which it was asked to return"
                )
            hidden, aux = hidden
            sink.take_aux_hidden_states(aux)
        if sink is not None:
            if NORM in sink.layer_ids and self.pipeline.stage.is_last:
                sink.put(HIDDEN_STATES, NORM, self._head_input(hidden), None)
            sink.end_step()
        # A third-party module may compute in another dtype.
        result: torch.Tensor = hidden.to(self.vllm_config.model_config.dtype)
        return result

    def _hooks(self, context: ForwardContext) -> AbstractContextManager[None]:
        """Return a block in which the model hands over what the sink keeps at hook points."""
        sink = context.row_sink
        names = frozenset[LayerId]() if sink is None else sink.indexes_of(HOOKS)
        names |= context.gathered_hooks
        return self.hook_points.watch(map(str, names)) if names else nullcontext()

    @cached_property
    def hook_points(self) -> HookPoints:
        """The places inside the model whose values requests can ask for."""
        are_shares = self.vllm_config.parallel_config.prefill_context_parallel_size > 1
        return find_hook_points(self.model, self.vllm_config.model_config, are_shares=are_shares)

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self.model
        return model.head_input(hidden) if isinstance(model, KnowsHeadInput) else hidden

    @cached_property
    def no_norm_reason(self) -> str | None:
        """The reason why rows cannot have the state after the final norm; None: they can."""
        sizes = self.vllm_config.model_config
        if sizes.get_row_size() != sizes.get_hidden_size():
            return (
                f"a row of the stream has {sizes.get_row_size()} elements, its norm "
                f"{sizes.get_hidden_size()}"
            )
        return self.model.why_no_norm() if isinstance(self.model, KnowsHeadInput) else None

    @cached_property
    def no_steering_reason(self) -> str | None:
        """The reason why nothing can be added to the model's stream; None: it can."""
        if isinstance(self.model, MayNotBeSteered):
            return self.model.why_no_steering()
        if not supports_row_capture(self.model):
            return "it does not run its layers through run_decoder_layers"
        return None

    @property
    def no_head_reason(self) -> str | None:
        """The reason why the model computes no logits; None: it does."""
        return self.model.why_no_head if isinstance(self.model, MayLackHead) else None

    def shutdown(self) -> None:
        """End the connector's threads and release the pool and the model."""
        if self.connector is not None:
            self.connector.shutdown()
            self.connector = None  # it may hold host memory, and its own views of the pool
        self.extractor.shutdown()
        self.release_pool()
        self._cache_layers.clear()


def _allocate_pool(config: KVCacheConfig, device: torch.device) -> torch.Tensor:
    """int8 [num_blocks, block_bytes], uninitialised: only what was written is ever read."""
    shape = (config.num_blocks, config.block_bytes)
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.int8, device=device)
    advice = "lower kv_cache_memory_bytes, or raise the limit (ulimit -v, or of the control group)"
    return allocate_host_bytes(config.size_bytes, "a KV pool", advice).view(shape)

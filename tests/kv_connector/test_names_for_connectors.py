"""Names that connectors of other packages, and tests of connectors, import from this package.

Each name is there. What it does is tested here, in ``test_upstream_names``, or with its module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector import slot_connector
from tests.kv_connector.slot_connector import SlotConnector
from vllm import distributed
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, get_current_vllm_config
from vllm.distributed.kv_events import (
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
    NullEventPublisher,
)
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_v1_kv_transfer_group,
    kv_transfer_state,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import (
    KVOutputAggregator,
    copy_kv_blocks,
    get_kv_connector_cache_layout,
    yield_req_data,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.exceptions import Failure, FailureKind
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv, round_down, round_up
from vllm.utils.torch_utils import get_kv_cache_torch_dtype
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(19, [60, 50])]

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NAMES = {
    "vllm": "LLM LLMEngine SamplingParams EngineArgs AsyncEngineArgs __version__",
    "vllm.version": "__version__",
    "vllm.config": (
        "VllmConfig ModelConfig CacheConfig ParallelConfig SchedulerConfig SpeculativeConfig "
        "DeviceConfig CompilationConfig AttentionConfig KVTransferConfig KVEventsConfig "
        "ECTransferConfig ModelDType get_layers_from_vllm_config get_current_vllm_config "
        "set_current_vllm_config"
    ),
    "vllm.config.kv_transfer": "KVTransferConfig",
    "vllm.config.kv_events": "KVEventsConfig",
    "vllm.config.ec_transfer": "ECTransferConfig",
    "vllm.distributed": (
        "get_tp_group get_pp_group get_dp_group get_dcp_group get_pcp_group get_world_group "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size "
        "get_decode_context_model_parallel_rank get_decode_context_model_parallel_world_size"
    ),
    "vllm.distributed.parallel_state": (
        "get_tp_group get_pp_group get_dp_group get_dcp_group get_pcp_group get_world_group "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size "
        "get_decode_context_model_parallel_rank get_decode_context_model_parallel_world_size"
    ),
    "vllm.distributed.kv_events": (
        "EventBatch KVCacheEvent BlockStored BlockRemoved AllBlocksCleared KVEventBatch "
        "KVEventAggregator KVConnectorKVEvents ExternalBlockHash MEDIUM_GPU EventPublisher "
        "NullEventPublisher ZmqEventPublisher EventPublisherFactory"
    ),
    "vllm.distributed.kv_transfer": (
        "get_kv_transfer_group has_kv_transfer_group is_v1_kv_transfer_group KVConnectorBaseType "
        "ensure_kv_transfer_initialized ensure_kv_transfer_shutdown"
    ),
    "vllm.distributed.kv_transfer.kv_transfer_state": "get_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_connector.base": "KVConnectorBase KVConnectorBaseType",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    "vllm.distributed.kv_transfer.kv_connector.utils": (
        "KVOutputAggregator copy_kv_blocks get_kv_connector_cache_layout yield_req_data EngineId "
        "BlockIds"
    ),
    V1: (
        "KVConnectorRole KVConnectorBase_V1 SupportsHMA supports_hma KVConnectorMetadata "
        "KVConnectorWorkerMetadata KVConnectorHandshakeMetadata"
    ),
    f"{V1}.base": (
        "KVConnectorRole KVConnectorBase_V1 SupportsHMA supports_hma KVConnectorMetadata "
        "KVConnectorWorkerMetadata KVConnectorHandshakeMetadata CopyBlocksOp"
    ),
    f"{V1}.metrics": (
        "KVConnectorStats KVConnectorPromMetrics KVConnectorLogging KVConnectorPrometheus "
        "PromMetric PromMetricT"
    ),
    f"{V1}.multi_connector": "MultiConnector MultiKVConnectorStats MultiKVConnectorPromMetrics",
    f"{V1}.example_connector": "ExampleConnector",
    f"{V1}.shared_storage_connector": "SharedStorageConnector",
    f"{V1}.offloading_connector": "OffloadingConnector",
    f"{V1}.example_hidden_states_connector": (
        "ExampleHiddenStatesConnector extract_from_kv_cache load_hidden_states"
    ),
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.forward_context": "ForwardContext get_forward_context set_forward_context",
    "vllm.logger": "init_logger",
    "vllm.model_executor.layers.attention": "Attention",
    "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
    "vllm.model_executor.layers.logits_processor": "LogitsProcessor",
    "vllm.model_executor.layers.vocab_parallel_embedding": "VocabParallelEmbedding ParallelLMHead",
    "vllm.model_executor.models": "ModelRegistry",
    "vllm.model_executor.models.extract_hidden_states": (
        "CacheOnlyAttentionLayer CacheOnlyAttentionMetadata basic_cache"
    ),
    "vllm.model_executor.models.interfaces": "EagleModelMixin SupportsEagle3",
    "vllm.model_executor.models.llama": "LlamaForCausalLM",
    "vllm.model_executor.models.utils": (
        "make_empty_intermediate_tensors_factory extract_layer_index maybe_prefix make_layers "
        "AutoWeightsLoader"
    ),
    "vllm.outputs": "RequestOutput CompletionOutput",
    "vllm.platforms": "current_platform",
    "vllm.sampling_params": "SamplingParams",
    "vllm.sequence": "IntermediateTensors",
    "vllm.utils": "cdiv",
    "vllm.utils.math_utils": "cdiv round_up round_down",
    "vllm.utils.torch_utils": "get_kv_cache_torch_dtype STR_DTYPE_TO_TORCH_DTYPE",
    "vllm.attention": "Attention AttentionBackend AttentionMetadata",
    "vllm.attention.layer": "Attention",
    "vllm.attention.backends.abstract": "AttentionBackend AttentionMetadata",
    "vllm.v1.attention.backends.utils": "get_kv_cache_layout",
    "vllm.v1.attention.backend": "AttentionBackend AttentionMetadata",
    "vllm.v1.core.block_pool": "BlockPool",
    "vllm.v1.core.kv_cache_manager": "KVCacheBlocks KVCacheManager",
    "vllm.v1.core.kv_cache_utils": "BlockHash KVCacheBlock get_kv_cache_configs",
    "vllm.v1.core.sched.output": "SchedulerOutput NewRequestData CachedRequestData",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.v1.kv_cache_interface": (
        "KVCacheConfig KVCacheGroupSpec KVCacheSpec KVCacheTensor AttentionSpec FullAttentionSpec "
        "MLAAttentionSpec "
        "SlidingWindowSpec ChunkedLocalAttentionSpec MambaSpec HiddenStateCacheSpec"
    ),
    "vllm.v1.outputs": "KVConnectorOutput ModelRunnerOutput",
    "vllm.v1.request": "Request RequestStatus",
    "vllm.v1.spec_decode.extract_hidden_states": "ExtractHiddenStatesProposer",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


# ---------------------------------------------------------------- the connector of this process


class AskingConnector(SlotConnector):
    """Looks for itself and for its layers, wherever code of others could."""

    @property
    def met(self) -> list[tuple[str, bool]]:
        return met

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        met.append(("load", _is_group(self)))
        for name, layer in forward_context.no_compile_layers.items():
            met.append((name, layer.kv_cache is self._caches[name]))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any, **kwargs: Any) -> None:
        layer = get_forward_context().no_compile_layers[layer_name]
        met.append(("save", _is_group(self) and layer.kv_cache is kv_layer))


def _is_group(connector: Any) -> bool:
    return has_kv_transfer_group() and get_kv_transfer_group() is connector


met: list[tuple[str, bool]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    met.clear()
    slot_connector.store.clear()
    slot_connector.calls.clear()


def transfer(name: str, module: str = __name__) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}


@pytest.fixture
def no_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: engines that other tests keep have connectors, too."""
    monkeypatch.setattr(kv_transfer_state, "_known", WeakSet())


@pytest.mark.usefixtures("no_other_engine")
def test_in_a_pass_each_engine_has_its_own(checkpoint: Checkpoint) -> None:
    assert not has_kv_transfer_group()
    assert not is_v1_kv_transfer_group()
    arguments: dict[str, Any] = {
        "block_size": 16,
        "kv_transfer_config": transfer("AskingConnector"),
    }
    folder = checkpoint("llama")
    with engine(folder, **arguments) as one:
        only = core_of(one).executor.worker.model_runner.connector.connector
        assert get_kv_transfer_group() is only
        assert is_v1_kv_transfer_group() and is_v1_kv_transfer_group(only)
        assert not is_v1_kv_transfer_group(object())
        with engine(folder, **arguments) as other:
            with pytest.raises(RuntimeError, match="there are 2: AskingConnector, AskingConnector"):
                get_kv_transfer_group()
            for llm in (one, other):
                llm.generate(PROMPTS, greedy(2), use_tqdm=False)
        assert get_kv_transfer_group() is only
    assert {where for where, _ in met} >= {"load", "save"}
    assert len({where for where, _ in met}) == 2 + 4
    assert all(is_right for _, is_right in met)
    with pytest.raises(RuntimeError, match="there are 0: none"):
        get_kv_transfer_group()


class EarlyConnector(SlotConnector):
    """Its constructor takes no kv_cache_config, as in early releases."""

    layouts: list[str] = []  # noqa: RUF012

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole) -> None:
        super().__init__(vllm_config, role, None)
        assert get_current_vllm_config() is vllm_config
        self.layouts.append(get_kv_connector_cache_layout())


class EarlyHeadsFirst(EarlyConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "HND"


@pytest.mark.parametrize(
    ("name", "layout"), [("EarlyConnector", "NHD"), ("EarlyHeadsFirst", "HND")]
)
def test_constructors_of_early_releases(name: str, layout: str, checkpoint: Checkpoint) -> None:
    config = transfer(name)
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=config) as llm:
        expected = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [o.num_cached_tokens for o in outputs] == [48, 48]
    assert EarlyConnector.layouts[-2:] == [layout] * 2
    with pytest.raises(RuntimeError, match="no current VllmConfig"):
        get_kv_connector_cache_layout()


@pytest.mark.usefixtures("no_other_engine")
def test_a_worker_side_for_a_process_without_an_engine() -> None:
    ensure_kv_transfer_initialized(VllmConfig())
    assert not has_kv_transfer_group()
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer("EarlyConnector")))
    ensure_kv_transfer_initialized(config)
    first = get_kv_transfer_group()
    assert first.role is KVConnectorRole.WORKER
    ensure_kv_transfer_initialized(config)
    assert get_kv_transfer_group() is first
    ensure_kv_transfer_shutdown()
    assert not has_kv_transfer_group()


def test_a_constructor_that_fails_is_not_called_again() -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer("BrokenConnector")))
    with pytest.raises(TypeError, match="of its own"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, None)


class BrokenConnector(SlotConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        raise TypeError("an error of its own")


# ---------------------------------------------------------------- outputs of several workers


@dataclass
class Sum:
    value: int

    def aggregate(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


class Events(KVConnectorKVEvents):
    def __init__(self, *hashes: bytes) -> None:
        self.counts = KVEventAggregator(1)
        self.add_events([BlockStored([one], None, [1], 1) for one in hashes])

    def add_events(self, events: list[Any]) -> None:
        self.counts.add_events(events)

    def aggregate(self) -> Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.counts.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self.counts.get_all_events()

    def get_number_of_workers(self) -> int:
        return self.counts.get_number_of_workers()

    def clear_events(self) -> None:
        self.counts.clear_events()


def output(rank: int, sent: set[str], received: set[str], **report: Any) -> ModelRunnerOutput:
    told = KVConnectorOutput(finished_sending=sent, finished_recving=received, **report)
    return ModelRunnerOutput({"a": [rank]}, kv_connector_output=told)


def test_what_several_workers_report() -> None:
    failure = Failure(FailureKind.DISK_FULL, "full")
    workers = KVOutputAggregator(2)
    together = workers.aggregate(
        [
            output(0, {"a", "b"}, {"x"}, invalid_block_ids={1}, kv_connector_stats=Sum(1)),
            output(
                1,
                {"b"},
                set(),
                invalid_block_ids={2},
                kv_connector_stats=Sum(2),
                kv_connector_worker_meta=Sum(5),
                failures={"b": failure},
            ),
        ],
        output_rank=1,
    )
    assert together is not None and together.sampled_token_ids == {"a": [1]}
    report = together.kv_connector_output
    assert report is not None
    assert (report.finished_sending, report.finished_recving) == ({"b"}, set())
    assert report.invalid_block_ids == {1, 2}
    assert (report.kv_connector_stats, report.kv_connector_worker_meta) == (Sum(3), Sum(5))
    assert report.failures == {"b": failure}
    # The others come later.
    together = workers.aggregate([output(0, set(), set()), output(1, {"a"}, {"x"})])
    assert together is not None and together.kv_connector_output is not None
    assert together.kv_connector_output.finished_sending == {"a"}
    assert together.kv_connector_output.finished_recving == {"x"}
    assert workers.aggregate([None, output(1, {"a"}, set())]) is None
    nothing = workers.aggregate([ModelRunnerOutput(), ModelRunnerOutput()])
    assert nothing is not None and nothing.kv_connector_output is None


def test_events_that_all_workers_had() -> None:
    outputs = [
        output(0, set(), set(), kv_cache_events=Events(b"1", b"2")),
        output(1, set(), set(), kv_cache_events=Events(b"2", b"3")),
    ]
    together = KVOutputAggregator(2).aggregate(outputs)
    assert together is not None and together.kv_connector_output is not None
    events = together.kv_connector_output.kv_cache_events
    assert events.get_number_of_workers() == 2
    assert [event.block_hashes for event in events.counts.get_common_events()] == [[b"2"]]


def test_how_many_workers_have_to_report() -> None:
    for count, expected in ((None, 3), (1, 1)):
        connector: Any = SimpleNamespace(get_finished_count=lambda count=count: count)
        workers = KVOutputAggregator.from_connector(connector, 3)
        for number in range(1, expected + 1):
            together = workers.aggregate([output(0, {"a"}, set())])
            assert together is not None and together.kv_connector_output is not None
            assert bool(together.kv_connector_output.finished_sending) is (number == expected)


def test_outputs_that_come_later() -> None:
    futures: list[Future[ModelRunnerOutput | None]] = [Future(), Future()]
    result = KVOutputAggregator(2).async_aggregate(futures)
    futures[1].set_result(output(1, {"a"}, set()))
    assert not result.done()
    futures[0].set_result(output(0, {"a"}, set()))
    together = result.result(timeout=0)
    assert together is not None and together.kv_connector_output is not None
    assert together.kv_connector_output.finished_sending == {"a"}
    futures = [Future(), Future()]
    result = KVOutputAggregator(2).async_aggregate(futures)
    futures[0].set_exception(OSError("gone"))
    futures[1].set_result(None)
    with pytest.raises(OSError, match="gone"):
        result.result(timeout=0)


def test_outputs_that_never_come_or_do_not_fit() -> None:
    future: Future[ModelRunnerOutput | None] = Future()
    result = KVOutputAggregator(1).async_aggregate([future])
    future.cancel()
    with pytest.raises(CancelledError):
        result.result(timeout=0)
    futures: list[Future[ModelRunnerOutput | None]] = [Future(), Future()]
    result = KVOutputAggregator(2).async_aggregate(futures)
    for rank, future in enumerate(futures):
        report = output(rank, set(), set())
        assert report.kv_connector_output is not None
        report.kv_connector_output.kv_connector_worker_meta = rank  # cannot be added up
        future.set_result(report)
    with pytest.raises(AttributeError, match="aggregate"):
        result.result(timeout=0)


def test_reports_that_cannot_be_aggregated_are_not_half_taken_in() -> None:
    workers = KVOutputAggregator(2)
    reports: Any = [output(rank, {"a"}, set()).kv_connector_output for rank in range(2)]
    for rank, report in enumerate(reports):
        report.kv_connector_worker_meta = rank
    with pytest.raises(AttributeError, match="aggregate"):
        workers.merge(reports)
    for report in reports:
        report.kv_connector_worker_meta = None
    merged: Any = [workers.merge(reports), workers.merge(reports[:1])]
    assert [one.finished_sending for one in merged] == [{"a"}, set()]


# ---------------------------------------------------------------- small ones


def test_requests_of_a_step() -> None:
    new = NewRequestData("new", [1, 2], greedy(1), ([1], [2]), 0)
    cached = CachedRequestData(
        ["on", "same", "again"], {"again"}, [], [([3], [4]), None, ([5], [6])], [1, 2, 0], [0, 0, 0]
    )
    step = SchedulerOutput([new], cached, {}, 0, set())
    assert list(yield_req_data(step)) == [
        ("new", ([1], [2]), False),
        ("on", ([3], [4]), False),
        ("same", None, False),
        ("again", ([5], [6]), True),
    ]


def test_blocks_of_layers_are_copied_by_their_ids() -> None:
    pool = {name: torch.randn(4, 3) for name in ("a", "b")}
    host = {name: torch.zeros(2, 3) for name in pool}
    copy_kv_blocks(pool, host, [3, 1], [0, 1], "d2h")
    assert all(torch.equal(host[name], pool[name][[3, 1]]) for name in pool)


class ListPublisher(EventPublisher):
    def __init__(self, data_parallel_rank: int, endpoint: str, **options: Any) -> None:
        super().__init__(data_parallel_rank)
        self.endpoint, self.sent = endpoint, []

    def publish(self, events: Any) -> None:
        self.sent.append(events)

    def shutdown(self) -> None:
        self.sent.clear()


@dataclass
class OwnEventsConfig:
    enable_kv_cache_events: bool = True
    publisher: str = "list"
    endpoint: str = "somewhere"


def test_publishers_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventPublisherFactory, "_makers", dict(EventPublisherFactory._makers))
    batch = KVEventBatch(1.0, [])
    unpublished = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    for config in (None, KVEventsConfig(), unpublished):
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, NullEventPublisher)
        publisher.publish(batch)
        publisher.shutdown()
    own: Any = OwnEventsConfig()
    with pytest.raises(ValueError, match="publisher='list' is not registered"):
        EventPublisherFactory.create(own)
    EventPublisherFactory.register_publisher("list", ListPublisher)
    with pytest.raises(KeyError, match="registered already"):
        EventPublisherFactory.register_publisher("list", ListPublisher)
    made = EventPublisherFactory.create(own, data_parallel_rank=2)
    assert isinstance(made, ListPublisher)
    made.publish(batch)
    assert (made.endpoint, made.sent, made._data_parallel_rank) == ("somewhere", [batch], 2)


def test_groups_of_one() -> None:
    names = ("tp", "pp", "dp", "dcp", "pcp", "world")
    for group in (getattr(distributed, f"get_{name}_group")() for name in names):
        assert (group.rank_in_group, group.world_size, group.rank) == (0, 1, 0)
        tensor, thing = torch.ones(2), object()
        assert group.broadcast(tensor, 0) is tensor
        assert group.broadcast_object(thing, 0) is thing
        group.barrier()


def test_numbers_and_dtypes() -> None:
    assert [cdiv(7, 4), round_up(7, 4), round_down(7, 4), round_up(8, 4)] == [2, 8, 4, 8]
    assert extract_layer_index("model.layers.7.self_attn.attn") == 7
    for name in ("model.norm", "layers.1.experts.3"):
        with pytest.raises(ValueError, match="numbers in it"):
            extract_layer_index(name)
    assert get_kv_cache_torch_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert get_kv_cache_torch_dtype("auto", "half") is torch.float16
    assert get_kv_cache_torch_dtype("bfloat16", "float32") is torch.bfloat16
    with pytest.raises(ValueError, match="cache_dtype='fp8'"):
        get_kv_cache_torch_dtype("fp8", torch.float32)

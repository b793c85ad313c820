"""Names that upstream's connectors and tests import: they exist, and do what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch

import vllm
from tests.engine.harness import core_of, engine, extraction_config, greedy
from tests.kv_connector import slot_connector
from vllm.config import ECTransferConfig, KVEventsConfig, ModelDType, VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVConnectorKVEvents,
    KVEventAggregator,
    KVEventBatch,
)
from vllm.entrypoints.chat_utils import resolve_hf_chat_template
from vllm.model_executor.models.extract_hidden_states import basic_cache
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.request import Request

Checkpoint = Callable[..., Path]


def test_specs_and_groups() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    rows = HiddenStateCacheSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    assert [isinstance(spec, AttentionSpec) for spec in (full, rows, state)] == [True, True, False]
    assert not isinstance(rows, FullAttentionSpec)
    group = KVCacheGroupSpec(["a", "b"], full)
    assert (group.layer_names, group.kv_cache_spec) == (["a", "b"], full)
    tensor = KVCacheTensor(size=64, layers=("a", "b"), layer_stride=16, block_stride=32)
    assert (tensor.shared_by, tensor.offset) == (["a", "b"], 0)
    assert BlockHash(b"x") == b"x"
    assert "bfloat16" in get_args(ModelDType)
    assert vllm.LLMEngine.__name__ == "LLMEngine"


def test_what_a_connector_notes_in_a_request_is_of_that_one_only() -> None:
    """As where each request comes from another process: prompts may share their settings."""
    params = SamplingParams(extra_args={"kv_transfer_params": {"remote": {"is_asked": True}}})
    one, other = (
        Request(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=[1], sampling_params=params, arrival_time=0.0
            )
        )
        for name in "ab"
    )
    assert one.kv_transfer_params is not None
    one.kv_transfer_params["remote"]["is_asked"] = False
    assert other.kv_transfer_params == {"remote": {"is_asked": True}}
    assert params.extra_args == {"kv_transfer_params": other.kv_transfer_params}
    assert one.is_finished() is False


def test_configs_of_what_is_not_here() -> None:
    config = VllmConfig(ec_transfer_config=ECTransferConfig(), kv_events_config={})
    assert config.ec_transfer_config is not None
    assert not config.ec_transfer_config.is_ec_transfer_instance
    assert not config.ec_transfer_config.is_ec_consumer
    assert config.ec_transfer_config.get_from_extra_config("a", 3) == 3
    assert config.kv_events_config == KVEventsConfig()
    assert KVEventsConfig().publisher == "null"
    assert KVEventsConfig(enable_kv_cache_events=True).publisher == "zmq"
    with pytest.raises(ValueError, match="buffer_steps=0 is not a positive number"):
        VllmConfig(kv_events_config={"buffer_steps": 0})
    with pytest.raises(ValueError, match="ec_connector='X' is not supported"):
        VllmConfig(ec_transfer_config={"ec_connector": "X", "ec_role": "ec_both"})


def test_events_of_several_workers() -> None:
    stored = BlockStored([b"a", 7], None, [1, 2], 2, medium="CPU")
    removed = BlockRemoved([b"a"])
    with pytest.raises(ValueError, match="num_workers=0"):
        KVEventAggregator(0)
    events = KVEventAggregator(1)
    events.increment_workers()
    with pytest.raises(ValueError, match="count=0"):
        events.increment_workers(0)
    events.add_events([stored, removed])
    events.add_events([BlockStored([b"a", 7], None, [1, 2], 2, medium="CPU"), AllBlocksCleared()])
    assert events.get_common_events() == [stored]
    assert len(events.get_all_events()) == 4
    assert events.get_number_of_workers() == 2
    events.reset_workers()
    assert events.get_common_events() == [removed, AllBlocksCleared()]
    events.clear_events()
    assert not events.get_all_events()
    batch = KVEventBatch(1.5, [stored, removed])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch) == batch
    assert issubclass(KVConnectorKVEvents, object)


def test_rows_that_are_stored_by_hand() -> None:
    pool = torch.full((3, 4, 2, 5), float("nan"))
    rows = torch.randn(3, 2, 5)
    basic_cache(rows, pool, torch.tensor([5, -1, 11]))
    assert torch.equal(pool[1, 1], rows[0])
    assert torch.equal(pool[2, 3], rows[2])
    assert int(pool.isnan().sum()) == pool.numel() - 20


def test_the_proposer_for_runners_of_others(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with engine(checkpoint("llama"), **extraction_config([2, 0], tmp_path)) as llm:
        runner = core_of(llm).executor.worker.model_runner
        proposer = runner.proposer
        streams = [torch.randn(4, proposer.hidden_size).bfloat16() for _ in range(2)]
        slots = torch.tensor([17, 18, -1, 40])
        metadata = SimpleNamespace(slot_mapping=slots)
        sampled = torch.tensor([[3], [-1], [9], [500]], dtype=torch.int32)
        assert torch.equal(proposer.propose(sampled, streams, metadata), sampled)
        rows = proposer.cache_layer.kv_cache
        per_block = rows.shape[1]
        for token, slot in ((0, 17), (1, 18), (3, 40)):
            expected = torch.stack([stream[token] for stream in streams]).to(rows.dtype)
            assert torch.equal(rows[slot // per_block, slot % per_block], expected)
        with pytest.raises(ValueError, match=r"1 layers, not the 2 of \[2, 0\]"):
            proposer.propose(sampled, streams[:1], metadata)
        with pytest.raises(ValueError, match=r"no group with 'cache_only_layers\.4'"):
            proposer.validate_same_kv_cache_group(SimpleNamespace(kv_cache_groups=[]))
        assert proposer.dummy_run(8) is None

        batch = SimpleNamespace(
            req_ids=["a", "b", "c", "d"], num_reqs=4, vocab_size=300, num_tokens_no_spec=[5] * 4
        )
        requests = {n: SimpleNamespace(get_token_id=lambda i, n=n: ord(n) + i) for n in "abcd"}
        discarded = torch.tensor([False, False, True, False])
        tokens, counts = proposer.prepare_next_token_ids_padded(sampled, requests, batch, discarded)
        assert tokens.tolist() == [3, ord("b") + 4, ord("c") + 4, ord("d") + 4]
        assert counts.tolist() == [1, 0, 1, 0]


class HashingConnector(slot_connector.SlotConnector):
    """Looks at the hashes of a request wherever it sees one."""

    seen: list[tuple[str, int, int]] = []  # noqa: RUF012

    def _look(self, where: str, request: Any) -> None:
        self.seen.append((where, len(request.block_hashes), request.num_tokens))

    def on_new_request(self, request: Any) -> None:
        self._look("new", request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._look("match", request)
        return 0, False

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._look("finished", request)
        return False, None


@pytest.mark.parametrize("caching", [True, False])
def test_hashes_are_there_when_a_connector_looks(caching: bool, checkpoint: Checkpoint) -> None:
    config = {
        "kv_connector": "HashingConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    arguments: dict[str, Any] = {"enable_prefix_caching": caching, "kv_transfer_config": config}
    with engine(checkpoint("llama"), **arguments) as llm:
        llm.generate([list(range(40))], greedy(30), use_tqdm=False)
    assert {where for where, _, _ in HashingConnector.seen} == {"new", "match", "finished"}
    assert all(hashes == tokens // 16 for _, hashes, tokens in HashingConnector.seen)
    assert HashingConnector.seen[-1] == ("finished", 4, 70)
    HashingConnector.seen.clear()
    slot_connector.calls.clear()


def test_names_of_stats_and_bases() -> None:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase, KVConnectorBaseType
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetricT,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiKVConnectorPromMetrics,
        MultiKVConnectorStats,
    )

    assert KVConnectorBase is KVConnectorBaseType is KVConnectorBase_V1
    assert issubclass(MultiKVConnectorStats, KVConnectorStats)
    assert issubclass(MultiKVConnectorPromMetrics, KVConnectorPromMetrics)
    assert PromMetricT.__bound__ is not None
    with pytest.raises(NotImplementedError):
        KVConnectorStats().reduce()


def test_the_template_that_lm_eval_asks_for(checkpoint: Checkpoint) -> None:
    tokenizer = get_tokenizer(str(checkpoint("llama")))
    own = tokenizer.chat_template
    assert own and resolve_hf_chat_template(tokenizer, None, None, model_config=None) == own
    assert resolve_hf_chat_template(tokenizer, "{{ messages }}", None) == "{{ messages }}"
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert [resolve_hf_chat_template(tokenizer, None, t) for t in (None, tools)] == ["a", "b"]
    assert resolve_hf_chat_template(tokenizer, "tool_use", None) == "b"
    tokenizer.chat_template = None
    assert resolve_hf_chat_template(tokenizer, None, tools) is None

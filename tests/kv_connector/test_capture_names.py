"""The names that connectors of trainers import, in a connector that uses every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from vllm.config import KVTransferConfig, get_layers_from_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    extract_from_kv_cache,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionLayer,
    CacheOnlyAttentionMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

Checkpoint = Callable[..., Path]
LENGTHS = (75, 33)
LAYERS = [0, 2, 3]


class CapturingConnector(Base, SupportsHMA):
    """Gathers rows by the step's slots, and again from the blocks of requests that end."""

    stepwise: list[torch.Tensor] = []  # noqa: RUF012
    at_end: dict[int, torch.Tensor] = {}  # noqa: RUF012
    other_layers: set[bool] = set()  # noqa: RUF012
    cache: torch.Tensor

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        (self.layer,) = layers
        assert "cache_only_layers" in self.layer
        others = [extract_layer_index(name) for name in kv_caches if name != self.layer]
        assert extract_layer_index(self.layer) > max(others)
        type(self).cache = kv_caches[self.layer]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if layer_name != self.layer:
            self.other_layers.add(isinstance(attn_metadata, CacheOnlyAttentionMetadata))
            return
        assert isinstance(attn_metadata, CacheOnlyAttentionMetadata)
        slots = get_forward_context().slot_mapping[layer_name]
        assert torch.equal(slots, attn_metadata.slot_mapping)
        self.stepwise.append(extract_from_kv_cache(kv_layer, slots, len(slots)))

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        blocks = torch.tensor(block_ids[-1])  # the rows' group is the last
        rows_per_block, count = self.cache.shape[2], request.num_prompt_tokens
        slots = (blocks[:, None] * rows_per_block + torch.arange(rows_per_block)).reshape(-1)
        assert len(slots) >= count  # every block of the request is held
        self.at_end[count] = extract_from_kv_cache(self.cache, slots, count).clone()
        return False, None

    def get_finished_count(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    CapturingConnector.stepwise.clear()
    CapturingConnector.at_end.clear()
    CapturingConnector.other_layers.clear()


def test_every_name_in_one_connector(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, prompts = checkpoint("llama"), random_prompts(3, list(LENGTHS))
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, **config) as llm:
        outputs = llm.generate(prompts, greedy(1), use_tqdm=False)
        expected = [rows_of(output) for output in outputs]
    config["kv_transfer_config"] = {
        "kv_connector": "CapturingConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_producer",
    }
    with engine(folder, max_num_batched_tokens=32, **config) as llm:
        llm.generate(prompts[:1], greedy(1), use_tqdm=False)
        stepwise = torch.cat(CapturingConnector.stepwise)
        assert len(CapturingConnector.stepwise) > 2  # chunks
        llm.generate(prompts[1:], greedy(1), use_tqdm=False)
    assert torch.equal(stepwise[: LENGTHS[0]], expected[0])
    assert CapturingConnector.at_end.keys() == set(LENGTHS)
    for length, rows in zip(LENGTHS, expected, strict=True):
        assert torch.equal(CapturingConnector.at_end[length], rows)
    assert CapturingConnector.other_layers == {False}


@dataclass
class _Request:
    token_ids: torch.Tensor
    block_ids: list[int]


@dataclass
class BlocksMetadata(KVConnectorMetadata):
    requests: dict[str, _Request] = field(default_factory=dict)


class BlocksConnector(Base, SupportsHMA):
    """Reads the rows of whole requests by their blocks, as connectors for older releases do."""

    found: dict[int, torch.Tensor] = {}  # noqa: RUF012

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert vllm_config.cache_config.block_size
        assert vllm_config.parallel_config.pipeline_parallel_size == 1
        assert vllm_config.scheduler_config.max_num_seqs
        assert self._kv_transfer_config.get_from_extra_config("pool_slots", 4) == 4
        (self.group,) = (
            index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if any("cache_only_layers" in name for name in group.layer_names)
        )
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        self.layer_ids = draft.eagle_aux_hidden_state_layer_ids
        self.num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.width = vllm_config.model_config.get_hidden_size()
        self.requests: dict[str, _Request] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = list(kv_caches)
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, names)
        (self.layer,) = layers
        assert get_tensor_model_parallel_rank() == get_pp_group().rank_in_group == 0

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **_: Any
    ) -> None:
        if layer_name != self.layer:
            return
        assert isinstance(attn_metadata, CacheOnlyAttentionMetadata)
        num_blocks, rows_per_block, *token = kv_layer.shape
        assert token == [len(self.layer_ids), self.width]
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlocksMetadata)
        for request in metadata.requests.values():
            blocks, count = torch.tensor(request.block_ids), len(request.token_ids)
            assert blocks.max() < num_blocks
            slots = (blocks[:, None] * rows_per_block + torch.arange(rows_per_block)).flatten()
            if len(slots) >= count:  # all of them are allocated
                self.found[count] = kv_layer.flatten(0, 1)[slots[:count]].clone()

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = BlocksMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            ids = torch.tensor(new.prompt_token_ids)
            assert scheduler_output.num_scheduled_tokens[new.req_id] <= len(ids)
            one = _Request(ids, list(new.block_ids[self.group]))
            self.requests[new.req_id] = metadata.requests[new.req_id] = one
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is not None:
                self.requests[request_id].block_ids.extend(new_ids[self.group])
            metadata.requests[request_id] = self.requests[request_id]
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return False, {"input_ids_list": self.requests.pop(request.request_id).token_ids.tolist()}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])

    def get_finished_count(self) -> int:
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_connector_for_older_releases(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    """It takes ``shape[1]`` of its view for the rows of a block."""
    folder, prompts = checkpoint(family), random_prompts(3, list(LENGTHS))
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, **config) as llm:
        expected = [rows_of(one) for one in llm.generate(prompts, greedy(1), use_tqdm=False)]
    config["kv_transfer_config"] = {
        "kv_connector": "BlocksConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_producer",
        "rows_before_layers": True,
    }
    BlocksConnector.found.clear()
    with engine(folder, max_num_batched_tokens=32, **config) as llm:
        outputs = llm.generate(prompts, greedy(1), use_tqdm=False)
    for prompt, output, rows in zip(prompts, outputs, expected, strict=True):
        ids = prompt["prompt_token_ids"]
        assert output.kv_transfer_params == {"input_ids_list": ids}
        assert torch.equal(BlocksConnector.found[len(ids)], rows)


def test_the_view_of_our_own_connectors_is_fixed(tmp_path: Path) -> None:
    config = extraction_config(LAYERS, tmp_path)["kv_transfer_config"]
    with pytest.raises(ValueError, match="rows_before_layers is for connectors of"):
        KVTransferConfig(**config, rows_before_layers=True)

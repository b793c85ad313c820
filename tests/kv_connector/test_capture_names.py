"""The names that connectors of trainers import, in a connector that uses every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from vllm.config import get_layers_from_vllm_config
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

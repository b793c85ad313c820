"""A connector is given a layer's cache as the same tensor everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    extract_from_kv_cache,
)

Checkpoint = Callable[..., Path]
ROWS_LAYER = "cache_only_layers.18"


class GatheringConnector(Base, SupportsHMA):
    """Gathers a step's rows by their slots inside save_kv_layer."""

    views: dict[str, Any] = {}  # noqa: RUF012
    rows: list[torch.Tensor] = []  # noqa: RUF012

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.views.update(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert kv_layer is self.views[layer_name]
        if layer_name == ROWS_LAYER:
            slots = attn_metadata.slot_mapping
            self.rows.append(extract_from_kv_cache(kv_layer, slots, len(slots)))

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    GatheringConnector.views.clear()
    GatheringConnector.rows.clear()


def test_save_kv_layer_gets_the_registered_view(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """[blocks, layers, rows, hidden] at both places; rows a block equal to layers hide no swap."""
    folder = checkpoint("llama", num_hidden_layers=18)
    layers = list(range(16))  # as many as rows of a block
    prompts = random_prompts(3, [40])
    config = extraction_config(layers, tmp_path)
    with engine(folder, **config) as llm:
        (output,) = llm.generate(prompts, greedy(1), use_tqdm=False)
        expected = rows_of(output)
    config["kv_transfer_config"] = {
        "kv_connector": "GatheringConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_producer",
    }
    with engine(folder, **config) as llm:
        llm.generate(prompts, greedy(1), use_tqdm=False)
    assert GatheringConnector.views[ROWS_LAYER].shape[1] == len(layers)
    assert torch.equal(torch.cat(GatheringConnector.rows), expected)

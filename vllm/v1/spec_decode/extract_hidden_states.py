"""The "draft model" that drafts nothing: it keeps the residual stream of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.utils.expert_trace import ExpertLayout
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.rows.capture import CaptureTarget, RowCapture

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LAYER_NAME = "extract_hidden_states"


def max_resident_tokens(vllm_config: VllmConfig) -> int | None:
    """Most tokens whose rows one request holds at once; None when all rows stay to the end."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return None
    if not KVConnectorFactory.rows_leave_each_step(transfer):
        return None
    under_way = vllm_config.scheduler_config.max_tokens_under_way
    # Blocks that are to be found again wait for the grain in which they end.
    waiting = HASH_TOKENS - 1 if vllm_config.cache_config.enable_prefix_caching else 0
    return under_way + waiting


def make_cache_layer(
    vllm_config: VllmConfig, experts: ExpertLayout | None = None
) -> CacheOnlyAttentionLayer:
    """The layer of the rows that ``speculative_config`` asks for, registered as the others are."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    return CacheOnlyAttentionLayer(
        num_heads=len(speculative.hidden_state_layer_ids),
        head_size=vllm_config.model_config.get_hidden_size(),
        prefix=LAYER_NAME,
        max_resident_tokens=max_resident_tokens(vllm_config),
        experts=experts,
    )


class ExtractHiddenStatesProposer:
    """Writes the rows of every scheduled token into the hidden-state group's blocks.

    Layer ids keep the order asked, duplicates too.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: GPUModelRunner | None,
        experts: ExpertLayout | None = None,
    ) -> None:
        if runner is None:
            raise ValueError(
                "ExtractHiddenStatesProposer needs the model runner whose steps it records: "
                "create it as ExtractHiddenStatesProposer(vllm_config, device, runner)"
            )
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.layer_ids: tuple[int, ...] = speculative.hidden_state_layer_ids
        self.experts = experts
        self.cache_layer = make_cache_layer(vllm_config, experts)
        self.layer_name = LAYER_NAME
        self.kv_cache_gid = -1
        self.rows_per_block = 0
        self._row_cache: torch.Tensor | None = None

    def initialize_kv_cache(self, config: KVCacheConfig, row_cache: torch.Tensor) -> None:
        """Remember the group of the rows and its view, [blocks, rows, layers, hidden]."""
        gid = config.hidden_state_group_id()
        assert gid is not None, "the plan has no hidden-state group"
        self.kv_cache_gid = gid
        self.rows_per_block = config.kv_cache_groups[gid].kv_cache_spec.block_size
        self._row_cache = row_cache

    def release_kv_cache(self) -> None:
        """Let go of the pool."""
        self._row_cache = None

    def target(self, slots: torch.Tensor) -> CaptureTarget:
        """Where the rows of a step's tokens go. slots: int64 [tokens]."""
        rows, layout = self._row_cache, self.experts
        assert rows is not None
        traces = None if layout is None else layout.view(rows)
        return CaptureTarget(rows, slots, self.layer_ids, traces)

    def begin_step(self, slots: torch.Tensor) -> RowCapture:
        """What captures the rows of a step that hands out no others."""
        return RowCapture([self.target(slots)])

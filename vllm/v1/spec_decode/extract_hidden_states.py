"""The "draft model" that does not draft: it keeps the residual stream of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer, basic_cache
from vllm.utils.boundaries import LayerId
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.rows.capture import CaptureTarget, RowCapture
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import Field, RowLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def layer_name_of(vllm_config: VllmConfig) -> str:
    """Return the name of the rows' layer; its number follows those of the model's layers."""
    return f"cache_only_layers.{vllm_config.model_config.get_total_num_hidden_layers()}"


def max_resident_tokens(vllm_config: VllmConfig) -> int | None:
    """The most tokens whose rows one request holds at once; None when all rows stay to the end."""
    transfer = vllm_config.connector_config
    if transfer is None or not KVConnectorFactory.rows_leave_each_step(transfer):
        return None
    under_way = vllm_config.scheduler_config.max_tokens_under_way
    # Blocks that are to be found again wait for the grain in which they end.
    waiting = HASH_TOKENS - 1 if KVConnectorFactory.keeps_prefixes(vllm_config) else 0
    return under_way + waiting


def make_cache_layer(
    vllm_config: VllmConfig, fields: tuple[Field, ...] = ()
) -> CacheOnlyAttentionLayer:
    """Make the layer for the rows that ``speculative_config`` asks for, and register it."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    return CacheOnlyAttentionLayer(
        num_heads=len(speculative.hidden_state_layer_ids),
        head_size=vllm_config.model_config.get_row_size(),
        prefix=layer_name_of(vllm_config),
        max_resident_tokens=max_resident_tokens(vllm_config),
        fields=fields,
    )


class ExtractHiddenStatesProposer:
    """Writes the rows of every scheduled token into the hidden-state group's blocks.

    Layer ids stay in the order in which they were asked for, and duplicates are kept.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: object,
        fields: tuple[Field, ...] = (),
    ) -> None:
        if runner is None:
            raise ValueError(
                "ExtractHiddenStatesProposer needs the model runner whose steps it records: "
                "create it as ExtractHiddenStatesProposer(vllm_config, device, runner)"
            )
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.layer_ids: tuple[LayerId, ...] = speculative.hidden_state_layer_ids
        self.cache_layer = make_cache_layer(vllm_config, fields)
        self.num_hidden_states = len(self.layer_ids)
        self.hidden_size = vllm_config.model_config.get_row_size()
        dtype = vllm_config.model_config.dtype
        self._hidden = HiddenStates(self.layer_ids, self.hidden_size, dtype, dtype)
        self._layout = RowLayout(self._hidden.cells, fields)
        self.layer_name = layer_name_of(vllm_config)
        self.attn_layer_names = [self.layer_name]
        self.kv_cache_gid = -1
        self.rows_per_block = 0
        self._row_cache: torch.Tensor | None = None

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """Find the group of the rows. ValueError: the plan has none."""
        groups = enumerate(kv_cache_config.kv_cache_groups)
        gid = next((g for g, group in groups if self.layer_name in group.layer_names), None)
        if gid is None:
            raise ValueError(f"the plan of the pool has no group with {self.layer_name!r}")
        self.kv_cache_gid = gid

    def initialize_kv_cache(self, config: KVCacheConfig, row_cache: torch.Tensor) -> None:
        """Remember the group of the rows and its view, [blocks, rows, layers, hidden]."""
        self.validate_same_kv_cache_group(config)
        self.rows_per_block = config.kv_cache_groups[self.kv_cache_gid].kv_cache_spec.block_size
        self._row_cache = row_cache

    def release_kv_cache(self) -> None:
        self._row_cache = None

    def target(self, slots: torch.Tensor) -> CaptureTarget:
        """Return the target of the rows of a step's tokens. slots: int64 [tokens]."""
        assert self._row_cache is not None, "there is no pool yet"
        return CaptureTarget(self._row_cache, slots, self._hidden, self._layout)

    def begin_step(self, slots: torch.Tensor) -> RowCapture:
        """Return the sink that captures the rows of a step that hands out no others."""
        return RowCapture([self.target(slots)])

    # The rest is for third-party runners, which collect the streams themselves.

    def propose(
        self,
        sampled_token_ids: torch.Tensor,
        target_hidden_states: Sequence[torch.Tensor],
        common_attn_metadata: Any,
        slot_mappings: Any = None,
        num_speculative_tokens: int = 1,
    ) -> torch.Tensor:
        """Keep the streams of a step that was run elsewhere; returns the sampled tokens.

        target_hidden_states: [tokens, hidden] for each layer id, in their order.
        common_attn_metadata: its ``slot_mapping`` says where the rows go. sampled_token_ids:
        [requests, 1]; they are the draft, which is accepted unchanged.
        """
        assert self._row_cache is not None, "there is no pool yet"
        if len(target_hidden_states) != self.num_hidden_states:
            raise ValueError(
                f"target_hidden_states has {len(target_hidden_states)} layers, not the "
                f"{self.num_hidden_states} of {list(self.layer_ids)}"
            )
        rows = torch.stack(list(target_hidden_states), dim=1).to(self._row_cache.dtype)
        basic_cache(rows, self._row_cache, common_attn_metadata.slot_mapping)
        return sampled_token_ids

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Mapping[str, Any],
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next token of each request, and how many sampled ones are tokens: int32 each.

        sampled_token_ids: [requests, 1], -1 if nothing was sampled. In that case, and where
        discard_request_mask (bool [requests]) is set, the request's last known token is used.
        """
        known = gpu_input_batch.num_tokens_no_spec
        last = [
            requests[name].get_token_id(int(known[i]) - 1)
            for i, name in enumerate(gpu_input_batch.req_ids[: gpu_input_batch.num_reqs])
        ]
        sampled = sampled_token_ids[:, 0].int()
        is_token = (sampled >= 0) & (sampled < gpu_input_batch.vocab_size)
        keep = is_token & ~discard_request_mask[: len(last)]
        return torch.where(keep, sampled, sampled.new_tensor(last)), is_token.int()

    def load_model(self, target_model: nn.Module) -> None:
        """Do nothing: the layer that keeps the rows was made with the proposer."""

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Do nothing: rows are captured in the model's own pass, which has its own trial run."""

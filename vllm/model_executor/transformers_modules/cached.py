"""Keeps in the pool, between two steps, what transformers caches of a layer.

``DynamicCache`` holds tensors that grow by a row per token (keys, values, keys of an indexer) and
states of fixed size (of convolutions and recurrences). Each kind has a layer of ours with a place
in the pool. Before a pass the cache of a request is filled from there; afterwards it goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.transformers_modules.boundaries import NotServableError
from vllm.ops.attention import write_kv
from vllm.ops.layout import HostStates
from vllm.v1.kv_cache_interface import PAGE_TOKENS, FullAttentionSpec, MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata, RecurrentMetadata


@dataclass(frozen=True)
class Part:
    """The tokens of one request in a step."""

    index: int
    """Index of the request in the step."""
    start: int
    """Index of its first token in the flat batch."""
    num_computed: int
    num_tokens: int


class CachedRows(nn.Module, AttentionLayerBase):
    """Two tensors that grow by a row per token: [1, heads, tokens, key_size], [..., value_size].

    ``kv_cache``: [blocks, pages, 16, heads, key_size + value_size], by default in the model's
    dtype.
    """

    kv_cache: torch.Tensor

    def __init__(
        self,
        heads: int,
        key_size: int,
        value_size: int,
        prefix: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.key_size, self.value_size = heads, key_size, value_size
        self.dtype = dtype
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size or PAGE_TOKENS,
            num_kv_heads=self.heads,
            head_size=self.key_size,
            head_size_v=self.value_size,
            dtype=self.dtype or vllm_config.model_config.dtype,
            heads_first=vllm_config.cache_config.kv_cache_layout == "HND",
        )

    @property
    def _metadata(self) -> AttentionMetadata:
        metadata: AttentionMetadata = get_forward_context().attn_metadata[self.layer_name]
        return metadata

    def load(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of tokens that were computed before this step."""
        _, pages, page_tokens, _, _ = self.kv_cache.shape
        position = torch.arange(part.num_computed, device=self.kv_cache.device)
        page = position // page_tokens
        block = self._metadata.block_table[part.index][page // pages].long()
        rows = self.kv_cache[block, page % pages, position % page_tokens].transpose(0, 1)[None]
        keys, values = rows[..., : self.key_size], rows[..., self.key_size :]
        return keys.contiguous(), values.contiguous()

    def store(self, part: Part, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the rows of this step's tokens; keys, values: those of all tokens so far."""
        new_keys, new_values = (
            x[0, :, part.num_computed :].transpose(0, 1).to(self.kv_cache.dtype).contiguous()
            for x in (keys, values)
        )
        assert len(new_keys) == len(new_values) == part.num_tokens, "a row for each token"
        slots = self._metadata.slot_mapping[part.start : part.start + part.num_tokens]
        write_kv(new_keys, new_values, slots.contiguous(), self.kv_cache)


class CachedStates(nn.Module, AttentionLayerBase):
    """Tensors of fixed size, [1, ...] each. ``kv_cache``: [blocks, ...] for each of them."""

    kv_cache: tuple[torch.Tensor, ...]

    def __init__(self, states: list[torch.Tensor], prefix: str) -> None:
        super().__init__()
        self.shapes = tuple(tuple(state.shape[1:]) for state in states)
        self.dtypes = tuple(state.dtype for state in states)
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        interval = vllm_config.cache_config.mamba_block_size
        return MambaSpec(
            block_size=interval or vllm_config.model_config.max_model_len,
            shapes=self.shapes,
            dtypes=self.dtypes,
        )

    def plan(self) -> HostStates:
        """Blocks of the states, and of the snapshots that are kept on the way."""
        metadata: RecurrentMetadata = get_forward_context().attn_metadata[self.layer_name]
        return metadata.states.on_host()

    def load(self, block: int) -> list[torch.Tensor]:
        return [view[block][None].clone() for view in self.kv_cache]

    def store(self, block: int, states: list[torch.Tensor]) -> None:
        for view, state in zip(self.kv_cache, states, strict=True):
            view[block].copy_(state[0])


_KNOWN_TENSORS = frozenset({"keys", "values", "indexer_keys", "_sliding_window_tensor"})
_STATES = frozenset({"conv_states", "recurrent_states"})


class LayerCaches(nn.Module):
    """Our layers for all that one layer of a ``DynamicCache`` holds.

    example: that layer after a pass over ``num_tokens`` tokens.
    """

    def __init__(self, example: Any, num_tokens: int, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        _refuse_unknown(example)
        self.rows: CachedRows | None = None
        self.indexer: CachedRows | None = None
        self.states: CachedStates | None = None
        keys: torch.Tensor | None = getattr(example, "keys", None)
        values: torch.Tensor | None = getattr(example, "values", None)
        if keys is not None and values is not None and keys.numel():
            _check_rows(keys, num_tokens, dtype)
            _check_rows(values, num_tokens, dtype, keys.shape[1])
            self.rows = CachedRows(keys.shape[1], keys.shape[3], values.shape[3], f"{prefix}.rows")
        indexed = getattr(example, "indexer_keys", None)
        if indexed is not None and indexed.numel():
            _check_rows(indexed[:, None], num_tokens, dtype)
            self.indexer = CachedRows(1, indexed.shape[2], 0, f"{prefix}.indexer")
        states = _states_of(example)
        self._state_places = [(name, key) for name, key, _ in states]
        if states:
            self.states = CachedStates([state for _, _, state in states], f"{prefix}.states")
        parts = (self.rows, self.indexer, self.states)
        self.layer_names = [part.layer_name for part in parts if part is not None]
        self._kernel_sizes = dict(getattr(example, "conv_kernel_size", {}))

    def fill(self, layer: Any, part: Part) -> None:
        """Fill the new ``layer`` with what the request's layer held after the last step."""
        if self.rows is not None:
            keys, values = self.rows.load(part)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        if self.indexer is not None:
            keys, _ = self.indexer.load(part)
            layer.lazy_initialization_indexer(keys[:, 0])
            layer.indexer_keys = keys[:, 0]
        if self.states is not None:
            self._fill_states(layer, self.states.load(self.states.plan().block_ids[part.index]))

    def _fill_states(self, layer: Any, states: list[torch.Tensor]) -> None:
        for (name, key), state in zip(self._state_places, states, strict=True):
            getattr(layer, name)[key] = state
            getattr(layer, f"is_{name}_initialized")[key] = True
            layer.has_previous_state[key] = True
            layer.device, layer.dtype = state.device, state.dtype
        layer.conv_kernel_size.update(self._kernel_sizes)

    def pretend(self, layer: Any, num_tokens: int) -> None:
        """Fill a layer of another stage, which nothing reads, so that it has so many tokens."""
        if self.rows is not None:
            zero = torch.zeros((), dtype=self.rows.dtype or torch.float32)
            rows = self.rows
            keys, values = (
                zero.expand(1, rows.heads, num_tokens, size)
                for size in (rows.key_size, rows.value_size)
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        if self.states is not None:
            shapes = zip(self.states.shapes, self.states.dtypes, strict=True)
            zeros = [torch.zeros((), dtype=dtype).expand(1, *shape) for shape, dtype in shapes]
            self._fill_states(layer, zeros)

    def take(self, layer: Any, part: Part) -> None:
        """Keep the rows of this step's tokens."""
        if self.rows is not None:
            self.rows.store(part, layer.keys, layer.values)
        if self.indexer is not None:
            keys = layer.indexer_keys[:, None]
            self.indexer.store(part, keys, keys[..., :0])

    def take_states(self, layer: Any, block: int) -> None:
        """Keep the states as they are now."""
        if self.states is not None:
            self.states.store(block, [tensor for _, _, tensor in _states_of(layer)])


def _states_of(layer: Any) -> list[tuple[str, int, torch.Tensor]]:
    """Yield attribute, key and tensor of every state of fixed size."""
    return [
        (name, key, tensor)
        for name in sorted(_STATES)
        for key, tensor in (getattr(layer, name, None) or {}).items()
        if tensor is not None
    ]


def _refuse_unknown(layer: Any) -> None:
    places = _KNOWN_TENSORS | _STATES
    unknown = [n for n, x in vars(layer).items() if n not in places and _holds_tensors(x)]
    if unknown:
        raise NotServableError(
            f"{type(layer).__name__} of its cache keeps {', '.join(unknown)}, which have no place "
            "in the pool"
        )


def _holds_tensors(x: Any) -> bool:
    """Return whether the value is a tensor, or a collection with one in it."""
    if isinstance(x, Mapping):
        return any(map(_holds_tensors, x.values()))
    if isinstance(x, list | tuple | set):
        return any(map(_holds_tensors, x))
    return torch.is_tensor(x)


def _check_rows(
    rows: torch.Tensor, num_tokens: int, dtype: torch.dtype, heads: int | None = None
) -> None:
    is_plain = rows.dim() == 4 and rows.shape[0] == 1 and rows.shape[2] == num_tokens
    if not is_plain or rows.dtype is not dtype or heads not in (None, rows.shape[1]):
        raise NotServableError(
            f"its cache keeps {tuple(rows.shape)} of {rows.dtype} for {num_tokens} tokens: not one "
            "row for each"
        )

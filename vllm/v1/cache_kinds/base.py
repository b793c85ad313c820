"""The interface of every kind of cache, and the places of layers in the pool. Plain data.

A *spec* says what one layer stores for a block of tokens; a *group* is a set of
layers that share a block table; a *tensor* says where the pages of a layer lie
inside the pool. Nothing here allocates.

The pool is one allocation ``int8[num_blocks, block_bytes]``. Every group overlays
it in its own way (docs/design.md, section 3)::

    attention group | page of 16 tokens: L0 L1 L2 ... | next 16 tokens: L0 L1 ... |
    recurrent group | state of L0 | state of L1 | ... as many as fit, of any sizes |
    hidden group    | row 0 | row 1 | ...  each [layers asked, hidden]             |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from vllm.platforms.interface import PAGE_TOKENS as PAGE_TOKENS
from vllm.utils import cdiv
from vllm.utils.token_spread import WHOLE, TokenSpread
from vllm.v1.attention.backend import AttentionMetadata, CacheOnlyAttentionMetadata
from vllm.v1.core.single_type_kv_cache_manager import TokenBlockManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ops.layout import SequenceLayout, StatePlan
    from vllm.v1.core.block_pool import BlockPool

MAX_WASTE = 0.02
"""Share of their bytes that states, windows and rows may waste before larger blocks are tried."""

LayerCache = torch.Tensor | tuple[torch.Tensor, ...]
"""A layer's views of the pool."""


def context_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks over which the tokens of one sequence are spread (DCP x PCP)."""
    parallel = vllm_config.parallel_config
    return parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size


def tokens_of_a_rank(vllm_config: VllmConfig) -> int:
    """Tokens of the longest possible request that one of these ranks has."""
    return cdiv(vllm_config.model_config.max_model_len, context_parallel_size(vllm_config))


class RetentionLimits(NamedTuple):
    """Limits on the blocks that stay findable without being held."""

    max_hidden_blocks: int


class StepInputs(Protocol):
    """Inputs from which the metadata of one step are made, for every group."""

    @property
    def layout(self) -> SequenceLayout:
        """The division of the flat batch into requests."""
        ...

    def block_table(self, group_id: int) -> torch.Tensor:
        """int32 [requests, longest table]; positions after a request's last block hold 0."""
        ...

    def slots(self, group_id: int) -> torch.Tensor:
        """int64 [tokens]: ``block * block_size + offset`` of every token; -1: not on this rank."""
        ...

    def state_plan(self, group_id: int) -> StatePlan:
        """The blocks that hold the states of a recurrent group."""
        ...


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The content that one layer keeps for a block of ``block_size`` tokens."""

    leads: ClassVar[int] = 0
    """Groups with the highest number set the bytes of a block; 0: never."""
    is_recurrent: ClassVar[bool] = False
    """True for one state per request of any length. Its snapshots are found, held and released
    together with those of all other recurrent groups."""
    holds_rows: ClassVar[bool] = False
    """True for captured hidden states, which only a connector reads."""

    block_size: int
    """Tokens that one block of this layer's group holds."""
    page_size_padded: int | None = None
    """Bytes that the page occupies, if it holds less."""

    @property
    def kind(self) -> str:
        """Name of the content in a few words."""
        return type(self).__name__

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer on this rank, if it keeps every token alike."""
        raise NotImplementedError

    @property
    def spread(self) -> TokenSpread:
        """The ranks over which the tokens of a block are spread. ``block_size`` is the number that
        each of them has."""
        return WHOLE

    @property
    def tokens_per_block(self) -> int:
        """Tokens for which the scheduler counts one block."""
        return self.block_size * self.spread.ranks

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of data in one page of one layer."""
        return self.block_size * self.token_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one page of one layer counts in the memory budget."""
        if self.page_size_padded is None:
            return self.real_page_size_bytes
        if self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"page_size_padded={self.page_size_padded} is smaller than the page's "
                f"data ({self.real_page_size_bytes} bytes)"
            )
        return self.page_size_padded

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens holds if all of them are needed."""
        return cdiv(num_tokens, self.tokens_per_block)

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        """Blocks that the longest possible request holds at once."""
        return self.num_blocks(vllm_config.model_config.max_model_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one layer of the longest possible request holds at once."""
        return self.max_blocks_per_request(vllm_config) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> KVCacheSpec:
        """Return the same spec for blocks of another number of tokens."""
        return replace(self, block_size=block_size)

    @property
    def group_key(self) -> Hashable:
        """A key that is equal for layers that are planned together (:meth:`layer_set`)."""
        raise NotImplementedError

    def layer_set(self, layers: Mapping[str, Any]) -> LayerSet:
        """Return the set of layers with one :attr:`group_key`, given their specs by name."""
        raise NotImplementedError

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        """``(offset, length)`` in bytes of a layer's contiguous runs inside one block."""
        return ((tensor.start_of(name), self.real_page_size_bytes),)

    def layer_views(self, pool: torch.Tensor, tensor: KVCacheTensor, name: str) -> LayerCache:
        """Return a layer's views of the pool int8 [num_blocks, block_bytes], without copies."""
        raise NotImplementedError

    def cross_layers_view(self, pool: torch.Tensor, tensor: KVCacheTensor) -> torch.Tensor | None:
        """All layers of a tensor as one view, layers first; None if a layer has several views."""
        return None

    def published_view(self, view: LayerCache) -> LayerCache:
        """Return the view that connectors get."""
        return view

    def data_references(self, tensor: KVCacheTensor, name: str) -> list[KVCacheDataReference]:
        """Return the places of a layer's data inside a block, for connectors."""
        runs = self.page_runs(tensor, name)
        return [KVCacheDataReference(layer=name, tensor_idx=0, runs=runs, head_stride=None)]

    def make_manager(
        self, pool: BlockPool, group_id: int, limits: RetentionLimits
    ) -> TokenBlockManager:
        """Make the manager of the group's block tables; recurrent groups share another one."""
        return TokenBlockManager(pool, group_id, self.tokens_per_block)

    def make_metadata(self, inputs: StepInputs, group_id: int) -> Any:
        """Make the metadata that the group's layers read in a forward pass."""
        table, slots = inputs.block_table(group_id), inputs.slots(group_id)
        kind = CacheOnlyAttentionMetadata if self.holds_rows else AttentionMetadata
        return kind(inputs.layout, table, slots)

    def describe(self, num_layers: int, used_bytes: int) -> str:
        """Describe the content of the group's blocks for the log. used_bytes: those of a block, or
        of all blocks that a request's states take."""
        raise NotImplementedError


class LayerSet(ABC):
    """Layers of one kind that are planned together."""

    order: ClassVar[int]
    """Place of its groups among those of other kinds."""
    leads: int = 0
    """The same as :attr:`KVCacheSpec.leads`."""
    page_bytes: int = 0
    """Bytes of ``PAGE_TOKENS`` tokens of all its layers, the unit of a block. 0: no pages."""
    state_bytes: int = 0
    """Bytes of one state of one layer, which a block has to hold. 0: no states."""
    row_bytes: int = 0
    """Bytes kept of one token without pages, which should fill a block well. 0: none."""
    fixed_bytes: int = 0
    """Bytes that a long request of any length keeps: states, tokens of a window. 0: none."""
    spreads_tokens: bool = False
    """True if a block holds tokens that lie on several ranks."""
    names: list[str]

    def fixed_blocks(self, block_bytes: int) -> float:
        """Blocks that ``fixed_bytes`` take beside a last one, which need not be full."""
        return 0

    def accepts(self, block_bytes: int) -> bool:
        """Return whether it needs no larger block, in a stack with states."""
        return self.fixed_blocks(block_bytes) * block_bytes <= ((1 + MAX_WASTE) * self.fixed_bytes)

    @abstractmethod
    def plan(self, block_bytes: int) -> list[GroupPlan]:
        """Plan its groups, for blocks of that size."""


class GroupPlan(NamedTuple):
    """One group, and the places of its layers; the sizes of its tensors are per block."""

    group: KVCacheGroupSpec
    tensors: list[KVCacheTensor]


def view_in_blocks(
    pool: torch.Tensor,
    dtype: torch.dtype,
    offset_bytes: int,
    block_stride_bytes: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """[blocks, *shape] with ``shape`` dense inside a block."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    size = dtype.itemsize
    return torch.as_strided(
        pool.view(-1).view(dtype),
        (pool.shape[0], *shape),
        (block_stride_bytes // size, *strides),
        offset_bytes // size,
    )


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """The places of some layers' pages of one group in the pool.

    Page ``p`` of layer ``layers[l]`` in block ``b`` starts at byte
    ``offset + b * block_stride + p * page_stride + l * layer_stride``; with heads first, that of
    head ``h`` starts ``h * head_stride`` after it.
    """

    size: int
    """Bytes of the whole pool."""
    layers: tuple[str, ...]
    offset: int = 0
    layer_stride: int
    block_stride: int
    page_stride: int = 0
    pages_per_block: int = 1
    head_stride: int = 0
    """0: the heads of a token lie side by side."""

    @property
    def shared_by(self) -> list[str]:
        """Upstream's name for ``layers``."""
        return list(self.layers)

    def start_of(self, name: str) -> int:
        """Byte inside a block at which that layer's first page begins."""
        return self.offset + self.layers.index(name) * self.layer_stride


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share a block table, and the spec of their content."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class KVCacheDataReference:
    """The place of one layer's data inside a block of its group, in bytes, without padding.

    Layers of a group are listed in its order. A recurrent layer has one reference for each
    tensor of its state, in the order of its spec.
    """

    layer: str
    tensor_idx: int
    """Index of the allocation in ``KVCacheReferences.tensors``."""
    runs: tuple[tuple[int, int], ...]
    """``(offset, length)`` of each contiguous run inside a block, in the order of the tokens."""
    head_stride: int | None
    """Bytes between two heads of one token; None for data without heads."""
    value_offset: int | None = None
    """Bytes between a head's key and its value; None if values are not stored separately."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of data in one block."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, kw_only=True)
class KVCacheTensorReference:
    """One allocation: a tensor int8 [blocks, page_size_bytes]; row b is block id b."""

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVCacheReferences:
    """The pool as bytes: moving a block is one copy of a row."""

    tensors: list[KVCacheTensorReference]
    group_data_refs: list[list[KVCacheDataReference]]
    """For each group, the places of its layers' data."""


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The plan of the pool: the number of blocks, and each group's layout of a block."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    block_bytes: int = 0
    layer_specs: Mapping[str, KVCacheSpec] = field(default_factory=dict, compare=False)
    """Each layer's own spec; layers of one group may differ in their heads."""
    tensor_of_layer: dict[str, KVCacheTensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for tensor in self.kv_cache_tensors:
            for name in tensor.layers:
                self.tensor_of_layer[name] = tensor

    def of_layers(self, names: Collection[str]) -> KVCacheConfig:
        """Return the plan as a rank that has only these layers sees it: groups keep their numbers,
        also those of which it has no layer, and layers their places."""
        groups = [
            replace(group, layer_names=[name for name in group.layer_names if name in names])
            for group in self.kv_cache_groups
        ]
        return replace(self, kv_cache_groups=groups)

    def references(self, pool: torch.Tensor) -> KVCacheReferences:
        """Describe the pool int8 [num_blocks, block_bytes] for connectors that move bytes."""
        groups = [
            [
                reference
                for name in group.layer_names
                for reference in self.spec_of(name).data_references(
                    self.tensor_of_layer[name], name
                )
            ]
            for group in self.kv_cache_groups
        ]
        allocation = KVCacheTensorReference(tensor=pool, page_size_bytes=self.block_bytes)
        return KVCacheReferences(tensors=[allocation], group_data_refs=groups)

    def cross_layers_view(self, pool: torch.Tensor) -> torch.Tensor | None:
        """One view of all layers, layers first; None: not all are laid out alike in one group."""
        if len(self.kv_cache_groups) != 1 or len(self.kv_cache_tensors) != 1:
            return None
        (group,), (tensor,) = self.kv_cache_groups, self.kv_cache_tensors
        view = self.spec_of(tensor.layers[0]).cross_layers_view(pool, tensor)
        if view is None or not group.layer_names:
            return None
        first = tensor.layers.index(group.layer_names[0])  # the layers of a stage follow each other
        return view[first : first + len(group.layer_names)]

    def layer_views(self, pool: torch.Tensor) -> dict[str, LayerCache]:
        """Return every layer's views of the pool, without copies."""
        return {
            name: self.spec_of(name).layer_views(pool, tensor, name)
            for name, tensor in self.tensor_of_layer.items()
        }

    def page_runs(self, name: str) -> tuple[tuple[int, int], ...]:
        """``(offset, length)`` in bytes of a layer's contiguous runs inside one block."""
        return self.spec_of(name).page_runs(self.tensor_of_layer[name], name)

    def spec_of(self, name: str) -> KVCacheSpec:
        """Return the spec of one layer for a block of its group."""
        if name in self.layer_specs:
            return self.layer_specs[name]
        return next(g.kv_cache_spec for g in self.kv_cache_groups if name in g.layer_names)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def recurrent_group_ids(self) -> list[int]:
        """Ids of the groups that keep one state per request."""
        return [
            g for g, group in enumerate(self.kv_cache_groups) if group.kv_cache_spec.is_recurrent
        ]

    @property
    def leading_spec(self) -> KVCacheSpec | None:
        """The spec of the group that sets the bytes of a block; None: recurrent states do."""
        specs = [group.kv_cache_spec for group in self.kv_cache_groups]
        return max((spec for spec in specs if spec.leads), key=lambda s: s.leads, default=None)

    def hidden_state_group_id(self) -> int | None:
        """Id of the group that holds captured rows, None when nothing is extracted."""
        for group_id, group in enumerate(self.kv_cache_groups):
            if group.kv_cache_spec.holds_rows:
                return group_id
        return None

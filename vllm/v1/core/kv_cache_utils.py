"""The plan of the pool: groups, the bytes of a block, how many blocks. Pure functions.

The arithmetic is explained in docs/pool.md. Everything here leads from frozen
specs to a frozen :class:`KVCacheConfig`; nothing is allocated and no tensor is made. A layer's
spec knows what the layer keeps and how that lies in a block (``vllm.v1.cache_kinds``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.utils import cdiv
from vllm.v1.cache_kinds.base import (
    MAX_WASTE,
    PAGE_TOKENS,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerSet,
)
from vllm.v1.cache_kinds.rows import share_tables
from vllm.v1.core.block_pool import BlockHash as BlockHash
from vllm.v1.core.kv_cache_manager import KVCacheBlock as KVCacheBlock

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

BLOCK_ALIGNMENT_BYTES = 64
"""Blocks that are not filled by pages are multiples of this (one cache line)."""
BLOCK_STEPS = 16
"""Larger blocks are tried in steps of about this fraction of the smallest one."""

Specs = Mapping[str, KVCacheSpec]


@dataclass(frozen=True)
class LayerSets:
    """The layers of a model, by how they use a block."""

    sets: tuple[LayerSet, ...]

    @property
    def main(self) -> LayerSet | None:
        """The set whose pages fill a block: full attention, or else the largest."""
        leading = [s for s in self.sets if s.leads]
        return max(leading, key=lambda s: (s.leads, s.page_bytes), default=None)

    @property
    def max_state_bytes(self) -> int:
        """Bytes of the largest recurrent state of one layer; 0 without recurrent layers."""
        return max((s.state_bytes for s in self.sets), default=0)

    @property
    def max_row_bytes(self) -> int:
        """Bytes of the rows of one token; 0 when none are captured."""
        return max((s.row_bytes for s in self.sets), default=0)


def sort_layers(specs: Specs) -> LayerSets:
    """Sort layers into sets; the hidden-state layer never changes how others are sorted."""
    by_key: dict[Hashable, dict[str, KVCacheSpec]] = {}
    for name, spec in specs.items():
        if not isinstance(spec, KVCacheSpec):
            raise TypeError(f"layer {name!r} has a KV-cache spec of unknown type {type(spec)}")
        by_key.setdefault(spec.group_key, {})[name] = spec
    sets = [next(iter(layers.values())).layer_set(layers) for layers in by_key.values()]
    return LayerSets(tuple(share_tables(sets)))


def plan_block_bytes(sets: LayerSets, cache_config: CacheConfig) -> int:
    """Choose the bytes of a block: the one free parameter of the layout.

    Raises:
        ValueError: ``attn_pack_size`` is out of range, or the block asked for cannot
            hold the rows of one token.
    """
    main, row_bytes = sets.main, sets.max_row_bytes
    pack = _attention_pack(sets, cache_config.attn_pack_size)
    if main is None:
        smallest = cdiv(max(sets.max_state_bytes, row_bytes, 1), BLOCK_ALIGNMENT_BYTES)
        return _grow(smallest * BLOCK_ALIGNMENT_BYTES, BLOCK_ALIGNMENT_BYTES, sets)
    unit = main.page_bytes
    # In upstream's terms, `pack` layers share the bytes of one state; all of them together
    # take len(layers) / pack times as much.
    num_pages = max(1, cdiv(sets.max_state_bytes * len(main.names), unit * pack))
    num_pages = max(num_pages, cdiv(max(s.page_bytes for s in sets.sets), unit))
    block_size = cache_config.block_size
    if block_size is not None:
        num_pages = max(num_pages, cdiv(block_size, PAGE_TOKENS))
    if block_size is None and cache_config.attn_pack_size is None:
        return _grow(num_pages * unit, unit, sets)
    if num_pages * unit < row_bytes:
        option = "block_size" if block_size is not None else "attn_pack_size"
        value = block_size if block_size is not None else cache_config.attn_pack_size
        raise ValueError(
            f"{option}={value} makes blocks of {num_pages * unit} bytes, but the hidden states of "
            f"one token take {row_bytes}: leave {option} out, or set block_size to at least "
            f"{cdiv(row_bytes, unit) * PAGE_TOKENS}"
        )
    return num_pages * unit


def _attention_pack(sets: LayerSets, pack: int | None) -> int:
    num_layers = len(sets.main.names) if sets.main else 0
    if pack is None:
        return max(num_layers, 1)
    if not sets.max_state_bytes or not num_layers:
        raise ValueError(
            f"attn_pack_size={pack} sets the block size of models that mix attention with "
            "recurrent layers, which this model does not: leave it out, or use block_size"
        )
    if not 1 <= pack <= num_layers:
        raise ValueError(
            f"attn_pack_size={pack} is out of range: this model has {num_layers} full-attention "
            f"layers, so it must be in [1, {num_layers}]"
        )
    return pack


def _grow(block_bytes: int, unit: int, sets: LayerSets) -> int:
    """The smallest block of at least ``block_bytes``, in whole units, that every set fills well."""
    row_bytes, step = sets.max_row_bytes, block_bytes
    if sets.max_state_bytes:
        step = max(1, block_bytes // (BLOCK_STEPS * unit)) * unit
    fits = _is_accepted if _is_accepted(block_bytes, sets) else _holds_states_well
    while not (_holds_rows_well(block_bytes, row_bytes) and fits(block_bytes, sets)):
        block_bytes += step
    return block_bytes


def _is_accepted(block_bytes: int, sets: LayerSets) -> bool:
    """Return whether this block may stay: without states, or if a set leads and all accept it."""
    has_say = sets.main is not None and all(s.accepts(block_bytes) for s in sets.sets)
    return has_say or not sets.max_state_bytes


def _holds_states_well(block_bytes: int, sets: LayerSets) -> bool:
    """Return whether states and windows take at most ``MAX_WASTE`` beyond their bytes, and a block.

    Two sizes of states may leave much of a block unused that holds the larger one. Blocks that
    hold all states, and 51 pages of every window, always pass.
    """
    others = [layers for layers in sets.sets if layers is not sets.main]
    used = sum(layers.fixed_blocks(block_bytes) for layers in others) * block_bytes
    return used <= (1 + MAX_WASTE) * sum(layers.fixed_bytes for layers in others)


def _holds_rows_well(block_bytes: int, row_bytes: int) -> bool:
    """Return whether rows waste at most ``MAX_WASTE`` of their bytes: always with room for 50."""
    return row_bytes == 0 or block_bytes <= (1 + MAX_WASTE) * (
        block_bytes - block_bytes % row_bytes
    )


@dataclass(frozen=True)
class PoolLayout:
    """Groups and the places of their layers in a block, before the number of blocks is known."""

    block_bytes: int
    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]
    """Their sizes are per block."""
    layer_specs: Specs

    def with_blocks(self, num_blocks: int) -> KVCacheConfig:
        """Return the plan of a pool of ``num_blocks`` blocks."""
        own_specs = {
            name: self.layer_specs[name].copy_with_new_block_size(group.kv_cache_spec.block_size)
            for group in self.groups
            for name in group.layer_names
        }
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[replace(t, size=num_blocks * self.block_bytes) for t in self.tensors],
            kv_cache_groups=list(self.groups),
            block_bytes=self.block_bytes,
            layer_specs=own_specs,
        )


def plan_layout(specs: Specs, cache_config: CacheConfig) -> PoolLayout:
    """Plan groups and strides for the layers of one worker.

    Raises:
        ValueError: the block asked for does not fit the model (see plan_block_bytes).
    """
    sets = sort_layers(specs)
    block_bytes = plan_block_bytes(sets, cache_config)
    in_order = sorted(sets.sets, key=lambda s: (s.order, s is not sets.main))
    plans = [plan for layers in in_order for plan in layers.plan(block_bytes)]
    tensors = tuple(tensor for plan in plans for tensor in plan.tensors)
    layout = PoolLayout(block_bytes, tuple(plan.group for plan in plans), tensors, dict(specs))
    check_layout(layout, specs)
    return layout


def check_layout(layout: PoolLayout, specs: Specs) -> None:
    """Assert that every group of a plan fits a block, and that its layers do not overlap."""
    grouped = [name for group in layout.groups for name in group.layer_names]
    placed = [name for tensor in layout.tensors for name in tensor.layers]
    assert sorted(placed) == sorted(grouped) == sorted(specs), "every layer is placed once"
    for group in layout.groups:
        runs = sorted(
            run
            for tensor in layout.tensors
            for name in tensor.layers
            if name in group.layer_names
            for run in specs[name].page_runs(tensor, name)
        )
        end = 0
        for start, length in runs:
            assert start >= end, f"layers of one group overlap at byte {start}"
            end = start + length
        assert end <= layout.block_bytes, f"group of {group.layer_names[0]} exceeds its block"
        assert group.kv_cache_spec.block_size > 0


def get_kv_cache_groups(vllm_config: VllmConfig, kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """Groups of the layers of one worker (upstream's name)."""
    return list(plan_layout(kv_cache_spec, vllm_config.cache_config).groups)


def blocks_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks that the longest possible request holds at once, over all groups."""
    return sum(g.kv_cache_spec.max_blocks_per_request(vllm_config) for g in groups)


def most_useful_bytes(vllm_config: VllmConfig, layout: PoolLayout) -> int:
    """Bytes that ``max_num_seqs`` requests of the greatest length hold at once."""
    most_blocks = vllm_config.scheduler_config.max_num_seqs * blocks_per_request(
        vllm_config, layout.groups
    )
    return (1 + most_blocks) * layout.block_bytes


def estimate_max_model_len(
    vllm_config: VllmConfig, layout: PoolLayout, available_bytes: int
) -> int:
    """Tokens of the longest request that fits into ``available_bytes``; 0 when none does."""
    model_config = vllm_config.model_config
    configured = model_config.max_model_len

    def fits(length: int) -> bool:
        model_config.max_model_len = length
        needed = 1 + blocks_per_request(vllm_config, layout.groups)
        return needed * layout.block_bytes <= available_bytes

    try:
        low, high = 0, configured
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low
    finally:
        model_config.max_model_len = configured


def get_kv_cache_configs(
    vllm_config: VllmConfig, kv_cache_specs: Sequence[Specs], available_memory: Sequence[int]
) -> list[KVCacheConfig]:
    """One plan per worker, all with the number of blocks that the tightest one can hold.

    Raises:
        ValueError: not even one request of ``max_model_len`` tokens fits.
    """
    layouts = [plan_layout(specs, vllm_config.cache_config) for specs in kv_cache_specs]
    fitting = zip(layouts, available_memory, strict=True)
    num_blocks = min(_num_blocks(vllm_config, layout, memory) for layout, memory in fitting)
    return [layout.with_blocks(num_blocks) for layout in layouts]


def _num_blocks(vllm_config: VllmConfig, layout: PoolLayout, available_bytes: int) -> int:
    needed = 1 + blocks_per_request(vllm_config, layout.groups)
    override = vllm_config.cache_config.num_gpu_blocks_override
    num_blocks = available_bytes // layout.block_bytes if override is None else override
    if num_blocks >= needed:
        return num_blocks
    length = vllm_config.model_config.max_model_len
    have = num_blocks * layout.block_bytes
    fitting = estimate_max_model_len(vllm_config, layout, have)
    hint = f"max_model_len={fitting} would fit; or raise" if fitting else "No length fits; raise"
    options = (
        "kv_cache_memory_bytes / gpu_memory_utilization"
        if override is None
        else f"num_gpu_blocks_override={override}"
    )
    raise ValueError(
        f"the KV pool is too small for one request of max_model_len={length} tokens: it needs "
        f"{needed} blocks of {layout.block_bytes} bytes ({needed * layout.block_bytes / 2**20:.1f} "
        f"MiB), {num_blocks} blocks ({have / 2**20:.1f} MiB) are there. {hint} {options}"
    )


def describe(config: KVCacheConfig) -> list[str]:
    """Describe the contents of the pool for the start-up log, one line per kind of group."""
    block_bytes = config.block_bytes
    lines = [
        f"KV pool: {config.num_blocks} blocks of {block_bytes:,} bytes "
        f"= {config.size_bytes / 2**20:,.1f} MiB"
    ]
    recurrent = config.recurrent_group_ids
    for group_id, group in enumerate(config.kv_cache_groups):
        if group_id in recurrent[1:]:
            continue
        spec = group.kv_cache_spec
        together = recurrent if group_id in recurrent else [group_id]
        names = [name for g in together for name in config.kv_cache_groups[g].layer_names]
        used = sum(length for name in names for _, length in config.page_runs(name))
        room = (config.num_blocks - 1) * spec.tokens_per_block
        holds = f", at most {room:,} tokens"
        whole = "a block"
        if spec.is_recurrent:
            holds, whole = f" in {len(recurrent)} blocks", "them"
        waste = 100 * (1 - used / (len(together) * block_bytes))
        lines.append(f"  {spec.describe(len(names), used)}{holds}, {waste:.1f} % of {whole} unused")
    return lines

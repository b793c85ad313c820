"""The plan of the pool: groups, the bytes of a block, how many blocks. Pure functions.

Sources of the arithmetic: docs/design.md section 3. Everything here goes from frozen
specs to a frozen :class:`KVCacheConfig`; nothing is allocated and no tensor is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    PAGE_TOKENS,
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheDataReference,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

logger = init_logger(__name__)

STATE_ALIGNMENT_BYTES = 64
"""Recurrent states that share a block start at multiples of this (one cache line)."""
MAX_HIDDEN_WASTE = 0.02
"""Share of a hidden-state block that may stay unused before larger blocks are tried."""
MAX_BLOCK_GROWTH = 16
"""How many times the smallest block is tried to get below ``MAX_HIDDEN_WASTE``."""

Specs = Mapping[str, KVCacheSpec]


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers with one block table: the same reach, whatever their heads."""

    layers: dict[str, AttentionSpec]

    @property
    def page_bytes(self) -> int:
        """Bytes of ``PAGE_TOKENS`` tokens of all these layers together."""
        return PAGE_TOKENS * sum(spec.token_bytes for spec in self.layers.values())


@dataclass(frozen=True)
class LayerSets:
    """The layers of a model, by how they use a block."""

    attention: tuple[AttentionLayers, ...]
    recurrent: tuple[dict[str, MambaSpec], ...]
    """One entry for each distinct state."""
    hidden: dict[str, HiddenStateCacheSpec]

    @property
    def main_attention(self) -> AttentionLayers | None:
        """The layers that set the block size: full attention, or else the largest set."""
        full = [s for s in self.attention if not _is_sliding(s)]
        return max(full or self.attention, key=lambda s: s.page_bytes, default=None)

    @property
    def max_state_bytes(self) -> int:
        """Bytes of the largest recurrent state of one layer; 0 without recurrent layers."""
        return max((_spec_of(s).real_page_size_bytes for s in self.recurrent), default=0)


def _is_sliding(layers: AttentionLayers) -> bool:
    return any(isinstance(spec, SlidingWindowSpec) for spec in layers.layers.values())


def _spec_of(layers: Mapping[str, MambaSpec]) -> MambaSpec:
    return next(iter(layers.values()))


def sort_layers(specs: Specs) -> LayerSets:
    """Sort layers into sets; the hidden-state layer never changes how others are sorted."""
    attention: dict[int | None, dict[str, AttentionSpec]] = {}
    recurrent: dict[MambaSpec, dict[str, MambaSpec]] = {}
    hidden: dict[str, HiddenStateCacheSpec] = {}
    for name, spec in specs.items():
        if isinstance(spec, HiddenStateCacheSpec):
            hidden[name] = spec
        elif isinstance(spec, MambaSpec):
            recurrent.setdefault(spec, {})[name] = spec
        elif isinstance(spec, AttentionSpec):
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
            attention.setdefault(window, {})[name] = spec
        else:
            raise TypeError(f"layer {name!r} has a KV-cache spec of unknown type {type(spec)}")
    return LayerSets(
        tuple(AttentionLayers(layers) for layers in attention.values()),
        tuple(recurrent.values()),
        hidden,
    )


# --------------------------------------------------------------------------- block bytes


def plan_block_bytes(sets: LayerSets, cache_config: CacheConfig) -> int:
    """Bytes that one block id stands for: the one free parameter of the layout.

    Raises:
        ValueError: ``attn_pack_size`` is out of range, or the block asked for cannot
            hold the rows of one token.
    """
    main = sets.main_attention
    pack = _attention_pack(sets, cache_config.attn_pack_size)
    row_bytes = max((spec.token_bytes for spec in sets.hidden.values()), default=0)
    if main is None:
        unit = cdiv(max(sets.max_state_bytes, row_bytes, 1), STATE_ALIGNMENT_BYTES)
        return unit * STATE_ALIGNMENT_BYTES
    unit = main.page_bytes
    # Upstream's terms: `pack` of the layers share the bytes of one state, all of them
    # together take len(layers) / pack as much.
    num_pages = max(1, cdiv(sets.max_state_bytes * len(main.layers), unit * pack))
    num_pages = max(num_pages, cdiv(max(s.page_bytes for s in sets.attention), unit))
    asked = cache_config.block_size
    if asked is not None:
        num_pages = max(num_pages, cdiv(asked, PAGE_TOKENS))
    if asked is None and cache_config.attn_pack_size is None:
        return _grow_for_rows(num_pages * unit, row_bytes)
    if num_pages * unit < row_bytes:
        option = "block_size" if asked is not None else "attn_pack_size"
        value = asked if asked is not None else cache_config.attn_pack_size
        raise ValueError(
            f"{option}={value} makes blocks of {num_pages * unit} bytes, but the hidden states of "
            f"one token take {row_bytes}: leave {option} out, or set block_size to at least "
            f"{cdiv(row_bytes, unit) * PAGE_TOKENS}"
        )
    return num_pages * unit


def _attention_pack(sets: LayerSets, pack: int | None) -> int:
    num_layers = len(sets.main_attention.layers) if sets.main_attention else 0
    if pack is None:
        return max(num_layers, 1)
    if not sets.recurrent or not num_layers:
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


def _grow_for_rows(block_bytes: int, row_bytes: int) -> int:
    """The smallest multiple of ``block_bytes`` that rows fill well, or the best of those tried."""
    if row_bytes == 0:
        return block_bytes
    first = cdiv(row_bytes, block_bytes)
    candidates = [block_bytes * m for m in range(first, first + MAX_BLOCK_GROWTH)]

    def waste(size: int) -> float:
        return (size % row_bytes) / size

    good = [size for size in candidates if waste(size) <= MAX_HIDDEN_WASTE]
    return good[0] if good else min(candidates, key=waste)


# --------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class PoolLayout:
    """Groups and where their layers lie in a block, before the number of blocks is known."""

    block_bytes: int
    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]
    """Sizes are those of one block."""


def plan_layout(specs: Specs, cache_config: CacheConfig) -> PoolLayout:
    """Plan groups and strides for the layers of one worker.

    Raises:
        ValueError: the block asked for does not fit the model (see plan_block_bytes).
    """
    sets = sort_layers(specs)
    block_bytes = plan_block_bytes(sets, cache_config)
    groups: list[KVCacheGroupSpec] = []
    tensors: list[KVCacheTensor] = []
    for layers in sorted(sets.attention, key=lambda s: s is not sets.main_attention):
        groups.append(_attention_group(layers, block_bytes))
        tensors += _attention_tensors(layers, block_bytes)
    for states in sets.recurrent:
        for names in _recurrent_groups(states, block_bytes):
            groups.append(KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=_spec_of(states)))
            tensors.append(_recurrent_tensor(names, _spec_of(states), block_bytes))
    for name, spec in sets.hidden.items():
        rows = block_bytes // spec.token_bytes
        spec = replace(spec, block_size=rows, page_size_padded=block_bytes)
        groups.append(KVCacheGroupSpec(layer_names=[name], kv_cache_spec=spec))
        tensors.append(
            KVCacheTensor(
                size=block_bytes, layers=(name,), layer_stride=0, block_stride=block_bytes
            )
        )
    layout = PoolLayout(block_bytes, tuple(groups), tuple(tensors))
    check_layout(layout)
    return layout


def _attention_group(layers: AttentionLayers, block_bytes: int) -> KVCacheGroupSpec:
    tokens = block_bytes // layers.page_bytes * PAGE_TOKENS
    # One spec stands for the group; layers with other heads keep their own in the tensors.
    spec = next(iter(layers.layers.values())).copy_with_new_block_size(tokens)
    return KVCacheGroupSpec(layer_names=list(layers.layers), kv_cache_spec=spec)


def _attention_tensors(layers: AttentionLayers, block_bytes: int) -> list[KVCacheTensor]:
    """One tensor for each run of layers with the same bytes a token: a constant stride."""
    by_bytes: dict[int, list[str]] = {}
    for name, spec in layers.layers.items():
        by_bytes.setdefault(spec.token_bytes, []).append(name)
    tensors = []
    offset = 0
    for token_bytes, names in by_bytes.items():
        stride = PAGE_TOKENS * token_bytes
        tensors.append(
            KVCacheTensor(
                size=block_bytes,
                layers=tuple(names),
                offset=offset,
                layer_stride=stride,
                block_stride=block_bytes,
                page_stride=layers.page_bytes,
                pages_per_block=block_bytes // layers.page_bytes,
            )
        )
        offset += stride * len(names)
    return tensors


def _state_stride(spec: MambaSpec) -> int:
    return cdiv(spec.real_page_size_bytes, STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES


def _recurrent_groups(states: Mapping[str, MambaSpec], block_bytes: int) -> list[tuple[str, ...]]:
    """Layers whose states share a block: as many as fit, evenly spread."""
    per_block = max(1, block_bytes // _state_stride(_spec_of(states)))
    names = tuple(states)
    num_groups = cdiv(len(names), per_block)
    per_group = cdiv(len(names), num_groups)
    return [names[i : i + per_group] for i in range(0, len(names), per_group)]


def _recurrent_tensor(names: tuple[str, ...], spec: MambaSpec, block_bytes: int) -> KVCacheTensor:
    stride = _state_stride(spec) if len(names) > 1 else spec.real_page_size_bytes
    return KVCacheTensor(
        size=block_bytes, layers=names, layer_stride=stride, block_stride=block_bytes
    )


def check_layout(layout: PoolLayout) -> None:
    """Invariants of a plan: every group fits a block, and its layers do not overlap."""
    spec_of_layer = {n: g.kv_cache_spec for g in layout.groups for n in g.layer_names}
    placed = [name for tensor in layout.tensors for name in tensor.layers]
    assert sorted(placed) == sorted(spec_of_layer), "every layer is placed once"
    for group in layout.groups:
        runs = sorted(
            run
            for tensor in layout.tensors
            for name in tensor.layers
            if name in group.layer_names
            for run in page_runs(tensor, name, spec_of_layer[name])
        )
        end = 0
        for start, length in runs:
            assert start >= end, f"layers of one group overlap at byte {start}"
            end = start + length
        assert end <= layout.block_bytes, f"group of {group.layer_names[0]} exceeds its block"
        assert group.kv_cache_spec.block_size > 0


def page_runs(tensor: KVCacheTensor, name: str, spec: KVCacheSpec) -> tuple[tuple[int, int], ...]:
    """``(offset, length)`` in bytes of a layer's contiguous runs inside one block."""
    start = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
    if isinstance(spec, AttentionSpec):
        length = tensor.layer_stride
        return tuple(
            (start + p * tensor.page_stride, length) for p in range(tensor.pages_per_block)
        )
    if isinstance(spec, MambaSpec):
        ends = spec.state_offsets
        starts = (cdiv(ends[i - 1], d.itemsize) * d.itemsize for i, d in enumerate(spec.dtypes, 1))
        return tuple((start + s, e - s) for s, e in zip(starts, ends[1:], strict=True))
    return ((start, spec.real_page_size_bytes),)


def data_reference(config: KVCacheConfig, group_id: int) -> KVCacheDataReference:
    """What a connector needs to move a block of one group by bytes."""
    group = config.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    runs = {name: page_runs(config.tensor_of_layer[name], name, spec) for name in group.layer_names}
    stride = 2 * spec.head_size * spec.dtype.itemsize if isinstance(spec, AttentionSpec) else None
    return KVCacheDataReference(layers=runs, head_stride=stride)


def get_kv_cache_groups(vllm_config: VllmConfig, kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """Groups of the layers of one worker (upstream's name)."""
    return list(plan_layout(kv_cache_spec, vllm_config.cache_config).groups)


# --------------------------------------------------------------------------- number of blocks


def blocks_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks that the longest possible request holds at once, over all groups."""
    return sum(g.kv_cache_spec.max_blocks_per_request(vllm_config) for g in groups)


def estimate_max_model_len(
    vllm_config: VllmConfig, layout: PoolLayout, available_bytes: int
) -> int:
    """The longest request that fits into ``available_bytes``; 0 when none does."""
    model_config = vllm_config.model_config
    asked = model_config.max_model_len

    def fits(length: int) -> bool:
        model_config.max_model_len = length
        needed = 1 + blocks_per_request(vllm_config, layout.groups)
        return needed * layout.block_bytes <= available_bytes

    try:
        low, high = 0, asked
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low
    finally:
        model_config.max_model_len = asked


def get_kv_cache_config(
    vllm_config: VllmConfig, specs: Specs, available_bytes: int
) -> KVCacheConfig:
    """Plan the pool of one worker inside ``available_bytes``.

    Raises:
        ValueError: not even one request of ``max_model_len`` tokens fits.
    """
    cache_config = vllm_config.cache_config
    layout = plan_layout(specs, cache_config)
    needed = 1 + blocks_per_request(vllm_config, layout.groups)
    num_blocks = available_bytes // layout.block_bytes
    if cache_config.num_gpu_blocks_override is not None:
        num_blocks = cache_config.num_gpu_blocks_override
    if num_blocks < needed:
        _raise_too_small(vllm_config, layout, num_blocks, needed)
    tensors = [replace(t, size=num_blocks * layout.block_bytes) for t in layout.tensors]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=list(layout.groups),
        block_bytes=layout.block_bytes,
    )


def get_kv_cache_configs(
    vllm_config: VllmConfig, kv_cache_specs: Sequence[Specs], available_memory: Sequence[int]
) -> list[KVCacheConfig]:
    """One plan for each worker, all with the number of blocks that fits the tightest."""
    configs = [
        get_kv_cache_config(vllm_config, specs, available)
        for specs, available in zip(kv_cache_specs, available_memory, strict=True)
    ]
    num_blocks = min(config.num_blocks for config in configs)
    return [
        replace(
            config,
            num_blocks=num_blocks,
            kv_cache_tensors=[
                replace(t, size=num_blocks * config.block_bytes) for t in config.kv_cache_tensors
            ],
        )
        for config in configs
    ]


def _raise_too_small(
    vllm_config: VllmConfig, layout: PoolLayout, num_blocks: int, needed: int
) -> None:
    length = vllm_config.model_config.max_model_len
    have = num_blocks * layout.block_bytes
    fitting = estimate_max_model_len(vllm_config, layout, have)
    hint = f"max_model_len={fitting} would fit" if fitting else "no length fits"
    raise ValueError(
        f"the KV pool is too small for one request of max_model_len={length} tokens: it needs "
        f"{needed} blocks of {layout.block_bytes} bytes ({needed * layout.block_bytes / 2**20:.1f} "
        f"MiB), {num_blocks} blocks ({have / 2**20:.1f} MiB) are there. {hint}; or raise "
        "kv_cache_memory_bytes / gpu_memory_utilization"
    )


# --------------------------------------------------------------------------- report


def describe(config: KVCacheConfig) -> list[str]:
    """What the pool holds, a line a kind of group; for the start-up log."""
    block_bytes = config.block_bytes
    lines = [
        f"KV pool: {config.num_blocks} blocks of {block_bytes:,} bytes "
        f"= {config.size_bytes / 2**20:,.1f} MiB"
    ]
    num_recurrent = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        used = sum(
            length
            for name in group.layer_names
            for _, length in page_runs(config.tensor_of_layer[name], name, spec)
        )
        waste = 100 * (1 - used / block_bytes)
        if isinstance(spec, MambaSpec):
            num_recurrent += 1
            if num_recurrent > 1:
                continue
            what = f"recurrent state: {len(group.layer_names)} layers a block"
        elif isinstance(spec, HiddenStateCacheSpec):
            what = (
                f"hidden states: {spec.block_size} rows a block, {spec.token_bytes:,} bytes a token"
            )
        else:
            kind = (
                "sliding-window attention" if isinstance(spec, SlidingWindowSpec) else "attention"
            )
            what = (
                f"{kind}: {len(group.layer_names)} layers, {spec.block_size} tokens a block, "
                f"{used // spec.block_size:,} bytes a token"
            )
        room = (config.num_blocks - 1) * spec.block_size
        holds = "" if isinstance(spec, MambaSpec) else f", at most {room:,} tokens"
        lines.append(f"  {what}{holds}, {waste:.1f} % of a block unused")
    if num_recurrent:
        lines.append(f"  recurrent state of one request: {num_recurrent} blocks")
    return lines


def log_plan(config: KVCacheConfig) -> None:
    """Write :func:`describe` to the log."""
    for line in describe(config):
        logger.info("%s", line)

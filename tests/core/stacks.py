"""Stacks of layers by what they keep: published shapes, random ones, and what one request takes.

``python -m tests.core.stacks`` prints what docs/journal/pool.md says of them.
"""

from __future__ import annotations

import random
import statistics
from typing import NamedTuple

import torch

from vllm.config import CacheConfig
from vllm.ops import recurrent, state_space
from vllm.utils import cdiv
from vllm.v1.cache_kinds.attention import ChunkedLocalAttentionSpec, LocalAttentionSpec
from vllm.v1.core.kv_cache_utils import PoolLayout, plan_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BF16 = torch.bfloat16
Stack = dict[str, KVCacheSpec]


def attention(
    heads: int, size: int, *, window: int | None = None, chunk: int | None = None
) -> KVCacheSpec:
    """Keys and values of one layer, of all tokens or of those in a window, or in a chunk."""
    if chunk is not None:
        return ChunkedLocalAttentionSpec(
            block_size=16,
            num_kv_heads=heads,
            head_size=size,
            dtype=BF16,
            attention_chunk_size=chunk,
        )
    if window is None:
        return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=size, dtype=BF16)
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=size, dtype=BF16, sliding_window=window
    )


def latent(size: int) -> KVCacheSpec:
    """A latent and its rotated key."""
    return FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=size, head_size_v=0, dtype=BF16
    )


def state(inputs: tuple[int, int], *shape: int) -> MambaSpec:
    """Inputs of a convolution in 16 bits, and a float32 state; some have one of them only."""
    tensors = [(inputs, BF16)] if inputs else []
    tensors += [(shape, torch.float32)] if shape else []
    shapes, dtypes = zip(*tensors, strict=True)
    return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes)


def mamba2(heads: int, head_dim: int, state_size: int, groups: int) -> MambaSpec:
    """Mamba-2 with a convolution over 4 tokens, and its pending tokens."""
    channels = heads * head_dim + 2 * groups * state_size
    pending = state_space.tokens_since_a_chunk(BF16, heads, head_dim, groups, state_size)
    states = (((3, channels), BF16), ((heads, state_size, head_dim), torch.float32))
    return MambaSpec.of_tensors(64, states, pending)


def delta_net(key_heads: int, value_heads: int) -> MambaSpec:
    """A gated delta net with heads of 128, and its pending tokens."""
    inputs = (3, 128 * (2 * key_heads + value_heads))
    pending = recurrent.tokens_since_a_chunk(BF16, key_heads, value_heads, 128, 128)
    states = ((inputs, BF16), ((value_heads, 128, 128), torch.float32))
    return MambaSpec.of_tensors(64, states, pending)


def stack(*layers: tuple[int, KVCacheSpec]) -> Stack:
    """So many layers of each kind; the planner does not care for their order."""
    specs = [spec for count, spec in layers for _ in range(count)]
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


PUBLISHED: dict[str, Stack] = {
    "Qwen3.5-0.8B": stack((6, attention(2, 256)), (18, delta_net(16, 16))),
    "Qwen3.5-9B": stack((8, attention(4, 256)), (24, delta_net(16, 32))),
    "Qwen3.5-27B": stack((16, attention(4, 256)), (48, delta_net(16, 48))),
    "Qwen3.5-35B-A3B": stack((10, attention(2, 256)), (30, delta_net(16, 32))),
    "Qwen3.5-397B-A17B": stack((15, attention(2, 256)), (45, delta_net(16, 64))),
    "Qwen3-Next-80B-A3B": stack((12, attention(2, 256)), (36, delta_net(16, 32))),
    "Nemotron-H-8B": stack((4, attention(8, 128)), (24, mamba2(128, 64, 128, 8))),
    "Nemotron-H-56B": stack((10, attention(8, 128)), (54, mamba2(256, 64, 256, 8))),
    "Nemotron-3-Nano-30B-A3B": stack((6, attention(2, 128)), (23, mamba2(64, 64, 128, 8))),
    "Bamba-9B": stack((3, attention(8, 128)), (29, mamba2(128, 64, 128, 1))),
    "Granite-4.0-H-Small": stack((4, attention(8, 128)), (36, mamba2(128, 64, 128, 1))),
    "Jamba-v0.1": stack((4, attention(8, 128)), (28, state((3, 8192), 16, 8192))),
    "Jamba-1.5-Large": stack((9, attention(8, 128)), (63, state((3, 16384), 16, 16384))),
    "Falcon-H1-0.5B": stack((36, attention(2, 64)), (36, mamba2(24, 64, 128, 1))),
    "Falcon-H1-7B": stack((44, attention(2, 128)), (44, mamba2(24, 128, 256, 1))),
    "Falcon-H1-34B": stack((72, attention(4, 128)), (72, mamba2(32, 128, 256, 2))),
    "Zamba2-1.2B": stack((6, attention(32, 128)), (38, mamba2(64, 64, 128, 1))),
    "Zamba2-7B": stack((13, attention(32, 224)), (81, mamba2(112, 64, 64, 2))),
    "LFM2-1.2B": stack((6, attention(8, 64)), (10, state((2, 2048)))),
    "Kimi-Linear-48B-A3B": stack((7, latent(576)), (20, state((3, 3 * 4096), 32, 128, 128))),
    "MiniMax-Text-01": stack((10, attention(8, 128)), (70, state((), 64, 128, 128))),
    "Codestral-Mamba-7B": stack((64, mamba2(128, 64, 128, 8))),
    "Mamba-2.8B": stack((64, state((3, 5120), 16, 5120))),
    "RecurrentGemma-2B": stack((8, attention(1, 256, window=2048)), (18, state((3, 2560), 2560))),
    "RecurrentGemma-9B": stack((12, attention(1, 256, window=2048)), (26, state((3, 4096), 4096))),
}

WINDOWED: dict[str, Stack] = {
    "Gemma-2-9B": stack((21, attention(8, 256)), (21, attention(8, 256, window=4096))),
    "Gemma-3-4B": stack((5, attention(4, 256)), (29, attention(4, 256, window=1024))),
    "Gemma-3-12B": stack((8, attention(8, 256)), (40, attention(8, 256, window=1024))),
    "Gemma-3-27B": stack((10, attention(16, 128)), (52, attention(16, 128, window=1024))),
    "gpt-oss-20b": stack((12, attention(8, 64)), (12, attention(8, 64, window=128))),
    "gpt-oss-120b": stack((18, attention(8, 64)), (18, attention(8, 64, window=128))),
    "Llama-4-Scout": stack((12, attention(8, 128)), (36, attention(8, 128, chunk=8192))),
}
"""Without states; their windows lie as they come."""


def random_stack(draw: random.Random, num_sizes: int) -> Stack:
    """4 to 64 layers that keep states of so many sizes, most with attention of several kinds."""

    def draw_state() -> MambaSpec:
        channels = 64 * draw.randint(4, 128)
        return draw.choice(
            [
                state((draw.randint(1, 4), channels)),
                state((3, channels), draw.choice([8, 16, 32]), channels),
                state((3, channels), channels),
                state((), draw.randint(2, 48), 64, 64),
                delta_net(4, draw.choice([4, 8, 16, 32])),
                mamba2(draw.randint(8, 128), 64, draw.choice([64, 128, 256]), draw.choice([1, 8])),
            ]
        )

    def draw_attention() -> KVCacheSpec:
        heads, size = draw.choice([1, 2, 3, 4, 8]), draw.choice([64, 80, 128, 256])
        window = draw.choice([None, None, None, 128, 1024])
        return draw.choice([latent(size + 64), attention(heads, size, window=window)])

    states: dict[int, MambaSpec] = {}
    while len(states) < num_sizes:
        spec = draw_state()
        states[spec.real_page_size_bytes] = spec
    kinds = list(states.values())
    layers = kinds + [draw.choice(kinds) for _ in range(draw.randint(4, 64) - num_sizes)]
    attentions = [draw_attention() for _ in range(draw.choice([0, 1, 1, 2]))]
    layers += [draw.choice(attentions) for _ in range(draw.randint(1, 32)) if attentions]
    return stack(*((1, spec) for spec in layers))


class Figures(NamedTuple):
    """Room that a request takes in a pool, in units of its contents: states, and keys that stay."""

    states: float
    """All states, and so every snapshot of them."""
    request: float
    """States and keys."""
    full_blocks: float
    """The same but for what the last block of each kind leaves unused."""
    block_bytes: int
    num_state_blocks: int


def figures(specs: Stack, num_tokens: int, layout: PoolLayout | None = None) -> Figures:
    """Figures of a request of ``num_tokens`` tokens, without its rows: they leave at once."""
    layout = layout or plan_layout(specs, CacheConfig())
    states = [spec.real_page_size_bytes for spec in specs.values() if spec.is_recurrent]
    keys = [
        spec.token_bytes * _tokens_kept(spec, num_tokens)
        for spec in specs.values()
        if isinstance(spec, AttentionSpec) and not spec.holds_rows
    ]
    groups = [group.kv_cache_spec for group in layout.groups if not group.kv_cache_spec.holds_rows]
    state_blocks = sum(spec.is_recurrent for spec in groups)
    tokens = [
        (_tokens_kept(spec, num_tokens), spec.block_size)
        for spec in groups
        if not spec.is_recurrent
    ]
    full = max(state_blocks - 1, 0) + sum(kept / size for kept, size in tokens)
    blocks = state_blocks + sum(cdiv(kept, size) for kept, size in tokens)
    ideal = sum(states) + sum(keys)
    return Figures(
        states=state_blocks * layout.block_bytes / sum(states) if states else 1.0,
        request=blocks * layout.block_bytes / ideal,
        full_blocks=full * layout.block_bytes / ideal,
        block_bytes=layout.block_bytes,
        num_state_blocks=state_blocks,
    )


def _tokens_kept(spec: KVCacheSpec, num_tokens: int) -> int:
    return min(num_tokens, spec.reach) if isinstance(spec, LocalAttentionSpec) else num_tokens


def random_figures(num_stacks: int, num_tokens: int) -> list[Figures]:
    """Figures of ``num_stacks`` random stacks, with states of 1 to 6 sizes in turn."""
    draw = random.Random(0)
    return [figures(random_stack(draw, 1 + i % 6), num_tokens) for i in range(num_stacks)]


def main() -> None:
    """Published shapes, then 1,000 random ones: a request of 4,096 tokens, and of 512."""
    print("| stack | block | blocks of states | states | 4,096 tokens | 512 tokens |")
    print("|---|---|---|---|---|---|")
    for name, specs in (PUBLISHED | WINDOWED).items():
        long, short = figures(specs, 4096), figures(specs, 512)
        block = f"{long.block_bytes / 2**20:.2f} MiB"
        ratios = " | ".join(f"{x:.3f}" for x in (long.states, long.request, short.request))
        print(f"| {name} | {block} | {long.num_state_blocks} | {ratios} |")
    found = random_figures(1000, 4096)
    for name, some in {"one size": found[::6], "2 to 6 sizes": _without_sixths(found)}.items():
        for field in ("states", "request", "full_blocks"):
            values = [getattr(own, field) for own in some]
            print(f"{name}: {field} mean {statistics.mean(values):.3f}, most {max(values):.3f}")


def _without_sixths(found: list[Figures]) -> list[Figures]:
    return [own for i, own in enumerate(found) if i % 6]


if __name__ == "__main__":
    main()

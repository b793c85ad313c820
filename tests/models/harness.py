"""Runs a model on the CPU without an engine: one request, caches and metadata made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.forward_context import HIDDEN_STATES, ForwardContext, set_forward_context
from vllm.model_executor.layers.weight import weight_of
from vllm.model_executor.model_loader import get_model
from vllm.ops.layout import SequenceLayout, StatePlan
from vllm.v1.attention.backend import AttentionMetadata, RecurrentMetadata
from vllm.v1.kv_cache_interface import PAGE_TOKENS, AttentionSpec, MambaSpec

PAGES_PER_BLOCK = 2
TOKENS_PER_BLOCK = PAGES_PER_BLOCK * PAGE_TOKENS


@dataclass
class ListSink:
    """Keeps a copy of every captured stream: layer id -> one tensor a forward pass."""

    layer_ids: frozenset[int]
    streams: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def wants(self, source: str) -> bool:
        return source == HIDDEN_STATES

    def put(self, source: str, index: int, *values: Any) -> None:
        hidden, residual = values
        stream = hidden.clone() if residual is None else hidden + residual
        self.streams.setdefault(index, []).append(stream)

    def rows(self, layer_id: int) -> torch.Tensor:
        return torch.cat(self.streams[layer_id])


def make_config(folder: Path, *, load_format: str = "auto", **model_options: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), **model_options),
        load_config=LoadConfig(load_format=load_format),  # type: ignore[arg-type]
    )


def floats_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """All rows of a weight, in whatever form it lies."""
    weight = weight_of(parameter)
    return weight.look_up(torch.arange(weight.shape[0]))


class SingleRequest:
    """A model, and one request whose tokens are fed to it chunk by chunk."""

    def __init__(self, vllm_config: VllmConfig, max_tokens: int) -> None:
        self.config = vllm_config
        self.model: Any = get_model(vllm_config=vllm_config)
        self.num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        num_blocks = -(-max_tokens // TOKENS_PER_BLOCK)
        # Neither in order nor without gaps; block 0 is the null block.
        self.block_ids = [2 * (num_blocks - i) + (i % 2) for i in range(num_blocks)]
        for layer in self.layers.values():
            layer.kv_cache = _poisoned_cache(layer.get_kv_cache_spec(vllm_config), num_blocks)
        self.num_computed = 0
        limit = vllm_config.model_config.longrope_limit
        self.rotary_offset = limit if limit is not None and max_tokens > limit else 0

    @property
    def layers(self) -> dict[str, Any]:
        return self.config.compilation_config.static_forward_context

    @torch.inference_mode()
    def run(
        self,
        token_ids: Sequence[int],
        sink: ListSink | None = None,
        num_layers_to_run: int | None = None,
    ) -> torch.Tensor:
        """The model's output for the next tokens of the request."""
        start, end = self.num_computed, self.num_computed + len(token_ids)
        self.num_computed = end
        context = ForwardContext(
            self._metadata(start, end),
            sink,
            num_layers_to_run,
            rotary_positions=torch.arange(start, end) + self.rotary_offset,
        )
        with set_forward_context(context):
            output: torch.Tensor = self.model(
                input_ids=torch.tensor(token_ids), positions=torch.arange(start, end)
            )
        return output

    def run_chunks(
        self, token_ids: Sequence[int], chunks: Iterable[int], sink: ListSink
    ) -> torch.Tensor:
        """Feed the tokens in chunks of the given sizes, the rest in one; logits of all."""
        outputs, start = [], 0
        for size in [*chunks, len(token_ids)]:
            piece = token_ids[start : start + size]
            if piece:
                hidden = self.run(piece, sink)
                with torch.inference_mode():
                    outputs.append(self.model.compute_logits(hidden))
            start += size
        return torch.cat(outputs)

    def _metadata(self, start: int, end: int) -> dict[str, Any]:
        layout = SequenceLayout(
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            max_query_len=end - start,
            max_seq_len=end,
        )
        positions = torch.arange(start, end)
        blocks = torch.tensor(self.block_ids)
        slots = (
            blocks[positions // TOKENS_PER_BLOCK] * TOKENS_PER_BLOCK + positions % TOKENS_PER_BLOCK
        )
        attention = AttentionMetadata(layout, blocks[None].int(), slots)
        none = torch.zeros(0, dtype=torch.int32)
        recurrent = RecurrentMetadata(
            layout,
            StatePlan(
                block_ids=torch.tensor([3], dtype=torch.int32),
                has_state=torch.tensor([start > 0]),
                snapshot_start=torch.zeros(2, dtype=torch.int32),
                snapshot_tokens=none,
                snapshot_blocks=none,
            ),
        )
        return {
            name: recurrent
            if isinstance(layer.get_kv_cache_spec(self.config), MambaSpec)
            else attention
            for name, layer in self.layers.items()
        }


def _poisoned_cache(spec: Any, num_blocks: int) -> Any:
    if isinstance(spec, MambaSpec):
        return tuple(
            torch.full((5, *shape), float("nan"), dtype=dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
    assert isinstance(spec, AttentionSpec)
    # A layer's pages stand between those of two others, as in the pool.
    pool = torch.full(
        (
            2 * num_blocks + 2,
            PAGES_PER_BLOCK,
            3,
            PAGE_TOKENS,
            spec.num_kv_heads,
            spec.content_size,
        ),
        float("nan"),
        dtype=spec.dtype,
    )
    return pool[:, :, 1]

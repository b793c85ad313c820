"""Sparse latent attention: an indexer selects the tokens that a query reads (DeepSeek-V3.2).

A token with at most ``top_k`` tokens to read reads them all, and the kernel reads them in place.
For any other token the selected ones are copied next to each other, in the order of their
positions, and the same kernel attends to the copies. This choice and every sum depend only on a
token's position and the tokens before it, so a row's bits do not depend on where a step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from vllm.forward_context import get_forward_context, only_rows
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import replicated_linear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.ops.attention import write_kv
from vllm.ops.layout import SequenceLayout
from vllm.ops.linear import linear
from vllm.v1.kv_cache_interface import PAGE_TOKENS, MLAAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata

_MOST_SCRATCH_BYTES = 64 * 2**20
"""Most bytes of scores, and of copied tokens, at a time."""

_NORM_EPSILON = 1e-6

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SequenceLayout, torch.Tensor], None]
"""``attend(query, kv_cache, block_table, layout, out)``."""


@dataclass(frozen=True)
class SparseRequest:
    """One request of a step that has tokens with more than ``top_k`` to read."""

    number: int
    first_row: int
    """Row of the first such token in the flat batch; these tokens are the request's last ones."""
    first_position: int
    seq_len: int

    @property
    def num_rows(self) -> int:
        return self.seq_len - self.first_position


class TokenSelection:
    """The tokens that each query of a step reads; the layers of a model share it."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._layout: SequenceLayout | None = None
        self.requests: list[SparseRequest] = []
        self.chosen: list[torch.Tensor] = []
        """Positions int64 [num_rows, top_k], ascending, for each request, by the last indexer."""
        self.dense_rows: torch.Tensor | None = None
        """Rows of the flat batch that read all tokens, int64; None: all rows."""
        self.dense_layout: SequenceLayout | None = None

    def begin(self, layout: SequenceLayout) -> None:
        """Divide the step's tokens, once for all layers."""
        if layout is self._layout:
            return
        self._layout, self.requests, self.chosen = layout, [], []
        starts, seq_lens = layout.query_start.tolist(), layout.seq_lens.tolist()
        dense_rows: list[int] = []
        dense_starts, dense_lens = [0], []
        for number, seq_len in enumerate(seq_lens):
            begin, end = starts[number], starts[number + 1]
            position = max(seq_len - (end - begin), min(self.top_k, seq_len))
            row = end - (seq_len - position)
            if position < seq_len:
                self.requests.append(SparseRequest(number, row, position, seq_len))
            dense_rows += range(begin, row)
            dense_starts.append(len(dense_rows))
            dense_lens.append(position)
        self.dense_rows, self.dense_layout = None, layout
        if self.requests:
            lengths = [end - begin for begin, end in pairwise(dense_starts)]
            self.dense_rows = torch.tensor(dense_rows, dtype=torch.int64)
            self.dense_layout = SequenceLayout(
                torch.tensor(dense_starts, dtype=torch.int32),
                torch.tensor(dense_lens, dtype=torch.int32),
                max(lengths),
                max(dense_lens),
            )

    def attend(
        self,
        attend: Attend,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """query: [tokens, heads, key_size] -> out [tokens, heads, value_size], dense."""
        assert self.dense_layout is not None
        if self.dense_rows is None:
            attend(query, kv_cache, block_table, self.dense_layout, out)
            return
        if len(self.dense_rows):
            part = out.new_empty((len(self.dense_rows), *out.shape[1:]))
            attend(query[self.dense_rows], kv_cache, block_table, self.dense_layout, part)
            out[self.dense_rows] = part
        token_bytes = kv_cache.shape[4] * kv_cache.element_size()
        rows_at_once = max(1, _MOST_SCRATCH_BYTES // (self.top_k * token_bytes))
        for request, chosen in zip(self.requests, self.chosen, strict=True):
            table = block_table[request.number]
            for start in range(0, request.num_rows, rows_at_once):
                positions = chosen[start : start + rows_at_once]
                first = request.first_row + start
                rows = slice(first, first + len(positions))
                attend_copies(attend, query[rows], kv_cache, table, positions, out[rows])


def attend_copies(
    attend: Attend,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend with queries of one request, each to its own tokens: positions [rows, top_k]."""
    rows, top_k = positions.shape
    pages = -(-top_k // PAGE_TOKENS)
    copies = kv_cache.new_zeros((rows, pages * PAGE_TOKENS, 1, kv_cache.shape[4]))
    copies[:, :top_k] = tokens_at(kv_cache, table, positions)
    layout = SequenceLayout(
        torch.arange(rows + 1, dtype=torch.int32),
        torch.full((rows,), top_k, dtype=torch.int32),
        1,
        top_k,
    )
    blocks = torch.arange(rows, dtype=torch.int32)[:, None]
    attend(query, copies.view(rows, pages, PAGE_TOKENS, 1, -1), blocks, layout, out)


def tokens_at(kv_cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the cache of tokens at ``positions`` of one request: [*positions, kv_heads, size]."""
    _, pages_per_block, page_tokens, _, _ = kv_cache.shape
    page = positions // page_tokens
    block = table[page // pages_per_block].long()
    return kv_cache[block, page % pages_per_block, positions % page_tokens]


class IndexerCache(Layer, AttentionLayerBase):
    """Keeps an indexer's keys in the pool, one per token."""

    kv_cache: torch.Tensor

    def __init__(self, size: int, prefix: str) -> None:
        super().__init__()
        self.size = size
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size or PAGE_TOKENS,
            num_kv_heads=1,
            head_size=self.size,
            dtype=vllm_config.model_config.dtype,
        )


class Indexer(Layer):
    """Selects the best earlier tokens by ``sum over heads of weight * relu(query * key)``.

    Queries are made of the low-rank query, keys and the heads' weights of the layer's input.
    Everything but the projections is computed in float32. Of equal scores the earlier token wins.
    """

    def __init__(
        self,
        hidden_size: int,
        query_size: int,
        heads: int,
        head_size: int,
        rotary_emb: RotaryEmbedding,
        selection: TokenSelection,
        prefix: str,
    ) -> None:
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.rotary_emb, self.selection = rotary_emb, selection
        self.wq_b = replicated_linear(query_size, heads * head_size, f"{prefix}.wq_b")
        self.wk = replicated_linear(hidden_size, head_size, f"{prefix}.wk")
        self.k_norm = LayerNorm(head_size, eps=_NORM_EPSILON)
        self.weights_proj = replicated_linear(
            hidden_size, heads, f"{prefix}.weights_proj", params_dtype=torch.float32
        )
        self.k_cache = IndexerCache(head_size, f"{prefix}.k_cache")

    def forward(self, positions: torch.Tensor, x: torch.Tensor, low_rank: torch.Tensor) -> None:
        """positions: int64 [tokens]; x: [tokens, hidden]; low_rank: [tokens, query_size].

        Stores the tokens' keys, and puts the selected positions into :attr:`selection`.
        """
        metadata: AttentionMetadata = get_forward_context().attn_metadata[self.k_cache.layer_name]
        query = self.wq_b(low_rank).unflatten(-1, (self.heads, self.head_size))
        key = self.k_norm(self.wk(x))[:, None]
        self.rotary_emb(positions, query, key)
        write_kv(key, key[..., :0], metadata.slot_mapping, self.k_cache.kv_cache)
        self.selection.begin(metadata.layout)
        self.selection.chosen = [
            self._choose(request, query, x, metadata.block_table[request.number])
            for request in self.selection.requests
        ]

    def _choose(
        self, request: SparseRequest, query: torch.Tensor, x: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Select positions for one request, int64 [num_rows, top_k]."""
        earlier = torch.arange(request.seq_len, device=x.device)
        keys = tokens_at(self.k_cache.kv_cache, table, earlier)[:, 0].float()
        chosen = []
        rows_at_once = max(1, _MOST_SCRATCH_BYTES // (4 * self.heads * request.seq_len))
        for start in range(0, request.num_rows, rows_at_once):
            stop = min(start + rows_at_once, request.num_rows)
            rows = slice(request.first_row + start, request.first_row + stop)
            with only_rows(rows):
                scores = self._scores(query[rows].float(), x[rows].float(), keys)
            for row, own in enumerate(scores, request.first_position + start):
                ranked = own[: row + 1].sort(descending=True, stable=True).indices
                chosen.append(ranked[: self.selection.top_k].sort().values)
        return torch.stack(chosen)

    def _scores(self, query: torch.Tensor, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return scores float32 [rows, tokens]; heads are added in order, for any rows and tokens.

        query: [rows, heads, n], x: [rows, hidden], keys: [tokens, n], all in float32.
        """
        weights = self.weights_proj(x) * (self.heads * self.head_size) ** -0.5
        products = query.new_empty((len(query) * self.heads, len(keys)))
        linear(query.flatten(0, 1), keys, None, products)
        by_head = products.relu_().view(len(query), self.heads, -1)
        total = torch.zeros_like(by_head[:, 0])
        for head in range(self.heads):
            total += weights[:, head, None] * by_head[:, head]
        return total

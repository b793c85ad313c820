"""The operations that models and the extraction path need beyond torch's own.

One protocol, several implementations: ``plain`` (torch only, the reference of the
tests and the fallback without a compiler), ``native_cpu`` (``csrc/cpu``) and the
CUDA ones. ``vllm.platforms`` chooses one per device.

Common rules: tensors may be strided, but their last dimension is contiguous;
``tokens`` are the tokens of all requests of a step, one request after another
(*flat batch*); arithmetic is float32 inside whatever the dtype (float32, bfloat16,
float16) of the tensors (attention may round the softmax weights to the dtype of the
values, the delta rule its state to bfloat16 where it multiplies it with 16-bit inputs);
and the result for a token never depends on what else is in the batch or where a chunk
starts (docs/design.md, "Bit-identity"). Outputs given as arguments are written
completely; nothing else is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class SequenceLayout:
    """How the flat batch divides into requests.

    ``query_start``: int32 [requests + 1], first token of each request in the batch.
    ``seq_lens``: int32 [requests], tokens of each request after this step (context
    and query). So the first query of request r stands at absolute position
    ``seq_lens[r] - (query_start[r + 1] - query_start[r])``.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_host: torch.Tensor | None = None
    seq_lens_host: torch.Tensor | None = None
    """Copies on the host, for kernels that plan there."""
    is_recorded: bool = False
    """The step is recorded, to be repeated with other lengths: nothing can be planned by them."""

    def on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``query_start`` and ``seq_lens``; without the copies this waits for the device."""
        if self.query_start_host is None or self.seq_lens_host is None:
            return self.query_start.cpu(), self.seq_lens.cpu()
        return self.query_start_host, self.seq_lens_host


class HostStates(NamedTuple):
    """Parts of a :class:`StatePlan` on the host, for kernels that plan there."""

    block_ids: list[int]
    snapshots: list[list[tuple[int, int]]]
    """(tokens of this step's chunk, block) of each request, in order of tokens."""


@dataclass(frozen=True, eq=False)
class StatePlan:
    """Which blocks of the pool hold the recurrent states of one group in this step.

    ``block_ids``: int32 [requests]; the state is read from there (when
    ``has_state[r]``, bool [requests]; zeros otherwise) and the state after the last
    token is written back there. Snapshots of request r are the entries
    ``snapshot_start[r]:snapshot_start[r + 1]``, in order of tokens: the state after
    ``snapshot_tokens[i]`` tokens of this step's chunk (1 <= n <= chunk length) is
    also written to block ``snapshot_blocks[i]``, nobody's own. All int32. ``is_final``: bool
    [requests]; where it is set nobody reads the state after the last token, and it need not
    be written.
    """

    block_ids: torch.Tensor
    has_state: torch.Tensor
    snapshot_start: torch.Tensor
    snapshot_tokens: torch.Tensor
    snapshot_blocks: torch.Tensor
    host: HostStates | None = None
    is_final: torch.Tensor | None = None

    def on_host(self) -> HostStates:
        """Blocks and snapshots on the host; without ``host`` this waits for the device."""
        if self.host is not None:
            return self.host
        starts = self.snapshot_start.tolist()
        kept = list(zip(self.snapshot_tokens.tolist(), self.snapshot_blocks.tolist(), strict=True))
        own = [kept[start:end] for start, end in itertools.pairwise(starts)]
        return HostStates(self.block_ids.tolist(), own)


class StateTensor(NamedTuple):
    """A tensor that a recurrent layer keeps of every request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RowReport(NamedTuple):
    """What a look at rows found: the first bad (row, column) of each kind, -1 for none."""

    nonfinite_row: int
    nonfinite_column: int
    zero_row: int
    zero_column: int

    @property
    def is_good(self) -> bool:
        """Whether there is neither."""
        return self.nonfinite_row < 0 and self.zero_row < 0

    def result(self) -> RowReport:
        """A report that is there is a :class:`PendingReport` too."""
        return self


Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Calls a function and returns what repeats it, and the tensor its result stands in then,
until another recording is repeated.

Raises :class:`NotRecordableError`.
"""


class NotRecordableError(Exception):
    """A function does what a recording cannot repeat; the message says what."""


class PendingReport(Protocol):
    """A report that may still be on its way from the device, with the rows it is about."""

    def result(self) -> RowReport:
        """Wait until rows and report are on the host. May be called on any thread."""
        ...


class PagedAttention(Protocol):
    """Attention alone: :meth:`Kernels.paged_attention`, or a backend that takes its place."""

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`Kernels.paged_attention`."""
        ...


class Kernels(Protocol):
    """Sources of the formulas: see each method; ``eps`` is added to the mean square."""

    name: str

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T + bias``; x: [tokens, n], weight: [m, n]. Returns [tokens, m].

        A row of the result has the same bits for any number of rows: what libraries compute
        differently for few rows is padded. Model code uses this, never F.linear.
        """
        ...

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor | None:
        """A copy of ``weight`` [m, n] in the order in which :meth:`linear` reads it fastest.

        The result stands for the weight in :meth:`linear` and nowhere else. None: there is
        no such order for this dtype.
        """
        ...

    def pack_table(self, table: torch.Tensor) -> torch.Tensor | None:
        """The same for embeddings [vocabulary, n] with which an LM head multiplies.

        The result stands for them in :meth:`linear` and :meth:`embedding`.
        """
        ...

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The rows ``token_ids`` (int64 [tokens]) of ``table``: [tokens, n], a new tensor."""
        ...

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of the largest logits of each row; of a row with NaN, the first of these.

        logits: [rows, vocabulary]. Returns int64 [rows].
        """
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """``x / rms(x)`` rounded once, times ``weight + offset``; over the last dimension.

        x: [..., n] with uniform stride between rows of every leading dimension (heads
        inside tokens may be strided). Returns a dense tensor of x's shape and dtype.
        offset 1.0 is the zero-centred form of Qwen3.5 and Gemma. With offset 0 the
        normalised value is rounded to x's dtype before the multiplication (Llama);
        with another offset the product is formed in float32 and rounded once.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """``residual += x`` in place (rounded to its dtype), then its ``rms_norm``; [tokens, n]."""
        ...

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``rms_norm(x, weight) * silu(gate)`` per head (Qwen3.5 ``linear_attn.norm``).

        x: [tokens, heads, n] dense; gate: [tokens, heads, n], may be a slice of a wider
        projection. Returns [tokens, heads, n]. The product with the gate is formed in
        float32 and rounded once.
        """
        ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, 2n] as (gate | up). Returns silu(gate) * up, [tokens, n]."""
        ...

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x * sigmoid(gate)``; x: [tokens, heads, n], gate the same shape, strided."""
        ...

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> None:
        """Rotate the first ``rotary_dim`` elements of each head, in place.

        positions: int64 [tokens]; query, key: [tokens, heads, head_size], strided;
        cos_sin: float32 [max_position, rotary_dim], cosines then sines. Half-split
        (NeoX) pairs (i, i + rotary_dim / 2), or interleaved pairs (2i, 2i + 1).
        """
        ...

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store keys and values of the flat batch.

        key, value: [tokens, kv_heads, head_size]; kv_cache: strided view
        [blocks, pages, page_tokens, kv_heads, 2 * head_size] (K | V in the last
        dimension); slots: int64 [tokens], ``block * tokens_per_block + offset``, -1 to
        skip the token.
        """
        ...

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the flat batch over the pool (keys already written).

        query: [tokens, heads, head_size]; kv_cache as in :meth:`write_kv`;
        block_table: int32 [requests, max_blocks]. Query head h reads KV head
        ``h // (heads / kv_heads)``. With a sliding window w a query at position p
        reads keys p - w + 1 .. p; blocks wholly before every query's window are never
        read (their table entry may be 0). With a soft cap c a score s (scaled) becomes
        ``c * tanh(s / c)``. sinks: [heads], dense, of any float dtype: one more score for
        each head, neither scaled nor capped, that takes its weight in the softmax and has no
        value. Returns [tokens, heads, head_size], dense. Keys are visited in tiles that start
        at absolute multiples of a fixed size.
        """
        ...

    def copy_blocks(
        self, pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        """Copy whole blocks inside the pool; no destination is a source.

        pool: int8 [num_blocks, block_bytes]; sources, destinations: int64 [copies].
        """
        ...

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state_cache: torch.Tensor,
        layout: SequenceLayout,
        states: StatePlan,
    ) -> torch.Tensor:
        """Depthwise causal convolution over time, then SiLU.

        x: [tokens, channels], strided; weight: [channels, width]; bias: [channels] or
        None; state_cache: strided view [blocks, width - 1, channels] in x's dtype (the
        last inputs, oldest first). Returns [tokens, channels], dense rows.
        """
        ...

    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state_cache: torch.Tensor,
        num_k_heads: int,
        layout: SequenceLayout,
        states: StatePlan,
        pending: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al. 2024).

        qkv: [tokens, 2 * num_k_heads * dk + num_v_heads * dv] after the convolution;
        a, b: [tokens, num_v_heads], strided; a_log, dt_bias: [num_v_heads];
        state_cache: float32 strided view [blocks, num_v_heads, dk, dv]; pending: views
        [blocks, ...] of what :meth:`delta_rule_pending` asked for, with which a state in
        the pool is complete only together. How a state lies there is the kernels' own affair.
        q and k are L2-normalised per head (eps 1e-6 on the sum of squares), q scaled by
        dk^-0.5; k-head h serves v-heads h*r .. h*r+r-1.
        decay = exp(-exp(a_log) * softplus(a + dt_bias)), beta = sigmoid(b).
        Per token: S *= decay; S += k (beta (v - S^T k))^T; o = S^T q.
        Returns o: [tokens, num_v_heads, dv] in qkv's dtype.
        """
        ...

    def delta_rule_pending(
        self, dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
    ) -> tuple[StateTensor, ...]:
        """What :meth:`gated_delta_rule` keeps of a request beside its state.

        For kernels that advance the state a chunk of tokens at a time: the tokens since.
        """
        ...

    def capture_rows(
        self,
        row_cache: torch.Tensor,
        slots: torch.Tensor,
        column: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        """Store ``hidden (+ residual)``, rounded to the dtype, as one column of the rows.

        row_cache: strided view [blocks, rows_per_block, layers, hidden]; slots: int64
        [tokens], ``block * rows_per_block + row``, -1 to skip; hidden, residual:
        [tokens, hidden].
        """
        ...

    def gather_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> PendingReport:
        """Copy rows out of the pool and look at every element once.

        out: [rows, layers, hidden] dense, on the host (pinned for another device). Reports
        the first (row, column) that holds a value that is not finite, and the first that is
        all zero; ``out`` may be read when the report is there, the pool may be written at once.
        """
        ...

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """What the block does with ``rows``, nothing that is queued after it waits for.

        Whoever calls it keeps ``rows``, and does not write them, until that is known to be over.
        """
        ...

    def inspect_rows(self, rows: torch.Tensor) -> PendingReport:
        """The report of :meth:`gather_rows` for dense rows [rows, layers, hidden]."""
        ...

    def leaving_rows_bytes(self, token_bytes: int) -> int:
        """Most device memory that rows take between :meth:`gather_rows` and the host.

        token_bytes: of the rows of one token.
        """
        ...

    def attention_scratch_bytes(self, max_seq_len: int) -> int:
        """Most memory that :meth:`paged_attention` takes beside its result; 0 on a CPU."""
        ...

    def record_calls(self) -> Record | None:
        """Makes recordings of functions that call these kernels and compute nothing else.

        Recordings of one ``Record`` are never repeated at the same time. None: torch records
        for this device, or nothing does.
        """
        ...

"""The decoder layer that most families share: attention and an MLP around the residual stream.

:class:`AttentionOptions` describes a family's attention, :class:`BlockLayout` its norms and how
branches are added to the stream. Names are Llama's; a family whose checkpoint has other names
lists them in ``DecoderForCausalLM.checkpoint_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from vllm.config.model_facts import config_value
from vllm.model_executor.hook_points import BlockHook
from vllm.model_executor.layers.activation import get_act_and_mul_fn, get_act_fn
from vllm.model_executor.layers.attention import Attention, AttentionLayerBase
from vllm.model_executor.layers.fused_moe import Router
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import (
    RowParallelLinear,
    column_linear,
    merged_linear,
    qkv_linear,
    row_linear,
)
from vllm.model_executor.layers.rotary_embedding import (
    RotaryEmbedding,
    get_rope,
    read_rope_parameters,
)
from vllm.model_executor.layers.shared_tokens import own_tokens, run_branch
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.utils import make_parameter
from vllm.ops.activations import sigmoid_gate

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Differences of a layer's attention from plain Llama's."""

    bias: bool = False
    """True if all projections have biases; the next two options are for some of them."""
    qkv_bias: bool = False
    output_bias: bool = False
    num_kv_heads: int | None = None
    """None: the config's ``num_key_value_heads``."""
    qk_norm: bool | Callable[[HeadSlice, int], nn.Module] = False
    """Norm of queries and keys: True for :attr:`BlockLayout.norm` of every head, or a function of
    this rank's heads and their size that makes a module for [tokens, heads, size]."""
    normalises_rotated: bool = False
    """True: that norm comes after the rotation, not before it."""
    rotates: bool = True
    rope_parameters: Mapping[str, Any] | None = None
    """None: the config's."""
    interleaved: bool = False
    """True: the rotation turns pairs (0, 1), (2, 3), ... instead of (i, i + half)."""
    sliding_window: int | None = None
    """Number of tokens that a query reads, with its own; None: all."""
    chunk_size: int | None = None
    """A query reads from the last multiple of this number on; None: from the first token."""
    query_factors: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Maps positions int64 [tokens] to the final factors of queries, float32 [tokens]."""
    scale: float | None = None
    """Scale of the scores; None: ``head_size**-0.5``."""
    soft_cap: float | None = None
    has_sinks: bool = False
    gates_output: bool = False
    """True: ``q_proj`` is twice as wide, [query | gate] of each head, and the output of a head is
    multiplied by the gate's sigmoid."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The positions of a block's norms, and how its branches are added to the stream.

    Sequential: ``s += m after(attention(before(s)))``, then the same with the MLP. Parallel:
    ``s += m (attention(before(s)) + mlp(before'(s)))``.
    """

    norm: Callable[[int], nn.Module]
    """Makes a norm for a number of elements."""
    norms_before: bool = True
    norms_after: bool = False
    parallel: Literal["no", "one norm", "two norms"] = "no"
    residual_multiplier: float = 1.0
    """The factor ``m``."""


def make_rope(
    vllm_config: VllmConfig,
    head_size: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    interleaved: bool = False,
) -> RotaryEmbedding:
    """Make a rotation; arguments as in :class:`AttentionOptions`, parameters None: the config's."""
    config = vllm_config.model_config.hf_text_config
    max_model_len = vllm_config.model_config.max_model_len
    return get_rope(
        head_size,
        config_value(config, ("max_position_embeddings",)) or max_model_len,
        not interleaved,
        read_rope_parameters(config, parameters or config.rope_parameters),
        num_positions=max_model_len,
    )


class SelfAttention(Layer):
    """Projections, norms of queries and keys, rotation, attention, output projection."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: AttentionOptions,
        norm: Callable[[int], nn.Module],
        prefix: str,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        head_size = vllm_config.model_config.get_head_size()
        num_heads = config.num_attention_heads
        self.qkv_proj = qkv_linear(
            config.hidden_size,
            head_size,
            num_heads * (2 if options.gates_output else 1),
            options.num_kv_heads or config.num_key_value_heads,
            f"{prefix}.qkv_proj",
            bias=options.bias or options.qkv_bias,
        )
        self.o_proj = row_linear(
            num_heads * head_size,
            config.hidden_size,
            f"{prefix}.o_proj",
            bias=options.bias or options.output_bias,
        )
        self.options = options
        q_heads = self.qkv_proj.heads_of("q", num_heads)
        heads = q_heads.count
        if options.qk_norm:
            own = options.qk_norm
            k_heads = self.qkv_proj.heads_of("k", self.qkv_proj.total_num_kv_heads)
            make = own if callable(own) else lambda heads, size: norm(size)
            self.q_norm = make(q_heads, head_size)
            self.k_norm = make(k_heads, head_size)
        self.rotary_emb = None
        if options.rotates:
            self.rotary_emb = make_rope(
                vllm_config, head_size, options.rope_parameters, interleaved=options.interleaved
            )
        sinks = make_parameter(torch.empty(heads), q_heads.load) if options.has_sinks else None
        self.attn = Attention(
            heads,
            head_size,
            head_size**-0.5 if options.scale is None else options.scale,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            total_num_kv_heads=self.qkv_proj.total_num_kv_heads,
            cache_config=vllm_config.cache_config,
            logits_soft_cap=options.soft_cap,
            per_layer_sliding_window=options.sliding_window,
            attention_chunk_size=options.chunk_size,
            prefix=f"{prefix}.attn",
            sinks=sinks,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        heads, kv_heads, head_size = (
            self.attn.num_heads,
            self.attn.num_kv_heads,
            self.attn.head_size,
        )
        qkv = self.qkv_proj(hidden_states).view(len(positions), -1, head_size)
        sizes = [self.qkv_proj.num_heads, kv_heads, kv_heads]
        q, k, v = torch.split_with_sizes(qkv, sizes, 1)
        gate = None
        if self.options.gates_output:
            q, gate = q.view(len(q), heads, 2, head_size).unbind(2)
        q, k = self._norm_and_rotate(positions, q, k)
        if self.options.query_factors is not None:
            q = (q * self.options.query_factors(positions)[:, None, None]).to(q.dtype)
        attended = self.attn(q, k, v)
        if gate is not None:
            gated = q.new_empty((len(q), heads, head_size))
            sigmoid_gate(attended.view(gated.shape), gate, gated)
            attended = gated.flatten(1)
        output: torch.Tensor = self.o_proj(attended)
        return output

    def _norm_and_rotate(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_norm, norm_last = bool(self.options.qk_norm), self.options.normalises_rotated
        norm_first = has_norm and not norm_last
        if norm_first and self.rotary_emb is not None:
            q, k = self.rotary_emb.after_norms(positions, q, k, self.q_norm, self.k_norm)
        elif norm_first:
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        if has_norm and norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k


class GatedMLP(Layer):
    """``down(activation(gate(x)) * up(x))``.

    activation: a module, or the name that the config's ``option`` holds.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str | nn.Module = "silu",
        *,
        option: str = "hidden_act",
        bias: bool = False,
        prefix: str,
    ) -> None:
        super().__init__()
        self.act_fn = (
            get_act_and_mul_fn(activation, option) if isinstance(activation, str) else activation
        )
        self.gate_up_proj = merged_linear(
            hidden_size, [intermediate_size] * 2, f"{prefix}.gate_up_proj", bias=bias
        )
        self.down_proj = row_linear(
            intermediate_size, hidden_size, f"{prefix}.down_proj", bias=bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return output


class PlainMLP(Layer):
    """``down(activation(up(x)))``; activation, option: see :class:`GatedMLP`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str | nn.Module,
        *,
        option: str = "hidden_act",
        bias: bool = True,
        prefix: str,
    ) -> None:
        super().__init__()
        self.act_fn = get_act_fn(activation, option) if isinstance(activation, str) else activation
        self.up_proj = column_linear(hidden_size, intermediate_size, f"{prefix}.up_proj", bias=bias)
        self.down_proj = row_linear(
            intermediate_size, hidden_size, f"{prefix}.down_proj", bias=bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        return output


class DecoderBlock(Layer):
    """One decoder layer; :class:`BlockLayout` defines what it computes.

    attention: a mixer that is called with positions; recurrent: mixers that are called without, by
    their names in the block. Several mixers run side by side, and their outputs are summed. A block
    without mixers is only an MLP; with ``mlp`` None it is only mixers.

    Norms before attention and MLP are ``input_layernorm`` and ``post_attention_layernorm``, as in
    Llama; norms after them are ``attention_output_norm`` and ``mlp_output_norm``. A subclass that
    combines mixers in another way overrides :meth:`mix`; if its MLP reads more than the normed
    stream, it overrides :meth:`feed_forward`. One that adds branches to the stream in another way
    overrides :meth:`forward`, which runs them by :meth:`run_mixers` and :meth:`run_mlp` because
    ranks may share the tokens of the stream.
    """

    def __init__(
        self,
        hidden_size: int,
        attention: nn.Module | None,
        mlp: nn.Module | None,
        layout: BlockLayout,
        *,
        recurrent: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self._multiplier = 1.0 * self.layout.residual_multiplier  # what is no number fails here
        self.stream_size = hidden_size
        self.self_attn, self.mlp = attention, mlp
        self.recurrent_names = tuple(recurrent or ())
        for name, layer in (recurrent or {}).items():
            self.add_module(name, layer)
        self.has_mixer = attention is not None or bool(recurrent)
        assert self.has_mixer or mlp is not None
        assert layout.parallel == "no" or (self.has_mixer and mlp is not None)
        self._mlp_needs_all = mlp is not None and _needs_all_tokens(mlp, self)
        self._mixers_need_all = any(
            _needs_all_tokens(mixer, self) for mixer in self._branches() if mixer is not mlp
        )
        for branch in self._branches():
            if (last := _last_layer(branch)) is not None:
                last.ends_branch = True
        has_mlp_norm = mlp is not None and layout.parallel != "one norm"

        def norm_if(is_there: bool) -> nn.Module | None:
            return layout.norm(hidden_size) if is_there else None

        self.input_layernorm = norm_if(layout.norms_before and self.has_mixer)
        self.post_attention_layernorm = norm_if(layout.norms_before and has_mlp_norm)
        self.attention_output_norm = norm_if(layout.norms_after and self.has_mixer)
        self.mlp_output_norm = norm_if(layout.norms_after and mlp is not None)

    def _branches(self) -> Iterator[nn.Module]:
        """Yield the mixers and the MLP."""
        if self.self_attn is not None:
            yield self.self_attn
        yield from map(self.get_submodule, self.recurrent_names)
        if self.mlp is not None:
            yield self.mlp

    def hook_points(self) -> Iterator[BlockHook]:
        """Yield the places in this block whose values requests can ask for."""
        size, attention, mlp = self.stream_size, self.self_attn, self.mlp
        if attention is not None:
            norm = None if self.recurrent_names else self.attention_output_norm
            yield from self._branch_hooks("attn", attention, norm)
            if isinstance(output := attention._modules.get("o_proj"), RowParallelLinear):
                yield BlockHook(("attn.hook_z",), output, output.input_size, "input")
        for name in self.recurrent_names:
            mixer = self.get_submodule(name)
            is_share = _last_layer(mixer) is not None
            yield BlockHook((f"{name}.hook_out",), mixer, size, path_of=mixer, is_share=is_share)
        if mlp is None:
            return
        yield from self._branch_hooks("mlp", mlp, self.mlp_output_norm)
        for router in (one for one in mlp.modules() if isinstance(one, Router)):
            gate, names = router.gate, ("mlp.hook_router_logits", "mlp.gate")
            yield BlockHook(names, gate, gate.output_size, path_of=gate, dtype=torch.float32)
        if self.has_mixer and self.layout.parallel == "no":
            yield self.middle_of_stream()

    def _branch_hooks(
        self, name: str, branch: nn.Module, norm: nn.Module | None
    ) -> Iterator[BlockHook]:
        """Yield the output of a branch, and of the norm after it if there is one."""
        own, normed = f"{name}.hook_out", f"hook_{name}_out"
        names = (own,) if norm is not None else (own, normed)
        is_share = _last_layer(branch) is not None
        yield BlockHook(names, branch, self.stream_size, path_of=branch, is_share=is_share)
        if norm is not None:
            yield BlockHook((normed,), norm, self.stream_size, path_of=norm, is_share=True)

    def middle_of_stream(self) -> BlockHook:
        """Return the point of the stream between the mixers and the MLP."""
        assert self.mlp is not None
        names, norm = ("hook_resid_mid", "ln2.hook_in"), self.post_attention_layernorm
        if norm is not None:
            return BlockHook(names, norm, self.stream_size, "sum", is_share=True)
        return BlockHook(names, self.mlp, self.stream_size, "input")

    def mix(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Run the mixers, and sum their outputs: [tokens, hidden] -> the same shape, or this
        rank's share of it."""
        mixed: torch.Tensor | None = None
        if self.self_attn is not None:
            mixed = own_tokens(self.self_attn(positions, x))
        for name in self.recurrent_names:
            output = own_tokens(getattr(self, name)(x))
            mixed = output if mixed is None else mixed + output
        assert mixed is not None
        return mixed

    def feed_forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Run the MLP: x: its input, read from the stream, [tokens, hidden]; stream: of the same
        tokens, or of this rank's."""
        assert self.mlp is not None
        output: torch.Tensor = self.mlp(x)
        return output

    def run_mixers(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Run the mixers over all tokens: x: this rank's, [tokens, hidden] -> the same shape."""

        def mix(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.mix(positions, x)

        return run_branch(mix, x, positions, needs_all_tokens=self._mixers_need_all)

    def run_mlp(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Run the MLP over all tokens: this rank's, both [tokens, hidden] -> the same shape."""
        return run_branch(self.feed_forward, x, stream, needs_all_tokens=self._mlp_needs_all)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """Return the stream ``hidden_states (+ residual)``, [tokens, hidden], after this layer."""
        branch, stream = hidden_states, residual
        if self.has_mixer:
            x, stream = _read(self.input_layernorm, hidden_states, residual)
            branch = self._finish(self.attention_output_norm, self.run_mixers(positions, x))
        if self.mlp is None:
            return branch, stream
        if self.layout.parallel == "no":
            x, stream = _read(self.post_attention_layernorm, branch, stream)
            return self._finish(self.mlp_output_norm, self.run_mlp(x, stream)), stream
        assert stream is not None
        if self.post_attention_layernorm is not None:
            x = self.post_attention_layernorm(stream)
        return branch + self._finish(self.mlp_output_norm, self.run_mlp(x, stream)), stream

    def _finish(self, norm: nn.Module | None, branch: torch.Tensor) -> torch.Tensor:
        """Apply the norm and the multiplier of a branch before it is added to the stream."""
        if norm is not None:
            branch = norm(branch)
        return branch if self._multiplier == 1.0 else branch * self._multiplier


class Float32StreamBlock(DecoderBlock):
    """A block of mixers only, whose stream is float32 for every dtype of the model.

    Mamba's configs call this ``residual_in_fp32``. The norm and the mixers compute in the model's
    dtype; the model's last norm has to be a ``Float32StreamRMSNorm``.
    """

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """Return the stream, [tokens, hidden] in float32, after this layer; embeddings may have
        another dtype."""
        assert residual is None and self.input_layernorm is not None and self.mlp is None
        x = self.input_layernorm(hidden_states)
        return hidden_states.float() + self.run_mixers(positions, x), None


def _last_layer(branch: nn.Module) -> RowParallelLinear | None:
    """Return the layer whose output a branch returns, but for what is done to each token alone."""
    layers = (branch._modules.get(name) for name in ("o_proj", "out_proj", "down_proj"))
    return next((layer for layer in layers if isinstance(layer, RowParallelLinear)), None)


def _needs_all_tokens(branch: nn.Module, block: nn.Module) -> bool:
    """Return whether ranks that share tokens inside of branches have to gather them for this one,
    because a layer, or the block itself, keeps more of them than those that are spread."""
    keepers = [one for one in (block, *branch.modules()) if isinstance(one, AttentionLayerBase)]
    return any(one.spread.is_whole for one in keepers)


def _read(
    norm: nn.Module | None, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a branch, and the stream itself."""
    if norm is None:
        stream = hidden_states if residual is None else residual.add_(hidden_states)
        return stream, stream
    if residual is None:
        return norm(hidden_states), hidden_states
    normed, stream = norm(hidden_states, residual)
    return normed, stream

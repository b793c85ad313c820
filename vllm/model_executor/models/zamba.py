"""Zamba: Mamba layers of several heads, and an attention block that some of them share.

The shared block runs before a Mamba layer and reads the stream and the embeddings; its output
enters the Mamba layer, not the stream. The checkpoint has its weights at the first layer that uses
it; each use has its own keys and values. Zamba2 (``zamba2.py``) is made of the same parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.forward_context import one_use
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import qkv_linear, replicated_linear, row_linear
from vllm.model_executor.layers.mamba.mamba1 import MambaMixer
from vllm.model_executor.models.decoder_block import DecoderBlock
from vllm.model_executor.models.decoder_loop import DecoderLayer, Stream
from vllm.model_executor.models.decoder_model import DecoderModel, HybridForCausalLM
from vllm.model_executor.models.utils import layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "hybrid")


class SharedAttention(Layer):
    """Attention over [stream | embeddings]; each use has its own cache of keys and values."""

    rotary_emb: nn.Module | None

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        head_size = config.attention_head_dim
        self.qkv_proj = qkv_linear(
            2 * config.hidden_size,
            head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            f"{prefix}.qkv_proj",
        )
        self.o_proj = row_linear(
            config.num_attention_heads * head_size, config.hidden_size, f"{prefix}.o_proj"
        )
        self.rotary_emb = None

    def make_cache(self, vllm_config: VllmConfig, prefix: str) -> Attention:
        """Make the cache of keys and values of one use."""
        head_size = self.qkv_proj.head_size
        return Attention(
            self.qkv_proj.num_heads,
            head_size,
            (head_size / 2) ** -0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            total_num_kv_heads=self.qkv_proj.total_num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
        )

    def project(self, x: torch.Tensor, use: int) -> tuple[torch.Tensor, ...]:
        """Project x [tokens, 2 * hidden] to queries, keys, values, each [tokens, heads * size]."""
        return torch.split(self.qkv_proj(x), self.qkv_proj.output_partition_sizes, dim=-1)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, use: int, cache: Attention
    ) -> torch.Tensor:
        """positions: int64 [tokens]; x: [tokens, 2 * hidden] -> [tokens, hidden]."""
        parts = self.project(x, use)
        q, k, v = (values.view(len(x), -1, cache.head_size) for values in parts)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        output: torch.Tensor = self.o_proj(cache(q, k, v))
        return output


class SharedBlock(Layer):
    """Norm, attention, norm, MLP, without a residual stream."""

    def __init__(self, config: Any, attention: SharedAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(2 * config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = attention
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = mlp

    def run_mlp(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: torch.Tensor = self.feed_forward(x)
        return output

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, use: int, cache: Attention
    ) -> torch.Tensor:
        """x: [tokens, 2 * hidden] -> [tokens, hidden]."""
        mixed = self.self_attn(positions, self.input_layernorm(x), use, cache)
        return self.run_mlp(self.pre_ff_layernorm(mixed), use)


class HybridLayer(Layer):
    """One use of a shared block, and the Mamba layer that reads its output."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        shared: SharedBlock,
        use: int,
        mamba: DecoderBlock,
        prefix: str,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.use = use
        self.shared_transformer = shared
        self.attn = shared.self_attn.make_cache(vllm_config, f"{prefix}.attn")
        self.linear = replicated_linear(config.hidden_size, config.hidden_size, f"{prefix}.linear")
        self.mamba_decoder = mamba

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        embeddings: torch.Tensor,
    ) -> Stream:
        """Return the stream ``hidden_states (+ residual)``, [tokens, hidden], after this layer."""
        stream = hidden_states if residual is None else residual.add_(hidden_states)
        x = torch.cat((stream, embeddings), dim=-1)
        with one_use(self.use):
            shared = self.shared_transformer(positions, x, self.use, self.attn)
        shared = self.linear(shared)
        mamba = self.mamba_decoder
        assert mamba.input_layernorm is not None
        return mamba.mix(positions, mamba.input_layernorm(stream + shared)), stream


class ZambaModel(DecoderModel):
    """A model that passes the embeddings to all layers that use the shared block."""

    def layer_calls(
        self, input_ids: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> Iterable[DecoderLayer]:
        embeddings = hidden_states.clone()  # layers change the stream in place
        return [
            functools.partial(layer, embeddings=embeddings)
            if isinstance(layer, HybridLayer)
            else layer
            for layer in self.layers
        ]


class SharingForCausalLM(HybridForCausalLM):
    """The frame of Zamba and Zamba2: Mamba layers, and blocks that hybrid layers share."""

    recurrent_name = "mamba"
    model_class: ClassVar[type[DecoderModel]] = ZambaModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        kinds = config.layers_block_type
        self._hybrid_ids = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
        self._shared: dict[int, SharedBlock] = {}  # by the number of the block
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # As the config says, also while a checkpoint's head differs from the embeddings.
        self._has_copies_of_blocks = self.head_tie.is_tied

    def num_blocks(self, config: Any) -> int:
        """Return the number of shared blocks, which hybrid layers use in turn."""
        return 1

    def make_mamba_layer(self, config: Any, index: int, prefix: str) -> DecoderBlock:
        """Make a norm and the recurrent layer that the config describes."""
        recurrent = {"mamba": self.make_recurrent(config, index, f"{prefix}.mamba")}
        layout = self.block_layout(config, index)
        return DecoderBlock(config.hidden_size, None, None, layout, recurrent=recurrent)

    def make_block(self, vllm_config: VllmConfig, first_use: int, prefix: str) -> SharedBlock:
        """Make the shared block of the uses ``first_use``, ``first_use + num_blocks``, ..."""
        raise NotImplementedError

    def weights_to_skip(self) -> tuple[str, ...]:
        """Skip the copies of shared blocks at later uses."""
        if not self._has_copies_of_blocks:
            return ()
        again = self._hybrid_ids[self.num_blocks(self.config) :]
        return tuple(f"model.layers.{index}.{self._block_name}." for index in again)

    @property
    def _block_name(self) -> str:
        return self.names_in_checkpoint().get("shared_transformer", "shared_transformer")

    def use_of(self, path: str) -> tuple[str, int]:
        """Return the path of a shared block's module at its first use, and the number of the use
        of the path; for other modules the same path and 0."""
        found = re.search(rf"(?<=layers\.)(\d+)(?=\.{self._block_name}\.)", path)
        if found is None or int(found[0]) not in self._hybrid_ids:
            return path, 0
        use = self._hybrid_ids.index(int(found[0]))
        first = self._hybrid_ids[use % len(self._shared)]
        return f"{path[: found.start()]}{first}{path[found.end() :]}", use

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        if layer_kind(config, index, _KINDS, "layers_block_type") == "linear_attention":
            return self.make_mamba_layer(config, index, prefix)
        use = self._hybrid_ids.index(index)
        first_use = use % self.num_blocks(config)
        # As in transformers, blocks are shared only if the embeddings are tied.
        block = first_use if vllm_config.model_config.hf_config.tie_word_embeddings else use
        if block not in self._shared:
            shared_prefix = f"{prefix}.shared_transformer"
            self._shared[block] = self.make_block(vllm_config, first_use, shared_prefix)
        mamba = self.make_mamba_layer(config, index, f"{prefix}.mamba_decoder")
        return HybridLayer(vllm_config, self._shared[block], use, mamba, prefix)


class ZambaForCausalLM(SharingForCausalLM):
    """Zamba 7B: Mamba of several heads, and an attention block that layers share."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "shared_transformer": "shared_transf",
        "x_proj.weight": "x_proj_weight",
        "dt_proj.weight": "dt_proj_weight",
        "rates": "A_log",
        "step_bias": "dt_proj_bias",
        "skip": "D",
    }

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        require_option(config, hidden_mamba_act="silu")
        width = config.mamba_expand * config.hidden_size
        if config.n_mamba_heads < 1 or width % config.n_mamba_heads:
            raise ValueError(
                f"config.json: n_mamba_heads={config.n_mamba_heads} does not divide "
                f"mamba_expand * hidden_size = {width}"
            )
        return MambaMixer(
            hidden_size=config.hidden_size,
            intermediate_size=width,
            state_size=config.mamba_d_state,
            step_rank=config.mamba_dt_rank,
            conv_width=config.mamba_d_conv,
            conv_option="mamba_d_conv",
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
            num_heads=config.n_mamba_heads,
            prefix=prefix,
        )

    def make_block(self, vllm_config: VllmConfig, first_use: int, prefix: str) -> SharedBlock:
        config = vllm_config.model_config.hf_text_config
        require_option(config, attention_hidden_size=2 * config.hidden_size)
        mlp = self.dense_mlp(config, f"{prefix}.feed_forward")
        return SharedBlock(config, SharedAttention(vllm_config, f"{prefix}.self_attn"), mlp)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Separate the channels of x and gate, which alternate in the checkpoint, and merge the
        heads of tensors with one value per channel."""
        if ".mamba.in_proj." in name and tensor.shape[0] % 2 == 0:
            pairs = tensor.reshape(-1, 2, *tensor.shape[1:])
            return pairs.transpose(0, 1).reshape(tensor.shape)
        by_channel = name.endswith((".mamba.A_log", ".mamba.D", ".mamba.dt_proj_bias"))
        return tensor.flatten(0, 1) if by_channel and tensor.dim() > 1 else tensor

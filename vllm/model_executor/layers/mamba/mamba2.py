"""Mamba-2 (Dao and Gu 2024): the recurrent layer of Nemotron-H, Bamba, Falcon-H1 and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.config.model_facts import config_value
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import divide, load_part, merged_linear, row_linear
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import make_parameter
from vllm.ops.activations import silu_gate
from vllm.ops.layout import StateTensor
from vllm.ops.norms import group_gated_rms_norm
from vllm.ops.state_space import pending_tensors, state_space_scan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Gating = Literal["gate, norm", "norm, gate", "gate"]
"""Combination of the recurrence's output y and the gate z: ``norm(y silu(z))``, as in most models,
``norm(y) silu(z)``, or ``y silu(z)``."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """Checked numbers and sizes of heads, read from a config."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of B and C; each is for ``num_heads / num_groups`` heads."""
    state_size: int
    conv_width: int
    conv_option: str
    """The config's name for ``conv_width``."""

    @classmethod
    def read(
        cls,
        config: Any,
        *,
        num_heads: str = "mamba_n_heads",
        head_dim: str = "mamba_d_head",
        num_groups: str = "mamba_n_groups",
        state_size: str = "mamba_d_state",
        conv_width: str = "mamba_d_conv",
    ) -> Mamba2Sizes:
        """Read the sizes by their names in the family's config.

        ValueError: one is not a size, or the groups do not divide the heads.
        """
        names = (num_heads, head_dim, num_groups, state_size, conv_width)
        values: list[Any] = [config_value(config, (name,)) for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config.json: {name}={value!r} has to be a whole number above 0")
        heads, size, groups, states, width = values
        if heads % groups:
            raise ValueError(
                f"config.json: {num_groups}={groups} does not divide {num_heads}={heads}"
            )
        return cls(
            num_heads=heads,
            head_dim=size,
            num_groups=groups,
            state_size=states,
            conv_width=width,
            conv_option=conv_width,
        )

    @property
    def inner_size(self) -> int:
        """Channels of x, of the gate and of the output."""
        return self.num_heads * self.head_dim


class Mamba2Mixer(RecurrentLayer):
    """Projection to [z | x | B | C | dt], convolution, recurrence, gate and norm, projection.

    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels of x, B and C] in the model's
    dtype, state view [blocks, heads, state_size, head_dim] in float32, pending tensors of the
    kernels...)``. dt_limits: limits of the time step, after softplus. multipliers: factors of the
    five parts of the projection.
    """

    mamba_type: ClassVar[str] = "mamba2"
    multipliers: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        sizes: Mamba2Sizes,
        *,
        norm_eps: float,
        gating: Gating = "gate, norm",
        input_bias: bool = False,
        output_bias: bool = False,
        conv_bias: bool = True,
        dt_limits: Sequence[float] = (0.0, math.inf),
        multipliers: Sequence[float] | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.whole_sizes, self.gating, self.norm_eps = sizes, gating, norm_eps
        self.dt_min, self.dt_max = _checked_limits(dt_limits)
        tp_size = get_tensor_model_parallel_world_size()
        self.num_heads = divide(sizes.num_heads, tp_size, f"the heads of {prefix!r}")
        self.num_groups = divide(sizes.num_groups, tp_size, f"the groups of {prefix!r}")
        self.inner_size = self.num_heads * sizes.head_dim
        states = sizes.num_groups * sizes.state_size
        parts = [sizes.inner_size, sizes.inner_size, states, states, sizes.num_heads]
        self.in_proj = merged_linear(hidden_size, parts, f"{prefix}.in_proj", bias=input_bias)
        columns = None
        if multipliers is not None:
            by_part = zip(self.in_proj.output_partition_sizes, multipliers, strict=True)
            columns = torch.cat([torch.full((part,), float(factor)) for part, factor in by_part])
        self.register_buffer("multipliers", columns, persistent=False)
        self.conv1d = CausalConv1d(
            tuple(parts[1:4]), sizes.conv_width, bias=conv_bias, option=sizes.conv_option
        )
        # Spread decays like those of trained models; a checkpoint overwrites them.
        spread = torch.linspace(1.0, 16.0, self.num_heads, dtype=torch.float32)
        self.A_log = make_parameter(spread.log(), load_part)
        self.D = make_parameter(torch.ones_like(spread), load_part)
        self.dt_bias = make_parameter(torch.full_like(spread, -4.0), load_part)
        self.norm = None if gating == "gate" else _NormWeight(self.inner_size)
        self.out_proj = row_linear(
            sizes.inner_size, hidden_size, f"{prefix}.out_proj", bias=output_bias
        )
        self.layer_name = prefix
        _check_state_dtype(register_layer(self))

    @property
    def conv_channels(self) -> int:
        """Channels of x, B and C on this rank."""
        return self.inner_size + 2 * self.num_groups * self.whole_sizes.state_size

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        sizes = self.whole_sizes
        inputs = (sizes.conv_width - 1, self.conv_channels)
        state = (self.num_heads, sizes.state_size, sizes.head_dim)
        return StateTensor(inputs, dtype), StateTensor(state, torch.float32)

    def pending_tensors(self, device_type: str, dtype: torch.dtype) -> Sequence[StateTensor]:
        sizes = self.whole_sizes
        heads, groups = (self.num_heads, sizes.head_dim), (self.num_groups, sizes.state_size)
        return pending_tensors(device_type, dtype, *heads, *groups)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        conv_cache, state_cache, *pending = self.kv_cache
        projected = self.in_proj(hidden_states)
        if self.multipliers is not None:
            projected = projected.mul_(self.multipliers)
        sizes = [self.inner_size, self.conv_channels, self.num_heads]
        z, xbc, dt = torch.split_with_sizes(projected, sizes, 1)
        convolved = self.conv1d(xbc, metadata, conv_cache, silu=True)
        output = xbc.new_empty((len(xbc), self.num_heads, self.whole_sizes.head_dim))
        state_space_scan(
            convolved,
            dt,
            self.A_log,
            self.dt_bias,
            self.D,
            self.num_groups,
            self.dt_min,
            self.dt_max,
            metadata.layout,
            metadata.states,
            state_cache,
            pending,
            output,
        )
        mixed: torch.Tensor = self.out_proj(self._gated(output, z))
        return mixed

    def _gated(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """output: [tokens, heads, head_dim]; z: [tokens, heads * head_dim] -> like z, dense."""
        by_group = (self.num_groups, self.inner_size // self.num_groups)
        output, gate = output.view(len(output), *by_group), z.view(len(z), *by_group)
        gated = torch.empty_like(output)
        if self.norm is None:
            silu_gate(output, gate, gated)
        else:
            weight, gates_first = self.norm.weight.view(by_group), self.gating == "gate, norm"
            group_gated_rms_norm(output, gate, weight, self.norm_eps, gates_first, gated)
        return gated.flatten(1)


class _NormWeight(Layer):
    """Weight [channels of this rank] of the norm after the recurrence."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = make_parameter(torch.ones(size), load_part)


def _checked_limits(dt_limits: Sequence[float]) -> tuple[float, float]:
    low, high = map(float, dt_limits) if len(dt_limits) == 2 else (math.nan, math.nan)
    if not 0.0 <= low <= high:
        raise ValueError(
            f"config.json: the limits {list(dt_limits)} of the time step (time_step_limit, "
            "time_step_min) have to be two numbers in order, not below 0"
        )
    return low, high


def _check_state_dtype(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a state that is not float32: rounding it between two steps would make
    bits depend on a prompt's chunks."""
    option = vllm_config.cache_config.mamba_ssm_cache_dtype
    config = vllm_config.model_config.hf_text_config
    in_config = config_value(config, ("mamba_ssm_cache_dtype",))
    if option == "auto" and in_config not in (None, "auto", "float32", torch.float32):
        raise ValueError(
            f"config.json: mamba_ssm_cache_dtype={in_config!r} is not supported; supported: "
            "'float32', which the option mamba_ssm_cache_dtype='float32' sets instead"
        )

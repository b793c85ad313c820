"""Token shift (RWKV): a layer reads a mixture of each token and the token before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.recurrent import causal_conv1d

if TYPE_CHECKING:
    from vllm.v1.attention.backend import RecurrentMetadata


class TokenShift(Layer):
    """``mix x[t] + (1 - mix) x[t - 1]`` for several mixes; x is zero before the first token.

    names: names of the mixes in the checkpoint, which has each as [1, 1, hidden].
    """

    def __init__(self, hidden_size: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            mix = torch.full((hidden_size,), 0.5)
            self.register_parameter(name, make_parameter(mix, _load_mix))
        # A convolution that returns the token before.
        taps = torch.tensor([1.0, 0.0]).repeat(hidden_size, 1)
        self.taps = nn.Buffer(taps, persistent=False)

    def forward(
        self, x: torch.Tensor, metadata: RecurrentMetadata, cache: torch.Tensor
    ) -> list[torch.Tensor]:
        """x: [tokens, hidden]; cache: [blocks, 1, hidden], last tokens -> like x, one per name."""
        before = torch.empty_like(x)
        layout, states = metadata.layout, metadata.states
        causal_conv1d(x, self.taps, None, False, layout, states, cache, before)
        now, past = x.float(), before.float()
        mixes = (self.get_parameter(name).float() for name in self.names)
        return [(now * mix + past * (1.0 - mix)).to(x.dtype) for mix in mixes]


def _load_mix(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    check_shape(loaded_weight, (1, 1, len(param)))
    param.data.copy_(loaded_weight[0, 0])

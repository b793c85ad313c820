"""Token shift (RWKV): what a layer reads is a mixture of a token and the one before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.utils import make_parameter
from vllm.ops.recurrent import causal_conv1d

if TYPE_CHECKING:
    from vllm.v1.attention.backend import RecurrentMetadata


class TokenShift(Layer):
    """``mix x[t] + (1 - mix) x[t - 1]`` for several mixes; zeros stand before the first token.

    names: of the mixes, as the checkpoint has them, each [1, 1, hidden] there.
    """

    def __init__(self, hidden_size: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            mix = torch.full((hidden_size,), 0.5)
            self.register_parameter(name, make_parameter(mix, _load_mix))
        # The convolution that gives the token before.
        taps = torch.tensor([1.0, 0.0]).repeat(hidden_size, 1)
        self.taps = nn.Buffer(taps, persistent=False)

    def forward(
        self, x: torch.Tensor, metadata: RecurrentMetadata, cache: torch.Tensor
    ) -> list[torch.Tensor]:
        """x: [tokens, hidden]; cache: [blocks, 1, hidden], the last token. One a name, like x."""
        before = torch.empty_like(x)
        layout, states = metadata.layout, metadata.states
        causal_conv1d(x, self.taps, None, False, layout, states, cache, before)
        now, past = x.float(), before.float()
        mixes = (self.get_parameter(name).float() for name in self.names)
        return [(now * mix + past * (1.0 - mix)).to(x.dtype) for mix in mixes]


def _load_mix(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    check_shape(loaded_weight, (1, 1, len(param)))
    param.data.copy_(loaded_weight[0, 0])

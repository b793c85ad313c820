"""Random weights: models without a checkpoint, for trying shapes and measuring speed."""

from __future__ import annotations

import math

import torch
from torch import nn

_VECTOR_SPREAD = 0.1


def initialize_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter by ``seed``, so that activations keep a reasonable scale.

    Matrices are uniform with variance 1 / fan-in. Vectors (norms, biases, decays) keep the
    value they were built with, spread a little, so that no two layers are alike.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if parameter.dim() == 1:
            noise = torch.empty_like(parameter.data)
            noise.uniform_(-_VECTOR_SPREAD, _VECTOR_SPREAD, generator=generators[device])
            parameter.data.add_(noise)
        else:
            bound = math.sqrt(3.0 / parameter.shape[-1])
            parameter.data.uniform_(-bound, bound, generator=generators[device])

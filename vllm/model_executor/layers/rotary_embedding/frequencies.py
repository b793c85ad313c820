"""Angular frequencies of rotary embeddings, by the formulas of transformers.

Calling transformers' own functions gives exactly its float32 values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
SUPPORTED_ROPE_TYPES = ("default", *SCALED_ROPE_TYPES)


class RotaryFrequencies(NamedTuple):
    """Radians per position, float32 [rotary_dim / 2], and the factor of cosines and sines."""

    inverse: torch.Tensor
    attention_factor: float


@dataclass(frozen=True)
class _RopeConfig:
    """The attributes of a model config that transformers' functions read."""

    rope_parameters: dict[str, Any]
    head_dim: int
    max_position_embeddings: int
    num_attention_heads: int = 1

    @property
    def hidden_size(self) -> int:
        return self.head_dim

    def standardize_rope_params(self) -> None:
        """Do nothing: the parameters already have their standard form."""


def rope_type_of(rope_parameters: Mapping[str, Any]) -> str:
    """Return ``rope_type``, also from its old name ``type``. ValueError: it is not supported."""
    rope_type: str = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if rope_type == "mrope":  # the three positions of a text token are equal: plain rotation
        return "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"rope_type={rope_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return rope_type


def rotary_frequencies(
    rope_parameters: Mapping[str, Any],
    head_size: int,
    max_position: int,
    *,
    is_long: bool = False,
) -> RotaryFrequencies:
    """Return the frequencies for a head of ``head_size`` elements.

    rope_parameters: ``rope_type``, ``rope_theta``, ``partial_rotary_factor`` (the part of the head
    that is rotated, from its start) and the scaling's own parameters. max_position: the
    model's ``max_position_embeddings``. is_long: use longrope's factors for long sequences.
    ValueError: the parameters give none, more than the head has, or some that are not finite.
    """
    try:
        frequencies = _compute(rope_parameters, head_size, max_position, is_long=is_long)
    except KeyError as error:
        raise ValueError(f"rope_parameters={dict(rope_parameters)} lack {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"rope_parameters={dict(rope_parameters)}: {error}") from error
    inverse, factor = frequencies
    if 2 * len(inverse) > head_size:
        raise ValueError(
            f"rope_parameters={dict(rope_parameters)}: they rotate {2 * len(inverse)} elements of "
            f"heads of {head_size}; use an even head_dim and a partial_rotary_factor of at most 1"
        )
    if not inverse.is_meta and not (inverse.isfinite().all() and math.isfinite(factor)):
        raise ValueError(
            f"rope_parameters={dict(rope_parameters)}: not all angular frequencies are finite; "
            "rope_theta and what scales it have to be above 0"
        )
    return frequencies


def _compute(
    rope_parameters: Mapping[str, Any], head_size: int, max_position: int, *, is_long: bool
) -> RotaryFrequencies:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = rope_type_of(rope_parameters)
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **rope_parameters}
    if rope_type == "dynamic" and parameters.get("alpha"):
        # Hunyuan's: another base for sequences of any length (arXiv 2309.16039).
        rope_type, rotary_dim = "default", int(head_size * parameters["partial_rotary_factor"])
        parameters["rope_theta"] *= parameters["alpha"] ** (rotary_dim / (rotary_dim - 2))
    if rope_type == "default":
        rotary_dim = int(head_size * parameters["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return RotaryFrequencies(1.0 / parameters["rope_theta"] ** exponents, 1.0)
    parameters.setdefault("original_max_position_embeddings", max_position)
    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](
        _RopeConfig(parameters, head_size, max_position),
        torch.get_default_device(),
        seq_len=parameters["original_max_position_embeddings"] + 1 if is_long else None,
    )
    return RotaryFrequencies(inverse.float(), float(factor))

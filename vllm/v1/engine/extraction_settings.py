"""The arguments of one call of ``extract()``, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, cast

import torch

from vllm.hidden_states.layer_ids import Layers, layer_items
from vllm.hidden_states.names import MOST_LOGPROBS, Pooling
from vllm.hidden_states.sample import check_pooling
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.steering import steering_specs
from vllm.transformers_utils.answer_masks import parse_mask_rule
from vllm.utils.text import brief, check_truth_values
from vllm.v1.engine.input_processor import TruncationSide
from vllm.v1.rows.fields.activations import checked_hooks
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES
from vllm.v1.rows.fields.requested import ALL_LOGPROBS

OnError = Literal["raise", "yield"]


class ByteLimit(NamedTuple):
    """The most bytes of all samples of one call."""

    num_bytes: int
    advice: str
    """Text for the error of a call that needs more: what sets the limit."""


@dataclass(frozen=True)
class ExtractionSettings:
    """The arguments of one call of ``extract()``."""

    layers: Layers | None
    positions: str | Sequence[int]
    dtype: str | torch.dtype | None
    is_ordered: bool
    on_error: OnError
    max_in_flight: int | None
    pooling: Pooling = "none"
    add_special_tokens: bool = True
    top_logprobs: int = 0
    logprob_temperature: float = 1.0
    sampling_params: SamplingParams | None = None
    hooks: Sequence[str] | str | None = None
    mask: str | None = None
    steering: Any = None
    lora_request: LoRARequest | None = None
    byte_limit: ByteLimit | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "left"
    choose_positions: Callable[[list[int]], list[int]] | None = None
    """Finds the positions by the token ids of a prompt, instead of ``positions``."""
    most_tokens: int | None = None
    """Most tokens of a prompt; None: as many as the context holds."""
    most_tokens_advice: str = ""
    """The end of the error about a longer prompt."""
    priority: int = 0
    own_options: frozenset[str] | None = None
    """Options that an ExtractRequest may have beside its prompt; None: all."""
    is_one_request: bool = False
    """All prompts begin together, so that their values are of the same weights."""

    def __post_init__(self) -> None:
        layers: Any = self.layers
        if isinstance(layers, Iterator):  # which every prompt of the call reads
            object.__setattr__(self, "layers", layer_items(layers))
        if self.on_error not in ("raise", "yield"):
            raise ValueError(f'on_error={self.on_error!r}: use "raise" or "yield"')
        most: object = self.max_in_flight
        if most is not None and not (isinstance(most, Integral) and int(most) >= 1):
            raise ValueError(f"max_in_flight={most!r}: has to be a whole number of at least 1")
        check_pooling(self.pooling)
        check_truth_values(ordered=self.is_ordered, add_special_tokens=self.add_special_tokens)
        if self.mask is not None:
            parse_mask_rule(self.mask)
        check_logprobs(self.top_logprobs, self.logprob_temperature)
        storage_dtype(self.dtype)
        checked_hooks(self.hooks)
        if self.steering is not None:
            steering_specs(self.steering)


def storage_dtype(value: object) -> str | None:
    """Return the name of a dtype in which rows can be delivered; None for the model's own."""
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else ""
    name = "fp8" if name == "float8_e4m3fn" else name
    if name not in STORAGE_DTYPES:
        raise ValueError(f"dtype={brief(value)}: use auto, {', '.join(STORAGE_DTYPES)}")
    return name


def check_logprobs(count: object, temperature: object) -> None:
    """Raise ValueError for a number of log-probabilities, or a temperature, that cannot be."""
    most, is_count = MOST_LOGPROBS, isinstance(count, Integral) and not isinstance(count, bool)
    if not is_count or not ALL_LOGPROBS <= cast("int", count) <= most:
        raise ValueError(
            f"top_logprobs={count!r}: has to be a whole number from 0 to {most}, or {ALL_LOGPROBS} "
            "for the whole vocabulary"
        )
    is_number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not is_number or not 1e-4 <= cast("float", temperature) <= 1e4:
        raise ValueError(f"logprob_temperature={temperature!r}: has to be in [0.0001, 10000]")

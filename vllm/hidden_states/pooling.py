"""One row for a prompt: the mean of its rows, or the last of them."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch

from vllm.hidden_states.fp8 import FP8, quantization_errors, quantize_rows
from vllm.hidden_states.sample import HiddenStatesSample

Pooling = Literal["none", "mean", "last"]


def check_pooling(value: object) -> None:
    """ValueError: it is none of ``Pooling``."""
    if value not in get_args(Pooling):
        raise ValueError(f"pooling={value!r}: use {', '.join(get_args(Pooling))}")


def mean_of_rows(sample: HiddenStatesSample, dtype: torch.dtype) -> HiddenStatesSample:
    """The sample with the mean of its float32 rows in ``dtype``, at the last of their positions."""
    mean, scales, errors = sample.hidden_states.mean(dim=0, keepdim=True), None, None
    rows = mean.to(dtype)
    if dtype == FP8:
        rows, scales = quantize_rows(mean)
        errors = quantization_errors(mean, rows, scales)
    return dataclasses.replace(
        sample,
        positions=sample.positions[-1:],
        hidden_states=rows,
        scales=scales,
        fp8_errors=errors,
    )

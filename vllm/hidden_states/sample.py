"""One prompt of an extraction, its hidden states, and what is there instead when it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from vllm.exceptions import Failure, FailureError
from vllm.hidden_states.fp8 import FP8, dequantize_rows, quantization_errors, quantize_rows
from vllm.hidden_states.layer_ids import Layers
from vllm.hidden_states.tensor_file import dtype_name
from vllm.utils.row_checks import find_bad_row

if TYPE_CHECKING:
    from vllm.inputs import Conversation, PromptType

Pooling = Literal["none", "mean", "last"]
"""One row for a prompt: the mean of its rows, or the last of them."""


@dataclass(frozen=True)
class ExtractRequest:
    """What :meth:`vllm.LLM.extract` takes for a prompt; None: what the call says."""

    prompt: PromptType | Conversation
    layers: Layers | None = None
    """``resolve_layer_ids`` says what may stand here."""
    positions: str | Sequence[int] | None = None
    """``all``, ``last``, ``every:K``, ``mask``, or a list of positions, whose order and duplicates
    are kept."""
    mask: Sequence[bool | int] | None = None
    """For ``mask``: one value for each token, true where its row is wanted."""
    dtype: str | torch.dtype | None = None
    """``auto`` (the model's), ``float32``, ``bfloat16``, ``float16`` or ``fp8``."""


@dataclass(frozen=True, eq=False, repr=False)
class HiddenStatesSample:
    """The rows of one prompt: row r belongs to the token ``token_ids[positions[r]]``."""

    index: int
    """Number of the prompt in the call, or of the sample in the dataset."""
    request_id: str
    """Of the request; read from a dataset, the name of the sample's file, or empty."""
    token_ids: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [rows]: ascending, or the list that was asked for, in its order"""
    hidden_states: torch.Tensor
    """[rows, layers, hidden]; float8_e4m3fn where there are scales"""
    scales: torch.Tensor | None
    """float32 [rows, layers] for fp8, otherwise None"""
    layer_ids: tuple[int, ...]
    record: int | None = None
    """Number of the record in the input, where it is known."""
    fp8_errors: torch.Tensor | None = None
    """float32 [rows, layers], relative error of each row's fp8 form, where it was measured."""
    expert_ids: torch.Tensor | None = None
    """int16 [rows, layers with experts, top_k], the router's first choice first; where traced."""
    expert_weights: torch.Tensor | None = None
    """float32, likewise: what each expert's output is multiplied with."""
    expert_layers: tuple[int, ...] = ()
    """The decoder layers, counted from 0, that ``expert_ids`` are of."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of its record, those that were asked to be kept."""

    def __repr__(self) -> str:
        rows = f"rows {list(self.hidden_states.shape)} {dtype_name(self.hidden_states.dtype)}"
        kept = f", columns {', '.join(self.columns)}" if self.columns else ""
        traced = f", experts of {len(self.expert_layers)} layers" if self.expert_layers else ""
        return (
            f"HiddenStatesSample({self.index}: {len(self.token_ids)} tokens, {rows}, "
            f"layers {list(self.layer_ids)}{traced}{kept})"
        )

    def take_rows(self, index: torch.Tensor) -> HiddenStatesSample:
        """A sample with the rows at ``index``, int64, in that order."""
        names = ("positions", "hidden_states", "scales", "fp8_errors", "expert_ids")
        parts = {name: getattr(self, name) for name in (*names, "expert_weights")}
        taken = {name: part[index] for name, part in parts.items() if part is not None}
        return dataclasses.replace(self, **taken)

    def rows(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[rows, layers, hidden] in ``dtype`` (default: as stored, or bfloat16 for fp8)."""
        if dtype == FP8:
            raise ValueError(
                f"dtype={dtype}: such values mean nothing without their scales; take "
                "hidden_states and scales"
            )
        if self.scales is not None:
            return dequantize_rows(self.hidden_states, self.scales, dtype or torch.bfloat16)
        return self.hidden_states if dtype is None else self.hidden_states.to(dtype)


@dataclass(frozen=True)
class FailedSample:
    """What an iterator with ``on_error="yield"`` gives for a request that failed."""

    index: int
    request_id: str
    failure: Failure

    @property
    def reason(self) -> str:
        """For a person."""
        return self.failure.message


class HiddenStatesError(FailureError):
    """The hidden states of prompt ``index`` could not be had."""

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure)
        self.args = (index, failure)
        self.index = index

    @property
    def reason(self) -> str:
        """For a person."""
        return self.failure.message

    def __str__(self) -> str:
        return f"prompt {self.index}: {self.reason}"


def check_pooling(value: object) -> None:
    """ValueError: it is none of ``Pooling``."""
    if value not in get_args(Pooling):
        raise ValueError(f"pooling={value!r}: use {', '.join(get_args(Pooling))}")


def mean_of_rows(sample: HiddenStatesSample, dtype: torch.dtype) -> HiddenStatesSample:
    """The sample with the mean of its float32 rows in ``dtype``, at the last of their positions.

    HiddenStatesError: it is not finite there, or all zero, as rows in that dtype must not be.
    """
    mean = sample.hidden_states.mean(dim=0, keepdim=True)
    pooled = dataclasses.replace(sample, positions=sample.positions[-1:], hidden_states=mean)
    pooled = in_dtype(pooled, dtype)
    failure = find_bad_row(pooled.rows(), pooled.layer_ids, pooled.positions.tolist())
    if failure is not None:
        message = f"mean in {dtype_name(dtype)}: {failure}"
        raise HiddenStatesError(sample.index, Failure(failure.kind, message))
    return pooled


def in_dtype(sample: HiddenStatesSample, dtype: torch.dtype) -> HiddenStatesSample:
    """The sample with dense rows of ``dtype``; with errors, if they become fp8 here."""
    rows = sample.hidden_states
    if dtype == rows.dtype or dtype != FP8:
        return dataclasses.replace(sample, hidden_states=rows.to(dtype).contiguous())
    values, scales = quantize_rows(rows)
    errors = quantization_errors(rows, values, scales)
    return dataclasses.replace(sample, hidden_states=values, scales=scales, fp8_errors=errors)

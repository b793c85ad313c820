"""One prompt of an extraction, its hidden states, and its failure if there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch

from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.hidden_states.layer_ids import Layers
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.tensor_file import dtype_name
from vllm.utils.boundaries import LayerId
from vllm.v1.rows.fields import LOSS_MASK
from vllm.v1.rows.fields.activations import is_hook_name
from vllm.v1.rows.fields.checks import find_bad_row
from vllm.v1.rows.fields.fp8 import FP8, dequantize_rows, quantization_errors, quantize_rows
from vllm.v1.rows.fields.hidden import HiddenStates

if TYPE_CHECKING:
    from vllm.inputs import Conversation, PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.steering import SteeringType

"""The reduction of a prompt's rows to one: their mean, or the last of them."""


@dataclass(frozen=True)
class ExtractRequest:
    """A prompt for :meth:`vllm.LLM.extract` with its options; None means the call's option."""

    prompt: PromptType | Conversation
    layers: Layers | None = None
    """Layers in any form that ``resolve_layer_ids`` takes."""
    positions: str | Sequence[int] | None = None
    """``all``, ``last``, ``every:K``, ``mask``, ``generated``, or a list of positions, whose order
    and duplicates are kept. They count over prompt and output; of a list, those that the finished
    text does not have are left out."""
    mask: str | Sequence[bool | int] | torch.Tensor | None = None
    """One value for each token of the prompt: ``positions="mask"`` keeps the rows of those that are
    true, and of generated tokens. The sample has it as ``loss_mask``, with any positions. For a
    conversation it may be a rule, such as ``answers`` or ``last-answer,before``."""
    dtype: str | torch.dtype | None = None
    """``auto`` (the model's), ``float32``, ``bfloat16``, ``float16`` or ``fp8``."""
    add_special_tokens: bool | None = None
    """True if a text gets the tokenizer's special tokens, such as BOS."""
    top_logprobs: int | None = None
    """Number of most likely next tokens to keep with each row, up to 1,024; 0: none; -1: the
    log-probabilities of the whole vocabulary."""
    logprob_temperature: float | None = None
    """Divides the logits before their softmax."""
    sampling_params: SamplingParams | None = None
    """Generate with these settings; the rows are those of prompt and output."""
    steering: SteeringType | None = None
    """Vectors to add to the stream; rows are taken after the addition."""
    hooks: Sequence[str] | str | None = None
    """Names of hook points inside layers whose values to keep with each row."""
    lora_request: LoRARequest | None = None
    """Adapter of the model for this prompt."""


@dataclass(frozen=True, eq=False, repr=False)
class HiddenStatesSample:
    """The rows of one prompt: row r belongs to the token ``token_ids[positions[r]]``."""

    index: int
    """Number of the prompt in the call, or of the sample in the dataset."""
    request_id: str
    """Id of the request; in a dataset, the name of the sample's file, or empty."""
    token_ids: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [rows]: ascending, or in the order of the list that was requested"""
    tensors: Mapping[str, torch.Tensor]
    """The tensors kept of these tokens, [rows, ...] each, by the names that files use."""
    layer_ids: tuple[LayerId, ...]
    record: int | None = None
    """Number of the record in the input, if it is known."""
    constants: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Values that fields of a row state once for all tokens, by the names that files use."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of its record that were kept on request."""
    num_generated_tokens: int = 0
    """Tokens at the end that the model generated."""
    output: CompletionOutput | None = None
    """The generated text, its finish reason and its log-probabilities, from :meth:`extract`."""

    def __repr__(self) -> str:
        rows = f"rows {list(self.hidden_states.shape)} {dtype_name(self.hidden_states.dtype)}"
        kept = f", columns {', '.join(self.columns)}" if self.columns else ""
        others = f", {', '.join(self.other_tensors)}" if self.other_tensors else ""
        return (
            f"HiddenStatesSample({self.index}: {len(self.token_ids)} tokens, {rows}, "
            f"layers {list(self.layer_ids)}{others}{kept})"
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before those that the model generated."""
        return len(self.token_ids) - self.num_generated_tokens

    @property
    def hidden_states(self) -> torch.Tensor:
        """[rows, layers, hidden]; float8_e4m3fn if there are scales."""
        return self.tensors["hidden_states"]

    @property
    def scales(self) -> torch.Tensor | None:
        """float32 [rows, layers] for fp8, otherwise None."""
        return self.tensors.get("scales")

    @property
    def fp8_errors(self) -> torch.Tensor | None:
        """float32 [rows, layers], relative error of each row's fp8 form; None if not measured."""
        return self.tensors.get("fp8_errors")

    @property
    def other_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are kept besides hidden states."""
        return {k: v for k, v in self.tensors.items() if k not in HiddenStates.tensor_names}

    @property
    def loss_mask(self) -> torch.Tensor | None:
        """bool [rows], the mask at the token of each row; None if it is not known, or rows are
        pooled. It is true for generated tokens."""
        return self.tensors.get(LOSS_MASK)

    @property
    def activations(self) -> dict[str, torch.Tensor]:
        """[rows, width] of each hook point, by the name that was requested."""
        return {name: tensor for name, tensor in self.tensors.items() if is_hook_name(name)}

    @property
    def expert_ids(self) -> torch.Tensor | None:
        """int16 [rows, layers with experts, top_k], the router's first choice first."""
        return self.tensors.get("expert_ids")

    @property
    def expert_weights(self) -> torch.Tensor | None:
        """float32 of the same shape, the factor of each expert's output."""
        return self.tensors.get("expert_weights")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The decoder layers, counted from 0, in ``expert_ids``."""
        return tuple(self.constants.get("expert_layers", ()))

    @property
    def top_token_ids(self) -> torch.Tensor | None:
        """int32 [rows, k], the most likely next tokens, the most likely first."""
        return self.tensors.get("top_token_ids")

    @property
    def top_logprobs(self) -> torch.Tensor | None:
        """float32 [rows, k], their log-probabilities; a dataset may store them as float16."""
        return self.tensors.get("top_logprobs")

    @property
    def logprobs(self) -> torch.Tensor | None:
        """float32 [rows, vocabulary], log-probabilities of all next tokens."""
        return self.tensors.get("logprobs")

    @property
    def token_logprobs(self) -> torch.Tensor | None:
        """float32 [rows], the log-probability of the token that follows; NaN for the last."""
        return self.tensors.get("token_logprobs")

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, **tensors: torch.Tensor) -> HiddenStatesSample:
        """Return a sample in which these tensors replace those of the same names."""
        return dataclasses.replace(self, tensors={**self.tensors, **tensors})

    def with_constants(self, constants: Mapping[str, Sequence[int]]) -> HiddenStatesSample:
        """Return a sample with these values that are the same for all tokens."""
        return dataclasses.replace(self, constants=constants)

    def in_float(self, dtype: torch.dtype | None) -> HiddenStatesSample:
        """Return a sample with :meth:`rows` instead of values with scales."""
        kept = {k: v for k, v in self.tensors.items() if k not in HiddenStates.tensor_names}
        tensors = {"hidden_states": self.rows(dtype), **kept}
        return dataclasses.replace(self, tensors=tensors)

    def take_rows(self, index: torch.Tensor | slice) -> HiddenStatesSample:
        """Return a sample with the rows at ``index``, int64 or a slice, in that order."""
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, positions=self.positions[index], tensors=tensors)

    def rows(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return [rows, layers, hidden] in ``dtype`` (default: as stored, or bfloat16 for fp8)."""
        if dtype == FP8:
            raise ValueError(
                f"dtype={dtype}: such values mean nothing without their scales; use "
                "hidden_states and scales"
            )
        if self.scales is not None:
            rows = dequantize_rows(self.hidden_states, self.scales, dtype or torch.bfloat16)
        else:
            rows = self.hidden_states if dtype is None else self.hidden_states.to(dtype)
        check_range(rows, self.hidden_states, f"sample {self.index}")
        return rows


@dataclass(frozen=True)
class FailedSample:
    """The item that an iterator with ``on_error="yield"`` yields for a request that failed."""

    index: int
    request_id: str
    failure: Failure

    @property
    def reason(self) -> str:
        """The reason as text for a person."""
        return self.failure.message


class HiddenStatesError(FailureError):
    """The hidden states of prompt ``index`` could not be extracted."""

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure)
        self.args = (index, failure)
        self.index = index

    @property
    def reason(self) -> str:
        """The reason as text for a person."""
        return self.failure.message

    def __str__(self) -> str:
        return f"prompt {self.index}: {self.reason}"


def check_range(changed: torch.Tensor, original: torch.Tensor, name: str) -> None:
    """Raise ValueError if values became infinite with the dtype that ``changed`` has."""
    most = torch.finfo(changed.dtype).max
    if most >= torch.finfo(torch.bfloat16).max or changed.dtype == original.dtype:
        return
    is_good, was_good = (
        (one.float() if one.itemsize == 1 else one).isfinite() for one in (changed, original)
    )
    if not torch.equal(is_good.to(was_good.device), was_good):
        raise ValueError(
            f"{name}: rows have values beyond the range of {dtype_name(changed.dtype)}, which ends "
            f"at {most:,.0f}; use bfloat16 or float32"
        )


def check_pooling(value: object) -> None:
    """Raise ValueError if ``value`` is not one of ``Pooling``."""
    if value not in get_args(Pooling):
        raise ValueError(f"pooling={value!r}: use {', '.join(get_args(Pooling))}")


def mean_of_rows(
    sample: HiddenStatesSample, dtype: torch.dtype, model_dtype: torch.dtype
) -> HiddenStatesSample:
    """Return the sample with the mean of its float32 rows and activations in ``dtype``, at their
    last position. Activations are not fp8: their dtype is the model's then.

    Raises HiddenStatesError if a mean in that dtype is not finite, or that of rows is all zero.
    """
    mean = sample.hidden_states.mean(dim=0, keepdim=True)
    inner = model_dtype if dtype == FP8 else dtype
    means = {k: v.mean(dim=0, keepdim=True).to(inner) for k, v in sample.activations.items()}
    last = sample.take_rows(slice(-1, None)).with_tensors(hidden_states=mean, **means)
    pooled = in_dtype(last, dtype)
    failure = find_bad_row(pooled.rows(), pooled.layer_ids, pooled.positions.tolist())
    if failure is not None:
        message = f"mean in {dtype_name(dtype)}: {failure}"
        raise HiddenStatesError(sample.index, Failure(failure.kind, message))
    for name, mean in means.items():
        if not mean.isfinite().all():
            message = f"mean in {dtype_name(inner)}: {name} is not finite"
            raise HiddenStatesError(sample.index, Failure(FailureKind.ROWS_NOT_FINITE, message))
    return pooled


def in_dtype(sample: HiddenStatesSample, dtype: torch.dtype) -> HiddenStatesSample:
    """Return the sample with dense rows of ``dtype``, and with errors if they become fp8 here."""
    rows = sample.hidden_states
    if dtype == rows.dtype or dtype != FP8:
        return sample.with_tensors(hidden_states=rows.to(dtype).contiguous())
    values, scales = quantize_rows(rows)
    errors = quantization_errors(rows, values, scales)
    return sample.with_tensors(hidden_states=values, scales=scales, fp8_errors=errors)

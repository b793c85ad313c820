"""Vectors, classes and values of prompts: extraction of the state after the final norm, and what
follows it.

    PoolingOptions -> PoolingCall: which rows to extract, and how they become a result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import torch
from torch.nn import functional

from vllm.config.model_facts import config_value
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import FailedSample, HiddenStatesSample
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.transformers_utils.pooling_config import StatedPooling, VectorPooling, read_pooling
from vllm.utils.boundaries import NORM
from vllm.utils.text import brief, check_truth_values, whole_number
from vllm.v1.engine.extraction_settings import ExtractionSettings
from vllm.v1.engine.input_processor import TruncationSide
from vllm.v1.engine.pooling_heads import Head, read_head

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
Pooled = PoolingRequestOutput[PoolingOutput]
_TOO_LONG = (
    ", the {source}; set truncate_prompt_tokens=-1 to cut prompts there as sentence-transformers "
    "does (on the {side}), or "
    "pooling='last' or 'mean' to take all tokens"
)
_OWN_OPTIONS = frozenset({"positions", "mask", "add_special_tokens", "lora_request"})


class PromptOptions(TypedDict, total=False):
    """Options of every call, about its prompts."""

    truncate_prompt_tokens: int | None
    """Keep this many tokens of each prompt; -1: as many as the context holds."""
    truncation_side: TruncationSide | None
    """The side that is cut off; the tokenizer's special tokens around a text stay."""
    add_special_tokens: bool
    """Give texts the tokenizer's special tokens."""
    lora_request: LoRARequest | None
    """Adapter of the model for all prompts without their own."""


@dataclass(frozen=True)
class PoolingOptions:
    """The result that one call wants for each prompt; None: as the checkpoint says."""

    task: PoolingTask = "embed"
    pooling: VectorPooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    """None: the right one, unless the checkpoint's files of sentence-transformers name the left."""
    add_special_tokens: bool = True
    lora_request: LoRARequest | None = None
    most_tokens: int | None = None
    """Refuse prompts with more tokens; None: only the context limits them."""
    most_tokens_advice: str = ""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("pooling_task", self.task, get_args(PoolingTask)),
            ("pooling", self.pooling, (*get_args(VectorPooling), None)),
            ("truncation_side", self.truncation_side, (*get_args(TruncationSide), None)),
        ):
            if not isinstance(value, str | None) or value not in allowed:
                raise ValueError(f"{name}={brief(value)}: use {', '.join(map(repr, allowed))}")
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value))
        for name in ("normalize", "use_activation", "add_special_tokens"):
            if getattr(self, name) is not None:
                check_truth_values(**{name: getattr(self, name)})
        keep = self.truncate_prompt_tokens
        if keep is not None and (keep < -1 or keep == 0):
            raise ValueError(f"truncate_prompt_tokens={keep}: has to be at least 1, or -1")


@dataclass(frozen=True)
class PoolingCall:
    """One call: the extraction below it, and the function that makes results of its samples."""

    settings: ExtractionSettings
    reduce: Callable[[torch.Tensor], torch.Tensor]
    """float32 [rows, hidden] -> the result's data"""

    def output(self, sample: HiddenStatesSample | FailedSample) -> Pooled:
        """Make the result of one prompt."""
        assert isinstance(sample, HiddenStatesSample)  # failures are raised
        if not len(sample.positions):
            raise ValueError(f"prompt {sample.index}: positions names none of its tokens")
        data = self.reduce(sample.hidden_states[:, 0])
        return PoolingRequestOutput(
            sample.request_id, PoolingOutput(data), sample.token_ids.tolist()
        )


class Pooler:
    """Makes the calls of one engine."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config

    def read_files(self) -> None:
        """Read the checkpoint's files, which may be those of another one when they are needed."""
        _ = self._head
        with suppress(ValueError, OSError):  # the calls that need these files say so
            _ = self._stated

    @property
    def head(self) -> Head:
        """The head for classes or values. ValueError: the checkpoint has none that is known."""
        if isinstance(self._head, str):
            raise ValueError(self._head)
        return self._head

    @cached_property
    def _head(self) -> Head | str:
        """The head, or the reason why there is none; the files are searched once."""
        try:
            return read_head(self._vllm_config)
        except ValueError as error:
            return str(error)

    @cached_property
    def _stated(self) -> StatedPooling:
        return read_pooling(self._model_config)

    def call(self, options: PoolingOptions) -> PoolingCall:
        """Make a call; raises ValueError if the checkpoint cannot serve these options."""
        if options.task in ("embed", "token_embed"):
            return self._embedding(options)
        return self._classification(options)

    def _embedding(self, options: PoolingOptions) -> PoolingCall:
        is_each_token = options.task == "token_embed"
        if is_each_token and options.pooling is not None:
            raise ValueError(
                f"pooling={options.pooling!r} with pooling_task='token_embed', which returns a "
                "vector of each token; use pooling_task='embed'"
            )
        stated = self._stated
        if stated.problem is not None and options.pooling is None and not is_each_token:
            raise ValueError(
                f"the checkpoint's vectors cannot be made: {stated.problem}; supported: a "
                "Transformer, Pooling of the last token or the mean, and Normalize. With "
                "pooling='last' or 'mean' you get those of the state after the final norm"
            )
        if is_each_token and stated.projects_tokens:
            raise ValueError(
                f"the checkpoint's vectors of tokens cannot be made: {stated.problem} and no "
                'Pooling; extract(..., layers=["norm"]) returns the states after the final norm'
            )
        if options.use_activation is not None:
            raise ValueError(
                f"use_activation={options.use_activation} with pooling_task={options.task!r}: it "
                "is for classes; use normalize, or leave it out"
            )
        self._check_dimensions(options.dimensions)
        pooling: Pooling = "none" if is_each_token else options.pooling or stated.pooling
        normalizes = stated.normalize if options.normalize is None else options.normalize
        reduce = partial(_as_vectors, dimensions=options.dimensions, normalizes=normalizes)
        if options.pooling is None and not is_each_token:
            options = self._limited(options, stated)
        settings = _settings(options, pooling)
        return PoolingCall(settings, reduce if is_each_token else lambda rows: reduce(rows)[0])

    def _limited(self, options: PoolingOptions, stated: StatedPooling) -> PoolingOptions:
        """Refuse or truncate prompts beyond the length that the checkpoint's vectors are made of,
        which is shorter than the context of many models."""
        side = options.truncation_side or stated.truncation_side
        options = replace(options, truncation_side=side)
        most_tokens = stated.most_tokens
        if most_tokens is None or most_tokens >= self._model_config.max_model_len:
            return options
        keep = options.truncate_prompt_tokens
        return replace(
            options,
            truncate_prompt_tokens=most_tokens if keep == -1 else keep,
            most_tokens=most_tokens,
            most_tokens_advice=_TOO_LONG.format(
                source=stated.most_tokens_source, side=stated.truncation_side
            ),
        )

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        config = self._model_config.hf_config
        listed = config_value(config, ("matryoshka_dimensions",)) or []
        if not isinstance(listed, list):
            raise ValueError(f"config.json: matryoshka_dimensions={listed!r} has to be a list")
        most = self._model_config.get_hidden_size()
        problem = None
        if not listed and not config_value(config, ("is_matryoshka",)):
            problem = (
                "the model was not trained for shorter vectors (config.json has neither "
                "matryoshka_dimensions nor is_matryoshka=true); leave it out, or set "
                'hf_overrides={"is_matryoshka": True}'
            )
        elif listed and dimensions not in listed:
            problem = f"use one of {', '.join(map(str, listed))}"
        elif not 1 <= dimensions <= most:
            problem = f"has to be from 1 to {most}"
        if problem is not None:
            message = f"dimensions={dimensions}: {problem}"
            raise VLLMValidationError(message, parameter="dimensions")

    def _classification(self, options: PoolingOptions) -> PoolingCall:
        head = self.head
        for name in ("pooling", "normalize", "dimensions"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name}={getattr(options, name)!r} with pooling_task={options.task!r}: it "
                    "is for vectors; use pooling_task='embed', or leave it out"
                )
        activation = None if options.use_activation is False else head.activation
        if isinstance(activation, str):
            raise ValueError(f"{activation}; use_activation=False gives raw scores")

        def reduce(rows: torch.Tensor) -> torch.Tensor:
            scores = head.scores(rows)
            return scores if activation is None else activation(scores)

        if options.task == "token_classify":
            return PoolingCall(_settings(options), reduce)
        if head.kind == "token":
            raise ValueError(
                "this checkpoint classifies tokens, not prompts "
                f"({', '.join(self._model_config.architectures)}): use "
                "encode(prompts, pooling_task='token_classify')"
            )
        settings = _settings(options, head=head)
        return PoolingCall(settings, lambda rows: reduce(rows)[0])


def stacked(results: Sequence[Pooled], width: int) -> torch.Tensor:
    """Return the results as one tensor [prompts, width]."""
    data = [one.outputs.data for one in results]
    return torch.stack(data) if data else torch.empty(0, width)


def _settings(
    options: PoolingOptions, pooling: Pooling = "none", head: Head | None = None
) -> ExtractionSettings:
    return ExtractionSettings(
        layers=NORM,
        positions="all",
        dtype="float32",
        is_ordered=True,
        on_error="raise",
        max_in_flight=None,
        pooling=pooling,
        add_special_tokens=options.add_special_tokens,
        lora_request=options.lora_request,
        truncate_prompt_tokens=options.truncate_prompt_tokens,
        truncation_side=options.truncation_side or "right",
        choose_positions=None if head is None else head.positions,
        most_tokens=options.most_tokens,
        most_tokens_advice=options.most_tokens_advice,
        own_options=_OWN_OPTIONS - ({"positions", "mask"} if head is not None else set()),
    )


def _as_vectors(rows: torch.Tensor, dimensions: int | None, normalizes: bool) -> torch.Tensor:
    kept = rows[:, :dimensions]
    return functional.normalize(kept, dim=-1) if normalizes else kept.contiguous()

"""The results that a user gets back: completions with log-probabilities, and pooled results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from vllm.exceptions import Failure
    from vllm.lora.request import LoRARequest
    from vllm.v1.outputs import ExtractedRows


class Logprob(NamedTuple):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1-based, over the whole vocabulary."""
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry per prompt token; the first is None, because nothing precedes it."""
SampleLogprobs = list[dict[int, Logprob]]
"""One entry per output token; the sampled token comes first."""


@dataclass
class RequestMetrics:
    """Unix times, in seconds."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    first_scheduled_time: float | None = None
    """Time when the request left the queue for its first step; a preemption does not change it."""


@dataclass
class CompletionOutput:
    """One of the ``n`` continuations of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while the generation goes on."""
    stop_reason: int | str | None = None
    """The stop token id or string; None for the end-of-sequence token; the message of an error."""
    failure: Failure | None = None
    """The failure, if ``finish_reason`` is "error"."""
    lora_request: None = None
    kv_transfer_params: dict[str, Any] | None = None
    """The connector's report on this continuation, such as the path of its file."""
    extracted: ExtractedRows | None = None
    """The rows that an ``extract()`` call requested."""
    num_restarts: int = 0
    """Times that weights may have changed while it was kept; its rows are of the last ones."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The results of a request so far; complete when ``finished`` is true."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    """The adapter that the request chose."""
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
    kv_transfer_params: dict[str, Any] | None = None
    """The ``kv_transfer_params`` of the first completion."""
    activations: dict[str, torch.Tensor] | None = None
    """``residual_stream`` [layers, tokens, hidden] of a finished request that has
    ``extra_args["output_residual_stream"]``; the last token is left out."""


OutputT = TypeVar("OutputT")


@dataclass
class PoolingOutput:
    """The numbers of one prompt: float32 [hidden] or [labels], or one such row per token."""

    data: torch.Tensor


@dataclass
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The classes of one prompt, in the order of the head's rows."""

    probs: list[float]
    """Probabilities; the raw score of a head with one label, or of a regression."""
    label: str | None = None
    """The most probable class by the config's ``id2label``."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class PoolingRequestOutput(Generic[OutputT]):
    """The result of a prompt that was reduced to one vector, or to one per token."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The vector of a prompt, from ``LLM.embed``."""

    @classmethod
    def of(cls, result: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """Return the tensor as a list."""
        output = EmbeddingOutput(result.outputs.data.tolist())
        return cls(result.request_id, output, result.prompt_token_ids)


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of a prompt, from ``LLM.classify``."""

    @classmethod
    def of(
        cls, result: PoolingRequestOutput[PoolingOutput], labels: Sequence[str | None]
    ) -> ClassificationRequestOutput:
        """Return the tensor as a list, and the most probable of ``labels``."""
        data = result.outputs.data
        output = ClassificationOutput(data.tolist(), labels[int(data.argmax())])
        return cls(result.request_id, output, result.prompt_token_ids)

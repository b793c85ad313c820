"""The interfaces of model classes, and functions that check for them.

A model is an ``nn.Module`` built as ``Model(vllm_config=..., prefix=...)``. Class attributes
declare what it can do beyond :class:`VllmModel`; the ``supports_*`` functions read them from a
class or an instance, of this package or a third-party one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import torch

from vllm.forward_context import RowSink
from vllm.utils.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.utils import WeightPlace


@runtime_checkable
class VllmModel(Protocol):
    """A decoder that turns the flat batch of a step into hidden states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None: ...

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] after the final norm.

        A model that implements :class:`SupportsEagle3` returns
        ``(hidden_states, [stream, ...])`` once layers are set.
        """
        ...


@runtime_checkable
class VllmModelForTextGeneration(VllmModel, Protocol):
    """A decoder with an LM head."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``(name in the checkpoint, tensor)``; returns the names of loaded parameters."""
        ...


@runtime_checkable
class MayLackHead(Protocol):
    """Loads checkpoints without an LM head, too."""

    why_no_head: str | None
    """The reason why the model computes no logits; None: it does."""


@runtime_checkable
class MayKeepWeights(Protocol):
    """Cannot always replace its weights."""

    why_weights_stay: str | None
    """The reason why :meth:`load_weights` works once only; None: it always works."""


@runtime_checkable
class FindsWeights(Protocol):
    """Knows where each tensor of a checkpoint belongs, so it takes adapters (LoRA)."""

    floats_are_transposed: ClassVar[bool]
    """True if float weights of linear layers are stored [inputs, outputs]."""

    def weight_finder(self) -> Callable[[str], WeightPlace | None]:
        """Return a function from a tensor's name in a checkpoint to its place; None: it has
        none."""
        ...


@runtime_checkable
class SharesModules(Protocol):
    """Has modules that several layers share, and runs each use in a block ``one_use``
    (:mod:`vllm.forward_context`), so each use has its own adapters."""

    def use_of(self, path: str) -> tuple[str, int]:
        """Return the path at the first use of a module, and the number of this use; for other
        modules the same path and 0."""
        ...


@runtime_checkable
class DividesIntoStages(Protocol):
    """Can run a part of its layers, as a pipeline stage."""

    @property
    def layers_read_embeddings(self) -> bool:
        """True if layers of later stages need embeddings, too."""
        ...

    def keep_stage(self, stage: PipelineStage) -> None:
        """Keep the weights of this stage. ValueError: it cannot be divided so."""
        ...


@runtime_checkable
class SkipsWeights(Protocol):
    """Does not use all tensors of its checkpoints."""

    def make_skipper(self) -> Callable[[str], str | None]:
        """Return a function from a tensor's name to the part of the checkpoint that is skipped and
        has it, in words after "weights"; None: it is not skipped."""
        ...


@runtime_checkable
class MayTieHead(Protocol):
    """Has a head that updates of its weights may tie to the embeddings, or untie."""

    def begin_update(self) -> None:
        """Note that new weights come, in one or several calls of ``load_weights``."""
        ...


@runtime_checkable
class SupportsRowCapture(Protocol):
    """Runs its layers through ``decoder_loop.run_decoder_layers``, so rows reach the sink."""

    supports_row_capture: ClassVar[Literal[True]] = True


@runtime_checkable
class KnowsHeadInput(Protocol):
    """Can say what its LM head reads, and whether that is the stream after a norm."""

    def head_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Output of the model [rows, hidden] -> input of the head [rows, hidden]."""
        ...

    def why_no_norm(self) -> str | None:
        """Return why there is no final norm; None: there is one."""
        ...


@runtime_checkable
class MayNotBeSteered(Protocol):
    """Can add vectors to its stream in some ways of running only."""

    def why_no_steering(self) -> str | None:
        """Return why it cannot add vectors; None: it can."""
        ...


@runtime_checkable
class SharesTokens(Protocol):
    """Can let ranks share the tokens between its branches."""

    def why_tokens_are_whole(self) -> str | None:
        """Return why every rank has to have all tokens; None: ranks can share them."""
        ...


@runtime_checkable
class SupportsPromptEmbeds(Protocol):
    """Needs no token ids if it gets ``inputs_embeds``, which enter the first layer."""

    supports_prompt_embeds: ClassVar[Literal[True]] = True


@runtime_checkable
class KnowsReference(Protocol):
    """Can compute in a second, plain way; its output is compared with that after loading."""

    knows_reference: ClassVar[Literal[True]] = True

    @property
    def num_ways_given_up(self) -> int:
        """Number of times that it fell back, or could not compute in a way from the start."""
        ...

    def fall_back(self, reason: str) -> None:
        """Compute in another way from now on, because the output differs from the reference.

        This may change its layers in the pool. ValueError: there is no other way.
        """
        ...

    def reference(self, token_ids: list[int], sink: RowSink) -> torch.Tensor | None:
        """Run one prompt in one pass: puts rows into ``sink``; -> logits [tokens, vocabulary].

        A pipeline stage puts rows of its own layers; None: it has no head.
        """
        ...

    def reference_stream(self, token_ids: list[int], begin: int, end: int) -> torch.Tensor | None:
        """Return the stream that enters this stage at tokens ``begin`` to ``end - 1`` of such a
        prompt; None: it is the first."""
        ...


@runtime_checkable
class SupportsEagle3(Protocol):
    """Returns the residual stream before chosen layers, besides its hidden states."""

    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Set the ids of the streams that ``forward`` returns from now on, in this order."""
        ...


class EagleModelMixin:
    """The layers at which a model returns its stream, and a helper that collects one."""

    aux_hidden_state_layers: tuple[int, ...] = ()

    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_hidden_state_layers = layers

    def _maybe_add_hidden_state(
        self,
        aux_hidden_states: list[torch.Tensor],
        layer_idx: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Append the stream that enters layer ``layer_idx`` if it is requested."""
        if layer_idx in self.aux_hidden_state_layers:
            # A copy: layers change the stream in place.
            stream = hidden_states.clone() if residual is None else hidden_states + residual
            aux_hidden_states.append(stream)
        return aux_hidden_states


@runtime_checkable
class HasInnerState(Protocol):
    """Keeps a recurrent state for each request."""

    has_inner_state: ClassVar[Literal[True]] = True


@runtime_checkable
class IsHybrid(Protocol):
    """Has recurrent layers and attention layers."""

    is_hybrid: ClassVar[Literal[True]] = True


@runtime_checkable
class SupportsPP(Protocol):
    """Can be split into pipeline stages."""

    supports_pp: ClassVar[Literal[True]] = True

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make tensors of the shapes that one stage sends to the next."""
        ...


def _declares(model: object, name: str) -> bool:
    return getattr(model, name, False) is True


def supports_row_capture(model: object) -> bool:
    return _declares(model, "supports_row_capture")


def check_takes_embeds(model: object) -> None:
    """Raise ValueError if the model needs token ids (``enable_prompt_embeds``)."""
    if not _declares(model, "supports_prompt_embeds"):
        raise ValueError(
            f"enable_prompt_embeds=True, but {type(model).__name__} does not declare "
            "supports_prompt_embeds: its layers need token ids besides embeddings; leave it out"
        )


def check_shares_tokens(model: object, option: str) -> None:
    """Raise ValueError if ranks cannot share tokens, which an option, with its value, asks for."""
    reason: str | None = "it has no layers of this engine"
    if isinstance(model, SharesTokens):
        reason = model.why_tokens_are_whole()
    if reason is not None:
        raise ValueError(
            f"{option}: {type(model).__name__} keeps all tokens on every rank, because {reason}; "
            "leave it out"
        )


def knows_reference(model: object) -> TypeGuard[KnowsReference]:
    return _declares(model, "knows_reference")


def supports_ranks(model: object) -> bool:
    """Return whether a model cuts modules of other packages over tensor-parallel ranks."""
    return _declares(model, "supports_ranks")


def supports_eagle3(model: object) -> bool:
    return _declares(model, "supports_eagle3")


def has_inner_state(model: object) -> bool:
    return _declares(model, "has_inner_state")


def is_hybrid(model: object) -> bool:
    return _declares(model, "is_hybrid")


def supports_pp(model: object) -> bool:
    return _declares(model, "supports_pp")


def has_aux_layers(module: object) -> bool:
    """Return whether a module of upstream's kind can return the streams of chosen layers."""
    return hasattr(module, "aux_hidden_state_layers")

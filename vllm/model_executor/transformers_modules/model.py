"""The model class that runs a module of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.forward_context import RowSink, get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    LayersDoneError,
    NotServableError,
    find_decoder_layers,
)
from vllm.model_executor.transformers_modules.experts import replace_experts
from vllm.model_executor.transformers_modules.loading import load_causal_lm
from vllm.model_executor.transformers_modules.packed import PackedSequences
from vllm.model_executor.transformers_modules.parts import replace_linear_layers
from vllm.model_executor.transformers_modules.row_by_row import ProductWatch, RowByRow
from vllm.model_executor.transformers_modules.survey import (
    POOLED,
    SURVEYED,
    Survey,
    attention_by,
    register_functions,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SURVEY_TOKENS = 7


class TransformersForCausalLM(nn.Module):
    """A causal model of transformers; requests of a step run as one packed sequence."""

    supports_row_capture: ClassVar[Literal[True]] = True
    knows_reference: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.causal_lm: Any = load_causal_lm(vllm_config).requires_grad_(False).eval()
        self._decoder_name = _name_of_decoder(self.causal_lm)
        try:
            layers = find_decoder_layers(self.decoder, model_config.get_total_num_hidden_layers())
            self.boundaries = Boundaries(
                layers, model_config.get_hidden_size(), model_config.dtype
            )
            replace_linear_layers(self.causal_lm)
            replace_experts(self.causal_lm)
            register_functions()
            self.sequences = self._pack(vllm_config, prefix)
        except NotServableError as error:
            raise ValueError(
                f"{self.description} cannot be served: {error}"
            ) from error

    @property
    def decoder(self) -> Any:
        """The module under the LM head."""
        return getattr(self.causal_lm, self._decoder_name)

    @property
    def way(self) -> str:
        """How requests of a step run."""
        return "packed"

    @property
    def description(self) -> str:
        return f"{type(self.causal_lm).__name__} of transformers"

    def _pack(self, vllm_config: VllmConfig, prefix: str) -> PackedSequences:
        if "position_ids" not in inspect.signature(self.decoder.forward).parameters:
            raise NotServableError("it takes no position_ids")
        survey = Survey(self.boundaries, vllm_config.model_config.max_model_len)
        watch = ProductWatch(_SURVEY_TOKENS, lambda: self.boundaries.current_layer is not None)
        device = next(self.causal_lm.parameters()).device
        tokens = torch.zeros(1, _SURVEY_TOKENS, dtype=torch.int64, device=device)
        positions = torch.arange(_SURVEY_TOKENS, device=device)[None]
        self.causal_lm.set_attn_implementation(SURVEYED)
        with torch.inference_mode(), attention_by(survey), watch, self._pass(None, None):
            output = self.decoder(input_ids=tokens, position_ids=positions, use_cache=False)
        self._output_class = type(output)
        self.causal_lm.set_attn_implementation(POOLED)
        if watch.makes_positions:
            raise NotServableError("its decoder layers count positions by themselves")
        if watch.products:
            logger.info(
                "%s calls %s: rows may differ in their last bits with what runs beside them.",
                type(self.causal_lm).__name__,
                ", ".join(sorted(watch.products)),
            )
        return PackedSequences(vllm_config, survey.calls, prefix)

    @contextmanager
    def _pass(self, sink: RowSink | None, num_layers_to_run: int | None) -> Iterator[None]:
        """A pass through the decoder layers; it may end early."""
        self.boundaries.begin(sink, num_layers_to_run)
        try:
            yield
        except LayersDoneError:
            self.boundaries.end()
            raise
        except BaseException:
            self.boundaries.forget()
            raise
        self.boundaries.end()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        embedded: torch.Tensor = self.causal_lm.get_input_embeddings()(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions: int64 [tokens] of the flat batch -> [tokens, hidden]."""
        assert intermediate_tensors is None, "one process runs all layers"
        context = get_forward_context()
        try:
            with self._pass(context.row_sink, context.num_layers_to_run), _row_by_row(positions):
                return self.sequences.run(self.decoder, input_ids, positions, inputs_embeds)
        except LayersDoneError as done:
            return done.hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary], by the model's own head and what follows it."""
        with self._decoder_returns(hidden_states[None]), _row_by_row(hidden_states):
            ids = torch.zeros(1, len(hidden_states), dtype=torch.int64, device=hidden_states.device)
            logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _decoder_returns(self, hidden_states: torch.Tensor) -> Iterator[None]:
        """The LM head's module runs as if the decoder had computed these."""
        modules = self.causal_lm._modules
        decoder = modules[self._decoder_name]
        output = self._output_class(last_hidden_state=hidden_states)
        modules[self._decoder_name] = _Computed(decoder, output)
        try:
            yield
        finally:
            modules[self._decoder_name] = decoder

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """They are there: transformers loaded them when the module was made."""
        return {name for name, _ in self.named_parameters()}

    @torch.inference_mode()
    def reference(self, token_ids: list[int], sink: RowSink) -> torch.Tensor:
        """Plain transformers on one prompt: rows to ``sink``; -> logits [tokens, vocabulary]."""
        device = next(self.causal_lm.parameters()).device
        self.causal_lm.set_attn_implementation("eager")
        try:
            with self._pass(sink, None):
                ids = torch.tensor([token_ids], device=device)
                logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.causal_lm.set_attn_implementation(POOLED)
        return logits


class _Computed(nn.Module):
    """Stands in for a decoder that has computed its hidden states already."""

    def __init__(self, decoder: Any, output: Any) -> None:
        super().__init__()
        self._decoder = [decoder]  # no submodule: nothing of it belongs to us
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._decoder[0], name)


def _name_of_decoder(causal_lm: Any) -> str:
    name: str = causal_lm.base_model_prefix
    if not isinstance(getattr(causal_lm, name, None), nn.Module):
        raise ValueError(f"{type(causal_lm).__name__} has no decoder apart from its LM head")
    return name


def _row_by_row(x: torch.Tensor) -> Any:
    return RowByRow() if x.device.type == "cpu" else nullcontext()

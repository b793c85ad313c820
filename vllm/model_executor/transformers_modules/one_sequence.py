"""Runs all requests of a step as one sequence, with attention through our layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    NotServableError,
    failures_refuse,
)
from vllm.model_executor.transformers_modules.positions import are_long, rotated_as_long
from vllm.model_executor.transformers_modules.row_by_row import ProductWatch
from vllm.model_executor.transformers_modules.sequences import Sequences
from vllm.model_executor.transformers_modules.survey import (
    POOLED,
    SURVEYED,
    AttentionCall,
    Survey,
    asks_for_attention,
    attention_by,
    check_keeps_nothing,
    set_attention,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = init_logger(__name__)

_SURVEY_TOKENS = 7


class OneSequence(Sequences):
    """Runs a transformers decoder on the flat batch of a step."""

    attends_by = POOLED

    def __init__(
        self, vllm_config: VllmConfig, causal_lm: Any, decoder: Any, boundaries: Boundaries
    ) -> None:
        super().__init__(vllm_config, causal_lm, decoder, boundaries)
        if "position_ids" not in self._arguments:
            raise NotServableError("it takes no position_ids")
        if not asks_for_attention(causal_lm):
            raise NotServableError("it attends by itself, not through transformers' interface")
        calls = self._survey(vllm_config, causal_lm, decoder)
        dtype = vllm_config.model_config.dtype
        seen: Counter[int] = Counter()
        self.layer_names: list[str] = []
        self.attention = nn.ModuleList()
        for call in calls:
            number = seen[call.layer]
            seen[call.layer] += 1
            name = f"layers.{call.layer}.attn" + (f".{number}" if number else "")
            self.layer_names.append(name)
            self.attention.append(
                Attention(
                    call.num_heads,
                    call.key_size,
                    call.scale,
                    num_kv_heads=call.num_kv_heads,
                    cache_config=vllm_config.cache_config,
                    logits_soft_cap=call.soft_cap,
                    per_layer_sliding_window=call.window,
                    prefix=name,
                    sinks=None if call.sinks is None else call.sinks.detach().contiguous(),
                    head_size_v=call.value_size,
                )
            )
        self._callers = [call.module for call in calls]
        self._layers = [call.layer for call in calls]
        self._dtype = dtype
        self._next = 0

    def _survey(self, vllm_config: VllmConfig, causal_lm: Any, decoder: Any) -> list[AttentionCall]:
        """Return the attention calls of one pass, in order."""
        max_model_len = vllm_config.model_config.max_model_len
        watch = ProductWatch(_SURVEY_TOKENS, lambda: self._boundaries.current_layer is not None)
        positions = torch.arange(_SURVEY_TOKENS, device=self._device)[None]
        survey = Survey(self._boundaries, max_model_len)

        def run(tokens: torch.Tensor) -> None:
            nonlocal survey
            survey = Survey(self._boundaries, max_model_len)
            with (
                attention_by(survey.attend, survey.describe_mask),
                self._boundaries.watch(None, None),
                watch,
            ):
                output = decoder(input_ids=tokens, position_ids=positions, use_cache=False)
            self.output_class = type(output)

        set_attention(causal_lm, SURVEYED)
        with torch.inference_mode(), failures_refuse():
            check_keeps_nothing(decoder, run, _SURVEY_TOKENS)
        set_attention(causal_lm, POOLED)
        missing = set(self._boundaries.running) - {call.layer for call in survey.calls}
        if missing:
            raise NotServableError(
                f"its layers {sorted(missing)[:8]} do not attend through transformers' interface"
            )
        if watch.makes_positions:
            raise NotServableError("its decoder layers count positions by themselves")
        if watch.products:
            logger.info(
                "%s calls %s: rows may differ in their last bits with what runs beside them.",
                type(causal_lm).__name__,
                ", ".join(sorted(watch.products)),
            )
        return survey.calls

    def run(
        self,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (decoder,) = self._decoders
        given = {name: tensor[None] for name, tensor in tokens.items()}
        own = [number for number, layer in enumerate(self._layers) if layer in self._own_layers]
        self._next = own[0] if own else 0
        end = self._next + len(own)

        def decode() -> Any:
            return decoder(**given, position_ids=positions[None], use_cache=False)

        context = get_forward_context()
        additions = None if context.steering is None else context.steering.additions
        with attention_by(self.attend), rotated_as_long(are_long(positions)):
            hidden = self._hidden_of(decode, context.row_sink, additions, incoming)
        if self._next != end:
            raise RuntimeError(f"{self._next} of {end} attention layers ran")
        return hidden

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        if module is not self._callers[self._next]:
            raise RuntimeError(f"attention is asked for by {type(module).__name__} out of turn")
        layer = self.attention[self._next]
        self._next += 1
        flat = layer(self._flat(query), self._flat(key), self._flat(value))
        by_head: torch.Tensor = flat.view(1, query.shape[2], query.shape[1], -1)
        return by_head.to(query.dtype)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, n] -> [tokens, heads, n], its last dimension dense."""
        rows = x[0].transpose(0, 1).to(self._dtype)
        return rows if rows.stride(2) == 1 else rows.contiguous()

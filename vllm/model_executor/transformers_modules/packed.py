"""All requests of a step as one sequence; attention through our layers, in the order of the survey."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.transformers_modules.boundaries import NotServableError
from vllm.model_executor.transformers_modules.survey import AttentionCall, attention_by

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PackedSequences(nn.Module):
    """Runs a transformers decoder on the flat batch of a step.

    calls: the attention that one pass asks for, in order.
    """

    def __init__(self, vllm_config: VllmConfig, calls: list[AttentionCall], prefix: str) -> None:
        super().__init__()
        if not calls:
            raise NotServableError(
                "it never calls transformers' attention function: it attends by itself"
            )
        dtype = vllm_config.model_config.dtype
        seen: Counter[int] = Counter()
        self.attention = nn.ModuleList()
        for call in calls:
            number = seen[call.layer]
            seen[call.layer] += 1
            name = f"layers.{call.layer}.attn" + (f".{number}" if number else "")
            self.attention.append(
                Attention(
                    call.num_heads,
                    call.key_size,
                    call.scale,
                    num_kv_heads=call.num_kv_heads,
                    cache_config=vllm_config.cache_config,
                    logits_soft_cap=call.soft_cap,
                    per_layer_sliding_window=call.window,
                    prefix=maybe_prefix(prefix, name),
                    sinks=None if call.sinks is None else call.sinks.detach().contiguous(),
                    head_size_v=call.value_size,
                )
            )
        self._callers = [call.module for call in calls]
        self._dtype = dtype
        self._next = 0

    def run(
        self,
        decoder: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        """The decoder's last hidden state [tokens, hidden]."""
        self._next = 0
        given: dict[str, Any] = {"position_ids": positions[None], "use_cache": False}
        if inputs_embeds is None:
            assert input_ids is not None
            given["input_ids"] = input_ids[None]
        else:
            given["inputs_embeds"] = inputs_embeds[None]
        with attention_by(self):
            output = decoder(**given)
        if self._next != len(self.attention):
            raise RuntimeError(f"{self._next} of {len(self.attention)} attention layers ran")
        hidden: torch.Tensor = output[0][0]
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

"""Runs one request of a step after another, and keeps what transformers caches in the pool.

This is for modules that attend by themselves, have their own masks, or keep recurrent states: they
see one sequence and its cache, as in transformers' own generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm.forward_context import RowSink
from vllm.model_executor.language_part import running_config
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    NotServableError,
    failures_refuse,
)
from vllm.model_executor.transformers_modules.cached import LayerCaches, Part
from vllm.model_executor.transformers_modules.sequences import EachByItself
from vllm.model_executor.transformers_modules.survey import check_keeps_nothing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SURVEY_TOKENS = 7
_CACHE_ARGUMENTS = ("past_key_values", "cache_params")


class OneByOne(EachByItself):
    """Runs a transformers decoder once for each request of a step.

    gives_positions: pass positions instead of leaving them to the module. token_by_token: pass one
    token at a time to a module that cannot continue from a cache with more.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        causal_lm: Any,
        decoder: Any,
        boundaries: Boundaries,
        *,
        gives_positions: bool = False,
        token_by_token: bool = False,
    ) -> None:
        super().__init__(vllm_config, causal_lm, decoder, boundaries)
        names = [name for name in _CACHE_ARGUMENTS if name in self._arguments]
        if not names:
            raise NotServableError(f"it takes none of {', '.join(_CACHE_ARGUMENTS)}")
        self._cache_argument = names[0]
        self._gives_positions = gives_positions and "position_ids" in self._arguments
        self._token_by_token = token_by_token
        self._config = running_config(vllm_config.model_config)
        cache = self._new_cache()
        positions = torch.arange(_SURVEY_TOKENS, device=self._device)

        def run(tokens: torch.Tensor) -> None:
            nonlocal cache
            cache = self._new_cache()
            with boundaries.watch(None, None):
                given = {"input_ids": tokens[0]}
                self.output_class = type(self._call(cache, given, positions))

        with torch.inference_mode(), failures_refuse():
            check_keeps_nothing(decoder, run, _SURVEY_TOKENS)
        dtype = vllm_config.model_config.dtype
        self._caches = [
            LayerCaches(layer, _SURVEY_TOKENS, dtype, f"layers.{index}")
            for index, layer in enumerate(cache.layers)
        ]
        self.keeps_states = any(caches.states is not None for caches in self._caches)
        self._caches_per_layer = max(1, len(self._caches) // boundaries.num_layers)
        self.layer_names = [name for caches in self._caches for name in caches.layer_names]
        if not self.layer_names:
            raise NotServableError("it keeps nothing in transformers' cache")

    def _run_request(
        self,
        part: Part,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None,
        sink: RowSink,
    ) -> torch.Tensor:
        cache = self._new_cache()
        if part.num_computed:
            for caches, layer in self._of_layers(cache, self._stage_layers):
                caches.fill(layer, part)
        self._pretend(cache, part.num_computed)
        outputs = []
        begin = 0
        for end in self._cuts(part):
            given = {name: part_of[begin:end] for name, part_of in tokens.items()}
            decode = partial(self._call, cache, given, positions[begin:end])
            places = range(part.num_computed + begin, part.num_computed + end)
            stream = None if incoming is None else incoming[begin:end]
            outputs.append(self._pass(decode, sink, part, places, stream))
            self._pretend(cache, places.stop)
            self._keep_states(cache, part, end)
            begin = end
        for caches, layer in self._of_layers(cache, self._own_layers):
            caches.take(layer, part)
        return torch.cat(outputs)

    @property
    def _stage_layers(self) -> range:
        stage = self._boundaries.stage
        return range(stage.first_layer, stage.end_layer)

    def _of_layers(self, cache: Any, layers: range) -> list[tuple[LayerCaches, Any]]:
        """Return the caches of decoder layers, each with its layer of ``cache``; a layer of
        LongCat-Flash has two."""
        pairs = zip(self._caches, cache.layers, strict=True)
        last = self._boundaries.num_layers - 1
        return [
            pair
            for number, pair in enumerate(pairs)
            if min(number // self._caches_per_layer, last) in layers
        ]

    def _pretend(self, cache: Any, num_tokens: int) -> None:
        """Let layers of other stages have so many tokens, because some modules count them there."""
        first, end, num_layers = self._boundaries.stage
        for layers in (range(first), range(end, num_layers)) if num_tokens else ():
            for caches, layer in self._of_layers(cache, layers):
                caches.pretend(layer, num_tokens)

    def _cuts(self, part: Part) -> list[int]:
        """Numbers of tokens after which a pass ends: where states are kept, and at the end."""
        cuts = {part.num_tokens}
        for caches in self._caches:
            if caches.states is not None:
                cuts.update(tokens for tokens, _ in caches.states.plan().snapshots[part.index])
        if self._token_by_token:
            first = 1 if part.num_computed else min(cuts)
            cuts.update(range(first, part.num_tokens))
        return sorted(cuts)

    def _keep_states(self, cache: Any, part: Part, num_tokens: int) -> None:
        for caches, layer in self._of_layers(cache, self._own_layers):
            if caches.states is None:
                continue
            plan = caches.states.plan()
            for tokens, block in plan.snapshots[part.index]:
                if tokens == num_tokens:
                    caches.take_states(layer, block)
            if num_tokens == part.num_tokens:
                caches.take_states(layer, plan.block_ids[part.index])

    def _new_cache(self) -> Any:
        """Make an empty cache. Layers with a window keep all tokens; masks hide the others."""
        from transformers import cache_utils

        cache = cache_utils.DynamicCache(config=self._config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is cache_utils.DynamicSlidingWindowLayer:
                cache.layers[index] = cache_utils.DynamicLayer()
            elif type(layer) is cache_utils.LinearAttentionAndSlidingWindowAttentionLayer:
                whole = cache_utils.LinearAttentionAndFullAttentionLayer
                cache.layers[index] = whole(number_of_states=layer.number_of_states)
        return cache

    def _call(self, cache: Any, tokens: Mapping[str, torch.Tensor], positions: torch.Tensor) -> Any:
        (decoder,) = self._decoders
        given = {**tokens, "position_ids": positions} if self._gives_positions else tokens
        batched = {name: tensor[None] for name, tensor in given.items()}
        return decoder(**batched, **{self._cache_argument: cache}, use_cache=True)

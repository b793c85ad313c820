"""One request of a step after another, what transformers caches of each kept in the pool.

For modules that attend by themselves, that have masks of their own, or whose layers keep recurrent
states: they see one sequence and its cache, as in transformers' own generation.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.forward_context import RowSink, get_forward_context
from vllm.model_executor.language_part import running_config
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    LayersDoneError,
    NotServableError,
    failures_refuse,
)
from vllm.model_executor.transformers_modules.cached import LayerCaches, Part
from vllm.model_executor.transformers_modules.module_state import check_keeps_nothing
from vllm.model_executor.transformers_modules.positions import are_long, rotated_as_long

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SURVEY_TOKENS = 7
_CACHE_ARGUMENTS = ("past_key_values", "cache_params")


class OneByOne(nn.Module):
    """Runs a transformers decoder once for each request of a step.

    gives_positions: hand them over, rather than leave them to the module. token_by_token: a
    module that goes on from a cache with one token at a time only gets no more.
    """

    takes_embeddings = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        decoder: Any,
        boundaries: Boundaries,
        prefix: str,
        *,
        gives_positions: bool,
        token_by_token: bool,
    ) -> None:
        super().__init__()
        parameters = inspect.signature(decoder.forward).parameters
        names = [name for name in _CACHE_ARGUMENTS if name in parameters]
        if not names:
            raise NotServableError(f"it takes none of {', '.join(_CACHE_ARGUMENTS)}")
        self._cache_argument = names[0]
        self._gives_positions = gives_positions and "position_ids" in parameters
        self._token_by_token = token_by_token
        self._config = running_config(vllm_config.model_config)
        self._boundaries = boundaries
        cache = self._new_cache()
        positions = torch.arange(_SURVEY_TOKENS, device=next(decoder.parameters()).device)

        def run(tokens: torch.Tensor) -> None:
            nonlocal cache
            cache = self._new_cache()
            with boundaries.watch(None, None):
                given = {"input_ids": tokens[0]}
                self.output_class = type(self._call(decoder, cache, given, positions))

        with torch.inference_mode(), failures_refuse():
            check_keeps_nothing(decoder, run, _SURVEY_TOKENS)
        dtype = vllm_config.model_config.dtype
        self._caches = [
            LayerCaches(layer, _SURVEY_TOKENS, dtype, maybe_prefix(prefix, f"layers.{index}"))
            for index, layer in enumerate(cache.layers)
        ]
        self.layer_names = [name for caches in self._caches for name in caches.layer_names]
        if not self.layer_names:
            raise NotServableError("it keeps nothing in transformers' cache")

    def run(
        self,
        decoder: Any,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The decoder's last hidden states [tokens, hidden]; rows go to the context's sink."""
        request = partial(self._request, decoder)
        return run_each(request, self.layer_names[0], tokens, positions)

    def _request(
        self,
        decoder: Any,
        part: Part,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        sink: JoinedRows,
    ) -> torch.Tensor:
        cache = self._new_cache()
        if part.num_computed:
            for caches, layer in zip(self._caches, cache.layers, strict=True):
                caches.fill(layer, part)
        last = get_forward_context().num_layers_to_run
        outputs = []
        begin = 0
        for end in self._cuts(part):
            given = {name: part_of[begin:end] for name, part_of in tokens.items()}
            try:
                with self._boundaries.watch(sink, last):
                    output = self._call(decoder, cache, given, positions[begin:end])
                outputs.append(output[0][0])
            except LayersDoneError as done:
                outputs.append(done.hidden)
            self._keep_states(cache, part, end)
            begin = end
        for caches, layer in zip(self._caches[:last], cache.layers, strict=False):
            caches.take(layer, part)
        return torch.cat(outputs)

    def _cuts(self, part: Part) -> list[int]:
        """Tokens of the part after which a pass ends: where states are kept, and at its end."""
        cuts = {part.num_tokens}
        for caches in self._caches:
            if caches.states is not None:
                cuts.update(tokens for tokens, _ in caches.states.plan().snapshots[part.index])
        if self._token_by_token:
            first = 1 if part.num_computed else min(cuts)
            cuts.update(range(first, part.num_tokens))
        return sorted(cuts)

    def _keep_states(self, cache: Any, part: Part, num_tokens: int) -> None:
        last = get_forward_context().num_layers_to_run
        for caches, layer in zip(self._caches[:last], cache.layers, strict=False):
            if caches.states is None:
                continue
            plan = caches.states.plan()
            for tokens, block in plan.snapshots[part.index]:
                if tokens == num_tokens:
                    caches.take_states(layer, block)
            if num_tokens == part.num_tokens:
                caches.take_states(layer, plan.block_ids[part.index])

    def _new_cache(self) -> Any:
        """An empty one; layers with a window keep all tokens: masks hide what they do not read."""
        from transformers import cache_utils

        cache = cache_utils.DynamicCache(config=self._config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is cache_utils.DynamicSlidingWindowLayer:
                cache.layers[index] = cache_utils.DynamicLayer()
            elif type(layer) is cache_utils.LinearAttentionAndSlidingWindowAttentionLayer:
                whole = cache_utils.LinearAttentionAndFullAttentionLayer
                cache.layers[index] = whole(number_of_states=layer.number_of_states)
        return cache

    def _call(
        self,
        decoder: Any,
        cache: Any,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
    ) -> Any:
        given = {**tokens, "position_ids": positions} if self._gives_positions else tokens
        batched = {name: tensor[None] for name, tensor in given.items()}
        return decoder(**batched, **{self._cache_argument: cache}, use_cache=True)


RunRequest = Callable[[Part, dict[str, torch.Tensor], torch.Tensor, "JoinedRows"], torch.Tensor]


def run_each(
    run_request: RunRequest,
    layer_name: str,
    tokens: Mapping[str, torch.Tensor],
    positions: torch.Tensor,
) -> torch.Tensor:
    """One request of a step after another: hidden states [tokens, hidden] of the flat batch.

    layer_name: of any layer with a place in the pool. run_request: of the part that is a request's,
    its tokens, their positions and where rows go -> [tokens, hidden].
    """
    context = get_forward_context()
    layout = context.attn_metadata[layer_name].layout
    starts, lengths = (x.tolist() for x in layout.on_host())
    joined = JoinedRows(context.row_sink)
    is_long = are_long(positions)
    hidden = []
    for index, (start, end) in enumerate(pairwise(starts)):
        part = Part(index, start, lengths[index] - (end - start), end - start)
        own = {name: given[start:end] for name, given in tokens.items()}
        with rotated_as_long(None if is_long is None else is_long[start]):
            hidden.append(run_request(part, own, positions[start:end], joined))
    joined.hand_over()
    return torch.cat(hidden)


class JoinedRows(RowSink):
    """Takes the rows of all passes of one step, and hands all their rows over at the end."""

    def __init__(self, sink: RowSink | None) -> None:
        self._sink = sink
        self.layer_ids = frozenset[int]() if sink is None else sink.layer_ids
        self._rows: dict[int, list[torch.Tensor]] = defaultdict(list)

    def capture(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        assert residual is None
        self._rows[layer_id].append(hidden.clone())

    def hand_over(self) -> None:
        for layer_id, rows in self._rows.items():
            assert self._sink is not None
            self._sink.capture(layer_id, torch.cat(rows), None)

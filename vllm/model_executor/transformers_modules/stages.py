"""Pipeline stages of transformers' modules.

All stages make the whole module, so that caches and hook points have the same names everywhere;
layers of other stages have made-up values in little memory until their parameters are dropped. Then
layers before the stage hand on what they get, and a pass ends before the layers after it.

Whether layers can be divided so is not guessed: with the values that are there, the layers of the
stage run twice, behind all others and by themselves, and have to give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    LayersDoneError,
    NotServableError,
)
from vllm.model_executor.transformers_modules.references import KeptRows, Reference
from vllm.utils.boundaries import LayerId
from vllm.utils.pipeline_stage import PipelineStage

PlainPass = Callable[..., torch.Tensor | None]
"""Runs plain transformers over a prompt: ``(ids, sink, incoming)`` -> logits; None: it ended before
the head."""


class HandsOn:
    """``forward`` of a layer of an earlier stage: it returns the stream that it gets."""

    def __init__(self, output: Any) -> None:
        """output: what the layer returns when it runs."""
        self._others = None if torch.is_tensor(output) else len(output) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        return stream if self._others is None else (stream, *[None] * self._others)


class _NoEmbeddings:
    """``forward`` of embeddings that nothing reads."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._nothing = weight.new_zeros(weight.shape[1])

    def __call__(self, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        # Ids may be on the device "meta", where the weight is.
        return self._nothing.repeat(*ids.shape, 1)


class Division:
    """Lets the module run as one stage; made while all layers have values."""

    def __init__(
        self, causal_lm: Any, boundaries: Boundaries, stage: PipelineStage, run: PlainPass
    ) -> None:
        self.stage = stage
        self._causal_lm, self._boundaries, self._run = causal_lm, boundaries, run
        self._outputs: list[Any] = [None] * len(boundaries.layers)
        self._after_layers: set[nn.Module] = set()
        """Modules that are called after the last layer only."""
        self.reads_embeddings: bool | None = None if self._may_lack_embeddings() else True
        """None: it is not known yet."""

    def _may_lack_embeddings(self) -> bool:
        embeddings = self._causal_lm.get_input_embeddings()
        return not self.stage.is_first and isinstance(embeddings, nn.Embedding)

    def references(self, prompts: list[list[int]]) -> list[Reference]:
        """Run plain transformers on prompts. NotServableError: the layers cannot be divided so."""
        found = []
        for prompt in prompts:
            sink = KeptRows(self.stage.num_layers)
            streams: dict[int, torch.Tensor] = {}
            with self._noted(streams):
                logits = self._run(prompt, sink, None)
            rows = {layer_id: torch.cat(parts) for layer_id, parts in sink.rows.items()}
            last = self.stage.end_layer + self.stage.is_last
            own: dict[LayerId, torch.Tensor] = {
                i: rows[i] for i in range(self.stage.first_layer, last)
            }
            first = None if self.stage.is_first else streams[self.stage.first_layer]
            reference = Reference(own, logits if self.stage.is_last else None, first)
            if not self.stage.is_whole:
                self._check(prompt, reference, streams)
            found.append(reference)
        return found

    def _check(
        self, prompt: list[int], reference: Reference, streams: dict[int, torch.Tensor]
    ) -> None:
        """NotServableError: the stage does not compute the same by itself."""
        if self._boundaries.running != list(range(self.stage.num_layers)):
            raise NotServableError("some of its layers are skipped in texts")
        expected = reference.logits
        if expected is None:
            expected = streams[self.stage.end_layer]
        problem = ""
        known = self.reads_embeddings
        for keeps_embeddings in (False, True) if known is None else (known,):
            with self._as_stage(keeps_embeddings):
                try:
                    result = self._by_itself(prompt, reference.incoming)
                except Exception as error:
                    problem = f"they fail with {error!r}"
                    continue
            if torch.equal(result, expected):
                self.reads_embeddings = keeps_embeddings
                return
            problem = "they compute something else"
        first, end = self.stage.first_layer, self.stage.end_layer - 1
        raise NotServableError(
            f"layers {first} to {end} read more of other layers than the stream; without them "
            f"{problem}. Set VLLM_PP_LAYER_PARTITION so that such layers are in one stage"
        )

    def _by_itself(self, prompt: list[int], incoming: torch.Tensor | None) -> torch.Tensor:
        try:
            logits = self._run(prompt, None, incoming)
        except LayersDoneError as done:
            return done.hidden
        assert logits is not None
        return logits

    @contextmanager
    def _as_stage(self, keeps_embeddings: bool) -> Iterator[None]:
        whole = self._boundaries.stage
        before = self._install(keeps_embeddings)
        try:
            yield
        finally:
            for module, forward in before:
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward
            self._boundaries.stage = whole

    def _install(self, keeps_embeddings: bool) -> list[tuple[nn.Module, Any]]:
        """Let passes run this stage alone; returns modules, each with the ``forward`` that it had
        of its own; None: that of its class."""
        self._boundaries.stage = self.stage
        layers = list(enumerate(self._boundaries.layers))[: self.stage.first_layer]
        forwards: dict[nn.Module, Any] = {one: HandsOn(self._outputs[i]) for i, one in layers}
        if not keeps_embeddings:
            embeddings = self._causal_lm.get_input_embeddings()
            forwards[embeddings] = _NoEmbeddings(embeddings.weight)
        before = [(module, vars(module).get("forward")) for module in forwards]
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        return before

    def install(self) -> None:
        """Let all later passes run this stage alone."""
        self._install(bool(self.reads_embeddings))

    def kept_modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of ``model`` whose parameters this stage needs."""
        own = range(self.stage.first_layer, self.stage.end_layer)
        layers = list(enumerate(self._boundaries.layers))
        dropped = {part for index, layer in layers if index not in own for part in layer.modules()}
        if not self.reads_embeddings:
            dropped.add(self._causal_lm.get_input_embeddings())
        if not self.stage.is_last:
            dropped |= self._after_layers
        kept = {part for index, layer in layers if index in own for part in layer.modules()}
        return kept | (set(model.modules()) - dropped)

    @contextmanager
    def _noted(self, streams: dict[int, torch.Tensor]) -> Iterator[None]:
        """Note, in a pass inside the block, the stream at this stage's ends, what layers return,
        and which modules are called after them."""
        layers, boundaries = self._boundaries.layers, self._boundaries
        is_over = False
        early: set[nn.Module] = set()
        handles = []

        def before(index: int) -> Callable[..., None]:
            def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                stream = args[0] if args else kwargs.get("hidden_states")
                streams[index] = boundaries.rows_of(stream, index).clone()

            return note

        def after(index: int) -> Callable[..., None]:
            def note(module: nn.Module, args: Any, output: Any) -> None:
                nonlocal is_over
                self._outputs[index] = output if torch.is_tensor(output) else [None] * len(output)
                is_over = index == len(layers) - 1

            return note

        def called(module: nn.Module, args: Any) -> None:
            (self._after_layers if is_over else early).add(module)

        for index in {self.stage.first_layer, self.stage.end_layer} - {len(layers)}:
            hook = layers[index].register_forward_pre_hook(before(index), with_kwargs=True)
            handles.append(hook)
        handles += [layer.register_forward_hook(after(i)) for i, layer in enumerate(layers)]
        inside = set(layers.modules())
        for module in self._causal_lm.modules():
            if module not in inside:
                handles.append(module.register_forward_pre_hook(called))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._after_layers -= early

"""The decoder layers of a transformers module, and what happens between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from vllm.distributed.communicators import GroupClosedError
from vllm.forward_context import HIDDEN_STATES, Additions, RowSink
from vllm.model_executor.models.decoder_loop import steer
from vllm.utils.pipeline_stage import PipelineStage

_SURVEY_TOKENS = 3


class NotServableError(ValueError):
    """A module cannot run in some way; the user sees the reason if no way is left."""


def reads_more_than_text(model: Any) -> bool:
    """Tell whether the config describes encoders of other things than text."""
    return model.config.get_text_config(decoder=True) is not model.config


@contextmanager
def failures_refuse() -> Iterator[None]:
    """Turn any failure of a trial pass into a reason against this way."""
    try:
        yield
    except (NotServableError, GroupClosedError):  # another rank has the reason of the latter
        raise
    except Exception as error:
        raise NotServableError(f"a pass over a few tokens fails with {error!r}") from error


def drop_encoders(model: Any) -> None:
    """Leave out the parts of the model that a pass over text does not call.

    Only outer parts are considered, never those of a decoder, whose experts other texts may call.
    NotServableError: the model computes nothing from text alone.
    """
    outer = [
        (parent, name, child)
        for parent in (model, *model.children())
        for name, child in parent.named_children()
    ]
    called: set[nn.Module] = set()
    handles = [
        part.register_forward_pre_hook(lambda module, _: called.add(module))
        for _, _, child in outer
        for part in child.modules()
    ]
    ids = torch.arange(1, _SURVEY_TOKENS + 1, device=next(model.parameters()).device)[None]
    try:
        with torch.inference_mode(), failures_refuse():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for parent, name, child in outer:
        if called.isdisjoint(child.modules()):
            parent._modules[name] = nn.Identity()


class LayersDoneError(Exception):
    """Ends a forward pass before a layer that is not needed; not an error."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        """[tokens, hidden], the stream that enters that layer."""


def find_decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers: the outermost of that length whose class the model records.

    transformers names the class in ``_can_record_outputs`` or ``_no_split_modules``; without a
    name the outermost list is taken. Encoders are left aside.
    """
    text = model.get_decoder() if reads_more_than_text(model) else model
    lists = [m for m in text.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise NotServableError(
            f"{type(model).__name__} has no list of the {num_layers} decoder layers that its "
            "config counts"
        )
    named = _names_of_layer_classes(model)
    for layers in lists:
        if any(type(layer).__name__ in named for layer in layers):
            return layers
    return lists[0]


def find_decoder(model: Any, layers: nn.ModuleList) -> str:
    """Path of the innermost module around ``layers`` that gets token ids."""
    path = next(name for name, module in model.named_modules() if module is layers)
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if path and "input_ids" in inspect.signature(module.forward).parameters:
            return str(path)
    raise NotServableError("it has no decoder apart from its LM head")


def _names_of_layer_classes(model: Any) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("hidden_states")
        for one in recorded if isinstance(recorded, list) else [recorded]:
            layer_class = getattr(one, "target_class", one)
            names.add(getattr(layer_class, "__name__", ""))
    return names - {""}


class Boundaries:
    """Hands over the stream at the boundaries of decoder layers while a pass runs.

    width, dtype: those of a residual stream; several streams of a token are one row. skipped:
    layers that do not run and leave the stream as it is. Without :meth:`watch` around it, a pass
    runs as usual.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        width: int,
        dtype: torch.dtype,
        *,
        num_streams: int = 1,
        skipped: Collection[int] = (),
    ) -> None:
        self.layers = layers
        self.num_layers = len(layers)
        self.running = [index for index in range(len(layers)) if index not in skipped]
        """Indices of the layers that run."""
        self._width = width * num_streams
        self.num_streams = num_streams
        self._dtype = dtype
        self._sink: RowSink | None = None
        self._additions: Additions = {}
        self._num_layers_to_run: int | None = None
        self._layers_begun: list[int] | None = None
        self._incoming: torch.Tensor | None = None
        self.stage = PipelineStage(0, len(layers), len(layers))
        """The layers that run here; those before them hand on what they get."""
        ends = [-1, *self.running]
        for before, index in pairwise(ends):
            hook = self._before(range(before + 1, index + 1))
            layers[index].register_forward_pre_hook(hook, with_kwargs=True)
        layers[ends[-1]].register_forward_hook(self._after_last)

    @contextmanager
    def watch(
        self,
        sink: RowSink | None,
        num_layers_to_run: int | None,
        additions: Additions | None = None,
        incoming: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Watch one pass: its rows go to ``sink``, and layers from that index on do not run.
        ``additions`` are those for the tokens of the pass. incoming: the stream of the stage
        before this one, [tokens, width]. A pass that comes to the next stage's layers ends with
        LayersDoneError.

        RuntimeError: the layers did not run in their order, once each.
        """
        self._sink, self._num_layers_to_run = sink, num_layers_to_run
        self._additions = additions or {}
        self._incoming = incoming
        begun = self._layers_begun = []
        is_over = False
        try:
            yield
            is_over = True
        except LayersDoneError:
            is_over = True
            raise
        finally:
            self._sink, self._num_layers_to_run, self._layers_begun = None, None, None
            self._additions, self._incoming = {}, None
            last = self.num_layers if num_layers_to_run is None else num_layers_to_run
            own = range(self.stage.first_layer, min(last, self.stage.end_layer))
            wanted = [index for index in self.running if index in own]
            if is_over and begun != wanted:
                raise RuntimeError(f"decoder layers ran in the order {begun}, wanted {wanted}")

    @property
    def sink(self) -> RowSink | None:
        """The sink of the pass that is watched."""
        return self._sink

    @property
    def current_layer(self) -> int | None:
        """Index of the running layer; None: none has begun."""
        return self._layers_begun[-1] if self._layers_begun else None

    def _before(self, indices: range) -> Callable[..., None]:
        """Make the hook before the last of these layers; those before it do not run."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._layers_begun is None:
                return None
            if indices[-1] < self.stage.first_layer:
                return None
            stream = args[0] if args else kwargs.get("hidden_states")
            if indices[-1] >= self.stage.end_layer:
                raise LayersDoneError(self.rows_of(stream, indices[-1]))
            steered = stream
            if indices[-1] == self.stage.first_layer and self._incoming is not None:
                steered = self._like(cast(torch.Tensor, stream), self._incoming)
            for index in indices:
                steered = self._at_boundary(index, steered)
            self._layers_begun.append(indices[-1])
            if steered is stream:
                return None
            if args:
                return (steered, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": steered}

        return hook

    def _after_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._layers_begun is None:
            return None
        stream = output if torch.is_tensor(output) else output[0]
        steered = stream
        for index in range(self.running[-1] + 1, self.num_layers + 1):
            steered = self._at_boundary(index, steered)
        if steered is stream:
            return None
        return steered if torch.is_tensor(output) else (steered, *output[1:])

    def _at_boundary(self, layer_id: int, stream: Any) -> Any:
        """Return the stream, with what is added to it here."""
        additions = self._additions.get(layer_id)
        if additions:
            stream = stream.clone(memory_format=torch.contiguous_format)
            steer(additions, stream.view(-1, stream.shape[-1]), None)
        hidden = self._as_rows(stream, layer_id)
        if self._sink is not None and layer_id in self._sink.layer_ids:
            self._sink.put(HIDDEN_STATES, layer_id, hidden, None)
        if layer_id == self._num_layers_to_run:
            raise LayersDoneError(hidden)
        return stream

    def _as_rows(self, stream: Any, layer_id: int) -> torch.Tensor:
        """Return :meth:`rows_of` in the model's dtype, dense."""
        rows = self.rows_of(stream, layer_id).to(self._dtype)
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def _like(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Bring the result of :meth:`rows_of` into the shape of ``stream``."""
        if stream.dim() == 4 and len(stream) == self.num_streams and stream.shape[1] == 1:
            return rows.view(1, len(rows), self.num_streams, -1).movedim(2, 0).contiguous()
        return rows.view(stream.shape)

    def rows_of(self, stream: Any, layer_id: int) -> torch.Tensor:
        """[1, tokens, hidden] or [tokens, hidden] -> [tokens, hidden].

        With several streams: [1, tokens, streams, hidden] or [streams, 1, tokens, hidden].
        """
        if torch.is_tensor(stream) and stream.dim() == 4 and self.num_streams > 1:
            is_first = len(stream) == self.num_streams and stream.shape[1] == 1
            stream = (stream.movedim(0, 2) if is_first else stream).flatten(2)
        shape = tuple(stream.shape) if torch.is_tensor(stream) else type(stream).__name__
        if not torch.is_tensor(stream) or stream.shape[-1] != self._width:
            raise NotServableError(
                f"its stream at layer {layer_id} is {shape}, no row of {self._width} for a token"
            )
        if stream.dim() == 3 and stream.shape[0] == 1:
            stream = stream[0]
        if stream.dim() != 2:
            raise NotServableError(
                f"its stream at layer {layer_id} is {shape}: not one row a token"
            )
        rows: torch.Tensor = stream
        return rows

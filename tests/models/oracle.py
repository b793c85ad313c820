"""Hidden states and logits of transformers, taken by hooks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm import SteeringVector

_LAST_NORMS = ("norm", "final_layer_norm", "final_layernorm", "final_norm", "ln_f", "norm_f")
_LAST_NORMS += ("embedding_norm", "ln_out", "out_norm")
_LAYERS = ("layers", "h", "blocks")


class Reference(NamedTuple):
    """streams[i]: the residual stream that enters layer i ([tokens, hidden]); logits of all."""

    streams: list[torch.Tensor]
    logits: torch.Tensor
    head_input: torch.Tensor
    """[tokens, hidden]"""


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a checkpoint as its class in transformers, with plain attention."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def _decoder_of(model: Any) -> Any:
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    return getattr(decoder, "model", decoder)


@torch.no_grad()
def reference_run(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> Reference:
    """Run the checkpoint in one pass without a cache."""
    model = load_reference(folder, dtype)
    decoder = _decoder_of(model)
    streams: list[torch.Tensor] = []

    def keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def keep_output(module: Any, args: tuple[Any, ...], output: Any) -> None:
        streams.append(output[0][0].clone())

    layers = _first(decoder, *_LAYERS)
    for layer in layers:
        layer.register_forward_pre_hook(keep_input, with_kwargs=True)
    if any(hasattr(decoder, name) for name in _LAST_NORMS):
        norm = _first(decoder, *_LAST_NORMS)
        norm.register_forward_pre_hook(keep_input, with_kwargs=True)
    else:  # GPT-1
        layers[-1].register_forward_hook(keep_output)
    read: list[torch.Tensor] = []

    def keep_head_input(module: Any, args: tuple[Any, ...]) -> None:
        read.append(args[0][0].clone())

    model.get_output_embeddings().register_forward_pre_hook(keep_head_input)
    logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return Reference(streams, logits, read[0])


def _first(module: Any, *names: str) -> Any:
    """The first of the submodules that there is: families name the same thing differently."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute error over the root mean square of what is expected.

    Infinite where ``actual`` is not finite: NaN would be lost in a ``max`` over several errors.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert expected.isfinite().all(), "what is expected is not finite"
    if not actual.isfinite().all():
        return math.inf
    expected = expected.double()
    rms = expected.square().mean().sqrt()
    return ((actual.double() - expected).abs().max() / rms).item()


def place_of(name: str) -> tuple[int, str] | None:
    """The layer's number and what follows it; None: a name in no layer."""
    found = re.search(r"(?:^|\.)(\d+)\.(.+)$", name)
    return None if found is None else (int(found[1]), found[2])


def first_of(value: Any) -> torch.Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    tensor: torch.Tensor = value
    return tensor


class ModuleOracle:
    """A checkpoint in plain transformers, of which modules are read."""

    def __init__(self, folder: Path) -> None:
        self.model = load_reference(folder)
        self.modules = {
            place: module
            for name, module in self.model.named_modules()
            if (place := place_of(name)) and not re.search("vision|visual|audio", name)
        }

    @torch.no_grad()
    def run(
        self, token_ids: list[int], places: Iterable[tuple[int, str]]
    ) -> dict[tuple[int, str], tuple[torch.Tensor | None, torch.Tensor]]:
        """Input and output of modules, [tokens, width]."""
        seen: dict[tuple[int, str], tuple[torch.Tensor | None, torch.Tensor]] = {}

        def keep(place: tuple[int, str], args: Any, output: Any) -> None:
            read = args[0].flatten(0, -2).clone() if args else None
            value = first_of(output)
            seen[place] = (read, value.reshape(-1, value.shape[-1]).clone())

        handles = [
            self.modules[place].register_forward_hook(
                lambda _, args, output, place=place: keep(place, args, output)
            )
            for place in places
        ]
        self.model(input_ids=torch.tensor([token_ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        return seen


@torch.no_grad()
def steered_run(
    folder: Path, token_ids: list[int], steering: Sequence[SteeringVector], num_prompt_tokens: int
) -> list[torch.Tensor]:
    """Streams of plain transformers whose layers get what is added; the last leaves the layers."""
    model = load_reference(folder)
    layers = _first(_decoder_of(model), *_LAYERS)
    streams: list[torch.Tensor] = []

    def add(layer_id: int, stream: torch.Tensor) -> torch.Tensor:
        stream = stream.clone()
        for one in steering:
            for own, vector in zip(one.layers, one.vectors, strict=True):  # type: ignore[arg-type]
                if own != layer_id:
                    continue
                where = torch.arange(stream.shape[1])
                if one.positions == "prompt":
                    where = where[where < num_prompt_tokens]
                elif one.positions == "generated":
                    where = where[where >= num_prompt_tokens]
                elif one.positions != "all":
                    where = where[torch.isin(where, torch.tensor(list(one.positions)))]
                if vector.dim() == 2:
                    order = torch.tensor(one.positions).argsort()
                    vector = vector[order][: len(where)]
                added = one.scale * vector
                if one.norm_match:
                    norms = stream[:, where].norm(dim=-1, keepdim=True)
                    added = one.scale * norms * vector / vector.norm(dim=-1, keepdim=True)
                stream[:, where] += added
        streams.append(stream[0].clone())
        return stream

    def before(layer_id: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (add(layer_id, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": add(layer_id, kwargs["hidden_states"])}

        return hook

    def after(_: Any, args: tuple[Any, ...], output: Any) -> Any:
        stream = add(len(layers), output if torch.is_tensor(output) else output[0])
        return stream if torch.is_tensor(output) else (stream, *output[1:])

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before(index), with_kwargs=True)
    layers[-1].register_forward_hook(after)
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return [*streams, logits]

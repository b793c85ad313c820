"""Hidden states and logits of transformers, taken by hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LAST_NORMS = ("norm", "final_layer_norm", "final_layernorm", "final_norm", "ln_f", "norm_f")
_LAST_NORMS += ("embedding_norm", "ln_out", "out_norm")


class Reference(NamedTuple):
    """streams[i]: the residual stream that enters layer i ([tokens, hidden]); logits of all."""

    streams: list[torch.Tensor]
    logits: torch.Tensor
    head_input: torch.Tensor
    """[tokens, hidden]"""


@torch.no_grad()
def reference_run(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> Reference:
    """Run the checkpoint in one pass without a cache."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    decoder = model.get_decoder()
    if hasattr(decoder, "language_model"):
        decoder = decoder.language_model
    decoder = getattr(decoder, "model", decoder)
    streams: list[torch.Tensor] = []

    def keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def keep_output(module: Any, args: tuple[Any, ...], output: Any) -> None:
        streams.append(output[0][0].clone())

    layers = _first(decoder, "layers", "h", "blocks")
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

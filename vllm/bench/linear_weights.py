"""The weights of a model's matrix products, and the products alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Literal, get_args

import torch
from torch.nn import functional

from vllm.ops.linear import linear, make_panels

Form = Literal["plain order", "oneDNN's order", "panels"]
"""Orders of a weight in memory: two for torch's products, and the panels of this engine."""

_LAYER_WEIGHT = re.compile(r"(?:model|language_model|backbone)\.layers\.(\d+)\.(.+)\.weight$")
_JOINED_WITH = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "linear_attn.in_proj_z": "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_b": "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_a": "linear_attn.in_proj_qkv",
    "mlp.up_proj": "mlp.gate_proj",
    "mixer.k_proj": "mixer.q_proj",
    "mixer.v_proj": "mixer.q_proj",
}
_EMBEDDINGS = ("embed_tokens", "embeddings")
_TRIALS = 5
_ROWS_OF_A_CHUNK = 512


@dataclass(frozen=True)
class LinearWeights:
    """``layers``: the weights of the products in order; ``head``: the LM head's weight."""

    layers: list[torch.Tensor]
    shapes: list[torch.Size]
    """Shapes of ``layers`` in plain order, whatever the form."""
    head: torch.Tensor
    form: Form = "plain order"

    @property
    def num_elements(self) -> int:
        return sum(shape.numel() for shape in self.shapes) + self.head.numel()

    @property
    def widths(self) -> set[int]:
        """The numbers of columns that inputs must have."""
        return {shape[1] for shape in (*self.shapes, self.head.shape)}

    @property
    def max_width(self) -> int:
        return max(self.widths)

    def multiply_layers(self, inputs: Mapping[int, torch.Tensor], num_rows: int) -> None:
        """Compute all products of the layers; inputs: width -> [rows, width]."""
        for weight, (columns, width) in zip(self.layers, self.shapes, strict=True):
            x = inputs[width][:num_rows]
            if weight.is_mkldnn:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            elif weight.dim() == 4:
                linear(x, weight, None, x.new_empty((num_rows, columns)))
            else:
                functional.linear(x, weight)

    def multiply_head(self, inputs: Mapping[int, torch.Tensor], num_rows: int) -> None:
        """Compute the product of the LM head."""
        functional.linear(inputs[self.head.shape[1]][:num_rows], self.head)

    def in_form(self, form: Form) -> LinearWeights:
        """Return the weights in another order; a weight without that order stays as it is."""
        if form == self.form:
            return self
        pack = make_panels if form == "panels" else _in_onednn_order
        return replace(self, layers=[pack(weight) for weight in self.layers], form=form)

    @torch.inference_mode()
    def fastest_form(self, inputs: Mapping[int, torch.Tensor]) -> Form:
        """Return the order in which the first few products are fastest; inputs: width ->
        [rows, width].

        An order that takes more than twice the time of another is tried only once: torch emulates
        16-bit products if the CPU, or a cap on its instruction set, has none.
        """
        some = replace(self, layers=self.layers[:8], shapes=self.shapes[:8])
        forms: tuple[Form, ...] = get_args(Form)
        candidates = [some.in_form(form) for form in forms]
        seconds = {form: float("inf") for form in forms}
        for trial in range(_TRIALS):
            for candidate in candidates:
                if trial > 0 and seconds[candidate.form] > 2 * min(seconds.values()):
                    continue
                start = perf_counter()
                candidate.multiply_layers(inputs, len(inputs[self.max_width]))
                elapsed = perf_counter() - start
                seconds[candidate.form] = min(seconds[candidate.form], elapsed)
        return min(forms, key=seconds.__getitem__)


def load_linear_weights(
    checkpoint: Path, num_layers: int | None = None, dtype: torch.dtype | None = None
) -> LinearWeights:
    """Load the matrices of the first ``num_layers`` decoder layers (None: all) and the LM head.

    dtype: data type of all of them; None: the checkpoint's.
    """
    from safetensors import safe_open

    parts: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    heads: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(("lm_head.weight", *(f"{table}.weight" for table in _EMBEDDINGS))):
                    heads[name.split(".")[-2]] = file.get_tensor(name)
                found = _LAYER_WEIGHT.search(name)
                if found is None or (num_layers is not None and int(found[1]) >= num_layers):
                    continue
                tensor = file.get_tensor(name)
                if tensor.dim() == 2:
                    parts[int(found[1]), _JOINED_WITH.get(found[2], found[2])].append(tensor)
    if not parts or not heads:
        raise ValueError(
            f"{checkpoint}: no safetensors files with weights of layers and embeddings"
        )
    layers = [torch.cat(parts.pop(key)).to(dtype) for key in sorted(parts)]
    shapes = [layer.shape for layer in layers]
    head = next(heads[name] for name in ("lm_head", *_EMBEDDINGS) if name in heads).to(dtype)
    return LinearWeights(layers, shapes, head)


def _in_onednn_order(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a weight for torch's own products; unchanged if torch has no such order for it."""
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_OF_A_CHUNK)
    except RuntimeError:
        return weight
    return packed

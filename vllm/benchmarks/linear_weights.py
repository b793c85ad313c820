"""The weights of a model's matrix products, and the products by themselves."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

Form = Literal["plain order", "packed order"]

_LAYER_WEIGHT = re.compile(r"(?:model|language_model)\.layers\.(\d+)\.(.+)\.weight$")
_JOINED_WITH = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "linear_attn.in_proj_z": "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_b": "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_a": "linear_attn.in_proj_qkv",
    "mlp.up_proj": "mlp.gate_proj",
}
_TRIALS = 5


@dataclass(frozen=True)
class LinearWeights:
    """``layers``: the weights of one product after another; ``head``: the LM head's."""

    layers: list[torch.Tensor]
    head: torch.Tensor
    form: Form = "plain order"

    @property
    def num_elements(self) -> int:
        return sum(weight.numel() for weight in self.layers) + self.head.numel()

    @property
    def widths(self) -> set[int]:
        """Every number of columns that an input has to have."""
        return {weight.shape[1] for weight in (*self.layers, self.head)}

    @property
    def max_width(self) -> int:
        return max(self.widths)

    def multiply_layers(self, inputs: Mapping[int, torch.Tensor], num_rows: int) -> None:
        """All products of the layers; inputs: width -> [rows, width]."""
        from vllm.kernels import get_kernels

        linear = functional.linear if self.form == "plain order" else get_kernels("cpu").linear
        for weight in self.layers:
            linear(inputs[weight.shape[1]][:num_rows], weight)

    def multiply_head(self, inputs: Mapping[int, torch.Tensor], num_rows: int) -> None:
        """The product of the LM head."""
        functional.linear(inputs[self.head.shape[1]][:num_rows], self.head)

    def in_form(self, form: Form) -> LinearWeights:
        """The same weights in another order; a weight without that order stays as it is."""
        if form == self.form:
            return self
        from vllm.kernels import get_kernels

        packed = [get_kernels("cpu").pack_weight(weight) for weight in self.layers]
        layers = [w if p is None else p for w, p in zip(self.layers, packed, strict=True)]
        return replace(self, layers=layers, form=form)

    @torch.inference_mode()
    def fastest_form(self, inputs: Mapping[int, torch.Tensor]) -> Form:
        """The order in which the first few products are faster; inputs: width -> [rows, width]."""
        some = replace(self, layers=self.layers[:8])
        forms: tuple[Form, Form] = ("plain order", "packed order")
        candidates = [some.in_form(form) for form in forms]
        seconds = {form: float("inf") for form in forms}
        for _ in range(_TRIALS):
            for candidate in candidates:
                start = time.perf_counter()
                candidate.multiply_layers(inputs, len(inputs[self.max_width]))
                elapsed = time.perf_counter() - start
                seconds[candidate.form] = min(seconds[candidate.form], elapsed)
        return min(forms, key=seconds.__getitem__)


def load_linear_weights(checkpoint: Path, num_layers: int | None = None) -> LinearWeights:
    """The matrices of the first ``num_layers`` decoder layers (None: all), and the LM head's."""
    from safetensors import safe_open

    parts: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    heads: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(("lm_head.weight", "embed_tokens.weight")):
                    heads[name.split(".")[-2]] = file.get_tensor(name)
                found = _LAYER_WEIGHT.search(name)
                if found is None or (num_layers is not None and int(found[1]) >= num_layers):
                    continue
                tensor = file.get_tensor(name)
                if tensor.dim() == 2:
                    parts[int(found[1]), _JOINED_WITH.get(found[2], found[2])].append(tensor)
    if not parts or not heads:
        raise ValueError(
            f"{checkpoint}: no safetensors files with model.layers.*.weight and embed_tokens.weight"
        )
    layers = [torch.cat(parts[key]) for key in sorted(parts)]
    return LinearWeights(layers, heads.get("lm_head", heads["embed_tokens"]))

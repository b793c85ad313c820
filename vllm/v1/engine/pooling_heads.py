"""Heads of checkpoints other than the LM head: classes or values, from the state after the norm.

The model does not run them. They are small, so the front end reads them and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from vllm.config.model_facts import config_value
from vllm.utils.text import brief

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HeadKind = Literal["sequence", "token", "value"]
Activation = Callable[[torch.Tensor], torch.Tensor]
_ROWS_AT_ONCE = 256
_SOFTMAX = partial(torch.softmax, dim=-1)
_BY_PROBLEM: dict[str, Activation | None] = {
    "single_label_classification": _SOFTMAX,
    "multi_label_classification": torch.sigmoid,
    "regression": None,
}
_STORED: dict[str, Activation | None] = {
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.Softmax": _SOFTMAX,
}
"""Activations of sentence-transformers, by the class that its configs name."""
_WANTED = (
    "it takes checkpoints of *ForSequenceClassification or *ForTokenClassification with "
    "score.weight or classifier.weight, and causal ones with TRL's v_head.summary.weight"
)


@dataclass(frozen=True)
class Head:
    """A linear layer with an output per label."""

    kind: HeadKind
    weight: torch.Tensor
    """float64 [labels, hidden]"""
    bias: torch.Tensor | None
    labels: tuple[str | None, ...]
    activation: Activation | str | None
    """Makes probabilities of scores; None: the scores are the result; a text: the reason why it is
    not known."""
    pad_token_id: int | None
    input_scale: float = 1.0
    """Factor from the state that the LM head reads to the state that this head reads."""

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 [rows, labels] of float32 [rows, hidden].

        In float64, because the last bits of a product depend on the number of its rows.
        """
        parts = (part.double() * self.input_scale for part in torch.split(rows, _ROWS_AT_ONCE))
        return torch.cat([functional.linear(one, self.weight, self.bias) for one in parts]).float()

    def positions(self, token_ids: list[int]) -> list[int]:
        """Return the position that the head reads: the last one that is not padding, as in
        transformers."""
        last = len(token_ids) - 1
        pad = self.pad_token_id
        if self.kind != "sequence" or pad is None or pad < 0:
            return [last]
        return [next((i for i in range(last, -1, -1) if token_ids[i] != pad), 0)]


def read_head(vllm_config: VllmConfig) -> Head:
    """Read the head of the checkpoint; raises ValueError if it has none that is known."""
    from vllm.model_executor.model_loader.checkpoint import (
        checkpoint_folder,
        iterate_weights,
        stored_names,
    )
    from vllm.model_executor.model_loader.weight_utils import check_dtype
    from vllm.model_executor.models.utils import BEFORE_CLASSIFIERS, CLASSIFIERS, VALUE_HEAD
    from vllm.utils.weight_files import find_weight_files

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    if load_config.load_format == "dummy":
        raise ValueError("load_format='dummy' gives no head for classes or values")
    kind = _kind_of(model_config.architectures)
    prefixes = (f"{VALUE_HEAD}summary.",) if kind == "value" else CLASSIFIERS
    folder = checkpoint_folder(model_config, load_config, fetches=False)
    files = find_weight_files(folder, load_config.load_format)
    of_head = prefixes if kind == "value" else (*prefixes, *BEFORE_CLASSIFIERS)
    names = sorted({name for name in stored_names(files) if name.startswith(of_head)})
    leaves = [{name.removeprefix(prefix) for name in names} for prefix in prefixes]
    if {"weight"} not in leaves and {"weight", "bias"} not in leaves:
        found = f"no {' or '.join(f'{prefix}*' for prefix in prefixes)}"
        if names:
            found = f"{', '.join(names)}, which is no head that this engine knows"
        raise ValueError(
            f"architectures={model_config.architectures}: the checkpoint has {found}; {_WANTED}"
        )
    tensors = dict(iterate_weights(files, names.__contains__))
    for name, tensor in tensors.items():
        check_dtype(name, tensor)
        if not tensor.isfinite().all():
            raise ValueError(f"the head {name} has values that are not finite")
    read = {name.rpartition(".")[2]: tensor.double() for name, tensor in tensors.items()}
    weight, bias = read["weight"], read.get("bias")
    hf_config, text_config = model_config.hf_config, model_config.hf_text_config
    num_labels = 1 if kind == "value" else int(hf_config.num_labels)
    expected = (num_labels, model_config.get_hidden_size())
    if tuple(weight.shape) != expected or (bias is not None and bias.shape != expected[:1]):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(
            f"the head {shapes} does not fit config.json: num_labels={num_labels}, "
            f"hidden_size={expected[1]}"
        )
    labels = {int(index): str(label) for index, label in (hf_config.id2label or {}).items()}
    base = config_value(text_config, ("dim_model_base",))  # of MiniCPM3, before its LM head only
    return Head(
        kind,
        weight,
        bias,
        (None,) if kind == "value" else tuple(labels.get(index) for index in range(num_labels)),
        None if kind == "value" else _activation(hf_config, num_labels),
        config_value(text_config, ("pad_token_id",)),
        1.0 if base is None else expected[1] / base,
    )


def _kind_of(architectures: list[str]) -> HeadKind:
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return "sequence"
    if any(name.endswith("ForTokenClassification") for name in architectures):
        return "token"
    return "value"


def _activation(hf_config: Any, num_labels: int) -> Activation | str | None:
    """Choose what makes probabilities: what sentence-transformers stored, or the problem."""
    stored = config_value(hf_config, ("sentence_transformers",))
    name = stored.get("activation_fn") if isinstance(stored, dict) else None
    name = name or config_value(hf_config, ("sbert_ce_default_activation_function",))
    problem = hf_config.problem_type
    for key, value, known in (
        ("sentence_transformers.activation_fn", name, _STORED),
        ("problem_type", problem, _BY_PROBLEM),
    ):
        if value and value not in known:
            return f"config.json: {key}={brief(value)}: known are {', '.join(known)}"
    if name:
        return _STORED[name]
    return None if num_labels == 1 else _BY_PROBLEM[problem or "single_label_classification"]

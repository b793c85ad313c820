"""Cuts a module of transformers over the tensor-parallel ranks, by the plan that it declares.

transformers names for linear layers, embeddings and experts how ranks share them ("colwise",
"rowwise", ...). What the plan does not name is whole on every rank. The values of a model that is
cut are compared with those of the whole one when it is loaded, so a plan that is not right for our
parts is refused.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import divide
from vllm.model_executor.layers.weight import Weight, find_weight
from vllm.model_executor.transformers_modules.experts import TransformersExperts
from vllm.model_executor.transformers_modules.made_up import is_made_up, made_up
from vllm.model_executor.transformers_modules.mlps import SharedMLP
from vllm.model_executor.transformers_modules.parts import LinearCut, PanelLinear

_BY_OUTPUTS = ("colwise", "packed_colwise")
_BY_INPUTS = ("rowwise", "packed_rowwise")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_EXPERTS = "moe_tp_experts"
_VOCABULARY = "embedding_rowwise"
_WHOLE = (
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_identity_expert",
    "embedding_colwise", "local_params",
)  # fmt: skip
_KNOWN = frozenset(
    {*_BY_OUTPUTS, *_BY_INPUTS, *_GATHERED, *_SPLIT_INPUT, _EXPERTS, _VOCABULARY, *_WHOLE}
)
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
"""Attributes of attention modules with the number of their heads."""

Runs = tuple[tuple[int, int], ...]
"""First row and number of rows of each part."""


class CutEmbedding:
    """``forward`` of an embedding of which this rank has some rows."""

    def __init__(self, module: Any, first: int, count: int) -> None:
        self._plain = module.forward
        self._first, self._count = first, count
        self.is_muted = False
        """True while nothing reads what it returns, and other ranks do not call it."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., width]."""
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self._count)
        rows: torch.Tensor = self._plain(local.masked_fill(elsewhere, 0))
        rows = rows.masked_fill(elsewhere[..., None], 0)
        return rows if self.is_muted else tensor_model_parallel_all_reduce(rows)


def cut_modules(model: Any, layers: nn.ModuleList) -> list[CutEmbedding]:
    """Cut what the plan of ``model`` names; returns its embeddings that are cut.

    ValueError: it has no plan for its layers, an unknown one, or sizes that do not divide.
    """
    plan = dict(getattr(model, "_tp_plan", None) or {})
    unknown = sorted({kind for kind in plan.values() if kind not in _KNOWN})
    if unknown:
        raise ValueError(f"its plan in transformers has kinds that are not known: {unknown}")
    cutter = _Cutter(model, plan)
    cutter.cut_all()
    if cutter.done.isdisjoint(layers.modules()):
        raise ValueError("transformers has no tensor-parallel plan for its layers")
    _give_own_memory(model)
    return cutter.embeddings


def _give_own_memory(model: nn.Module) -> None:
    """Copy what is whole on every rank out of larger memory, like that of a mapped file."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().nbytes() > tensor.nbytes and not is_made_up(tensor):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


class _Cutter:
    def __init__(self, model: Any, plan: dict[str, str]) -> None:
        self.ranks = get_tensor_model_parallel_world_size()
        self.rank = get_tensor_model_parallel_rank()
        self.done: set[nn.Module] = set()
        self.embeddings: list[CutEmbedding] = []
        self._paths = {module: path for path, module in model.named_modules()}
        self._parents = {
            child: (parent, name)
            for parent in model.modules()
            for name, child in parent.named_children()
        }
        self._made: dict[tuple[int, Any], nn.Parameter] = {}  # some parameters are tied
        self._old: list[nn.Parameter] = []  # their addresses are keys
        patterns = [(_pattern(name), kind) for name, kind in plan.items()]
        names = [*self._paths.values(), *(name for name, _ in model.named_parameters())]
        self._kinds = {
            name: kind for name in names for pattern, kind in patterns if pattern.fullmatch(name)
        }
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())

    def cut_all(self) -> None:
        modules = [(one, self._kinds.get(path)) for one, path in self._paths.items()]
        for module, _ in modules:
            shared = vars(module).get("forward")
            if isinstance(shared, SharedMLP):
                self._cut_mlp(shared)
        for module, kind in modules:
            if kind is None or module in self.done:
                continue
            if kind == _EXPERTS:
                experts = getattr(module, "engine_experts", None)
                if isinstance(experts, TransformersExperts):  # others stay whole
                    self._cut_experts(experts, self._paths[module])
            elif kind == _VOCABULARY:
                if isinstance(module, nn.Embedding):
                    self._cut_embedding(module)
            elif kind not in _WHOLE:
                self._cut_linear(module, kind)
        for name, kind in self._kinds.items():
            if name in self._parameters and kind not in _WHOLE:
                self._cut_vector(name, kind)

    def _cut_mlp(self, shared: SharedMLP) -> None:
        """Cut an MLP whose products the plan names, whatever it says of their results."""
        products = (*shared.inner, shared.down)
        kinds = [self._kinds.get(self._paths[one]) for one in products]
        if any(kind is None or kind in _WHOLE for kind in kinds):
            return
        width = self._divide(shared.down.in_features, shared.down, "inner width")
        first = self.rank * width
        for linear in shared.inner:
            parts = linear.out_features // shared.down.in_features or 1
            size = linear.out_features // parts
            runs = tuple((part * size + first, width) for part in range(parts))
            self._take_rows(linear, runs)
        self._take_columns(shared.down, first, width)
        shared.down.cut = LinearCut(reduces=True)

    def _cut_experts(self, experts: TransformersExperts, path: str) -> None:
        ups, downs = (cast(list[PanelLinear], list(one)) for one in (experts.up, experts.down))
        whole = downs[0].in_features
        width = divide(whole, self.ranks, f"the width of the experts of {path!r}")
        first = self.rank * width
        for up, down in zip(ups, downs, strict=True):
            parts = range(up.out_features // whole)
            self._take_rows(up, tuple((part * whole + first, width) for part in parts))
            self._take_columns(down, first, width)
        experts.is_cut = True

    def _cut_embedding(self, embedding: Any) -> None:
        first, count, padded = self._share(embedding.weight.shape[0])
        weight = self._slice(embedding.weight, ((first, count),), None, padded)
        embedding.weight, embedding.padding_idx = weight, None
        cut = CutEmbedding(embedding, first, count)
        vars(embedding)["forward"] = cut
        self.embeddings.append(cut)
        self.done.add(embedding)

    def _cut_linear(self, linear: nn.Module, kind: str) -> None:
        path = self._paths[linear]
        if type(linear) is not PanelLinear:
            raise ValueError(f"{path!r} is a {type(linear).__name__}, which is not cut ({kind})")
        if kind in _GATHERED:
            total = linear.out_features
            first, count, padded = self._share(total)
            self._take_rows(linear, ((first, count),), padded)
            linear.out_features = total
            linear.cut = LinearCut(gathers=total)
        elif kind in _SPLIT_INPUT:
            if linear.in_features % self.ranks:
                return  # its input is whole
            width = linear.in_features // self.ranks
            self._take_columns(linear, self.rank * width, width)
            linear.cut = LinearCut(reduces=True, first_column=self.rank * width)
        elif kind in _BY_INPUTS:
            width = self._divide(linear.in_features, linear, "inputs")
            self._take_columns(linear, self.rank * width, width)
            linear.cut = LinearCut(reduces=True)
        else:
            self._cut_outputs(linear)

    def _cut_outputs(self, linear: PanelLinear) -> None:
        """Cut by heads if there are any. Ranks share a head of keys and values if there are more
        ranks than heads."""
        parent, name = self._parents[linear]
        size, total = getattr(parent, "head_dim", None), linear.out_features
        heads = next((h for h in (getattr(parent, n, None) for n in _HEADS) if h), None)
        units = total
        if name in ("q_proj", *_KEYS_AND_VALUES) and isinstance(size, int) and total % size == 0:
            units = total // size
        elif isinstance(heads, int) and total % heads == 0:
            units = heads
        if name in _KEYS_AND_VALUES and units < self.ranks and self.ranks % units == 0:
            width, sharing = total // units, self.ranks // units
            self._take_rows(linear, ((self.rank // sharing * width, width),))
            groups = getattr(parent, "num_key_value_groups", None)
            if isinstance(groups, int) and name == "k_proj":
                cast(Any, parent).num_key_value_groups = max(1, groups // sharing)
            return
        width = self._divide(units, linear, "heads" if units < total else "outputs")
        width *= total // units
        self._take_rows(linear, ((self.rank * width, width),))

    def _cut_vector(self, name: str, kind: str) -> None:
        """Cut a parameter with an entry for each head."""
        parameter = self._parameters[name]
        path, _, last = name.rpartition(".")
        owner = next(module for module, its in self._paths.items() if its == path)
        if self._kinds.get(path) == _EXPERTS or getattr(owner, last, None) is not parameter:
            return
        if parameter.dim() != 1 or kind not in _BY_OUTPUTS:
            raise ValueError(f"{name!r} of {tuple(parameter.shape)} is not cut ({kind})")
        width = divide(len(parameter), self.ranks, f"the entries of {name!r}")
        part = parameter.data.narrow(0, self.rank * width, width).clone()
        setattr(owner, last, nn.Parameter(part, requires_grad=False))

    def _divide(self, total: int, linear: PanelLinear, what: str) -> int:
        return divide(total, self.ranks, f"the {what} of {self._paths[linear]!r}")

    def _share(self, total: int) -> tuple[int, int, int]:
        """First row, number of rows, and rows that every rank has with those past the end."""
        padded = -(-total // self.ranks)
        first = min(self.rank * padded, total)
        return first, min(padded, total - first), padded

    def _take_rows(self, linear: PanelLinear, runs: Runs, padded: int | None = None) -> None:
        linear.weight = self._slice(linear.rows.parameter, runs, None, padded)
        if linear.bias is not None:
            linear.bias = self._slice(linear.bias, runs, None, padded)
        linear.out_features = len(linear.rows.parameter)
        self.done.add(linear)

    def _take_columns(self, linear: PanelLinear, first: int, count: int) -> None:
        linear.weight = self._slice(linear.rows.parameter, None, (first, count))
        if self.rank:
            linear.bias = None
        linear.in_features = count
        self.done.add(linear)

    def _slice(
        self,
        parameter: nn.Parameter,
        runs: Runs | None,
        columns: tuple[int, int] | None,
        padded: int | None = None,
    ) -> nn.Parameter:
        key = (id(parameter), (runs, columns, padded))
        if key not in self._made:
            data = parameter.data
            parts = [data] if runs is None else [data.narrow(0, *run) for run in runs]
            part = torch.cat(parts) if len(parts) > 1 and not is_made_up(data) else parts[0]
            length = sum(len(one) for one in parts) if padded is None else padded
            if columns is not None:
                part = part.narrow(1, *columns)
            if is_made_up(data):
                part = made_up(torch.Size((length, *part.shape[1:])), data.dtype)
            elif len(part) < length:
                part = torch.cat((part, part.new_zeros(length - len(part), *part.shape[1:])))
            else:
                part = part.clone(memory_format=torch.contiguous_format)
            made = nn.Parameter(part, requires_grad=False)
            weight = find_weight(parameter)
            if weight is not None:
                Weight(made, stays_in_rows=weight.stays_in_rows)
            self._made[key] = made
            self._old.append(parameter)
        return self._made[key]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", "[^.]+"))

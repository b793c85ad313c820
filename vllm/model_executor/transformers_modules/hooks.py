"""Hook points of a module of transformers: its submodules, by their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vllm.model_executor.hook_points import HookPoint, first_tensor
from vllm.v1.rows.fields.activations import HookForm

_NUM_TOKENS = (5, 11)
"""Tokens of the passes that show shapes."""
_ATTENTIONS = ("self_attn", "attn", "attention", "self_attention")
_MLPS = ("mlp", "feed_forward", "ffn")


def find_module_points(
    layers: Iterable[nn.Module], names: Mapping[nn.Module, str], run: Callable[[int], None]
) -> Iterator[HookPoint]:
    """Yield the points in decoder layers; ``run`` runs a pass over so many tokens, to see shapes.

    names: paths of all modules. These have no points: parts of a module whose ``forward`` was
    replaced, because they do not run; modules that run more than once in a pass; and what is
    inside of experts, which see some of the tokens.
    """
    layers = list(layers)
    inside = {
        module: (index, layer)
        for index, layer in enumerate(layers)
        for module in _running_parts(layer)
    }
    first, second = (_forms_in_pass(inside, run, count) for count in _NUM_TOKENS)
    added = _added_branches(layers, run)
    for module, (index, layer) in inside.items():
        form = first.get(module)
        if form is not None and form == second.get(module):
            own = (*_names_in_block(layer, module, names, module in added), names[module])
            yield HookPoint(own, index + 1, form, module)


def _forms_in_pass(
    modules: Iterable[nn.Module], run: Callable[[int], None], num_tokens: int
) -> dict[nn.Module, HookForm | None]:
    """Return the forms of what modules return in a pass; None: it is not a row for each token."""
    forms: dict[nn.Module, HookForm | None] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        form = _form_of(first_tensor(output), num_tokens)
        forms[module] = None if module in forms else form

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        run(num_tokens)
    finally:
        for handle in handles:
            handle.remove()
    return forms


def _added_branches(
    layers: Iterable[nn.Module], run: Callable[[int], None]
) -> frozenset[nn.Module]:
    """Return the attentions and MLPs whose output is what the layer adds to the stream.

    The output of the others is the layer's own, or goes into another part of the layer as it is:
    it is the stream already (BLOOM's parts add it themselves), or a norm follows. A branch that
    returns one of its parameters, too, leaves it to the layer to add it: GPT-NeoX-Japanese's bias.
    """
    returned: dict[nn.Module, torch.Tensor] = {}
    others: set[nn.Module] = set()

    def note(branch: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_tensor(value := first_tensor(output)):
            returned[branch] = value.flatten().clone()
        if isinstance(output, tuple) and any(isinstance(one, nn.Parameter) for one in output):
            others.add(branch)

    def compare(branches: list[nn.Module], *values: Any) -> None:
        if torch.is_tensor(value := first_tensor(values)) and value.is_floating_point():
            flat = value.flatten()
            others.update(one for one in branches if one in returned and flat.equal(returned[one]))

    handles = []
    for layer in layers:
        children = dict(layer.named_children())
        branches = [children[name] for name in (*_ATTENTIONS, *_MLPS) if name in children]
        for child in children.values():
            if isinstance(child, nn.Dropout | nn.Identity):
                continue

            def before(
                module: nn.Module,
                args: tuple[Any, ...],
                options: dict[str, Any],
                branches: list[nn.Module] = branches,
            ) -> None:
                rest = [branch for branch in branches if branch is not module]
                compare(rest, *args, *options.values())

            handles.append(child.register_forward_pre_hook(before, with_kwargs=True))

        def behind(
            module: nn.Module, args: Any, output: Any, branches: list[nn.Module] = branches
        ) -> None:
            compare(branches, output)

        handles += [branch.register_forward_hook(note) for branch in branches]
        handles.append(layer.register_forward_hook(behind))
    try:
        run(_NUM_TOKENS[0])
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(returned) - others


def _running_parts(layer: nn.Module) -> Iterator[nn.Module]:
    for name, child in layer.named_children():
        yield child
        if "forward" not in vars(child) and name != "experts":
            yield from _running_parts(child)


def _form_of(value: Any, num_tokens: int) -> HookForm | None:
    """Return the form of [1, tokens, width] or [tokens, width]; None: it is something else."""
    is_floats = torch.is_tensor(value) and value.is_floating_point()
    if not is_floats or value.dim() not in (2, 3) or (value.dim() == 3 and len(value) != 1):
        return None
    return HookForm(value.shape[-1], value.dtype) if value.shape[-2] == num_tokens else None


def _names_in_block(
    layer: nn.Module, module: nn.Module, names: Mapping[nn.Module, str], is_added: bool
) -> Iterator[str]:
    """Yield TransformerLens' names of a child of a layer; is_added: to the stream, as it is."""
    path = names[module].removeprefix(names[layer] + ".")
    block = f"blocks.{names[layer].rpartition('.')[2]}"
    for kind, usual in (("attn", _ATTENTIONS), ("mlp", _MLPS)):
        if path in usual:
            yield f"{block}.{kind}.hook_out"
            if is_added:
                yield f"{block}.hook_{kind}_out"

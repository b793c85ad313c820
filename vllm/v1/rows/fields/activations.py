"""Activations: values at hook points inside decoder layers, and the stream by hooks' names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.forward_context import HIDDEN_STATES
from vllm.utils.boundaries import LayerId
from vllm.utils.text import brief
from vllm.v1.rows.fields.layout import Cells, Field, TensorForm

_IN_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
HOOKS = "hooks"
"""The source: values at hook points, put under the first name of the point."""


class HookForm(NamedTuple):
    """The form of a token's values at a hook point."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Activation(Field):
    """The values at one hook point; its tensor has the name by which it was requested."""

    name: ClassVar[str] = "activations"
    source: ClassVar[str] = HOOKS
    tensor_names: ClassVar[tuple[str, ...]] = ()

    requested: str
    """Name of the tensor."""
    point: str
    """First name of the hook point."""
    depth: int
    """Decoder layers that have to run for it."""
    form: HookForm
    stored: torch.dtype
    """Dtype on the host."""

    @property
    def cells(self) -> Cells:
        return Cells(self.form.dtype, 1, self.form.width)

    @property
    def indexes(self) -> Sequence[LayerId]:
        return (self.point,)

    def columns_of(self, index: LayerId) -> Sequence[int]:
        return (0,) if index == self.point else ()

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take one tensor, [tokens, width]."""
        return values[0], None

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        return {self.requested: TensorForm(self.stored, (self.form.width,))}

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.requested: cells[:, 0].to(self.stored)}

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        """Find a row that is not finite. All values of a row may be zero."""
        bad = (~tensors[self.requested].isfinite()).any(-1).nonzero()
        if not len(bad):
            return None
        message = f"{self.requested} of token {positions[int(bad[0, 0])]} is not finite"
        if self.stored is torch.float16:
            message += " (as float16, which ends at 65,504)"
        return Failure(FailureKind.ROWS_NOT_FINITE, message)


@dataclass(frozen=True)
class StreamActivation(Activation):
    """The stream at the boundary ``depth``, by the name of a hook point."""

    source: ClassVar[str] = HIDDEN_STATES

    @property
    def boundaries(self) -> frozenset[LayerId]:
        return frozenset((self.depth,))

    @property
    def indexes(self) -> Sequence[LayerId]:
        return (self.depth,)

    def columns_of(self, index: LayerId) -> Sequence[int]:
        return (0,) if index == self.depth else ()

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, residual = values
        return hidden.to(self.form.dtype), residual


_SAMPLE_NAMES = "'blocks.3.hook_attn_out' or 'model.layers.3.mlp'"


def is_hook_name(name: str) -> bool:
    """Tell whether a tensor is named after a hook point. No other field's name has a dot."""
    return "." in name


def checked_hooks(hooks: object) -> tuple[str, ...]:
    """Return the names of hook points, each once. ValueError: they are not names."""
    names = [hooks] if isinstance(hooks, str) else [] if hooks is None else hooks
    if not isinstance(names, list | tuple):
        raise ValueError(f"hooks={brief(hooks)}: has to be a list of names such as {_SAMPLE_NAMES}")
    for name in names:
        if not isinstance(name, str) or not is_hook_name(name):
            raise ValueError(
                f"hooks={brief(hooks)}: {brief(name)} is not the name of a hook point; use names "
                f"such as {_SAMPLE_NAMES} (all: vllm models MODEL --hooks)"
            )
    return tuple(dict.fromkeys(cast("list[str]", names)))


def layer_of(path: str) -> int | None:
    """Return the number of the decoder layer in a module's path; None: it is in none."""
    found = _IN_LAYER.search(path)
    return None if found is None else int(found[1])


Place = tuple[int, str]
"""Number of a layer, and the rest of a name after it."""


def place_of(name: str) -> Place:
    """Return the number of the layer in a name, -1 if there is none, and the rest after it."""
    found = _IN_LAYER.search(name)
    return (-1, name) if found is None else (int(found[1]), name[found.end() :])

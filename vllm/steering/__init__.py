"""Steering: vectors that are added to the residual stream of a request's tokens."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, cast

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.inputs import plain_numbers
from vllm.utils.text import brief, check_truth_values

if TYPE_CHECKING:
    import torch

Where = Literal["all", "prompt", "generated"]
PARTS = ("prompt", "generated")
"""Tokens that a later request may have in the other part: its prompt may hold generated ones."""
_MOST_VECTORS = 1024
_MOST_LAYERS = 2**31 - 1
_LARGEST = 1e30


class SteeringSpec(msgspec.Struct, frozen=True):
    """One vector at one boundary, in the form in which a request carries it."""

    layer_id: int
    vector: bytes
    """float32 [hidden], times the scale; of length 1 times the scale if ``norm_match``."""
    positions: str | list[int] = "all"
    norm_match: bool = False
    is_by_position: bool = False
    """True: ``vector`` is [positions, hidden], one for each of the positions, which ascend."""

    @property
    def leading_shape(self) -> tuple[int, ...]:
        return (len(self.positions),) if self.is_by_position else ()

    @property
    def width(self) -> int:
        return len(self.vector) // (4 * math.prod(self.leading_shape))


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """Adds ``scale * vectors[i]`` to the stream at boundary ``layers[i]``.

    Rows are extracted after the addition, so the row of a steered boundary contains the vector.
    ValueError: a value cannot be used.
    """

    vectors: torch.Tensor
    """[hidden] for one layer, [layers, hidden], or, with a vector for each of the ``positions``,
    [layers, positions, hidden]; floats."""
    layers: int | Sequence[int]
    """Layer ids: i is the stream after i decoder layers."""
    scale: float = 1.0
    positions: Where | Sequence[int] = "all"
    """Tokens to steer: all, those of the prompt, generated ones, or positions in the text."""
    norm_match: bool = False
    """True: the vector is first scaled to the norm of the stream at the token."""

    def __post_init__(self) -> None:
        self.specs()

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        layers: int | Sequence[int] | None = None,
        *,
        scale: float = 1.0,
        positions: Where | Sequence[int] = "all",
        norm_match: bool = False,
    ) -> SteeringVector:
        """Read vectors from a file: .safetensors, .pt, or .gguf as repeng writes them.

        layers: layer ids. A file that names the layers of its tensors (``layers.N`` for layer id
        N; GGUF's ``direction.N`` for N + 1) gives those vectors, by default all of them; the
        vectors of another file are added at these layers. ValueError: the file cannot be used.
        """
        import torch

        from vllm.steering.files import read_steering_file

        found, place = read_steering_file(path), f" in {brief(os.fspath(path))}"
        if isinstance(found, dict):
            named, layers = list(found), plain_numbers(layers)
            chosen = named if layers is None else [layers] if isinstance(layers, int) else layers
            is_list = isinstance(chosen, list | tuple | range) and bool(chosen)
            if not is_list or any(layer not in named for layer in chosen):
                _fail("layers", layers, f"some of those{place}, which are {brief(named)}")
            widths = {len(found[layer]) for layer in chosen}
            if len(widths) > 1:
                _fail("vectors", sorted(widths), f"of one width{place}")
            vectors = torch.stack([found[layer].float() for layer in chosen])
            return cls(vectors, list(chosen), scale, positions, norm_match)
        if layers is None:
            _fail("layers", None, f"given, because the tensor{place} names no layer")
        return cls(found, layers, scale, positions, norm_match)

    def specs(self) -> list[SteeringSpec]:
        """Return one spec per layer."""
        import torch

        layers, positions = plain_numbers(self.layers), plain_numbers(self.positions)
        layers = [layers] if isinstance(layers, int) else layers
        are_ids = isinstance(layers, list | tuple | range) and all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31
            for one in layers
        )
        if not are_ids:
            _fail("layers", self.layers, "a layer id from 0 on, or a list of them")
        given: object = self.vectors
        if (
            not torch.is_tensor(given)
            or not given.is_floating_point()
            or given.dim() not in (1, 2, 3)
            or given.is_meta
            or given.layout is not torch.strided
        ):
            _fail("vectors", given, "a tensor of floats, [hidden] or [layers, hidden]")
        check_truth_values(norm_match=self.norm_match)
        rows = self.vectors.detach().float().cpu()
        rows = rows[None] if rows.dim() == 1 else rows
        shape = tuple(self.vectors.shape)
        if len(rows) != len(layers) or not all(shape):
            _fail("vectors", shape, f"a row for each of the {len(layers)} layers")
        scale: object = plain_numbers(self.scale)
        if not isinstance(scale, int | float) or not abs(scale) <= _LARGEST:
            _fail("scale", scale, "a finite number")
        rows = rows / rows.norm(dim=-1, keepdim=True) if self.norm_match else rows
        rows = rows * float(self.scale)
        if not rows.isfinite().all():
            expected = "finite, also times the scale, and not zero with norm_match"
            _fail("vectors", "...", expected)
        where, is_by_position = _checked_positions(positions), rows.dim() == 3
        if is_by_position:
            if not isinstance(where, list) or not len(where) == len(positions) == shape[1]:
                expected = f"{shape[1]} different positions for vectors of shape {shape}"
                _fail("positions", self.positions, expected)
            rows = rows[:, torch.tensor(positions).argsort()]
        return [
            SteeringSpec(layer, row.numpy().tobytes(), where, bool(self.norm_match), is_by_position)
            for layer, row in zip(layers, rows.contiguous(), strict=True)
        ]


def _checked_positions(positions: object) -> str | list[int]:
    if positions in ("all", *PARTS):
        return str(positions)
    are_positions = isinstance(positions, list | tuple | range) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in positions
    )
    if not are_positions:
        _fail("positions", positions, "all, prompt, generated, or a list of numbers from 0 on")
    return sorted(set(cast("Iterable[int]", positions)))


SteeringType = SteeringVector | SteeringSpec | Sequence[SteeringVector | SteeringSpec]
"""Values of the options ``steering``: one vector, or a list of them."""


def steering_specs(value: object) -> list[SteeringSpec]:
    """Return the specs of one vector or several. ValueError: they are something else."""
    given = [value] if isinstance(value, SteeringVector | SteeringSpec) else value
    specs: list[SteeringSpec] = []
    for one in given if isinstance(given, list | tuple) else [given]:
        if isinstance(one, SteeringSpec):
            specs.append(one)
        elif isinstance(one, SteeringVector):
            specs += one.specs()
        else:
            _fail("steering", one, "a SteeringVector, or a list of them", prefix="")
    if len(specs) > _MOST_VECTORS:
        _fail("steering", f"{len(specs)} vectors", f"at most {_MOST_VECTORS}", prefix="")
    return specs


def check_fit(specs: Iterable[SteeringSpec], num_layers: int, width: int) -> None:
    """Raise ValueError if a model with so many layers has no place for the vectors."""
    for spec in specs:
        if spec.layer_id > num_layers:
            _fail("layers", spec.layer_id, f"a layer id from 0 to {num_layers}")
        if spec.width != width:
            _fail("vectors", f"{spec.width} elements", f"{width} elements, as the stream has")


def steering_digest(specs: Sequence[SteeringSpec]) -> str:
    """Return a digest of what is added: requests share prefixes only if theirs are equal."""
    return hashlib.sha256(msgspec.msgpack.encode(specs)).hexdigest()


def _fail(name: str, value: object, expected: str, prefix: str = "steering ") -> NoReturn:
    raise VLLMValidationError(
        f"{prefix}{name}={brief(value)}: has to be {expected}", parameter="steering"
    )

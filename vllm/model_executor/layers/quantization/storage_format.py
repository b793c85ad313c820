"""The base of storage formats, and the checks that all of them make."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.packed_linear import PackedExperts, PackedWeight
from vllm.ops.served_activations import ServedActivations

UNUSED = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale",
    "input_scale_ub", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale",
    "kv_scale", "output_zero_point", "k_zero_point", "v_zero_point", "weight_shape",
)  # fmt: skip
"""Tensors beside a weight that are not used: activations and caches are not quantised."""

_NAN_POWER = 255
_INPUT_SCALES = ("input_scale", "activation_scale")

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one module by the last parts of their names."""


class StorageFormat(ABC):
    """A format in which a linear layer lies in a checkpoint: its tensors and their meaning."""

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    """Last parts of the names of tensors that have to be there."""
    optional: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = "."
    """Stands before the last part; not a dot for tensors of all experts, which no module owns."""
    announced: tuple[str, ...] = ()
    """Optional tensors that have to be there because the config announces them."""
    activations: ServedActivations | None = None
    """The rounding of a layer's inputs when the checkpoint is served; None: there is none."""
    takes_one_scale: bool = True
    """True if a weight may have a single scale instead of those for its parts."""

    def split(self, name: str) -> tuple[str, str] | None:
        """Split a tensor's name into module and last part; None: another format's tensor."""
        module, _, leaf = name.rpartition(self.separator)
        return (module, leaf) if leaf in self.leaves else None

    @property
    def leaves(self) -> tuple[str, ...]:
        has_scale = self.activations is not None and self.activations.has_scale
        return (*self.required, *self.optional, *(_INPUT_SCALES if has_scale else ()))

    def tensor_name(self, module: str, leaf: str) -> str:
        """Name of that tensor of the module."""
        return f"{module}{self.separator}{leaf}"

    def names(self, module: str) -> list[str]:
        """Names that tensors of the module may have."""
        return [self.tensor_name(module, leaf) for leaf in self.leaves]

    def weight_name(self, module: str) -> str:
        """Name of the weight in a checkpoint that is not quantised."""
        return f"{module}.weight" if self.separator == "." else module

    def read(self, module: str, tensors: Tensors) -> PackedWeight | PackedExperts:
        """Make the weight [m, n] from all its tensors. ValueError names what is wrong."""
        required = (*self.required, *self.announced)
        for leaf in required:
            if leaf not in tensors:
                raise ValueError(
                    f"weight {self.tensor_name(module, leaf)!r} is missing from the checkpoint: "
                    f"{self.name} needs {', '.join(required)}"
                )
        return self.unpack(Reader(self, module, tensors))

    def read_as_served(self, module: str, tensors: Tensors) -> PackedWeight | PackedExperts:
        """Do the same with the rounding of inputs. ValueError: there is none that is supported."""
        rule, stored = self.activations, Reader(self, module, tensors)
        if rule is None:
            raise ValueError(
                f"activation_quantization='as_served': module '{module}' is stored as {self.name} "
                "with activations that are not quantised, or not to 8 bits by a rule that is "
                "supported; leave the option out"
            )
        if rule.has_scale:
            leaf = next(filter(stored.has, _INPUT_SCALES), None)
            if leaf is None:
                raise stored.fail(_INPUT_SCALES[0], "is missing, and 'as_served' needs it")
            scale = stored.finite(leaf).float()
            if scale.numel() != 1 or scale.item() <= 0:
                raise stored.fail(leaf, f"is {scale.tolist()}, expected one above 0")
            rule = rule.with_scale(scale.item())
        weight = self.read(module, tensors)
        one = weight if isinstance(weight, PackedWeight) else weight.weights[0]
        size = rule.group_size
        if size is not None and size < one.columns and size != one.group_size:
            raise stored.fail(
                self.required[0],
                f"has scales for {one.group_size} columns each, and 'as_served' inputs for "
                f"{size}; supported: for as many",
            )
        return weight.with_activations(rule)

    @abstractmethod
    def unpack(self, stored: Reader) -> PackedWeight | PackedExperts:
        """Make the weight; all required tensors are there."""


FormatOf = Callable[[str, Collection[str]], StorageFormat | None]
"""``format_of(module, names of all tensors)``: the module's format; None: it is not quantised."""


class Reader:
    """Reads the tensors of one module and checks each of them."""

    def __init__(self, stored: StorageFormat, module: str, tensors: Tensors) -> None:
        self._stored, self._module, self._tensors = stored, module, tensors

    def has(self, leaf: str) -> bool:
        return leaf in self._tensors

    def fail(self, leaf: str, problem: str) -> ValueError:
        name = self._stored.tensor_name(self._module, leaf)
        return ValueError(f"weight {name!r} {problem} ({self._stored.name})")

    def each(self) -> Iterator[Reader]:
        """Yield a reader for each index of the tensors' first dimension."""
        for tensors in zip(*self._tensors.values(), strict=True):
            one = dict(zip(self._tensors, tensors, strict=True))
            yield Reader(self._stored, self._module, one)

    def get(
        self, leaf: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> torch.Tensor:
        """Return the tensor, which has one of the dtypes; None in shape stands for any size."""
        tensor = self._tensors[leaf]
        if tensor.dtype not in dtypes:
            raise self.fail(leaf, f"is {tensor.dtype}, supported: {', '.join(map(str, dtypes))}")
        if shape is not None:
            fits = tensor.dim() == len(shape) and all(
                wanted is None or size == wanted
                for size, wanted in zip(tensor.shape, shape, strict=True)
            )
            if not fits:
                expected = ", ".join("any" if size is None else str(size) for size in shape)
                raise self.fail(leaf, f"has shape {tuple(tensor.shape)}, expected ({expected})")
        return tensor

    def finite(
        self,
        leaf: str,
        dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
        shape: Sequence[int | None] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of scales, none of them infinite or NaN."""
        scales = self.get(leaf, dtypes, shape)
        bad = ~scales.float().isfinite()
        if bad.any():
            value = scales.float()[bad][0].item()
            raise self.fail(leaf, f"holds {value} in {int(bad.sum())} place(s); scales are finite")
        return scales

    def by_group(
        self, leaf: str, shape: tuple[int, int], dtypes: Sequence[torch.dtype]
    ) -> torch.Tensor:
        """Return finite values per row and group; a single one is expanded if that is allowed."""
        values, takes_one = self.finite(leaf, dtypes), self._stored.takes_one_scale
        if takes_one and values.numel() == 1:
            return values.reshape(1, 1).expand(shape)
        if tuple(values.shape) not in (shape, shape[:1] if shape[1] == 1 else shape):
            expected = f"{shape} or one value" if takes_one else f"{shape}"
            raise self.fail(leaf, f"has shape {tuple(values.shape)}, expected {expected}")
        return values.reshape(shape)

    def powers_of_two(self, leaf: str, shape: Sequence[int | None] | None = None) -> torch.Tensor:
        """Return scales ``2 ** (code - 127)`` as float8_e8m0fnu."""
        codes = self.get(leaf, (torch.uint8, torch.float8_e8m0fnu), shape).view(torch.uint8)
        if (codes == _NAN_POWER).any():
            raise self.fail(leaf, f"holds {_NAN_POWER}, which is NaN, among its scales")
        return codes.view(torch.float8_e8m0fnu)

    def check_zeros(self, leaf: str, zeros: torch.Tensor, bits: int) -> None:
        """ValueError: not all zeros of a symmetric weight are the middle of its codes."""
        middle = 1 << (bits - 1)
        if (zeros != middle).any():
            other = int(zeros[zeros != middle][0])
            raise self.fail(
                leaf,
                f"means zeros of {other}, and sym=true zeros of {middle}; correct sym, or "
                "checkpoint_format ('gptq' stores zeros that are one too small, 'gptq_v2' does "
                "not), in quantization_config",
            )

    def check_no_nan_codes(self, leaf: str, codes: torch.Tensor) -> None:
        """ValueError: codes of float8_e4m3fn hold NaN, which products would not show."""
        bad = (codes.view(torch.uint8) & 0x7F) == 0x7F
        if bad.any():
            raise self.fail(leaf, f"holds NaN in {int(bad.sum())} place(s)")


def unpack_integers(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack int32 [.., n, ..] to uint8 codes [.., n * 32 / bits, ..], lowest bits first."""
    if 32 % bits:  # some codes cross integers
        words = packed.movedim(dim, -1).long() & 0xFFFFFFFF
        pairs = words | torch.nn.functional.pad(words, (0, 1))[..., 1:] << 32
        starts = torch.arange(words.shape[-1] * 32 // bits, device=packed.device) * bits
        crossing = (pairs[..., starts // 32] >> starts % 32) & ((1 << bits) - 1)
        return crossing.to(torch.uint8).movedim(-1, dim)
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8)
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def join_halves(codes: torch.Tensor) -> torch.Tensor:
    """Join uint8 [m, n] below 16 to [m, n / 2 rounded up], the first of two in the low half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def integer_weight(
    codes: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group_size: int,
    order: torch.Tensor | None = None,
    columns: int | None = None,
) -> PackedWeight:
    """Make the weight ``(code - zero) * scale``: uint8 codes [m, n], zeros and scales [m, groups].

    Zeros that are all equal go into the values of the codes. columns: n, if codes of 4 bits
    already lie two to a byte.
    """
    is_joined, columns = columns is not None, columns or codes.shape[1]
    first = int(zeros.flatten()[0]) if zeros.numel() else 0
    alike = bool((zeros == first).all())
    if bits == 8:
        given = None if alike and first == 128 else (zeros.to(torch.int16) - 128).to(torch.int8)
        signed = (codes ^ 0x80).view(torch.int8)
        return PackedWeight(
            signed.contiguous(), scales, columns, group_size, zeros=given, order=order
        )
    table = tuple(float(code - (first if alike else 0)) for code in range(16))
    given = None if alike else zeros.to(torch.int8)
    return PackedWeight(
        codes if is_joined else join_halves(codes),
        scales,
        columns,
        group_size,
        table,
        zeros=given,
        order=order,
    )


def groups_of(columns: int, group_size: int) -> tuple[int, int]:
    """Return the size of groups, of which -1 means all columns, and their number.

    The last group has fewer columns if the size does not divide them.
    """
    size = columns if group_size == -1 else group_size
    return size, -(-columns // size)


def order_of_groups(
    stored: Reader, leaf: str, columns: int, group_size: int
) -> torch.Tensor | None:
    """Sort the inputs by their groups, which the tensor holds; None: they are in order.

    ValueError: groups differ in size.
    """
    groups = stored.get(leaf, (torch.int32, torch.int64), (columns,)).long()
    in_order = torch.arange(columns, device=groups.device) // group_size
    if torch.equal(groups, in_order) or bool((groups == -1).all()):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        raise stored.fail(
            leaf, f"does not give each of the groups {group_size} of the {columns} inputs"
        )
    return order


def setting(config: Mapping[str, Any], name: str, default: Any, supported: Sequence[Any]) -> Any:
    """Read an entry of a quantization_config, ``default`` if it is null. ValueError: its value is
    not supported."""
    value = default if config.get(name) is None else config[name]
    if value not in supported:
        raise ValueError(
            f"quantization_config: {name}={value!r} is not supported; supported: "
            f"{', '.join(map(repr, supported))}"
        )
    return supported[supported.index(value)]  # JSON may have 4.0 for 4


def names_of(config: Mapping[str, Any], name: str) -> list[str]:
    """Read an optional entry that is a list of names. ValueError: it is not."""
    value = config.get(name) or []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"quantization_config: {name}={value!r} has to be a list of names")
    return list(value)


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an optional entry that maps names to settings. ValueError: it does not."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config: {name}={value!r} has to map names to settings")
    return value


def expression(text: str, name: str) -> re.Pattern[str]:
    """Compile a regular expression of an entry. ValueError: it is not one."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"quantization_config: {name}: {text!r} is not a regular expression: {error}"
        ) from error


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read an entry that is a whole number above 0, or -1. ValueError: it is not."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ValueError(
            f"quantization_config: {name}={value!r} has to be a whole number above 0, or -1"
        )
    return value


def block_of(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Read an entry with rows and columns of a block, also "128x128". ValueError: it has none."""
    value = config.get(name)
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list | tuple) and len(sizes) == 2:
        rows, columns = map(str, sizes)
        if rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 0:
            return int(rows), int(columns)
    raise ValueError(f"quantization_config: {name}={value!r} has to be two numbers above 0")

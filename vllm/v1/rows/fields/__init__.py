"""Fields: the kinds of values that are kept of a token, one module each.

To add one, write a subclass of :class:`vllm.v1.rows.fields.layout.Field`. Engines keep it when
their option ``row_fields`` names it as "module:Class"; the built-in fields have separate options.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm.v1.rows.fields.layout import Field

BUILT_IN = {"expert_trace": "vllm.v1.rows.fields.experts:Experts"}
"""Option of an engine -> the field that it adds."""
LOSS_MASK = "loss_mask"
"""Tensor, bool [rows], of samples whose loss mask is known."""


def find_field(name: str) -> type[Field]:
    """Import the class ``"module:Class"``. ValueError: there is no such field."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"row_fields: {name!r} cannot be imported ({error}); name a field as 'module:Class'"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Field)):
        raise ValueError(f"row_fields: {name!r} is not a subclass of {Field.__module__}.Field")
    if inspect.getattr_static(found, "make") is vars(Field)["make"]:
        raise ValueError(f"row_fields: {name!r} has no method make, so no engine can keep it")
    return found


def find_fields(names: Iterable[str]) -> tuple[type[Field], ...]:
    """Import these classes, each once. ValueError: two of them store a tensor of the same name."""
    found = tuple(dict.fromkeys(map(find_field, names)))
    owners: dict[str, type[Field]] = {}
    for one in found:
        for tensor_name in (*one.tensor_names, *one.constant_names):
            other = owners.setdefault(tensor_name, one)
            if other is not one or tensor_name in RESERVED_NAMES:
                raise ValueError(
                    f"row_fields: {one.__name__} stores a tensor {tensor_name!r}, a name that is "
                    "in use; choose another one"
                )
    return found


class StoredNames(NamedTuple):
    """Names of the fields' tensors in a file."""

    tensors: tuple[str, ...] = ()
    """Tensors with a row for each token."""
    constants: tuple[str, ...] = ()
    """Tensors that are the same for all tokens."""

    @classmethod
    def of(cls, fields: Iterable[type[Field] | Field]) -> StoredNames:
        """Return the names that fields store."""
        fields = list(fields)
        return cls(
            tuple(name for one in fields for name in one.tensor_names),
            tuple(name for one in fields for name in one.constant_names),
        )

    @classmethod
    def in_file(cls, metadata: Mapping[str, str]) -> StoredNames:
        """Return the names that a file may have: those of built-in fields, and of its metadata."""
        built_in = cls.of(map(find_field, BUILT_IN.values()))
        return built_in.plus(*(json.loads(metadata.get(key, "[]")) for key in METADATA_KEYS))

    def plus(self, tensors: Iterable[str], constants: Iterable[str]) -> StoredNames:
        return StoredNames((*self.tensors, *tensors), (*self.constants, *constants))

    @property
    def foreign(self) -> StoredNames:
        """The names without those of the built-in fields."""
        known = frozenset(itertools.chain(*StoredNames.of(map(find_field, BUILT_IN.values()))))
        tensors, constants = (tuple(name for name in names if name not in known) for names in self)
        return StoredNames(tensors, constants)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of a file from which its readers know the names that are not built in."""
        stated = zip(METADATA_KEYS, self.foreign, strict=True)
        return {key: json.dumps(names) for key, names in stated if names}


METADATA_KEYS = ("row_tensors", "row_constants")
RESERVED_NAMES = frozenset(
    {
        "hidden_states",
        "hidden_states_scales",
        "scales",
        "fp8_errors",
        "token_ids",
        "positions",
        "row_offsets",
        "token_offsets",
        "sample_index",
        "record_index",
        "columns",
        LOSS_MASK,
        "column_offsets",
    }
)
"""Tensors that files of rows have besides those of fields."""

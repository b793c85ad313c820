"""A reader of the tensors of small GGUF files, such as control vectors.

    | magic | version | tensors | entries | entries: key, type, value | tensors: name, shape,
    type, offset | padding | data |

Numbers are little-endian. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_FORMATS = "BbHhIif?__Qqd"
"""struct's codes of the types of values; ``_``: text and lists."""
_TEXT, _LIST = 8, 9
_TENSOR_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


class _Reader:
    """Reads values one after another. ValueError: the file ends before."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.place = self.place, self.place + num_bytes
        if self.place > len(self._data):
            raise ValueError("the file is truncated")
        return self._data[start : self.place]

    def number(self, code: str) -> Any:
        code = f"<{code}"
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Return a value; of lists nothing but their lengths are read."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_code(kind))
        kind, length = self.number("I"), self.number("Q")
        if kind in (_TEXT, _LIST):
            for _ in range(length):
                self.value(kind)
        else:
            self.take(length * struct.calcsize(f"<{_code(kind)}"))
        return None


def _code(kind: int) -> str:
    if not 0 <= kind < len(_FORMATS) or _FORMATS[kind] == "_":
        raise ValueError(f"GGUF values of type {kind} are not known")
    return _FORMATS[kind]


def read_gguf(data: bytes, name: re.Pattern[str]) -> dict[str, torch.Tensor]:
    """Return the tensors with such a name, [n] each. ValueError: the file cannot be used."""
    import torch

    reader = _Reader(data)
    if reader.take(4) != _MAGIC:
        raise ValueError("it is not a GGUF file")
    if (version := reader.number("I")) not in (2, 3):
        raise ValueError(f"its GGUF version is {version}; 2 and 3 are read")
    num_tensors, num_entries = reader.number("Q"), reader.number("Q")
    alignment = 32
    for _ in range(num_entries):
        key, kind = reader.text(), reader.number("I")
        value = reader.value(kind)
        alignment = value if key == "general.alignment" else alignment
    entries = []
    for _ in range(num_tensors):
        own_name = reader.text()
        shape = [reader.number("Q") for _ in range(reader.number("I"))]
        entries.append((own_name, shape, reader.number("I"), reader.number("Q")))
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    begin = -(-reader.place // alignment) * alignment
    found: dict[str, torch.Tensor] = {}
    room = len(data)
    for own_name, shape, kind, offset in entries:
        if not name.fullmatch(own_name):
            continue
        if kind not in _TENSOR_TYPES or len(shape) != 1:
            raise ValueError(
                f"tensor {own_name!r} has GGUF type {kind} and shape {shape}: has to be "
                "one-dimensional, of float32, float16 or bfloat16"
            )
        dtype: torch.dtype = getattr(torch, _TENSOR_TYPES[kind])
        reader.place = begin + offset
        content = bytearray(reader.take(math.prod(shape) * dtype.itemsize))
        room -= len(content)
        if room < 0:
            raise ValueError("its tensors lie over one another")
        found[own_name] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0)
    if not found:
        raise ValueError("it has no tensor direction.<layer>, as control vectors have")
    return found

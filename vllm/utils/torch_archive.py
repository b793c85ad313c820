"""Reads what ``torch.save`` wrote: dense tensors, also in dicts and lists.

No code in it is run, nothing grows beyond the size of the file, and whatever it holds takes time
and memory in proportion to its size. None of that holds for ``torch.load(weights_only=True)``.

    archive, since torch 1.6   PK...; ROOT/data.pkl, ROOT/data/KEY with the bytes of each storage
    stream, before             five pickles (a mark, the protocol, the system, the content, the
                               keys of the storages), then int64 count and values of each storage
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from vllm.utils.text import brief

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STREAM_MARK = 0x1950A86A20F9469CFC6C
_STREAM_PROTOCOL = 1001
_MOST_PICKLE_BYTES = 1 << 17
"""A request has at most so many. torch.save needs less than 100 for each tensor, and its name."""
MOST_FILE_PICKLE_BYTES = 32 << 20
"""A file with the weights of a model or an adapter has at most so many."""
_MOST_DIMENSIONS = 16


def is_saved(data: bytes) -> bool:
    """Return whether data, or their beginning, look as what ``torch.save`` writes."""
    return data.startswith(b"PK") or _is_stream(data[:32])


def _is_stream(head: bytes) -> bool:
    mark = _STREAM_MARK.to_bytes(10, "little")
    return head.startswith(pickle.PROTO) and mark in head


def read_saved(
    data: bytes,
    dtypes: Sequence[torch.dtype] = FLOATS,
    most_pickle_bytes: int = _MOST_PICKLE_BYTES,
) -> object:
    """Return the content of data, with tensors of some dtypes. Raises any exception if it is
    something else, or damaged."""
    if not data:
        raise ValueError("it is empty")
    content = memoryview(bytearray(data))
    return _Reading(content, dtypes, most_pickle_bytes).of(io.BytesIO(data), checks=True)


def map_saved(path: Path) -> object:
    """Return the content of a file, with tensors of any dtype that are mapped into memory."""
    size = path.stat().st_size
    if not size:
        raise ValueError("it is empty")
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    content: Any = mapped.numpy().data
    with path.open("rb") as file:
        return _Reading(content, None, MOST_FILE_PICKLE_BYTES).of(file, checks=False)


class _Reading:
    """The reading of one file."""

    def __init__(
        self, content: memoryview, dtypes: Sequence[torch.dtype] | None, most_bytes: int
    ) -> None:
        self._content = content
        self._dtypes = dtypes
        self._most_bytes = most_bytes

    def of(self, file: Any, checks: bool) -> object:
        if _is_stream(file.read(32)):
            file.seek(0)
            return self._stream(io.BytesIO(file.read(self._most_bytes)))
        with zipfile.ZipFile(file) as archive:
            return self._members(archive, checks)

    def _members(self, archive: zipfile.ZipFile, checks: bool) -> object:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("the archive is compressed")
        most, num_bytes = len(self._content), sum(one.file_size for one in archive.infolist())
        if num_bytes > most:
            raise ValueError(f"the archive of {most} bytes claims to hold {num_bytes}")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("it was saved in big-endian byte order")
        if entries["data.pkl"].file_size > self._most_bytes:
            raise ValueError(f"its data.pkl has more than {self._most_bytes:,} bytes")
        data = archive.read(entries["data.pkl"])
        for name, entry in entries.items() if checks else ():
            # zipfile would not look at what a damaged directory says is empty
            if zlib.crc32(self._place(entry)) != entry.CRC:
                raise ValueError(f"{brief(name)} in it is damaged")
        places = {
            name.removeprefix("data/"): self._place(entry)
            for name, entry in entries.items()
            if name.startswith("data/")
        }
        return _Unpickler(io.BytesIO(data), self._dtypes, places).load()

    def _place(self, entry: zipfile.ZipInfo) -> memoryview:
        """Return the bytes of an entry, which are behind a header with two texts."""
        sizes = bytes(self._content[entry.header_offset + 26 : entry.header_offset + 30].tolist())
        begin = (
            entry.header_offset
            + 30
            + sum(int.from_bytes(sizes[i : i + 2], "little") for i in (0, 2))
        )
        return self._content[begin : begin + entry.file_size]

    def _stream(self, file: io.BytesIO) -> object:
        for expected in (_STREAM_MARK, _STREAM_PROTOCOL):
            if _Unpickler(file, self._dtypes).load() != expected:
                raise ValueError("it is of another kind of file")
        system: Any = _Unpickler(file, self._dtypes).load()
        if system["little_endian"] is not True:
            raise ValueError("it was saved in big-endian byte order")
        begin = file.tell()
        sizes = _Unpickler(file, self._dtypes)  # the tensors of which have no data yet
        sizes.load()
        keys: Any = _Unpickler(file, self._dtypes).load()
        end, places = file.tell(), {}
        for key in keys:
            num_bytes = (
                int.from_bytes(self._content[end : end + 8], "little")
                * sizes.dtypes_of[key].itemsize
            )
            places[key] = self._content[end + 8 : end + 8 + num_bytes]
            end += 8 + num_bytes
        if end > len(self._content):
            raise ValueError(f"it has {len(self._content):,} bytes of {end:,}")
        file.seek(begin)
        return _Unpickler(file, self._dtypes, places).load()


# Parameters are named one by one, so that a long tuple of arguments is refused, not copied.
def _rebuild_tensor(
    storage: torch.Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: object = None,
    backward_hooks: object = None,
    bits: Mapping[str, bool] | None = None,
) -> torch.Tensor:
    if len(size) > _MOST_DIMENSIONS:
        raise ValueError(f"the tensor has {len(size)} dimensions")
    tensor = storage.as_strided(size, stride, offset)
    if tensor.numel() > storage.numel():
        raise ValueError(
            f"the tensor of shape {tuple(size)} was saved with {storage.numel()} values; save a "
            "contiguous one"
        )
    if bits and bits.keys() != {"neg"}:
        raise ValueError(f"the tensor is a view that changes its values: {brief(bits)}")
    return tensor.neg() if bits and bits["neg"] else tensor


def _rebuild_untyped(
    storage: torch.Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: object,
    backward_hooks: object,
    dtype: torch.dtype,
    bits: Mapping[str, bool] | None = None,
) -> torch.Tensor:
    return _rebuild_tensor(storage.view(dtype), offset, size, stride, bits=bits)


def _rebuild_parameter(
    tensor: object, requires_grad: object = None, backward_hooks: object = None
) -> object:
    return tensor


def _rebuild_parameter_with_state(
    tensor: object, requires_grad: object, backward_hooks: object, state: object
) -> object:
    return tensor


def _empty_dict() -> OrderedDict[object, object]:
    return OrderedDict()


_FUNCTIONS = {
    "collections.OrderedDict": _empty_dict,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
}
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
_BYTES = "torch.storage.UntypedStorage"
"""The storage of dtypes that have none of their own, which are named beside it."""
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_OPERATIONS = """PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID BINPUT LONG_BINPUT
MEMOIZE BINGET LONG_BINGET NONE NEWFALSE NEWTRUE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
SHORT_BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
EMPTY_DICT"""


class _Operations(dict[int, Any]):
    """Code of an operation -> the method that does it."""

    def __missing__(self, code: int) -> NoReturn:
        raise ValueError(f"torch.save does not write the operation {code}")


_CODES = [getattr(pickle, name)[0] for name in _OPERATIONS.split()]


# The class in C would allocate as much memory as an index in the pickle says.
class _Unpickler(pickle._Unpickler):
    """Unpickles dense tensors. torch.load may read another directory of the archive than zipfile,
    and unpickles tensors that grow.

    Names are text or numbers: hashing a deep tuple ends the process, and one of tuples that share
    their parts takes for ever.
    """

    dispatch: ClassVar[dict[int, Any]] = _Operations(
        (code, pickle._Unpickler.dispatch[code]) for code in _CODES
    )
    """The operations that torch.save writes. Others set attributes, or allocate what they claim."""

    def __init__(
        self,
        file: io.BytesIO,
        dtypes: Sequence[torch.dtype] | None,
        places: Mapping[str, memoryview] | None = None,
    ) -> None:
        super().__init__(file)
        self._dtypes = dtypes
        self._places = places
        """Bytes of each storage. None: tensors are on the meta device."""
        self._storages: dict[str, torch.Tensor] = {}
        self.dtypes_of: dict[str, torch.dtype] = {}
        """By the name of a storage."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if self._dtypes is None:
            dtype = torch.uint8 if name == _BYTES else _STORAGES.get(name) or _DTYPES.get(name)
        else:
            dtype = _STORAGES[name] if _STORAGES.get(name) in self._dtypes else None
        if dtype is None:
            kinds = [str(one).removeprefix("torch.") for one in self._dtypes or ()]
            of = f" of {', '.join(kinds)}" if kinds else ""
            raise ValueError(f"{name} is not part of a dense tensor{of}")
        return dtype

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def load_setitem(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self._set([name, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_build(self) -> None:
        self.stack.pop()  # versions of a module's parts
        if not isinstance(self.stack[-1], OrderedDict):
            raise ValueError("it has other objects than dense tensors")

    dispatch.update(
        {
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.BUILD[0]: load_build,
        }
    )

    def _set(self, items: list[Any]) -> None:
        names = items[::2]
        if not all(isinstance(name, str | int) for name in names):
            raise ValueError("a dict in it has other names than text and numbers")
        self.stack[-1].update(zip(names, items[1::2], strict=True))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, dtype, key, _, count, *view = pid
        if not isinstance(key, str):
            raise ValueError("the name of a storage is not text")
        if not isinstance(dtype, torch.dtype) or (view and view[0] is not None):
            raise ValueError(f"storage {brief(key)} is a part of another")
        if self.dtypes_of.setdefault(key, dtype) != dtype:
            raise ValueError(f"storage {brief(key)} has two dtypes")
        if key not in self._storages:
            self._storages[key] = self._storage(key, dtype, count)
        return self._storages[key]

    def _storage(self, key: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        if self._places is None:
            return torch.empty(count, dtype=dtype, device="meta")
        data = self._places[key]
        if not data:
            return torch.empty(0, dtype=dtype)
        is_aligned = torch.frombuffer(data, dtype=torch.uint8).data_ptr() % dtype.itemsize == 0
        return torch.frombuffer(data if is_aligned else bytearray(data), dtype=dtype)

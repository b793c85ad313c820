"""Prompts that come as embeddings: their checks, and their form as bytes for other processes."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch

from vllm.utils.text import brief, message_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class PackedEmbeds(NamedTuple):
    """Checked embeddings of a prompt."""

    num_tokens: int
    data: bytes
    """[tokens, hidden] in the model's dtype."""
    digest: str
    """Digest of ``data``; only prompts with the same content share prefixes."""


def pack_prompt_embeds(value: Any, model_config: ModelConfig) -> PackedEmbeds:
    """Check and pack a tensor [tokens, hidden]; raises ValueError if the model cannot take it."""
    if not model_config.enable_prompt_embeds:
        raise ValueError(
            "prompt_embeds: this engine takes text and token ids only; start it with "
            "enable_prompt_embeds=True (--enable-prompt-embeds)"
        )
    hidden_size, limit = model_config.get_hidden_size(), model_config.max_model_len
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"prompt_embeds of type {type(value).__name__}: has to be a torch.Tensor")
    if not _is_plain(value):
        raise ValueError(
            f"prompt_embeds of {value.dtype}, {value.layout}, on {value.device}: has to be a dense "
            f"tensor with all its values, of {_DTYPE_NAMES}"
        )
    if value.dim() != 2 or value.shape[1] != hidden_size:
        raise ValueError(
            f"prompt_embeds of shape {tuple(value.shape)}: has to be [tokens, {hidden_size}], "
            "a row of the model's hidden size for each token"
        )
    if not 0 < len(value) <= limit:
        raise ValueError(
            f"prompt_embeds of {len(value)} tokens: has to be at least 1 and at most "
            f"max_model_len={limit}"
        )
    rows = value.detach().resolve_neg().to("cpu", model_config.dtype).contiguous()
    if not rows.isfinite().all():
        token = int((~rows.isfinite()).any(1).nonzero()[0])
        name = str(model_config.dtype).removeprefix("torch.")
        raise ValueError(f"prompt_embeds: the row of token {token} is not finite in {name}")
    data = rows.view(torch.uint8).numpy().tobytes()
    return PackedEmbeds(len(rows), data, hashlib.sha256(data).hexdigest())


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor is dense, of a supported dtype, and has all of its values."""
    if value.layout is not torch.strided or value.is_meta or value.is_nested:
        return False
    end = value.storage_offset() + sum(
        (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
    )
    is_whole = not value.numel() or end < value.untyped_storage().nbytes() // value.itemsize
    return is_whole and value.dtype in DTYPES


def read_embeds(text: str) -> torch.Tensor:
    """Read a tensor that ``torch.save`` wrote, in base64, as clients of the HTTP API send it.

    No code in it is run, and it does not grow: the archive is not compressed, and its tensor has
    no more values than the archive. Raises ValueError if ``text`` is not such a tensor.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"prompt_embeds is not base64: {error}") from error
    try:
        loaded = read_archive(data)
    except Exception as error:  # whatever a damaged archive leads to
        reason = message_of(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"prompt_embeds is not a tensor saved by torch.save: {reason}") from error
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(
            f"prompt_embeds holds a {type(loaded).__name__}: has to be a tensor, saved by itself"
        )
    return loaded


def read_archive(data: bytes) -> object:
    """Return what ``torch.save`` wrote: dense tensors, also in dicts and lists.

    No code in it is run, and it does not grow. Raises any exception if it is something else.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return _read_members(archive, len(data))


def _read_members(archive: zipfile.ZipFile, most_bytes: int) -> object:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ValueError("the archive is compressed")
    num_bytes = sum(entry.file_size for entry in archive.infolist())
    if num_bytes > most_bytes:
        raise ValueError(f"the archive of {most_bytes} bytes claims to hold {num_bytes}")
    contents = {name: archive.read(entry) for name, entry in entries.items()}
    if contents.get("byteorder", b"little") != b"little":
        raise ValueError("it was saved in big-endian byte order")
    if len(contents["data.pkl"]) > _MOST_PICKLE_BYTES:
        raise ValueError(f"its data.pkl has more than {_MOST_PICKLE_BYTES:,} bytes")
    return _TensorReader(contents).load()


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


def _rebuild_parameter(
    tensor: object, requires_grad: object = None, backward_hooks: object = None
) -> object:
    return tensor


def _empty_dict() -> OrderedDict[object, object]:
    return OrderedDict()


_KNOWN = {
    "collections.OrderedDict": _empty_dict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}


_MOST_PICKLE_BYTES = 1 << 17
"""torch.save needs less than 100 for each tensor."""
_MOST_DIMENSIONS = 16
_OPERATIONS = """PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BINPERSID BINPUT LONG_BINPUT
MEMOIZE BINGET LONG_BINGET NONE NEWFALSE NEWTRUE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT"""


class _Operations(dict[int, Any]):
    """Code of an operation -> the method that does it."""

    def __missing__(self, code: int) -> NoReturn:
        raise ValueError(f"torch.save does not write the operation {code}")


_CODES = [getattr(pickle, name)[0] for name in _OPERATIONS.split()]


# The class in C would allocate as much memory as an index in the pickle says.
class _TensorReader(pickle._Unpickler):
    """Unpickles dense tensors. torch.load may read another directory of the archive than zipfile,
    and unpickles tensors that grow.

    Names are text or numbers: hashing a deep tuple ends the process, and one of tuples that share
    their parts takes for ever.
    """

    dispatch: ClassVar[dict[int, Any]] = _Operations(
        (code, pickle._Unpickler.dispatch[code]) for code in _CODES
    )
    """The operations that torch.save writes. Others set attributes, or allocate what they claim."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__(io.BytesIO(contents["data.pkl"]))
        self._contents = contents
        self._storages: dict[str, torch.Tensor] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _KNOWN:
            raise ValueError(f"{name} is not part of a dense tensor of {_DTYPE_NAMES}")
        return _KNOWN[name]

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def load_setitem(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self._set([name, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    dispatch.update({pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems})

    def _set(self, items: list[Any]) -> None:
        names = items[::2]
        if not all(isinstance(name, str | int) for name in names):
            raise ValueError("a dict in it has other names than text and numbers")
        self.stack[-1].update(zip(names, items[1::2], strict=True))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, dtype, key, _, _ = pid
        if not isinstance(key, str):
            raise ValueError("the name of a storage is not text")
        if key not in self._storages:
            data = bytearray(self._contents[f"data/{key}"])
            self._storages[key] = (
                torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            )
        return self._storages[key]


def unpack_prompt_embeds(data: bytes, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data of :class:`PackedEmbeds` as a tensor [tokens, hidden] on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(-1, hidden_size)

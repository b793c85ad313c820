"""Prompts that come as embeddings: their checks, and their form as bytes for other processes."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.utils.text import message_of
from vllm.utils.torch_archive import FLOATS, read_saved

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)


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
    return is_whole and value.dtype in FLOATS


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
        loaded = read_saved(data)
    except Exception as error:  # whatever a damaged archive leads to
        reason = message_of(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"prompt_embeds is not a tensor saved by torch.save: {reason}") from error
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(
            f"prompt_embeds holds a {type(loaded).__name__}: has to be a tensor, saved by itself"
        )
    return loaded


def unpack_prompt_embeds(data: bytes, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data of :class:`PackedEmbeds` as a tensor [tokens, hidden] on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(-1, hidden_size)

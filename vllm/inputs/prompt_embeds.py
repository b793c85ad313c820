"""Prompts that come as embeddings: their checks, and their form as bytes for other processes."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_OVERHEAD_BYTES = 64 << 10
"""Most bytes of an archive besides the values."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPES:
        raise ValueError(
            f"prompt_embeds of {value.dtype}, {value.layout}, on {value.device}: has to be a dense "
            f"tensor of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
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
    rows = value.detach().to("cpu", model_config.dtype).contiguous()
    if not rows.isfinite().all():
        token = int((~rows.isfinite()).any(1).nonzero()[0])
        name = str(model_config.dtype).removeprefix("torch.")
        raise ValueError(f"prompt_embeds: the row of token {token} is not finite in {name}")
    data = rows.view(torch.uint8).numpy().tobytes()
    return PackedEmbeds(len(rows), data, hashlib.sha256(data).hexdigest())


def read_embeds(text: str, model_config: ModelConfig) -> torch.Tensor:
    """Read a tensor that ``torch.save`` wrote, in base64, as clients of the HTTP API send it.

    No code in it is run, and data larger than any prompt are not unpacked. Raises ValueError if
    ``text`` is not such a tensor.
    """
    largest = max(dtype.itemsize for dtype in DTYPES)
    limit = model_config.max_model_len * model_config.get_hidden_size() * largest + _OVERHEAD_BYTES
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"prompt_embeds is not base64: {error}") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(f"prompt_embeds is not a tensor saved by torch.save: {error}") from error
    if num_bytes > limit:
        raise ValueError(
            f"prompt_embeds unpacks to {num_bytes} bytes: a prompt of "
            f"max_model_len={model_config.max_model_len} tokens has at most {limit}"
        )
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged archive leads to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"prompt_embeds is not a tensor saved by torch.save: {reason}") from error
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(
            f"prompt_embeds holds a {type(loaded).__name__}: has to be a tensor, saved by itself"
        )
    return loaded


def unpack_prompt_embeds(data: bytes, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the data of :class:`PackedEmbeds` as a tensor [tokens, hidden] on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(-1, hidden_size)

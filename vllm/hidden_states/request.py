"""One prompt of an extraction with settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm.inputs import PromptType


@dataclass(frozen=True)
class ExtractRequest:
    """What :meth:`vllm.LLM.extract` takes for a prompt; None: what the call says."""

    prompt: PromptType
    layers: str | Sequence[int | str] | None = None
    """``resolve_layer_ids`` says what may stand here."""
    positions: str | Sequence[int] | None = None
    """``all``, ``last``, ``every:K``, ``mask``, or the positions themselves."""
    mask: Sequence[bool | int] | None = None
    """For ``mask``: one value for each token, true where its row is wanted."""
    dtype: str | torch.dtype | None = None
    """``auto`` (the model's), ``float32``, ``bfloat16``, ``float16`` or ``fp8``."""

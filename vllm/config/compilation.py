"""CompilationConfig: what is known about the built model."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from vllm.utils.checked import config


@config()
class CompilationConfig:
    """Holds the layers that keep state, by name; the models fill it while they are built."""

    static_forward_context: dict[str, Any] = field(default_factory=dict)
    """Layer name -> layer, in the order of construction."""

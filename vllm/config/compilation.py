"""CompilationConfig: the layers of the built model."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from vllm.utils.checked import config


@config()
class CompilationConfig:
    """Holds the layers that keep state, by name; a model fills it while it is built."""

    static_forward_context: dict[str, Any] = field(default_factory=dict)
    """Layer name -> layer, in the order of construction."""

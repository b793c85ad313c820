"""Upstream's path for :mod:`vllm.model_classes`."""

from __future__ import annotations

from vllm.model_classes import ModelRegistry as ModelRegistry

"""The hook points of a checkpoint, listed without reading its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vllm.model_executor.hook_points import HookPoint, HookPoints, find_hook_points
from vllm.model_report.outline import outline_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def list_hooks(vllm_config: VllmConfig) -> list[HookPoint]:
    """Return all hook points. ValueError: an engine would refuse the checkpoint."""
    return hooks_of(vllm_config).points


def hooks_of(vllm_config: VllmConfig) -> HookPoints:
    """Return the hook points, to find some by name; errors as of :func:`list_hooks`."""
    model = outline_model(vllm_config).model
    return find_hook_points(model, vllm_config.model_config)


def hooks_as_text(points: list[HookPoint]) -> str:
    """Return one line per point: its first name, its form, its other names."""
    rows = [(point.names[0], _form(point), ", ".join(point.names[1:])) for point in points]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(2)]
    return "\n".join(f"{row[0]:{widths[0]}}{row[1]:{widths[1]}}{row[2]}".rstrip() for row in rows)


def hooks_as_json(points: list[HookPoint]) -> str:
    """Return a JSON list of objects with names, width, dtype and number of layers to run."""
    listed = [
        {
            "names": point.names,
            "width": point.form.width,
            "dtype": str(point.form.dtype).removeprefix("torch."),
            "layers_to_run": point.depth,
        }
        for point in points
    ]
    return json.dumps(listed, indent=2)


def _form(point: HookPoint) -> str:
    return f"[rows, {point.form.width}] {str(point.form.dtype).removeprefix('torch.')}"

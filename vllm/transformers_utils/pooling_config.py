"""Reads how a checkpoint pools its rows to one vector, from the files of sentence-transformers."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm.transformers_utils.config import load_json, load_json_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig

VectorPooling = Literal["last", "mean"]
_KINDS: dict[str, VectorPooling] = {"lasttoken": "last", "mean_tokens": "mean"}
_MODE = "pooling_mode_"


class StatedPooling(NamedTuple):
    """The content of modules.json and of the files that it names."""

    pooling: VectorPooling = "last"
    normalize: bool = True
    problem: str | None = None
    """The reason why this engine cannot make these vectors; None: it can."""


def read_pooling(model_config: ModelConfig) -> StatedPooling:
    """Read the checkpoint's pooling; without its files: the last row, normalised.

    Raises ValueError for files that cannot be read.
    """
    revision, token = model_config.revision, model_config.hf_token
    modules = load_json(model_config.model, "modules.json", revision=revision, hf_token=token)
    if modules is None:
        return StatedPooling()
    paths: dict[str, str] = {}
    try:
        for module in modules:
            kind = module["type"].rpartition(".")[2]
            if kind not in ("Transformer", "Pooling", "Normalize"):
                return StatedPooling(problem=f"modules.json has the module {module['type']!r}")
            paths[kind] = str(module["path"])
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"modules.json is not a list of modules: {error!r}") from error
    normalizes = "Normalize" in paths
    if "Pooling" not in paths:
        return StatedPooling(normalize=normalizes, problem="modules.json has no module Pooling")
    path = PurePosixPath(paths["Pooling"]) / "config.json"
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"modules.json: the path {paths['Pooling']!r} leaves the checkpoint")
    stated = load_json_file(model_config.model, str(path), revision=revision, hf_token=token)
    if stated is None:
        return StatedPooling(normalize=normalizes, problem=f"{path} is missing")
    modes = _modes(stated)
    pooling = _KINDS.get(modes[0]) if len(modes) == 1 else None
    if pooling is None:
        shown = " and ".join(modes) or "no pooling_mode"
        return StatedPooling(normalize=normalizes, problem=f"{path} says {shown}")
    return StatedPooling(pooling, normalizes)


def _modes(stated: dict[str, Any]) -> list[str]:
    """List the modes: one flag for each, or in newer files one name or several."""
    named = stated.get("pooling_mode")
    if named is None:
        flags = [key for key, value in stated.items() if key.startswith(_MODE) and value]
        return [key.removeprefix(_MODE) for key in flags]
    names = [str(one) for one in (named if isinstance(named, list) else [named])]
    return ["mean_tokens" if name == "mean" else name for name in names]

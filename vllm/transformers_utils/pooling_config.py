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
_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_OF_TEXTS = "sentence_bert_config.json"
"""The file of the module Transformer, about texts before they are tokens."""


class StatedPooling(NamedTuple):
    """The content of modules.json and of the files that it names."""

    pooling: VectorPooling = "last"
    normalize: bool = True
    problem: str | None = None
    """The reason why this engine cannot make these vectors; None: it can."""
    most_tokens: int | None = None
    """Length at which sentence-transformers truncates texts; None: the context's."""


def read_pooling(model_config: ModelConfig) -> StatedPooling:
    """Read the checkpoint's pooling; without its files: the last row, normalised.

    Raises ValueError for files that cannot be read.
    """
    revision, token = model_config.revision, model_config.hf_token
    modules = load_json(model_config.model, "modules.json", revision=revision, hf_token=token)
    if modules is None:
        return StatedPooling()
    try:
        types = [str(module["type"]) for module in modules]
        kinds = [one.rpartition(".")[2] for one in types]
        paths = {kind: str(one["path"]) for kind, one in zip(kinds, modules, strict=True)}
    except (TypeError, KeyError) as error:
        raise ValueError(f"modules.json is not a list of modules: {error!r}") from error
    for kind, name in zip(kinds, types, strict=True):
        if kind not in _ORDERS[-1] or not name.startswith("sentence_transformers."):
            return StatedPooling(problem=f"modules.json has the module {name!r}")
    normalizes = "Normalize" in paths
    if "Pooling" not in paths:
        return StatedPooling(normalize=normalizes, problem="modules.json has no module Pooling")
    if kinds not in _ORDERS:
        problem = f"modules.json has the modules {', '.join(kinds)} in this order"
        return StatedPooling(normalize=normalizes, problem=problem)

    if paths["Transformer"] not in ("", "."):
        problem = f"modules.json has the model in {paths['Transformer']!r}"
        return StatedPooling(normalize=normalizes, problem=problem)

    def read(path: PurePosixPath | str) -> dict[str, Any] | None:
        return load_json_file(model_config.model, str(path), revision=revision, hf_token=token)

    path = PurePosixPath(paths["Pooling"]) / "config.json"
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"modules.json: the path {paths['Pooling']!r} leaves the checkpoint")
    stated = read(path)
    if stated is None:
        return StatedPooling(normalize=normalizes, problem=f"{path} is missing")
    modes = _modes(stated)
    pooling = _KINDS.get(modes[0]) if len(modes) == 1 else None
    if pooling is None:
        shown = " and ".join(modes) or "no pooling_mode"
        return StatedPooling(normalize=normalizes, problem=f"{path} says {shown}")
    of_texts = read(_OF_TEXTS) or {}
    if of_texts.get("do_lower_case"):
        problem = f"{_OF_TEXTS} says do_lower_case, and texts are tokenised as they are"
        return StatedPooling(pooling, normalizes, problem)
    most_tokens = of_texts.get("max_seq_length")
    if most_tokens is not None and (type(most_tokens) is not int or most_tokens < 1):
        raise ValueError(
            f"{_OF_TEXTS}: max_seq_length={most_tokens!r} has to be a number of tokens"
        )
    return StatedPooling(pooling, normalizes, most_tokens=most_tokens)


def _modes(stated: dict[str, Any]) -> list[str]:
    """List the modes: one flag for each, or in newer files one name or several."""
    named = stated.get("pooling_mode")
    if named is None:
        flags = [key for key, value in stated.items() if key.startswith(_MODE) and value]
        return [key.removeprefix(_MODE) for key in flags]
    names = [str(one) for one in (named if isinstance(named, list) else [named])]
    return ["mean_tokens" if name == "mean" else name for name in names]

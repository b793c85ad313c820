"""Reads how a checkpoint pools its rows to one vector, from the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm.transformers_utils.config import load_json, load_json_file
from vllm.utils.text import brief

if TYPE_CHECKING:
    from vllm.config import ModelConfig

VectorPooling = Literal["last", "mean"]
_KINDS: dict[str, VectorPooling] = {"lasttoken": "last", "mean_tokens": "mean"}
_MODE = "pooling_mode_"
_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_ARCHITECTURES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_OF_TEXTS = tuple(f"sentence_{one}_config.json" for one in _ARCHITECTURES)
"""Names of the file of the module Transformer, about texts before they are tokens, and about how
the model is loaded. The first that there is counts."""
_OF_VECTORS = "config_sentence_transformers.json"
_MADE_HERE: Mapping[str, tuple[Any, ...]] = {
    "do_lower_case": (False,),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "unpad_inputs": (True, False),
}
"""Values with which sentence-transformers makes the vectors that this engine makes."""
_ABOUT_LOADING = ("model", "config", "tokenizer", "processor")
_WITHOUT_EFFECT = frozenset(
    ("attn_implementation", "dtype", "padding_side", "torch_dtype", "trust_remote_code")
)
"""Options of loading that change at most the rounding."""
_AS_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_LENGTH = "model_max_length"
_Read = Callable[[PurePosixPath | str], dict[str, Any] | None]


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
    name, of_texts = next(
        ((name, found) for name in _OF_TEXTS if (found := read(name))), (_OF_TEXTS[0], {})
    )
    if (other := _problem_of_texts(name, of_texts) or _problem_of_vectors(read)) is not None:
        return StatedPooling(pooling, normalizes, other)
    return StatedPooling(pooling, normalizes, most_tokens=_most_tokens(name, of_texts, read))


def _problem_of_texts(name: str, stated: dict[str, Any]) -> str | None:
    """Name what a file of the module Transformer asks for and this engine does not do."""
    for key, value in stated.items():
        if not value or key == "max_seq_length":
            continue
        about, _, kind = key.rpartition("_")
        if about in _ABOUT_LOADING and kind in ("args", "kwargs") and isinstance(value, dict):
            is_made = {*value} <= {*_WITHOUT_EFFECT, _LENGTH}
        elif key == "modality_config":  # a text becomes a conversation if messages are listed
            is_made = "message" not in value and value.get("text") == _AS_TEXT["text"]
        else:
            is_made = value in _MADE_HERE.get(key, ())
        if not is_made:
            return f"{name} says {key}={brief(value)}"
    return None


def _problem_of_vectors(read: _Read) -> str | None:
    """Name what is done to every text before the model, and to every vector behind it."""
    stated = read(_OF_VECTORS) or {}
    chosen, prompts = stated.get("default_prompt_name"), stated.get("prompts") or {}
    if chosen is not None and prompts.get(chosen) != "":
        return f"{_OF_VECTORS} says default_prompt_name={chosen!r}: no prompt is put before texts"
    width = stated.get("truncate_dim")
    return None if width is None else f"{_OF_VECTORS} says truncate_dim={width!r}"


def _most_tokens(name: str, stated: dict[str, Any], read: _Read) -> int | None:
    """Return the length at which texts are truncated: the file's own, or the tokenizer's."""
    own = [
        stated.get(f"{one}_{kind}") or {} for one in _ABOUT_LOADING for kind in ("args", "kwargs")
    ]
    lengths = [(name, _LENGTH, one.get(_LENGTH)) for one in own]
    lengths.append((name, "max_seq_length", stated.get("max_seq_length")))
    tokenizer = "tokenizer_config.json"
    lengths.append((tokenizer, _LENGTH, (read(tokenizer) or {}).get(_LENGTH)))
    for file, key, length in lengths:
        if length is None:
            continue
        if type(length) not in (int, float) or not 1 <= length < inf:
            raise ValueError(f"{file}: {key}={brief(length)} has to be a number of tokens")
        return int(length)  # transformers writes 1e30 for no limit
    return None


def _modes(stated: dict[str, Any]) -> list[str]:
    """List the modes: one flag for each, or in newer files one name or several."""
    named = stated.get("pooling_mode")
    if named is None:
        flags = [key for key, value in stated.items() if key.startswith(_MODE) and value]
        return [key.removeprefix(_MODE) for key in flags]
    names = [str(one) for one in (named if isinstance(named, list) else [named])]
    return ["mean_tokens" if name == "mean" else name for name in names]

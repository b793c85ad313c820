"""Reads how a checkpoint pools its rows to one vector, from the files of sentence-transformers."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm.logger import init_logger
from vllm.transformers_utils.config import load_json, load_json_file
from vllm.utils.text import brief

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

VectorPooling = Literal["last", "mean"]
_KINDS: dict[str, VectorPooling] = {"lasttoken": "last", "mean_tokens": "mean"}
_MODE = "pooling_mode_"
_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_OF_TEXTS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file of the module Transformer; sentence-transformers takes the first one that has
entries."""
_OF_TOKENIZERS = "tokenizer_config.json"
_OF_VECTORS = "config_sentence_transformers.json"
_AS_HERE = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
}
"""Entries of that file, with the values that say what this engine does anyway."""
_OTHER_SPELLINGS = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
_HARMLESS = {
    "model_kwargs": ("torch_dtype", "dtype", "attn_implementation"),
    "config_kwargs": (),
    "processor_kwargs": ("model_max_length", "truncation_side", "padding_side"),
    "processing_kwargs": (),
}
"""Entries that are objects, and their keys that change no vector, or that are read."""
_LAST_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}


class StatedPooling(NamedTuple):
    """The content of modules.json and of the files that it names."""

    pooling: VectorPooling = "last"
    normalize: bool = True
    problem: str | None = None
    """The reason why this engine cannot make these vectors; None: it can."""
    most_tokens: int | None = None
    """Length at which sentence-transformers truncates texts; None: the context's."""
    most_tokens_source: str = ""
    """The entry that states this length."""
    truncation_side: Literal["left", "right"] = "right"
    """The side that sentence-transformers cuts off."""
    projects_tokens: bool = False
    """True if the problem is a module behind each token's state, as in models of many vectors."""


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
            problem = f"modules.json has the module {name!r}"
            return StatedPooling(problem=problem, projects_tokens="Pooling" not in paths)
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
    name, of_texts = next(((one, found) for one in _OF_TEXTS if (found := read(one))), ("", {}))
    of_others = _problem_of_texts(of_texts)
    if of_others is not None:
        return StatedPooling(pooling, normalizes, f"{name} says {of_others}")
    of_vectors = read(_OF_VECTORS) or {}
    if (width := of_vectors.get("truncate_dim")) is not None:
        problem = f"{_OF_VECTORS} says truncate_dim={brief(width)}"
        return StatedPooling(pooling, normalizes, problem)
    of_tokenizer = read(_OF_TOKENIZERS) or {}
    given = _object(of_texts, "processor_kwargs")
    side = given.get("truncation_side", of_tokenizer.get("truncation_side", "right"))
    if side not in ("left", "right"):
        raise ValueError(f"truncation_side={brief(side)} of the tokenizer: has to be left or right")
    _warn_of_prompt(of_vectors)
    lengths = _lengths(name, of_texts, of_tokenizer, model_config)
    most_tokens, source = min(lengths, default=(None, ""))
    return StatedPooling(pooling, normalizes, None, most_tokens, source, side)


def _warn_of_prompt(stated: dict[str, Any]) -> None:
    """Say which prompt sentence-transformers puts before texts without being asked."""
    name, prompts = stated.get("default_prompt_name"), stated.get("prompts")
    prompt = prompts.get(name) if isinstance(name, str) and isinstance(prompts, dict) else None
    if prompt:
        logger.warning(
            "%s: default_prompt_name=%r: sentence-transformers puts %s before each text; here "
            "texts are taken as they are, so put it there yourself",
            _OF_VECTORS,
            name,
            brief(prompt),
        )


def _object(of_texts: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an entry that is an object, under its older or its newer name."""
    for spelling in (name, *(old for old, new in _OTHER_SPELLINGS.items() if new == name)):
        if of_texts.get(spelling):
            return dict(of_texts[spelling])
    return {}


def _problem_of_texts(of_texts: dict[str, Any]) -> str | None:
    """Name what the module Transformer does that this engine does not; None: nothing."""
    for key, value in of_texts.items():
        if value is None or value is False or value == {}:
            continue
        if key == "do_lower_case":
            return f"{key}, and texts are tokenised as they are"
        if key in ("max_seq_length", "unpad_inputs"):
            continue
        if key == "modality_config" and isinstance(value, dict):
            if "message" in value:
                return (
                    f"{key}.message: sentence-transformers gives each text to the chat template as "
                    "a message of the user, and texts are tokenised as they are"
                )
            if value.get("text") == _LAST_STATE:
                continue
        harmless = _HARMLESS.get(_OTHER_SPELLINGS.get(key, key))
        if harmless is not None and isinstance(value, dict):
            others = [one for one in value if one not in (*harmless, "trust_remote_code")]
            if others:
                return f"{key}.{others[0]}={brief(value[others[0]])}"
        elif value not in _AS_HERE.get(key, ()):
            return f"{key}={brief(value)}"
    return None


def _lengths(
    name: str, of_texts: dict[str, Any], of_tokenizer: dict[str, Any], model_config: ModelConfig
) -> list[tuple[int, str]]:
    """List the lengths of which sentence-transformers takes the smallest, with their places."""
    given = _object(of_texts, "processor_kwargs")
    in_file = (
        (given.get("model_max_length"), f"model_max_length of the checkpoint's {name}"),
        (of_texts.get("max_seq_length"), f"max_seq_length of the checkpoint's {name}"),
    )
    stated = [(length, source) for length, source in in_file if length is not None][:1]
    if not stated:
        most = model_config.hf_config.to_dict().get("max_position_embeddings")
        of_all = (
            (of_tokenizer.get("model_max_length"), f"model_max_length of {_OF_TOKENIZERS}"),
            (None if most == -1 else most, "max_position_embeddings of config.json"),
        )
        stated = [(length, source) for length, source in of_all if length is not None]
    for length, source in stated:
        if type(length) not in (int, float) or length < 1:
            key, _, file = source.partition(" of ")
            raise ValueError(f"{file}: {key}={brief(length)} has to be a number of tokens")
    return [(int(length), source) for length, source in stated]


def _modes(stated: dict[str, Any]) -> list[str]:
    """List the modes: one flag for each, or in newer files one name or several."""
    named = stated.get("pooling_mode")
    if named is None:
        flags = [key for key, value in stated.items() if key.startswith(_MODE) and value]
        return [key.removeprefix(_MODE) for key in flags]
    names = [str(one) for one in (named if isinstance(named, list) else [named])]
    return ["mean_tokens" if name == "mean" else name for name in names]

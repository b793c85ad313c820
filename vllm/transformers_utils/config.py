"""Reads the files that describe a checkpoint, from a local folder or the Hugging Face hub."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from vllm.logger import init_logger
from vllm.transformers_utils.config_entries import check_entries
from vllm.utils.lazy_modules import only_what_configs_need
from vllm.utils.regular_files import check_files, check_regular
from vllm.utils.text import brief, message_of, parse_json
from vllm.utils.weight_files import (
    check_not_adapter,
    find_weight_files,
    is_safetensors,
    not_a_model,
    read_torch_file,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

HfOverrides = Mapping[str, Any] | Callable[["PretrainedConfig"], "PretrainedConfig"]

_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BUILT_LIKE = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers loads only with the checkpoint's code -> a type that has the same
config and the same class."""
_NAMES_OF_KERNELS = {"xlstm": {"chunkwise_kernel", "sequence_kernel", "step_kernel"}}
"""Model types -> entries that choose kernels, not values. transformers chooses its own kernels."""
_IN_ROPE_PARAMETERS = ("rope_theta", "partial_rotary_factor")
_ROPE_NAMES = ("rope_parameters", "rope_scaling", *_IN_ROPE_PARAMETERS)
"""Entries of config.json that transformers reads into ``rope_parameters``."""


@only_what_configs_need()
def load_hf_config(
    model: str,
    *,
    revision: str | None = None,
    code_revision: str | None = None,
    trust_remote_code: bool = False,
    hf_token: bool | str | None = None,
    hf_overrides: HfOverrides | None = None,
) -> PretrainedConfig:
    """Return the transformers config of ``model``, a folder or hub id, with overrides applied.

    ValueError names the model and its fault.
    """
    _check_folder(model)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content: dict[str, Any] = {}
    try:
        content = load_json_file(model, "config.json", revision=revision, hf_token=hf_token) or {}
        check_entries(content)
        model_type = str(content.get("model_type"))
        known, unread = _BUILT_LIKE.get(model_type), _NAMES_OF_KERNELS.get(model_type, set())
        if known is not None and model_type not in CONFIG_MAPPING:
            config = CONFIG_MAPPING[known].from_dict({**content, "model_type": known})
        elif unread:
            read = {name: value for name, value in content.items() if name not in unread}
            config = CONFIG_MAPPING[model_type].from_dict(read)
        else:
            config = AutoConfig.from_pretrained(
                model,
                revision=revision,
                code_revision=code_revision,
                trust_remote_code=trust_remote_code,
                token=hf_token,
            )
    except Exception as error:  # transformers' own validation errors share no base class
        if not content:
            name, adapter = "adapter_config.json", None
            with suppress(OSError, UnicodeError):  # no file and no hub id can have that name
                adapter = load_json_file(model, name, revision=revision, hf_token=hf_token)
            if adapter is not None:
                raise not_a_model(model, "its base model") from error
        if isinstance(error, KeyError):
            reason = _explain_unknown_entry(content, error)
        else:
            reason = f"{message_of(error)}{_entries_looked_at(content, error)}"
        named = f"model={brief(model)}" + (f", revision={brief(revision)}" if revision else "")
        raise ValueError(f"{named}: its config.json cannot be loaded: {reason}") from error
    config = apply_hf_overrides(config, hf_overrides) if hf_overrides else config
    for one in (config, config.get_text_config(decoder=True)):
        _complete_rope_parameters(one)
    return config


def _complete_rope_parameters(config: PretrainedConfig) -> None:
    """Put what a class has no field for into ``rope_parameters``, as transformers' models do."""
    rope = getattr(config, "rope_parameters", None)
    if rope and getattr(config, "original_max_position_embeddings", None) is not None:
        config.standardize_rope_params()


def _explain_unknown_entry(content: Mapping[str, Any], error: KeyError) -> str:
    """Name the entries with a value that transformers does not know, such as a kind of layer."""
    entry = error.args[0]
    if isinstance(entry, str) and " " in entry:
        return entry  # a sentence of transformers
    fields = [
        f"{name}={value!r}"
        for name, value in content.items()
        if (isinstance(value, list) or (isinstance(value, str) and isinstance(entry, str)))
        and entry in value
    ]
    return f"{entry!r} is not known" + (f", in {', '.join(fields)}" if fields else "")


def _entries_looked_at(content: Mapping[str, Any], error: Exception) -> str:
    """Name the entries of config.json that transformers read in the code that refused it."""
    frame = error.__traceback__
    names: set[str] = set()
    while frame is not None:
        code = frame.tb_frame.f_code
        if "/transformers/" in Path(code.co_filename).as_posix():
            names = set(code.co_names) & set(content) or names
        frame = frame.tb_next
    cause = error.__cause__ or error.__context__
    if not names and isinstance(cause, Exception):
        return _entries_looked_at(content, cause)
    entries = ", ".join(f"{name}={content[name]!r}" for name in sorted(names))
    return f" (read there: {entries})" if entries else ""


def _check_folder(model: str) -> None:
    """Raise ValueError for a path that is not a checkpoint folder. Hub ids pass."""
    path = Path(model).expanduser()
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ValueError(
            f"model={brief(model)}: {error.strerror}; give a checkpoint folder or a hub id"
        ) from error
    if is_folder:
        check_files(path)
        if not (path / "config.json").is_file():
            check_not_adapter(path, model)
            raise ValueError(
                f"model={model!r}: the folder has no config.json; give the folder of a "
                "Hugging Face checkpoint"
            )
    elif _is_path(model):
        raise ValueError(f"model={model!r} is not a folder; give a checkpoint folder or a hub id")


def _is_path(model: str) -> bool:
    """Return whether ``model`` is a path. No hub id looks like one."""
    return Path(model).is_file() or Path(model).is_absolute() or model.startswith((".", "~"))


def apply_hf_overrides(config: PretrainedConfig, overrides: HfOverrides) -> PretrainedConfig:
    """Set attributes of ``config`` (a dict sets those of a nested config), or call ``overrides``.

    A key that only the nested text config has is set there. ValueError: the config refuses a
    value.
    """
    from transformers import PretrainedConfig

    if callable(overrides):
        found: object = overrides(config)
        if not isinstance(found, PretrainedConfig):
            raise ValueError(
                f"hf_overrides returned {found!r}: a function has to return the config it is given"
            )
        return found
    try:
        check_entries(overrides)
        _override(config, copy.deepcopy(overrides))  # transformers writes into what it is given
        config.validate()
        if not isinstance(config.get_text_config(decoder=True), PretrainedConfig):
            raise ValueError("this config has no config of a text model inside it")
    except Exception as error:  # these validation errors share no base class either
        raise ValueError(f"hf_overrides={dict(overrides)!r} is not valid: {error}") from error
    return config


def _override(config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    text_config = config.get_text_config(decoder=True)
    rotates = config if getattr(config, "rope_parameters", None) is not None else text_config
    for key, value in _with_rope_parameters(rotates, overrides).items():
        current = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(current, "to_dict"):
            _override(current, value)
        elif not hasattr(config, key) and hasattr(text_config, key):
            setattr(text_config, key, value)
        else:
            if not hasattr(config, key) and key not in _ROPE_NAMES:
                _warn_of_new_entry(config, key)
            setattr(config, key, value)


def _warn_of_new_entry(config: PretrainedConfig, key: str) -> None:
    """Warn only: a third-party class may read an entry that transformers' config does not have."""
    alike = get_close_matches(key, [name for name in vars(config) if not name.startswith("_")], n=1)
    logger.warning(
        "hf_overrides sets %r, which %s does not have%s",
        *(key, type(config).__name__, f": is {alike[0]!r} meant?" if alike else ""),
    )


def _with_rope_parameters(
    config: PretrainedConfig, overrides: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return ``overrides`` with all entries of the rotation under ``rope_parameters``.

    The config's base and its rotated part of the heads stay unless the overrides name them.
    """
    stated = getattr(config, "rope_parameters", None)
    asked = {key: value for key, value in overrides.items() if key in _ROPE_NAMES}
    if not asked or not isinstance(stated, Mapping):
        return overrides
    older = asked.pop("rope_scaling", stated)
    scaling = asked.pop("rope_parameters", older) or {"rope_type": "default"}
    if any(isinstance(value, Mapping) for value in (*stated.values(), *scaling.values())):
        if "rope_parameters" in overrides:
            return overrides
        raise ValueError(f"the model has rotations of several kinds, rope_parameters={stated}")
    kept = {key: stated[key] for key in _IN_ROPE_PARAMETERS if key in stated}
    others = {key: value for key, value in overrides.items() if key != "rope_scaling"}
    return {**others, "rope_parameters": {**kept, **scaling, **asked}}


def load_json_file(
    model: str, filename: str, *, revision: str | None = None, hf_token: bool | str | None = None
) -> dict[str, Any] | None:
    """Return the JSON object in ``filename`` of a checkpoint, or None if there is no such file."""
    content = load_json(model, filename, revision=revision, hf_token=hf_token)
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"model={model!r}: {filename} does not hold a JSON object")
    return content


def load_json(
    model: str, filename: str, *, revision: str | None = None, hf_token: bool | str | None = None
) -> Any:
    """Return the content of a checkpoint's JSON file, or None if there is no such file."""
    path = _find_file(model, filename, revision, hf_token)
    if path is None or not check_regular(path):
        return None
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def find_commit(
    model: str, *, revision: str | None = None, hf_token: bool | str | None = None
) -> str | None:
    """Return the commit of the files of a hub id; None for a folder, or if there are none."""
    from transformers.utils.hub import extract_commit_hash

    path = _find_file(model, "config.json", revision, hf_token)
    commit: str | None = None if path is None else extract_commit_hash(str(path), None)
    return commit


def _find_file(
    model: str, filename: str, revision: str | None, hf_token: bool | str | None
) -> Path | None:
    """Return the place of a checkpoint's file; None: the hub does not have it."""
    folder = Path(model).expanduser()
    if folder.is_dir() or _is_path(model):
        return folder / filename
    from transformers.utils import cached_file

    found = cached_file(
        model,
        filename,
        revision=revision,
        token=hf_token,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def stored_dtype(model: str) -> torch.dtype | None:
    """Return the dtype of most numbers in a local checkpoint's first weight file, or None."""
    folder = Path(model).expanduser()
    numbers: Counter[torch.dtype | None] = Counter()
    with suppress(SafetensorError, ValueError, OSError):  # damaged: loading it will say so
        path = find_weight_files(folder)[0]
        if not is_safetensors(path):
            for tensor in read_torch_file(path, shapes_only=True).values():
                numbers[tensor.dtype] += tensor.numel()
        else:
            with safe_open(path, framework="pt") as file:
                for part in map(file.get_slice, file.keys()):
                    dtype = _SAFETENSORS_DTYPES.get(part.get_dtype())
                    numbers[dtype] += math.prod(part.get_shape())
    known = set(_SAFETENSORS_DTYPES.values())
    return next((dtype for dtype, _ in numbers.most_common() if dtype in known), None)

"""The one list of what computed values depend on besides the tokens of their prompt.

Code that keeps values longer than an engine lives (shared prefixes, datasets that are resumed)
compares this list. Differences between requests of one engine are in the hashes of their
prefixes (``v1/core/prefix_hash.py``).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import xxhash

from vllm import envs
from vllm.model_classes import ModelRegistry, import_class
from vllm.plugins import loaded_plugins
from vllm.utils import random_uuid
from vllm.utils.weight_files import (
    digest_of_ends,
    digest_of_samples,
    find_weight_files,
    index_of,
    weight_map,
)
from vllm.version import VALUES_VERSION

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.vllm import VllmConfig

_WHERE_READ = ("_name_or_path", "transformers_version", "_commit_hash")
"""Entries of a config that record where it was read from."""
_WITHOUT_CODE = ("vllm", "torch", "builtins")
"""Packages whose code is not digested, because the version of this package stands for it."""


def value_identity(vllm_config: VllmConfig, kernels: str) -> dict[str, Any]:
    """Everything that values depend on, by name; equal identities mean equal bits.

    kernels: the kernels in words, from ``vllm.ops.sources.kernels_of``. Entries that do not apply
    to this engine are left out. A class without a source file never has the same identity twice.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    ranks, spread = parallel.tensor_parallel_size, parallel.token_spread
    prefill = parallel.prefill_context_parallel_size
    spreads = ranks > 1 and parallel.enable_expert_parallel
    separate = model.separate_quantization_config
    identity = {
        "config": _digest({k: v for k, v in _config(model).items() if k not in _WHERE_READ}),
        "model_dtype": str(model.dtype),
        "load_format": vllm_config.load_config.load_format,
        "disable_sliding_window": model.disable_sliding_window,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "mamba_cache_dtype": vllm_config.cache_config.mamba_cache_dtype,
        "mamba_ssm_cache_dtype": vllm_config.cache_config.mamba_ssm_cache_dtype,
        **model.computed_otherwise,
        **_weights(vllm_config),
        "separate_quantization_config": _digest(separate) if separate else None,
        "model_classes": _model_classes(model),
        "row_fields": {one.__qualname__: _code_of(one) for one in model.row_field_classes},
        "remote_code": _remote_code(model),
        "transformers": _transformers_version(model),
        "plugins": [_plugin(plugin) for plugin in loaded_plugins],
        "kernels": kernels,
        **_asked_kernels(vllm_config),
        "tensor_parallel_size": ranks if ranks > 1 else None,
        "prefill_context_parallel_size": prefill if prefill > 1 else None,
        "enable_expert_parallel": spreads or None,
        "token_spread": None if spread.is_whole else [spread.ranks, spread.interleave],
        "values_version": VALUES_VERSION,
    }
    return {name: value for name, value in identity.items() if value not in (None, [], {})}


def _asked_kernels(vllm_config: VllmConfig) -> dict[str, str | None]:
    """Kernels of a device that compute only if they are asked for, beside its usual ones."""
    backend, usual = vllm_config.attention_backend, vllm_config.device_config.platform
    is_fla = vllm_config.device_config.device_type == "cuda" and envs.VLLM_GDN_BACKEND == "FLA"
    return {
        "attention_backend": backend if backend != usual.attention_backends[0] else None,
        "delta_rule_backend": "FLA" if is_fla and vllm_config.model_config.is_hybrid else None,
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    config: dict[str, Any] = model.hf_config.to_dict()
    return config


def _weights(vllm_config: VllmConfig) -> dict[str, Any]:
    """Identify local files by content, a hub id by its commit, and dummy weights by their seed."""
    model = vllm_config.model_config
    load_format = vllm_config.load_config.load_format
    if load_format == "dummy":
        return {"seed": model.seed}
    folder = Path(model.model).expanduser()
    if not folder.is_dir():
        return {"hub_id": model.model, "hub_commit": model.hub_commit or model.revision}
    files = find_weight_files(folder, load_format)
    index = index_of(files[0])
    is_indexed = len(files) > 1 and index.is_file()  # it tells which file a tensor is read from
    return {
        "weights": digest_of_ends(files),
        "weights_sampled": digest_of_samples(files),
        "weight_index": _digest(weight_map(index)) if is_indexed else None,
    }


def _model_classes(model: ModelConfig) -> dict[str, dict[str, str]]:
    """Registered and overriding model classes, by the architecture that they run."""
    found = {}
    for name in dict.fromkeys((*model.architectures, *model.causal_architectures)):
        target = model.model_class_overrides.get(name) or ModelRegistry.registered(name)
        if target is not None:
            model_class = import_class(name, target) if isinstance(target, str) else target
            found[name] = {
                "class": f"{model_class.__module__}:{model_class.__qualname__}",
                "code": _code_of(model_class),
            }
    return found


def _code_of(model_class: type) -> str:
    """A digest of the source files of a class, its bases, and the modules that these use."""
    files = set()
    for one in model_class.__mro__:
        if one.__module__.partition(".")[0] in _WITHOUT_CODE:
            continue
        try:
            files.add(Path(inspect.getfile(one)))
        except (OSError, TypeError):  # made in an interactive session
            return random_uuid()
        files |= _files_used_by(one.__module__)
    return _digest_of_files(files)


def _files_used_by(module: str) -> set[Path]:
    """The files of modules whose classes and functions a module has, directly or through others.

    Installed packages are left out, except the module's own.
    """
    own, files, seen, todo = module.partition(".")[0], set(), set(), [module]
    while todo:
        name = todo.pop()
        package, found = name.partition(".")[0], sys.modules.get(name)
        file = None if found is None else vars(found).get("__file__")
        is_known = name in seen or package in _WITHOUT_CODE or package in sys.stdlib_module_names
        seen.add(name)
        if is_known or not file or (package != own and "site-packages" in Path(file).parts):
            continue
        files.add(Path(file))
        for value in vars(found).values():
            if isinstance(value, ModuleType):
                todo.append(value.__name__)
            elif isinstance(value, type | FunctionType):
                todo.append(value.__module__)
    return files


def _remote_code(model: ModelConfig) -> str | None:
    """Digests or commits of the code that ``auto_map`` names as ``[PLACE--]module.Class``; None if
    it may not run."""
    auto_map = _config(model).get("auto_map")
    if not model.trust_remote_code or not auto_map:
        return None
    found = set()
    for reference in auto_map.values():
        place, _, name = str(reference).rpartition("--")
        revision = model.code_revision or (None if place else model.revision)
        with suppress(OSError):  # loading the model says so
            module = f"{name.partition('.')[0]}.py"
            found.add(_code_at(place or model.model, module, revision, model.hf_token))
    return " ".join(sorted(found))


def _code_at(place: str, module: str, revision: str | None, token: bool | str | None) -> str:
    """A digest of the code in a folder, or the commit of a module on the hub."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        return _digest_of_files(folder.rglob("*.py"))
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash

    path = cached_file(place, module, revision=revision, token=token)
    return f"{place}:{extract_commit_hash(path, revision)}"


def _transformers_version(model: ModelConfig) -> str | None:
    """The version of transformers if its module computes, not a class of this package."""
    is_ours = ModelRegistry.find_model_cls(model.causal_architectures) is not None
    if is_ours and model.model_impl != "transformers" and not model.runs_as_module:
        return None
    import transformers

    version: str = transformers.__version__
    return version


def _plugin(plugin: EntryPoint) -> dict[str, str]:
    return {
        "name": plugin.name,
        "value": plugin.value,
        "version": plugin.dist.version if plugin.dist is not None else "",
        "code": _digest_of_files(_files_of_package(plugin.module)),
    }


def _files_of_package(module: str) -> set[Path]:
    """All files of the outermost package of a module, because functions import when they run; the
    module's own file if there is no package or its code is not digested."""
    package, file = module.partition(".")[0], sys.modules[module].__file__
    spec = None if package in _WITHOUT_CODE else sys.modules[package].__spec__
    folders = (spec and spec.submodule_search_locations) or ()
    found = {path for folder in folders for path in Path(folder).rglob("*.py")}
    return found or ({Path(file)} if file else set())


def _digest_of_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(text.encode())

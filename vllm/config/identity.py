"""The one list of what computed values depend on besides the tokens of their prompt.

Code that keeps values longer than an engine lives (shared prefixes, datasets that are resumed)
compares this list. Differences between requests of one engine are in the hashes of their
prefixes (``v1/core/prefix_hash.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from vllm import envs
from vllm.config.code_identity import code_of, digest_of_files, files_of_plugin
from vllm.model_classes import ModelRegistry, import_class
from vllm.plugins import loaded_plugins
from vllm.utils.weight_files import (
    digest_of_content,
    digest_of_ends,
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

_CHANGE_NO_STATE = frozenset({
    "architectures", "bos_token_id", "compression_config", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "problem_type", "quantization_config", "return_dict", "tie_word_embeddings",
    "use_cache",
})  # fmt: skip
"""Entries that trainers change, and that states do not depend on. Tensors say which head is tied,
and how weights are stored."""
_FOR_TRAINING = re.compile("dropout|pdrop|loss|aux|jitter|^initializer_|^unsloth|_version$|^_")


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
        "row_fields": {one.__qualname__: code_of(one) for one in model.row_field_classes},
        "remote_code": _remote_code(model),
        "transformers": _transformers_version(model),
        "registered_in_transformers": _registered_in_transformers(model),
        "plugins": [_plugin(plugin) for plugin in loaded_plugins],
        "kernels": kernels,
        "float32_products": _float32_products(vllm_config),
        **_asked_kernels(vllm_config),
        "tensor_parallel_size": ranks if ranks > 1 else None,
        "prefill_context_parallel_size": prefill if prefill > 1 else None,
        "enable_expert_parallel": spreads or None,
        "token_spread": None if spread.is_whole else [spread.ranks, spread.interleave],
        "values_version": VALUES_VERSION,
    }
    return {name: value for name, value in identity.items() if value not in (None, [], {})}


def config_for_values(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json that a model's states depend on, by name.

    Those of towers are left out, and how weights are stored.
    """
    return {
        name: value
        for one in (model.hf_config, model.hf_text_config)
        for name, value in one.to_dict().items()
        if name not in (*_WHERE_READ, *_CHANGE_NO_STATE, *one.sub_configs)
        and _FOR_TRAINING.search(name) is None
    }


def _asked_kernels(vllm_config: VllmConfig) -> dict[str, str | None]:
    """Kernels of a device that compute only if they are asked for, beside its usual ones."""
    backend, usual = vllm_config.attention_backend, vllm_config.device_config.platform
    is_fla = vllm_config.device_config.device_type == "cuda" and envs.VLLM_GDN_BACKEND == "FLA"
    return {
        "attention_backend": backend if backend != usual.attention_backends[0] else None,
        "delta_rule_backend": "FLA" if is_fla and vllm_config.model_config.is_hybrid else None,
    }


def _float32_products(vllm_config: VllmConfig) -> str | None:
    """Return torch's switch for float32 products on the device; None: they are not rounded."""
    is_cuda = vllm_config.device_config.device_type == "cuda"
    backend: Any = torch.backends.cuda if is_cuda else torch.backends.mkldnn
    precision: str = backend.matmul.fp32_precision
    return None if precision in ("none", "ieee") else precision


def _config(model: ModelConfig) -> dict[str, Any]:
    config: dict[str, Any] = model.hf_config.to_dict()
    return config


def _weights(vllm_config: VllmConfig) -> dict[str, Any]:
    """Identify local files by content, a hub id by its commit, and dummy weights by their seed."""
    model = vllm_config.model_config
    load_format = vllm_config.load_config.load_format
    if load_format == "dummy":
        return {"seed": model.seed}
    folder = Path(model.model)
    if not folder.is_dir():
        return {"hub_id": model.model, "hub_commit": model.hub_commit or model.revision}
    files = find_weight_files(folder, load_format)
    index = index_of(files[0])
    is_indexed = len(files) > 1 and index.is_file()  # it tells which file a tensor is read from
    return {
        "weights": digest_of_ends(files),
        "weights_content": digest_of_content(files),
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
                "code": code_of(model_class),
            }
    return found


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
        return digest_of_files(folder.rglob("*.py"))
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


def _registered_in_transformers(model: ModelConfig) -> dict[str, str]:
    """Digests of the code of classes that a program registered with transformers' auto classes."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    found: dict[str, str] = {}
    for config_class in {type(model.hf_config), type(model.hf_text_config)}:
        classes = [config_class]
        for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM):
            mapping: Any = auto._model_mapping
            if config_class in mapping:
                known = mapping[config_class]
                classes += known if isinstance(known, tuple | list) else [known]
        for one in classes:
            if one.__module__.partition(".")[0] not in ("transformers", "transformers_modules"):
                found[f"{one.__module__}:{one.__qualname__}"] = code_of(one)
    return found


def _plugin(plugin: EntryPoint) -> dict[str, str]:
    return {
        "name": plugin.name,
        "value": plugin.value,
        "version": plugin.dist.version if plugin.dist is not None else "",
        "code": digest_of_files(files_of_plugin(plugin.module)),
    }


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(text.encode())

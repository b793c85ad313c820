"""Which class runs a checkpoint: one of ours, or transformers' module (``model_impl``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.models.registry import ModelRegistry, import_class
from vllm.model_executor.utils import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

Made = TypeVar("Made")
_NOT_CAUSAL = ("use_bidirectional_attention", "add_cross_attention")
"""Entries of a config that let a token depend on more than those before it."""
_TRANSFORMERS_MODULE = "vllm.model_executor.transformers_modules.model:TransformersForCausalLM"


def make_model(vllm_config: VllmConfig, make: Callable[[type[nn.Module]], Made]) -> Made:
    """What ``make`` makes of the class that runs the checkpoint.

    Where a class of ours does not do what the config asks, transformers' module does and nobody
    asked for that class, the module runs instead. ValueError: neither can.
    """
    model_config = vllm_config.model_config
    model_class = choose_model_class(model_config)
    layers = vllm_config.compilation_config.static_forward_context
    before = set(layers)
    try:
        return make(model_class)
    except UnsupportedConfigError as error:
        if not _does_it_in_transformers(model_config, error.option):
            raise
        for name in set(layers) - before:
            del layers[name]
        logger.warning("%s by %s: transformers' module runs it.", error, model_class.__name__)
        try:
            return make(import_class(model_class.__name__, _TRANSFORMERS_MODULE))
        except ValueError as second:
            raise ValueError(f"{error}; and by transformers' module: {second}") from second


def choose_model_class(model_config: ModelConfig) -> type[nn.Module]:
    """ValueError: neither this engine nor transformers has a causal model of that architecture."""
    names = model_config.architectures
    for name in names:
        if name in model_config.model_class_overrides:
            return import_class(name, model_config.model_class_overrides[name])
    ours = ModelRegistry.find_model_cls(names)
    if model_config.model_impl == "vllm" or (ours and model_config.model_impl == "auto"):
        return ModelRegistry.resolve_model_cls(names)[0]
    problem = _why_not_in_transformers(model_config)
    if problem is not None:
        raise ValueError(
            f"architectures={names} of the model's config are not supported; supported: "
            f"{', '.join(ModelRegistry.get_supported_archs())}, and the causal models of "
            f"transformers ({problem}). A class of your own can be added with "
            f"ModelRegistry.register_model"
        )
    return import_class(names[0] if names else "", _TRANSFORMERS_MODULE)


def _does_it_in_transformers(model_config: ModelConfig, option: str | None) -> bool:
    """Whether its class may run instead of ours, and reads that option of the config at all."""
    if model_config.model_impl != "auto" or model_config.model_class_overrides:
        return False
    if option in _NOT_CAUSAL or _why_not_in_transformers(model_config) is not None:
        return False
    if option is None:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config.hf_config), None)
    module = inspect.getmodule(found)
    # Up to the end of the name: a longer one is another option.
    read = re.compile(rf"config\.{re.escape(option)}\b")
    return module is not None and read.search(inspect.getsource(module)) is not None


def _why_not_in_transformers(model_config: ModelConfig) -> str | None:
    """Why transformers' AutoModelForCausalLM would not make what the config names."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config, names = model_config.hf_config, model_config.architectures
    if not names and model_config.model_impl == "auto":
        return "which one it is, config.json has to say"
    remote = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in remote:
        if model_config.trust_remote_code:
            return None
        return "this one brings code of its own, which runs only with trust_remote_code=True"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{transformers.__version__} has none for {type(config).__name__}"
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = found if isinstance(found, tuple | list) else (found,)
    known = [one.__name__ for one in classes]
    if names and not set(names) & set(known):
        return f"of {type(config).__name__} it is {' or '.join(known)}"
    return None

"""Chooses what runs a checkpoint: a class of ours, or transformers' module (``model_impl``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from vllm.config.failures import failures_named
from vllm.logger import init_logger
from vllm.model_classes import ModelRegistry, import_class, unsupported_message
from vllm.model_executor.language_part import is_language_part, running_config
from vllm.model_executor.utils import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

Made = TypeVar("Made")
_NOT_CAUSAL = ("is_causal", "use_bidirectional_attention", "add_cross_attention")
"""Entries of a config that let a token depend on more than earlier tokens."""
_TRANSFORMERS_MODULE = "vllm.model_executor.transformers_modules.model:TransformersForCausalLM"


def make_model(vllm_config: VllmConfig, make: Callable[[type[nn.Module]], Made]) -> Made:
    """Call ``make`` on the class that runs the checkpoint, and return the result.

    If our class does not support the config, but transformers' module does and no option asks for
    our class, the module runs instead. ValueError: neither can.
    """
    model_config = vllm_config.model_config
    model_class = choose_model_class(model_config)
    layers = vllm_config.compilation_config.static_forward_context
    before = set(layers)
    try:
        with failures_named(model_config.hf_config):
            return make(model_class)
    except UnsupportedConfigError as error:
        if not _does_it_in_transformers(model_config, error.option):
            raise
        for name in set(layers) - before:
            del layers[name]
        logger.warning("%s by %s: transformers' module runs it.", error, model_class.__name__)
        model_config.runs_as_module = True
        try:
            with failures_named(model_config.hf_config):
                return make(_class_of_modules(model_config, model_class.__name__))
        except ValueError as second:
            raise ValueError(f"{error}; and by transformers' module: {second}") from second


def choose_model_class(model_config: ModelConfig) -> type[nn.Module]:
    """ValueError: neither this engine nor transformers has a causal model of that architecture."""
    for name in (*model_config.architectures, *model_config.causal_architectures):
        if name in model_config.model_class_overrides:
            return import_class(name, model_config.model_class_overrides[name])
    names = _known_names(model_config)
    ours = ModelRegistry.find_model_cls(names)
    if model_config.model_impl == "vllm" or (ours and model_config.model_impl == "auto"):
        if _runs_remote_code(model_config):
            logger.warning(
                "The code that comes with model=%r does not run, although trust_remote_code=True: "
                "this engine has a class for %s. If that code computes something else, "
                "model_impl='transformers' runs it.",
                model_config.model,
                ", ".join(names),
            )
        return ModelRegistry.resolve_model_cls(names)[0]
    problem = _why_not_in_transformers(model_config)
    if problem is not None:
        known = {*ModelRegistry.get_supported_archs(), *transformers_architectures()}
        raise ValueError(unsupported_message(model_config.architectures, known, problem))
    return _class_of_modules(model_config, names[0] if names else "")


def _class_of_modules(model_config: ModelConfig, architecture: str) -> type[nn.Module]:
    """The class that runs transformers' modules. ValueError: they do not support an option."""
    if model_config.quantise_at_load is not None:
        raise ValueError(
            f"quantization={model_config.quantization!r} is not supported for {architecture!r} as "
            "transformers' own module, which reads weights as tensors; leave the option out, or "
            "model_impl='transformers' where this engine has a class of its own"
        )
    return import_class(architecture, _TRANSFORMERS_MODULE)


def _known_names(model_config: ModelConfig) -> list[str]:
    """The architectures of config.json under the names that are used here.

    Some checkpoints spell transformers' name differently, and in some only ``text_config``
    describes the language model.
    """
    names = model_config.architectures
    if ModelRegistry.find_model_cls(names) is not None or _runs_remote_code(model_config):
        return names
    names = model_config.causal_architectures
    if ModelRegistry.find_model_cls(names) is not None:
        return names
    own = names_in_transformers(running_config(model_config))
    if is_language_part(model_config):
        return own or names
    spelled = {_letters(name): name for name in own}
    return [spelled.get(_letters(name), name) for name in names]


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _brings_code(model_config: ModelConfig) -> bool:
    return "AutoModelForCausalLM" in (getattr(model_config.hf_config, "auto_map", None) or {})


def _runs_remote_code(model_config: ModelConfig) -> bool:
    return model_config.trust_remote_code and _brings_code(model_config)


def _does_it_in_transformers(model_config: ModelConfig, option: str | None) -> bool:
    """Return whether transformers' class may run instead of ours, and reads that option at all."""
    if model_config.model_impl != "auto" or model_config.model_class_overrides:
        return False
    if option in _NOT_CAUSAL or _why_not_in_transformers(model_config) is not None:
        return False
    if option is None:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(running_config(model_config)), None)
    module = inspect.getmodule(found)
    # The name has to end there: a longer one is another option.
    read = re.compile(rf"""config(\.|, ["']){re.escape(option)}\b""")
    return module is not None and read.search(inspect.getsource(module)) is not None


def _why_not_in_transformers(model_config: ModelConfig) -> str | None:
    """The reason why transformers does not have the config's model; None: it has it."""
    import transformers

    names = _known_names(model_config)
    if not names and model_config.model_impl == "auto":
        return "which one it is, config.json has to say"
    if _runs_remote_code(model_config):
        return None
    config = running_config(model_config)
    known = names_in_transformers(config)
    named = not names or is_language_part(model_config) or set(names) & set(known)
    if known and named:
        return None
    if _brings_code(model_config):
        return "this one brings code of its own, which runs only with trust_remote_code=True"
    if not known:
        return f"{transformers.__version__} has none for {type(config).__name__}"
    return f"of {type(config).__name__} it is {' or '.join(known)}"


def transformers_architectures() -> list[str]:
    """Return, by name, the causal models of the installed transformers without a class of ours,
    including those that read more than text.

    They run as transformers' own module if that turns out to be possible when they are loaded, or
    by a class of ours for their text model if there is one.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    names: set[str] = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for found in mapping.values():
            names.update([found] if isinstance(found, str) else found)
    return sorted(names - set(ModelRegistry.get_supported_archs()), key=str.lower)


def names_in_transformers(config: Any) -> list[str]:
    """Names of the classes that :func:`auto_class` makes from such a config."""
    return [name for _, names in _known_classes(config) for name in names]


def auto_class(config: Any) -> Any:
    """AutoModelForCausalLM, also for configs that only code beside them knows; for a model with
    encoders, the class that holds them too."""
    from transformers import AutoModelForCausalLM

    known = list(_known_classes(config))
    stated = set(config.architectures or ())
    named = [one for one, names in known if stated & set(names)]
    return [*named, *(one for one, _ in known), AutoModelForCausalLM][0]


def _known_classes(config: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield auto classes that know the config, and the names of the classes that they make."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    for one in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        mapping: Any = one._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found if isinstance(found, tuple | list) else (found,)
            yield one, [model_class.__name__ for model_class in found]

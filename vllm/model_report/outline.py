"""A model without its weights, built as an engine would build it, with the checks of loading."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from vllm.config import set_current_vllm_config
from vllm.model_executor.captures import make_fields
from vllm.model_executor.layers.quantization.quantization import read_quantization
from vllm.model_executor.model_loader.checkpoint import iterate_shapes, tensor_bytes
from vllm.model_executor.model_loader.loader import find_weights, initialize_model, load_checkpoint
from vllm.model_executor.models.interfaces import check_takes_embeds
from vllm.model_executor.transformers_modules.choice import make_model
from vllm.model_executor.transformers_modules.loading import outline_causal_lm
from vllm.model_executor.transformers_modules.model import TransformersForCausalLM
from vllm.utils.pipeline_stage import PipelineStage
from vllm.v1.spec_decode.extract_hidden_states import make_cache_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Outline(NamedTuple):
    """A model whose parameters have shapes but no memory."""

    model: nn.Module
    model_impl: str
    """"vllm" or "transformers"."""
    description: str
    """Name of the code that computes."""
    way: str
    """The way in which the requests of a step run."""
    stored_bytes: int | None
    """Bytes of the tensors in the checkpoint's files; None: not known without downloading them."""


def outline_model(vllm_config: VllmConfig) -> Outline:
    """Build the model and compare it with its checkpoint; its layers enter the config.

    Raises ValueError if an engine would refuse it.
    """
    config = _without_quantising(vllm_config)
    files = _weights_on_this_machine(config)
    stored_bytes = None if files is None else tensor_bytes(files)

    def make(model_class: type[nn.Module]) -> Outline:
        if issubclass(model_class, TransformersForCausalLM):
            outlines = _class_of_outlines(files)
            outlined: Any = initialize_model(config, model_class=outlines, device="cpu")
            way = outlined.way_in_words
            return Outline(outlined, "transformers", outlined.description, way, stored_bytes)
        with _parameters_without_memory():
            model = initialize_model(config, model_class=model_class, device="cpu")
        if files is not None:
            _check_tensors(model, config, files)
        name = f"{model_class.__module__}.{model_class.__name__}"
        return Outline(model, "vllm", name, "all requests of a step as one batch", stored_bytes)

    found = make_model(vllm_config, make)
    if config.model_config.enable_prompt_embeds:
        check_takes_embeds(found.model)
    fields = make_fields(found.model, config.model_config)
    if config.speculative_config is not None:
        with set_current_vllm_config(config):
            make_cache_layer(config, fields)
    return found


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move parameters of modules that are made in the block to the meta device at once.

    Tensors that are not parameters stay real, because constructors may read them.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.device.type == "meta":  # tied: it stays the same object
            return None
        moved = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        moved.__dict__.update(parameter.__dict__)  # its loader
        return moved

    # torch's annotation forgets that a hook may return a parameter.
    hook = register_module_parameter_registration_hook(cast(Any, move))
    try:
        yield
    finally:
        hook.remove()


def _without_quantising(vllm_config: VllmConfig) -> VllmConfig:
    """Return the config without quantisation at load: there are no values to be quantised."""
    if vllm_config.model_config.quantise_at_load is None:
        return vllm_config
    config, model_config = copy.copy(vllm_config), copy.copy(vllm_config.model_config)
    model_config.quantization = None
    config.model_config = model_config
    return config


def _weights_on_this_machine(vllm_config: VllmConfig) -> list[Path] | None:
    """Return the weight files; None if there are none or they would have to be downloaded."""
    is_folder = Path(vllm_config.model_config.model).is_dir()
    try:
        return find_weights(vllm_config, fetches=False)
    except ValueError:
        if is_folder:
            raise
    return None


def _check_tensors(model: nn.Module, vllm_config: VllmConfig, files: list[Path]) -> None:
    """Raise ValueError if a tensor is missing, left over, or of another shape.

    The tensors of a quantised checkpoint are checked only when they are read.
    """
    quantization = vllm_config.model_config.quantization_config
    if quantization is None:
        load_checkpoint(model, vllm_config, files, iterate=iterate_shapes)
    else:
        read_quantization(quantization)


def _class_of_outlines(files: list[Path] | None) -> type[TransformersForCausalLM]:
    class Outlined(TransformersForCausalLM):
        @staticmethod
        def load(vllm_config: VllmConfig, stage: PipelineStage) -> Any:
            return outline_causal_lm(vllm_config, files)

    return Outlined

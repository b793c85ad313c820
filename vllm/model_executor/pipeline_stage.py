"""The part of a model that one pipeline stage runs.

All stages build the same modules, so that layers, hook points and caches have the same names and
numbers everywhere. A stage then keeps the weights of its own layers, the first one also those of
the embeddings, the last one those of the norm and the LM head. Other parameters are on the device
"meta": they have shapes and no memory, and no weights are read for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from vllm.model_executor.models.decoder_model import DecoderForCausalLM, DecoderModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PipelineStage(NamedTuple):
    """The layers of a stage."""

    first_layer: int
    end_layer: int
    """One more than the last layer."""
    num_layers: int
    """Layers of all stages."""

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    def takes_part(self, num_layers_to_run: int | None) -> bool:
        """Return whether a step that runs so many layers (None: all) needs this stage.

        The stream at a boundary between two stages is kept by the later one.
        """
        return self.is_first or num_layers_to_run is None or num_layers_to_run >= self.first_layer


def stage_of(vllm_config: VllmConfig) -> PipelineStage:
    """Return the stage of this rank. ValueError: the layers cannot be divided so."""
    model_config = vllm_config.model_config
    layers = model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    return PipelineStage(*layers, model_config.get_total_num_hidden_layers())


def keep_stage(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Take the memory of other stages' parameters from a model that has no weights yet.

    ValueError: the model cannot be divided into stages, or not there.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return
    stage = stage_of(vllm_config)
    name = type(model).__name__
    if not isinstance(model, DecoderForCausalLM) or not isinstance(model.model, DecoderModel):
        raise ValueError(
            f"pipeline_parallel_size={stages}: {name} has modules of other packages, which are not "
            "divided into stages; use 1"
        )
    decoder = model.model
    own: list[nn.Module] = list(decoder.layers[stage.first_layer : stage.end_layer])
    if stage.is_first or decoder.layers_read_embeddings:
        own.append(decoder.embed_tokens)
    if stage.is_last:
        own += [decoder.norm, model.lm_head]
    shared = (decoder.layers, decoder.embed_tokens, decoder.norm)
    own += [child for child in decoder.children() if child not in shared]
    own += [child for child in model.children() if child not in (decoder, model.lm_head)]
    modules = {module for part in own for module in part.modules()}
    _check_caches(modules, stages)
    kept = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in kept:
                empty = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
                module.register_parameter(key, empty)
    decoder.stage = stage


def _check_caches(modules: set[nn.Module], stages: int) -> None:
    """ValueError: a layer of the stage reads keys and values of another stage."""
    for module in modules:
        for target in getattr(module, "_target", ()):
            if target not in modules:
                raise ValueError(
                    f"pipeline_parallel_size={stages}: {module.layer_name!r} reads the cache of "
                    f"{target.layer_name!r}, which is in another stage; set "
                    "VLLM_PP_LAYER_PARTITION so that both are in one, or use 1"
                )

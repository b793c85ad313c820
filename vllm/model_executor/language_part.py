"""Multimodal checkpoints: a language model of any family, with encoders of other modalities.

Only the language model runs, as if its tensors and its config were a separate checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Tensor = TypeVar("Tensor")

AROUND_CAUSAL_MODELS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "Llava", "LlavaNext", "LlavaNextVideo", "LlavaOnevision", "VideoLlava", "VipLlava",
        "AyaVision", "Cohere2Vision", "Idefics2", "Idefics3", "SmolVLM", "InternVL", "Lfm2Vl",
        "Mistral3", "Ovis2", "GotOcr2", "Qwen2Audio", "Voxtral", "DeepseekVL", "DeepseekVLHybrid",
        "Exaone4_5_", "GlmAsr", "HyperCLOVAXVisionV2", "LightOnOcr", "MiniCPMOcr",
        "MiniCPMV4_6", "MiniCPMV4_7", "MossTranscribeDiarize", "Qwen3ASR",
        "VideoLlama3",
        "Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe",
    )
)  # fmt: skip
"""Architectures that pass embeddings to the causal model of any family that their ``text_config``
describes; those in the last line pass them to a family of their own."""
_AROUND_OTHERS = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
)
"""Architectures whose text model has no causal class in transformers, but one in this engine."""
_MODEL = re.compile(
    r"(model\.)?(language_model\.)+(model\.)?(?!lm_head\.)"
    r"|(model\.)?(language_model\.)+(?=lm_head\.)"
    r"|(model\.)?text_model\.|model\.(?=(embed_tokens|layers|norm)\.)|(?=lm_head\.)"
)
"""Prefixes of the names of the language model's tensors, in old checkpoints and in new ones. Some
releases of transformers repeat one."""
_INSIDE = re.compile(r"(model\.)?(language_model\.)+(model\.)?(visual|vision_tower|vision_model)\.")
"""Encoders under the prefix of the language model, as some releases of transformers save them."""
_BESIDE = re.compile(
    r"(model\.)?(visual|vision|video|audio|image|multi_modal|connector|embed_vision|embed_audio|mtp"
    r"|aligner|high_res_vision|merger|projector)"
)


def is_language_part(model_config: ModelConfig) -> bool:
    """Return whether transformers' causal model is a part of the checkpoint's model."""
    return not AROUND_CAUSAL_MODELS.isdisjoint(model_config.causal_architectures)


def has_others_beside(model_config: ModelConfig) -> bool:
    """Return whether the checkpoint has tensors that the class of a language model skips."""
    return not (AROUND_CAUSAL_MODELS | _AROUND_OTHERS).isdisjoint(model_config.causal_architectures)


def running_config(model_config: ModelConfig) -> Any:
    """Return the config of the model that runs: the checkpoint's, or its language model's."""
    if not is_language_part(model_config):
        return model_config.hf_config
    config = copy.deepcopy(model_config.hf_text_config)
    config.tie_word_embeddings = model_config.ties_word_embeddings
    return config


def name_in_language_part(name: str) -> str | None:
    """Return the name of a tensor in a checkpoint of only the language model; None: the tensor is
    not part of it. Names with an unknown prefix do not change."""
    if _INSIDE.match(name):
        return None
    if found := _MODEL.match(name):
        rest = name[found.end() :]
        return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return None if _BESIDE.match(name) else name


def tensors_of_language_part(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the language model's tensors, with their names in a checkpoint of only that model."""
    for written, tensor in weights:
        name = name_in_language_part(written)
        if name is not None:
            yield name, tensor

"""Model classes by the architecture name that a checkpoint's config gives.

The registry belongs to the process. Classes are kept as ``"module:Class"`` until they
are needed, so that listing them imports nothing, and so that a worker process can be
told what its parent registered (:meth:`_ModelRegistry.snapshot`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from torch import nn

from vllm.logger import init_logger

logger = init_logger(__name__)

_MODELS = "vllm.model_executor.models"

_BUILT_IN = {
    "BailingHybridForCausalLM": f"{_MODELS}.bailing_hybrid:BailingHybridForCausalLM",
    "BambaForCausalLM": f"{_MODELS}.bamba:BambaForCausalLM",
    "ApertusForCausalLM": f"{_MODELS}.apertus:ApertusForCausalLM",
    "ArceeForCausalLM": f"{_MODELS}.arcee:ArceeForCausalLM",
    "Cohere2ForCausalLM": f"{_MODELS}.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": f"{_MODELS}.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": f"{_MODELS}.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": f"{_MODELS}.deepseek_v2:DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM": f"{_MODELS}.deepseek_v2:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": f"{_MODELS}.dots1:Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM": f"{_MODELS}.ernie45:Ernie4_5_MoeForCausalLM",
    "Ernie4_5ForCausalLM": f"{_MODELS}.ernie45:Ernie4_5ForCausalLM",
    "FalconH1ForCausalLM": f"{_MODELS}.falcon_h1:FalconH1ForCausalLM",
    "Exaone4ForCausalLM": f"{_MODELS}.exaone4:Exaone4ForCausalLM",
    "FalconForCausalLM": f"{_MODELS}.falcon:FalconForCausalLM",
    "FalconMambaForCausalLM": f"{_MODELS}.mamba:FalconMambaForCausalLM",
    "Gemma2ForCausalLM": f"{_MODELS}.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": f"{_MODELS}.gemma:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": f"{_MODELS}.gemma:Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM": f"{_MODELS}.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": f"{_MODELS}.gemma4:Gemma4ForConditionalGeneration",
    "GemmaForCausalLM": f"{_MODELS}.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": f"{_MODELS}.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": f"{_MODELS}.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": f"{_MODELS}.deepseek_v2:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": f"{_MODELS}.glm4:GlmForCausalLM",
    "GlmMoeDsaForCausalLM": f"{_MODELS}.deepseek_v2:GlmMoeDsaForCausalLM",
    "GPT2LMHeadModel": f"{_MODELS}.gpt2:GPT2LMHeadModel",
    "GPTNeoXForCausalLM": f"{_MODELS}.gpt_neox:GPTNeoXForCausalLM",
    "GptOssForCausalLM": f"{_MODELS}.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": f"{_MODELS}.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": f"{_MODELS}.granite:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": f"{_MODELS}.bamba:GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM": f"{_MODELS}.granite:GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM": f"{_MODELS}.helium:HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM": f"{_MODELS}.hunyuan_v1:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": f"{_MODELS}.hunyuan_v1:HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM": f"{_MODELS}.jamba:JambaForCausalLM",
    "KimiLinearForCausalLM": f"{_MODELS}.kimi_linear:KimiLinearForCausalLM",
    "Lfm2ForCausalLM": f"{_MODELS}.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": f"{_MODELS}.lfm2:Lfm2MoeForCausalLM",
    "Llama4ForCausalLM": f"{_MODELS}.llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": f"{_MODELS}.llama4:Llama4ForConditionalGeneration",
    "LlamaForCausalLM": f"{_MODELS}.llama:LlamaForCausalLM",
    "LongcatFlashForCausalLM": f"{_MODELS}.longcat_flash:LongcatFlashForCausalLM",
    "MiniCPM3ForCausalLM": f"{_MODELS}.minicpm3:MiniCPM3ForCausalLM",
    "Mamba2ForCausalLM": f"{_MODELS}.mamba2:Mamba2ForCausalLM",
    "MambaForCausalLM": f"{_MODELS}.mamba:MambaForCausalLM",
    "MiniMaxForCausalLM": f"{_MODELS}.minimax:MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM": f"{_MODELS}.minimax_m2:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": f"{_MODELS}.ministral:Ministral3ForCausalLM",
    "MinistralForCausalLM": f"{_MODELS}.ministral:MinistralForCausalLM",
    "Mistral3ForConditionalGeneration": f"{_MODELS}.ministral:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": f"{_MODELS}.llama:MistralForCausalLM",
    "MixtralForCausalLM": f"{_MODELS}.mixtral:MixtralForCausalLM",
    "NemotronHForCausalLM": f"{_MODELS}.nemotron_h:NemotronHForCausalLM",
    "NemotronForCausalLM": f"{_MODELS}.nemotron:NemotronForCausalLM",
    "Olmo2ForCausalLM": f"{_MODELS}.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": f"{_MODELS}.olmo2:Olmo3ForCausalLM",
    "OlmoHybridForCausalLM": f"{_MODELS}.olmo_hybrid:OlmoHybridForCausalLM",
    "OlmoeForCausalLM": f"{_MODELS}.olmoe:OlmoeForCausalLM",
    "OlmoForCausalLM": f"{_MODELS}.olmo:OlmoForCausalLM",
    "OpenAIGPTLMHeadModel": f"{_MODELS}.openai_gpt:OpenAIGPTLMHeadModel",
    "OPTForCausalLM": f"{_MODELS}.opt:OPTForCausalLM",
    "Phi3ForCausalLM": f"{_MODELS}.phi3:Phi3ForCausalLM",
    "PhiForCausalLM": f"{_MODELS}.phi:PhiForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": f"{_MODELS}.qwen_vl:Qwen2_5_VLForConditionalGeneration",
    "Qwen2ForCausalLM": f"{_MODELS}.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": f"{_MODELS}.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": f"{_MODELS}.qwen_vl:Qwen2VLForConditionalGeneration",
    "Qwen3_5ForCausalLM": f"{_MODELS}.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": f"{_MODELS}.qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": f"{_MODELS}.qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "ZambaForCausalLM": f"{_MODELS}.zamba:ZambaForCausalLM",
    "Zamba2ForCausalLM": f"{_MODELS}.zamba2:Zamba2ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": (
        f"{_MODELS}.qwen3_5_moe:Qwen3_5MoeForConditionalGeneration"
    ),
    "Qwen3ForCausalLM": f"{_MODELS}.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": f"{_MODELS}.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": f"{_MODELS}.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": f"{_MODELS}.qwen_vl:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": f"{_MODELS}.qwen_vl:Qwen3VLMoeForConditionalGeneration",
    "RecurrentGemmaForCausalLM": f"{_MODELS}.recurrent_gemma:RecurrentGemmaForCausalLM",
    "RwkvForCausalLM": f"{_MODELS}.rwkv:RwkvForCausalLM",
    "SeedOssForCausalLM": f"{_MODELS}.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": f"{_MODELS}.smollm3:SmolLM3ForCausalLM",
    "StableLmForCausalLM": f"{_MODELS}.stablelm:StableLmForCausalLM",
    "Starcoder2ForCausalLM": f"{_MODELS}.starcoder2:Starcoder2ForCausalLM",
    "xLSTMForCausalLM": f"{_MODELS}.xlstm:xLSTMForCausalLM",
}

HOW_TO_REGISTER = (
    "register it in every process: give a package an entry point of the group "
    "'vllm.general_plugins' whose function calls ModelRegistry.register_model("
    "architecture, 'module:Class')"
)


class _ModelRegistry:
    """Architecture -> class, or where to import it from."""

    def __init__(self, built_in: Mapping[str, str]) -> None:
        self._built_in = dict(built_in)
        self._registered: dict[str, str | type[nn.Module]] = {}

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Make ``model_cls`` (a class, or ``"module:Class"``) the one for ``model_arch``.

        Replaces what was registered for that architecture before.
        """
        if isinstance(model_cls, str):
            if model_cls.count(":") != 1:
                raise ValueError(
                    f"model_cls={model_cls!r} of architecture {model_arch!r} must be 'module:Class'"
                )
        elif not (isinstance(model_cls, type) and issubclass(model_cls, nn.Module)):
            raise ValueError(
                f"model_cls={model_cls!r} of architecture {model_arch!r} must be a subclass "
                f"of torch.nn.Module or 'module:Class'"
            )
        if model_arch in self.get_supported_archs():
            logger.info("Architecture %s is now served by %s.", model_arch, model_cls)
        self._registered[model_arch] = model_cls

    def get_supported_archs(self) -> list[str]:
        """Every architecture that can be resolved, sorted."""
        return sorted(self._built_in.keys() | self._registered.keys())

    def find_model_cls(self, architectures: Sequence[str]) -> str | None:
        """The first of ``architectures`` that has a class; None: none has. Imports nothing."""
        supported = set(self.get_supported_archs())
        return next((name for name in architectures if name in supported), None)

    def describe(self, architecture: str) -> str:
        """What its class runs: the first paragraph of the class's own docstring, on one line."""
        model_class, _ = self.resolve_model_cls(architecture)
        paragraph = (model_class.__doc__ or "").strip().split("\n\n")[0]
        return " ".join(paragraph.split()).removesuffix(".")

    def resolve_model_cls(self, architectures: str | Sequence[str]) -> tuple[type[nn.Module], str]:
        """The class for the first supported of ``architectures``, and that architecture."""
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        for name in names:
            target = self._registered.get(name, self._built_in.get(name))
            if isinstance(target, str):
                return import_class(name, target), name
            if target is not None:
                return target, name
        raise ValueError(
            f"architectures={names} of the model's config are not supported; supported: "
            f"{', '.join(self.get_supported_archs())}. A class of your own can be added with "
            f"ModelRegistry.register_model"
        )

    def snapshot(self) -> dict[str, str]:
        """What was registered beyond the built-in models, as ``"module:Class"``.

        A spawned worker gives it to :meth:`restore`. A class that no import by name leads
        to (made in a function or a notebook cell) cannot be handed on: a ValueError.
        """
        return {
            arch: target if isinstance(target, str) else _name_of_class(arch, target)
            for arch, target in self._registered.items()
        }

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Register what another process had registered when it took ``snapshot``."""
        for arch, target in snapshot.items():
            self.register_model(arch, target)


def import_class(arch: str, target: str) -> type[nn.Module]:
    """The class ``"module:Class"`` of an architecture; a ValueError where it is none."""
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: "", ".a"
        raise ValueError(
            f"architecture {arch!r} is registered as {target!r}, which cannot be imported "
            f"in this process ({error}); {HOW_TO_REGISTER}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{target!r} of architecture {arch!r} is no torch.nn.Module class")
    return found


def _name_of_class(arch: str, model_cls: type[nn.Module]) -> str:
    module_name, class_name = model_cls.__module__, model_cls.__qualname__
    try:
        importable = getattr(importlib.import_module(module_name), class_name) is model_cls
    except (ImportError, AttributeError):
        importable = False
    if not importable:
        raise ValueError(
            f"architecture {arch!r}: the class {module_name}.{class_name} cannot be imported "
            f"by name, so a worker process cannot find it; {HOW_TO_REGISTER}"
        )
    return f"{module_name}:{class_name}"


ModelRegistry = _ModelRegistry(_BUILT_IN)

"""Model classes by the architecture name that a checkpoint's config gives.

The registry belongs to the process. Classes are kept as ``"module:Class"`` until they
are needed, so that listing them imports nothing, and so that a worker process can be
told what its parent registered (:meth:`_ModelRegistry.snapshot`).
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from vllm.logger import init_logger

logger = init_logger(__name__)

_ARCHITECTURES = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM GraniteMoeHybridForCausalLM",
    "cohere": "Cohere2ForCausalLM CohereForCausalLM",
    "deepseek_v2": (
        "DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM "
        "Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM"
    ),
    "dots1": "Dots1ForCausalLM",
    "ernie45": "Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration GemmaForCausalLM",
    "gemma4": "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    "glm4": "Glm4ForCausalLM GlmForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1": "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM MistralForCausalLM",
    "llama4": "Llama4ForCausalLM Llama4ForConditionalGeneration",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mamba": "FalconMambaForCausalLM MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "Ministral3ForCausalLM MinistralForCausalLM Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "openai_gpt": "OpenAIGPTLMHeadModel",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen_vl": (
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration "
        "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration"
    ),
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "xlstm": "xLSTMForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}
"""Module of ``vllm.model_executor.models`` -> architectures, which are also the class names."""
_BUILT_IN = {
    architecture: f"vllm.model_executor.models.{module}:{architecture}"
    for module, architectures in _ARCHITECTURES.items()
    for architecture in architectures.split()
}

HOW_TO_REGISTER = (
    "register it in every process: give a package an entry point of the group "
    "'vllm.general_plugins' whose function calls ModelRegistry.register_model("
    "architecture, 'module:Class')"
)


class _ModelRegistry:
    """Maps an architecture to its class, or to the ``"module:Class"`` to import."""

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

    def registered(self, architecture: str) -> str | type[nn.Module] | None:
        """The class registered for an architecture; None: none beyond the built-in ones."""
        return self._registered.get(architecture)

    def find_model_cls(self, architectures: Sequence[str]) -> str | None:
        """The first of ``architectures`` that has a class; None: none has. Imports nothing."""
        supported = set(self.get_supported_archs())
        return next((name for name in architectures if name in supported), None)

    def describe(self, architecture: str) -> str:
        """Describe the class: the first paragraph of its own docstring, on one line."""
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
        raise ValueError(unsupported_message(names, self.get_supported_archs()))

    def snapshot(self) -> dict[str, str]:
        """The models registered beyond the built-in ones, as ``"module:Class"``.

        A spawned worker passes them to :meth:`restore`. ValueError: a class cannot be
        imported by name (it was made in a function or a notebook cell).
        """
        return {
            arch: target if isinstance(target, str) else _name_of_class(arch, target)
            for arch, target in self._registered.items()
        }

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Register what another process had registered when it took ``snapshot``."""
        for arch, target in snapshot.items():
            self.register_model(arch, target)


def unsupported_message(names: Sequence[str], known: Iterable[str], reason: str = "") -> str:
    """Return the message for architectures without a class; it names the nearest of ``known``."""
    by_stem: dict[str, list[str]] = {}
    for name in sorted(known):
        by_stem.setdefault(_stem(name), []).append(name)
    stems = difflib.get_close_matches(_stem(names[0]), by_stem, 5, 0) if names else []
    nearest = [name for stem in stems for name in by_stem[stem]][:5]
    hint = f"the nearest that are: {', '.join(nearest)}; " if nearest else ""
    return (
        f"architectures={list(names)} of the model's config are not supported"
        f"{reason and f' ({reason})'}; {hint}`vllm models` lists all. A class of your own can be "
        "added with ModelRegistry.register_model"
    )


def _stem(architecture: str) -> str:
    """Return the part of a name that tells the family, without "ForCausalLM" and the like."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model|LM)$", "", architecture).lower()


def import_class(arch: str, target: str) -> type[nn.Module]:
    """Import the class ``"module:Class"`` of an architecture. ValueError: it is not a model."""
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: "", ".a"
        raise ValueError(
            f"architecture {arch!r} is registered as {target!r}, which cannot be imported "
            f"in this process ({error}); {HOW_TO_REGISTER}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{target!r} of architecture {arch!r} is not a torch.nn.Module class")
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

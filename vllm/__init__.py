"""An inference engine made for extracting hidden states from causal language models.

Importing this package is cheap: every public name is imported on first use (PEP 562),
so that ``import vllm`` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from vllm.engine.arg_utils import EngineArgs as EngineArgs
    from vllm.entrypoints.llm import LLM as LLM
    from vllm.inputs import PromptType as PromptType
    from vllm.inputs import TextPrompt as TextPrompt
    from vllm.inputs import TokensPrompt as TokensPrompt
    from vllm.model_classes import ModelRegistry as ModelRegistry
    from vllm.outputs import ClassificationOutput as ClassificationOutput
    from vllm.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from vllm.outputs import CompletionOutput as CompletionOutput
    from vllm.outputs import EmbeddingOutput as EmbeddingOutput
    from vllm.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from vllm.outputs import PoolingOutput as PoolingOutput
    from vllm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from vllm.outputs import RequestOutput as RequestOutput
    from vllm.sampling_params import SamplingParams as SamplingParams
    from vllm.steering import SteeringType as SteeringType
    from vllm.steering import SteeringVector as SteeringVector
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine as LLMEngine

_MODULE_OF = {
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "ClassificationOutput": "vllm.outputs",
    "ClassificationRequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "EmbeddingRequestOutput": "vllm.outputs",
    "EngineArgs": "vllm.engine.arg_utils",
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "ModelRegistry": "vllm.model_classes",
    "PoolingOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "PromptType": "vllm.inputs",
    "RequestOutput": "vllm.outputs",
    "SamplingParams": "vllm.sampling_params",
    "SteeringType": "vllm.steering",
    "SteeringVector": "vllm.steering",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
}

__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    from vllm.utils.gc_utils import without_garbage_collection

    with without_garbage_collection():
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""Phi-3, Phi-3.5 and Phi-4: Llama whose projections of one input are stored as one tensor."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.llama import MistralForCausalLM
from vllm.model_executor.models.utils import StackedParams


class Phi3ForCausalLM(MistralForCausalLM):
    """Phi-3 mini and medium, Phi-3.5-mini, Phi-4, Phi-4-mini; longrope for long contexts."""

    stacked_params: ClassVar[StackedParams] = {}

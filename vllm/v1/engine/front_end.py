"""What the engines of this package are to their callers, wherever their core runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING, Any, Self

from vllm.transformers_utils.tokenizer import TokenizerLike, load_tokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class EngineFrontEnd:
    """Config, tokenizer and text of one engine, and who is told what its connector says."""

    input_processor: InputProcessor
    """Made when the core is there: it settles max_model_len where that is to fit the memory."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.tokenizer, self._no_tokenizer_reason = load_tokenizer(self.model_config)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.on_connector_stats: list[Callable[[dict[str, Any]], object]] = []
        """Called with the data of what the KV connector counted in a step, where it did."""
        self.on_kv_cache_events: list[Callable[[list[Any]], object]] = []
        """Called with the KV connector's cache events of a step, where there are some."""

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> Self:
        """An engine for a config that is complete and checked."""
        return cls(vllm_config)

    def get_tokenizer(self) -> TokenizerLike:
        """The transformers tokenizer; ValueError that says why where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"this engine has no tokenizer: {self._no_tokenizer_reason}")
        return self.tokenizer

    def _make_input_processor(self) -> InputProcessor:
        return InputProcessor(self.vllm_config, self.tokenizer, self._no_tokenizer_reason)

    def _tell_of_connector(self, stats: Iterable[dict[str, Any]], events: list[Any]) -> None:
        for counted, take_stats in product(stats, self.on_connector_stats):
            take_stats(counted)
        for take_events in self.on_kv_cache_events if events else ():
            take_events(events)

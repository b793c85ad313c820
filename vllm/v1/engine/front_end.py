"""The part that all engines of this package have in common, wherever their core runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Self

from vllm.transformers_utils.tokenizer import TokenizerLike, load_tokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.engine.pooling import Pooler


class EngineFrontEnd:
    """Config, tokenizer and text of one engine, and the listeners to its connector."""

    input_processor: InputProcessor
    """Made once the core exists: the core settles max_model_len if that is to fit the memory."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.tokenizer, self._no_tokenizer_reason = load_tokenizer(self.model_config)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.on_connector_stats: list[Callable[[dict[str, Any]], object]] = []
        """Called with the data of the KV connector's stats of a step, if there are any."""
        self.on_kv_cache_events: list[Callable[[list[Any]], object]] = []
        """Called with the cache events of a step, if there are any."""

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> Self:
        """Make an engine for a config that is complete and checked."""
        return cls(vllm_config)

    def get_tokenizer(self) -> TokenizerLike:
        """Return the transformers tokenizer. ValueError: there is none, for the reason given."""
        if self.tokenizer is None:
            raise ValueError(f"this engine has no tokenizer: {self._no_tokenizer_reason}")
        return self.tokenizer

    @cached_property
    def pooler(self) -> Pooler:
        """Makes the calls for vectors, classes and values."""
        from vllm.v1.engine.pooling import Pooler

        return Pooler(self.vllm_config)

    def _make_input_processor(self) -> InputProcessor:
        self.pooler.read_files()
        return InputProcessor(self.vllm_config, self.tokenizer, self._no_tokenizer_reason)

    def _notify_listeners(self, stats: Iterable[dict[str, Any]], events: list[Any]) -> None:
        for data, take_stats in product(stats, self.on_connector_stats):
            take_stats(data)
        for take_events in self.on_kv_cache_events if events else ():
            take_events(events)

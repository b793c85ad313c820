"""EngineArgs: the options of an engine, for Python and for the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, field, is_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, get_type_hints

from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.logger import LogFormat, init_logger, set_log_format
from vllm.platforms.interface import Platform
from vllm.plugins import load_general_plugins
from vllm.utils.options import (
    WITHOUT_EFFECT,
    FieldOption,
    Group,
    add_flags,
    given_options,
    options_of,
)
from vllm.utils.text import unknown_key_message

logger = init_logger(__name__)

T = TypeVar("T")

_ENGINE = Group("Engine", "Extraction, its destination, and options of the whole engine.")


def _config_options(config_class: type[VllmConfig]) -> dict[str, list[FieldOption]]:
    """Options of the config that each field of ``config_class`` holds; its own options under ""."""
    parts, own = {}, []
    hints = get_type_hints(config_class)
    for option in options_of(config_class, _ENGINE):
        if is_dataclass(part := hints[option.field.name]):
            assert isinstance(part, type)
            parts[option.field.name] = options_of(part)
        else:
            own.append(option)
    return {**parts, "": own}


def dataclass_with_options_of(config_class: type[VllmConfig]) -> Callable[[type[T]], type[T]]:
    """Class decorator: a dataclass that also has a field for each option of ``config_class``."""

    def decorate(cls: type[T]) -> type[T]:
        by_config = _config_options(config_class)
        options = list(chain.from_iterable(by_config.values()))
        annotations = {option.name: option.hint for option in options}
        assert len(annotations) == len(options), "two configs have options of one name"
        cls.__annotations__ = annotations | cls.__annotations__
        for option in options:
            if option.field.default_factory is not MISSING:
                setattr(cls, option.name, field(default_factory=option.field.default_factory))
            elif option.field.default is not MISSING:
                setattr(cls, option.name, option.field.default)
        cls.config_class, cls.config_options = config_class, by_config  # type: ignore[attr-defined]
        return dataclass(cls)

    return decorate


@dataclass_with_options_of(VllmConfig)
class EngineArgs:
    """Options of an engine: those of the configs in VllmConfig, and the fields below.

    An option that is None has its default, as if it were left out: trainers pass what their user
    has not set. Nothing is checked before :meth:`create_engine_config`.
    """

    config_class: ClassVar[type[VllmConfig]]
    config_options: ClassVar[dict[str, list[FieldOption]]]

    disable_log_stats: bool = False
    """Do not log throughput and pool usage."""
    log_format: LogFormat | None = None
    """Format of the log: lines of text, or of JSON. Default: the environment variable
    VLLM_LOG_FORMAT, else text."""
    # Tools for vLLM pass these, and no value depends on them.
    swap_space: Annotated[float | None, WITHOUT_EFFECT] = None
    """Accepted and without effect: preempted requests are computed again."""
    compilation_config: Annotated[dict[str, Any] | None, WITHOUT_EFFECT] = None
    """Accepted and without effect: nothing is compiled."""
    limit_mm_per_prompt: Annotated[dict[str, Any] | None, WITHOUT_EFFECT] = None
    """Accepted and without effect: prompts are text, and others are refused."""
    disable_cascade_attn: Annotated[bool, WITHOUT_EFFECT] = False
    """Accepted and without effect: there is no cascade attention."""
    disable_log_requests: Annotated[bool, WITHOUT_EFFECT] = False
    """Accepted and without effect: requests are not logged."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        def __init__(self, model: str, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for option in self.options():
            if getattr(self, option.name) is None:
                setattr(self, option.name, option.default())

    @classmethod
    def options(cls) -> list[FieldOption]:
        """Every option, in the order of the command line's help."""
        options = list(chain.from_iterable(cls.config_options.values()))
        names = {option.name for option in options}
        return options + [own for own in options_of(cls, _ENGINE) if own.name not in names]

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Make one like the constructor; an unknown name is a ValueError with the nearest one."""
        known = [option.name for option in cls.options()]
        for name in kwargs:
            if name not in known:
                raise ValueError(unknown_key_message("engine options", name, known))
        if "model" not in kwargs:
            raise ValueError("model is missing; give a checkpoint folder or a hub id")
        return cls(**kwargs)

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, left_out: Collection[str] = ()
    ) -> argparse.ArgumentParser:
        """Add a flag for every option but ``left_out`` to ``parser``, in one group per config;
        return the parser."""
        add_flags(parser, [option for option in cls.options() if option.name not in left_out])
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the options out of ``args``, which may hold more; others keep their default."""
        options = given_options(cls, args)
        if options.get("model") is None:
            raise ValueError("--model is missing; give a checkpoint folder or a hub id")
        return cls(**options)

    def create_engine_config(self) -> VllmConfig:
        """Check everything; ValueError names the option, the value and what would work."""
        if self.log_format is not None:
            set_log_format(self.log_format)
        load_general_plugins()
        self._name_those_without_effect()
        values: dict[str, Any] = {
            section: {option.field.name: self._value(option) for option in options}
            for section, options in self.config_options.items()
        }
        model_config = ModelConfig(**values.pop("model_config"))
        device_config = DeviceConfig(**values.pop("device_config"))
        scheduling = values["scheduler_config"]
        scheduling["max_model_len"] = model_config.max_model_len
        if self.max_num_batched_tokens is None and self.enable_chunked_prefill:
            platform = device_config.platform
            default = self._default_max_num_batched_tokens(platform, model_config)
            if self.pipeline_parallel_size > 1:
                default = min(default, platform.default_max_num_batched_tokens_of_stages)
            scheduling["max_num_batched_tokens"] = default
        values |= values.pop("") | {"model_config": model_config, "device_config": device_config}
        return self.config_class(**values)

    def _name_those_without_effect(self) -> None:
        given = [
            option.name
            for option in self.options()
            if not option.declared.has_effect and getattr(self, option.name) != option.default()
        ]
        if given:
            logger.warning("%s: accepted for vLLM's tools, without effect here", ", ".join(given))

    def _value(self, option: FieldOption) -> Any:
        value, supported = getattr(self, option.name), option.declared.supported
        if supported and value not in supported:
            raise ValueError(
                f"{option.name}={value!r} is not supported yet; "
                f"use {' or '.join(map(repr, supported))}"
            )
        return value

    def _default_max_num_batched_tokens(self, platform: Platform, model: ModelConfig) -> int:
        return platform.max_num_batched_tokens_of(model.get_hidden_size())


class AsyncEngineArgs(EngineArgs):
    """Options of an engine behind a server."""

    def _default_max_num_batched_tokens(self, platform: Platform, model: ModelConfig) -> int:
        return platform.default_max_num_batched_tokens_of_servers

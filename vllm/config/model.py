"""ModelConfig: the model, its dtype and its longest request."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vllm import envs
from vllm.config import model_facts
from vllm.config.failures import failures_named
from vllm.config.parallel import ParallelConfig
from vllm.logger import init_logger
from vllm.utils.checked import UNSET, Fillable, at_least, config, is_unset, require
from vllm.utils.pipeline_stage import PipelineStage
from vllm.utils.text import brief, did_you_mean, message_of

# A help text reads the fields below: nothing that loads torch is imported before an object is made.
if TYPE_CHECKING:
    from torch import dtype as TorchDType
    from transformers import PretrainedConfig

    from vllm.v1.rows.fields.layout import Field as RowField
else:
    TorchDType = Any

logger = init_logger(__name__)

AUTO_DTYPE: Any = "auto"
AUTO_FIT_MAX_MODEL_LEN = -1
_LENGTH_WITHOUT_LIMIT = 2048
ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
"""Names of the dtypes that a model can run in."""
_QUANTISE_AT_LOAD = ("fp8", "int8", "int4")
_SAMPLING_DEFAULTS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Key of generation_config.json -> field of SamplingParams."""


def _parse_dtype(value: object) -> TorchDType | None:
    """Return None for "auto", otherwise the dtype for a name, or a supported dtype as it is."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    dtypes = STR_DTYPE_TO_TORCH_DTYPE
    name = str(value).removeprefix("torch.")
    if value is None or value == AUTO_DTYPE:
        return None
    if name not in dtypes or value not in (name, f"torch.{name}", dtypes[name]):
        shown = repr(value) if isinstance(value, str) else value
        raise ValueError(
            f"dtype={shown} is not supported{did_you_mean(name, dtypes)}; "
            f"use 'auto' or one of {', '.join(dtypes)}"
        )
    return dtypes[name]


def _json_file(model: str, name: str, **access: Any) -> dict[str, Any] | None:
    from vllm.transformers_utils.config import load_json_file

    return load_json_file(model, name, **access)


def _of_modelopt(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a ModelOpt file, or of its copy in config.json."""
    found = content.get("quantization")
    if not isinstance(found, dict):
        raise ValueError(
            f"hf_quant_config.json: quantization={found!r} has to map names to settings; "
            "write it again with ModelOpt, or remove the file if no weight is quantised"
        )
    return {"quant_method": "modelopt", **found}


@config()
class ModelConfig:
    """The model and what its files say about it.

    ``tokenizer``, ``dtype`` and ``max_model_len`` of an object always have a value.
    """

    model: str
    """Checkpoint: a local folder, or an id on the Hugging Face hub. A ~ becomes the home folder."""
    tokenizer: Annotated[str, Fillable] = UNSET
    """Folder or hub id of the tokenizer. Default: the model's."""
    tokenizer_mode: Literal["auto"] = "auto"
    """Way of loading the tokenizer."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, outputs have no text."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    """Implementation of the model: "vllm" is a class of this engine, "transformers" is
    transformers' own module on this engine's pool, "auto" is a class of this engine if there is
    one, else transformers' module."""
    dtype: Annotated[
        TorchDType, Fillable, BeforeValidator(_parse_dtype), Field(validate_default=True)
    ] = AUTO_DTYPE
    """Dtype of weights and activations. "auto": exactly the checkpoint's, float32 included."""
    quantization: str | None = None
    """Quantise linear layers and experts of a float checkpoint while it loads: fp8, int8 or int4.
    For a quantised checkpoint only its own quant_method is accepted."""
    head_quantization: Literal["fp8", "int8", "int4"] | None = None
    """Quantise the LM head, and the embedding tied to it, as quantization does linear layers; also
    in quantised checkpoints. Default: they stay as the checkpoint has them."""
    activation_quantization: Literal["as_served"] | None = None
    """as_served: round the inputs of quantised layers to 8 bits, as the kernels that serve the
    checkpoint do. Default: activations stay in the model's dtype."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of dummy weights, and of requests that sample without a seed."""
    revision: str | None = None
    """Version of the model on the hub: branch, tag or commit."""
    code_revision: str | None = None
    """Version of the model's code on the hub."""
    tokenizer_revision: str | None = None
    """Version of the tokenizer on the hub. Default: revision, if the tokenizer is the model's."""
    max_model_len: Annotated[int, Fillable] = UNSET
    """Most tokens of a request, prompt and output. Default: as many as the model was made for.
    -1: as many of those as fit in memory."""
    enforce_eager: bool = False
    """Never replay recorded decode steps (CUDA graphs)."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """Accepted for existing callers, without effect: one engine generates, embeds and extracts."""
    language_model_only: bool = False
    """Accepted for existing callers, without effect: only the language part is ever loaded."""
    enable_sleep_mode: bool = False
    """Accepted for existing callers, without effect: each engine can sleep."""
    served_model_name: Annotated[
        list[str] | str | None,
        require(lambda names: names is None or (names and all(names)), "use no empty name"),
    ] = None
    """Name, or names, of the model in the HTTP API. Default: as given in model."""
    hf_overrides: dict[str, Any] | Callable[[Any], Any] = field(default_factory=dict)
    """Entries of config.json to replace, or a function from config to config."""
    model_class_overrides: dict[str, str] = field(default_factory=dict)
    """Model classes by architecture, as "module:Class", instead of the registered ones; imported
    when the model is built."""
    hf_token: bool | str | None = None
    """Token for the hub; True: the one stored on this machine."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Most logprobs a request may ask for; -1: no limit."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """"raw_logprobs": report the model's log-probabilities. "processed_logprobs": those from which
    tokens are drawn, after penalties, temperature and the cut of unlikely tokens; those of the
    prompt after temperature."""
    enable_prompt_embeds: bool = False
    """Accept prompts as embeddings, {"prompt_embeds": tensor [tokens, hidden]}; over HTTP, in
    /v1/completions. Only for clients whom you trust with the input of the model."""
    expert_trace: bool = False
    """Besides hidden states, return the experts to which each mixture layer routed each token, and
    their weights; all layers then run."""
    row_fields: list[str] = field(default_factory=list)
    """Keep more of each token besides its hidden states: your own fields, as "module:Class"
    (docs/design.md), imported when the model is built."""
    generation_config: str = "auto"
    """Folder of generation_config.json, whose values become sampling defaults.
    "auto": the model's. "vllm": none."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Entries of generation_config.json to set or replace, such as {"temperature": 0.5}."""
    disable_sliding_window: bool = False
    """Use no sliding window, and no more tokens per request than the window holds."""

    auto_fit_max_model_len: bool = field(default=False, init=False)
    """True if max_model_len was given as -1; the engine then lowers it to what fits."""

    runs_as_module: bool = field(default=False, init=False)
    """True once transformers' module turned out to run the model instead of our class of it."""

    def __post_init__(self) -> None:
        self.model = os.path.expanduser(self.model)
        self.tokenizer = (
            self.model if is_unset(self.tokenizer) else os.path.expanduser(self.tokenizer)
        )
        with failures_named(self.hf_config):
            self._resolve()

    def _resolve(self) -> None:
        """Set the options that follow from the checkpoint, and check them."""
        if is_unset(self.dtype):
            self.dtype = self._checkpoint_dtype()
        self._resolve_max_model_len()
        self._check_quantization()
        _ = self.row_field_classes  # raises now if a name is wrong
        self._check_override_generation_config()
        _ = self._generation_config

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a function in ``hf_overrides``, which may be in a program's main file.

        Other processes get ``hf_config``, which it has changed already.
        """
        _ = self.hf_config
        is_function = callable(self.hf_overrides)
        return {**vars(self), **({"hf_overrides": {}} if is_function else {})}

    def of_checkpoint(self, folder: str, revision: str | None) -> ModelConfig:
        """Return a copy that reads the config.json of another checkpoint, with these options.

        Functions in ``hf_overrides`` count in the process that made them only.
        """
        read = (
            "hf_config",
            "hf_text_config",
            "quantization_config",
            "separate_quantization_config",
        )
        other = copy.copy(self)
        for name in read:
            vars(other).pop(name, None)
        other.model, other.revision = folder, revision
        return other

    @cached_property
    def hf_config(self) -> PretrainedConfig:
        """The whole config of the checkpoint, ``hf_overrides`` applied."""
        from vllm.transformers_utils.config import load_hf_config

        return load_hf_config(
            self.model,
            revision=self.revision,
            code_revision=self.code_revision,
            trust_remote_code=self.trust_remote_code,
            hf_token=self.hf_token,
            hf_overrides=self.hf_overrides,
        )

    @cached_property
    def hf_text_config(self) -> PretrainedConfig:
        """The config of the language model; ``hf_config`` itself if it holds no other config."""
        text_config = self.hf_config.get_text_config(decoder=True)
        model_facts.check_sizes(text_config)
        return text_config

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        """The checkpoint's settings for its quantised weights; None: they are in floating point."""
        found = self._stated_quantization()
        if found is not None:
            settings = dict(found if isinstance(found, dict) else found.to_dict())
            return _of_modelopt(settings) if "quantization" in settings else settings
        content = self.separate_quantization_config
        return None if content is None else _of_modelopt(content)

    @cached_property
    def separate_quantization_config(self) -> dict[str, Any] | None:
        """The file into which earlier releases of ModelOpt wrote the settings; None: there is none,
        or config.json has the settings."""
        if self._stated_quantization() is not None:
            return None
        return _json_file(
            self.model, "hf_quant_config.json", revision=self.revision, hf_token=self.hf_token
        )

    def _stated_quantization(self) -> Any:
        sources = (self.hf_config, self.hf_text_config)
        names = ("quantization_config", "compression_config")
        found = (model_facts.config_value(source, names) for source in sources)
        return next((one for one in found if one is not None), None)

    @cached_property
    def hub_commit(self) -> str | None:
        """The commit of a hub id's files; None for a folder, or if it is not known."""
        from vllm.transformers_utils.config import find_commit

        return find_commit(self.model, revision=self.revision, hf_token=self.hf_token)

    @property
    def quantise_at_load(self) -> str | None:
        """Format to which linear layers are quantised while they load; None: they are not."""
        return None if self.quantization_config is not None else self.quantization

    @property
    def computed_otherwise(self) -> dict[str, str]:
        """The given options that change the values computed from the same files and config."""
        options = {
            "quantization": self.quantise_at_load,
            "head_quantization": self.head_quantization,
            "activation_quantization": self.activation_quantization,
            "model_impl": None if self.model_impl == "auto" else self.model_impl,
        }
        return {name: value for name, value in options.items() if value is not None}

    @cached_property
    def row_field_classes(self) -> tuple[type[RowField], ...]:
        """The fields kept of each token besides its hidden states."""
        from vllm.v1.rows.fields import BUILT_IN, find_fields

        built_in = [name for option, name in BUILT_IN.items() if getattr(self, option)]
        return find_fields([*built_in, *self.row_fields])

    def option_of(self, row_field: type[RowField]) -> str:
        """The option, with its value, that asks for a field."""
        from vllm.v1.rows.fields import BUILT_IN, find_field

        built_in = (option for option, name in BUILT_IN.items() if find_field(name) is row_field)
        option = next(built_in, "row_fields")
        return f"{option}={getattr(self, option)}"

    def check_means(self) -> None:
        """Raise ValueError if a field is kept besides hidden states: fields have no mean."""
        for row_field in self.row_field_classes:
            raise ValueError(
                f"pooling='mean' with {self.option_of(row_field)}: there is no mean of "
                f"{row_field.name}; use 'none' or 'last', or leave the option out"
            )

    def _check_quantization(self) -> None:
        if self.activation_quantization is not None and self.quantization_config is None:
            raise ValueError(
                f"activation_quantization={self.activation_quantization!r}: the checkpoint "
                f"{self.model!r} has no quantization_config that says how it is served; leave the "
                "option out"
            )
        if self.quantization is None:
            return
        stored = self.quantization_config
        method = None if stored is None else str(stored.get("quant_method"))
        supported = _QUANTISE_AT_LOAD if method is None else (method,)
        if self.quantization not in supported:
            kind = "a float checkpoint" if method is None else f"a checkpoint stored as {method!r}"
            raise ValueError(
                f"quantization={self.quantization!r} is not supported for {kind}; use "
                f"{', '.join(map(repr, supported))} or None"
            )

    def _check_override_generation_config(self) -> None:
        """Check that each entry is one that has an effect, and that requests can have its value."""
        override = self.override_generation_config
        known = [*_SAMPLING_DEFAULTS, "eos_token_id"]
        for key in override:
            if key not in known:
                raise ValueError(
                    f"override_generation_config has {brief(key)}, on which nothing depends"
                    f"{did_you_mean(key, known)}; use {', '.join(known)}"
                )
        from vllm.sampling_params import SamplingParams

        ends = override.get("eos_token_id")
        try:
            SamplingParams.from_optional(
                **{ours: override.get(key) for key, ours in _SAMPLING_DEFAULTS.items()},
                stop_token_ids=ends if isinstance(ends, list) or ends is None else [ends],
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"override_generation_config={brief(override)}: {error}") from error

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        stated = {**self._generation_config_of_file(), **self.override_generation_config}
        return {key: value for key, value in stated.items() if value is not None}

    def _generation_config_of_file(self) -> dict[str, Any]:
        if self.generation_config == "vllm":
            return {}
        is_auto = self.generation_config == "auto"
        source = self.model if is_auto else self.generation_config
        try:
            content = _json_file(
                source,
                "generation_config.json",
                revision=self.revision if is_auto else None,
                hf_token=self.hf_token,
            )
        except (OSError, UnicodeError) as error:  # it is not a name that the hub could have
            raise ValueError(f"generation_config={brief(source)}: {message_of(error)}") from error
        if content is None and not is_auto:
            raise ValueError(
                f"generation_config={brief(source)} has no generation_config.json; "
                "use 'auto', 'vllm' or a folder that has one"
            )
        return content or {}

    def try_get_generation_config(self) -> dict[str, Any]:
        """Entries of generation_config.json and of ``override_generation_config``."""
        return dict(self._generation_config)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults that the checkpoint states, by field of SamplingParams."""
        found = self._generation_config
        return {ours: found[key] for key, ours in _SAMPLING_DEFAULTS.items() if key in found}

    def get_eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the config and from generation_config.json, each once."""
        ids: list[int] = []
        config_ids = self._stated("eos_token_id")
        if config_ids is None:
            config_ids = model_facts.config_value(self.hf_config, ("eos_token_id",))
        for value in (config_ids, self._generation_config.get("eos_token_id")):
            if value is not None:
                ids.extend(value if isinstance(value, list | tuple) else [value])
        return tuple(dict.fromkeys(ids))

    def _checkpoint_dtype(self) -> TorchDType:
        """The dtype that config.json states, else that of the weights, else float32."""
        for source in (self.hf_text_config, self.hf_config):
            dtype = model_facts.config_value(source, ("dtype",))
            if dtype is not None:
                parsed = _parse_dtype(str(dtype))
                assert parsed is not None
                return parsed
        from vllm.transformers_utils.config import stored_dtype

        stored = stored_dtype(self.model)
        if stored is None:
            logger.warning("%s does not state its dtype: float32 is used", self.model)
        fallback = _parse_dtype("float32")
        assert fallback is not None
        return stored or fallback

    def _resolve_max_model_len(self) -> None:
        limit = self._length_limit()
        if is_unset(self.max_model_len) or self.max_model_len == AUTO_FIT_MAX_MODEL_LEN:
            self.auto_fit_max_model_len = self.max_model_len == AUTO_FIT_MAX_MODEL_LEN
            if limit is None:
                logger.warning(
                    "%s states no maximum length: max_model_len=%d is used",
                    self.model,
                    _LENGTH_WITHOUT_LIMIT,
                )
            self.max_model_len = limit.num_tokens if limit else _LENGTH_WITHOUT_LIMIT
        elif self.max_model_len < 1:
            raise ValueError(
                f"max_model_len={self.max_model_len} is not valid; use at least 1, "
                "or -1 for as many tokens as fit in memory"
            )
        elif limit is not None and self.max_model_len > limit.num_tokens:
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than the model was made for; "
                f"use at most {limit.num_tokens} ({limit.source})"
            )

    def _length_limit(self) -> model_facts.LengthLimit | None:
        limit = model_facts.length_limit(self.hf_text_config)
        window = self.get_sliding_window()
        if self.disable_sliding_window and window is not None:
            by_window = model_facts.LengthLimit(window, "sliding_window, which is disabled")
            return by_window if limit is None else min(limit, by_window)
        return limit

    @cached_property
    def longrope_limit(self) -> int | None:
        """Longest sequence that longrope rotates by its factors for short ones; None: the model's
        rotation does not depend on the length."""
        return model_facts.longrope_limit(self.hf_text_config)

    @property
    def architectures(self) -> list[str]:
        """Class names of the model as config.json gives them."""
        return list(self.hf_config.architectures or [])

    @cached_property
    def causal_architectures(self) -> list[str]:
        """The same with the causal class instead of a bare model, or one with another head."""
        return model_facts.causal_architectures(self.hf_config)

    @property
    def has_other_head(self) -> bool:
        """True if config.json names a bare model, or one with another head than an LM head."""
        return self.causal_architectures != self.architectures

    def _stated(self, *names: str) -> Any:
        return model_facts.config_value(self.hf_text_config, names)

    def _size(self, *names: str) -> int:
        return int(model_facts.required_value(self.hf_text_config, names))

    @property
    def ties_word_embeddings(self) -> bool:
        """True if the LM head is the embeddings. If a multimodal config states it, that decides
        for its text model."""
        outer = model_facts.config_value(self.hf_config, ("tie_word_embeddings",))
        return bool(self._stated("tie_word_embeddings") if outer is None else outer)

    def get_hidden_size(self) -> int:
        return self._size("hidden_size")

    def get_num_streams(self) -> int:
        """Residual streams that a layer hands on for each token: one, except in a few models."""
        return int(self._stated(*model_facts.STREAMS_NAMES) or 1)

    def get_row_size(self) -> int:
        """Elements of a row: the residual stream of a token at a boundary between layers; several
        streams lie one after another."""
        return self.get_num_streams() * self.get_hidden_size()

    def get_vocab_size(self) -> int:
        return self._size("vocab_size")

    def get_head_size(self) -> int:
        explicit = self._stated("head_dim")
        if explicit is not None:
            return int(explicit)
        return self.get_hidden_size() // self._size("num_attention_heads")

    def get_sliding_window(self) -> int | None:
        """Tokens of the sliding window; None if the model has none."""
        window = self._stated("sliding_window")
        is_off = self._stated("use_sliding_window") is False
        return None if window is None or is_off else int(window)

    def get_total_num_kv_heads(self) -> int:
        """Key/value heads of a layer over all ranks."""
        return self._size(*model_facts.KV_HEADS_NAMES, "num_attention_heads")

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Key/value heads of a layer on one rank; ranks share heads when there are too few."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of a layer on one rank."""
        return self._size("num_attention_heads") // parallel_config.tensor_parallel_size

    def get_total_num_hidden_layers(self) -> int:
        """Decoder layers over all pipeline stages."""
        return model_facts.num_decoder_layers(self.hf_text_config)

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Decoder layers on this rank's pipeline stage."""
        start, end = self.get_layers_start_end_indices(parallel_config)
        return end - start

    def stage_of(self, parallel_config: ParallelConfig) -> PipelineStage:
        """Return this rank's pipeline stage. ValueError: the layers cannot be divided so, or there
        are more ranks than heads."""
        self._check_heads(parallel_config.tensor_parallel_size)
        layers = self.get_layers_start_end_indices(parallel_config)
        return PipelineStage(*layers, self.get_total_num_hidden_layers())

    def _check_heads(self, num_ranks: int) -> None:
        """ValueError: no layer can be cut over so many ranks. Layers say whether theirs can, but
        only when every rank has its process."""
        entries = {**vars(self.hf_config), **vars(self.hf_text_config)}
        named = [n for name, n in entries.items() if "heads" in name or name == "n_head"]
        heads = [n for n in named if type(n) is int]
        most = max(heads, default=self.get_hidden_size())
        if num_ranks > most:
            raise ValueError(
                f"tensor_parallel_size={num_ranks} is more than this model has heads; use at most "
                f"{most}, a size that divides them"
            )

    def get_layers_start_end_indices(self, parallel_config: ParallelConfig) -> tuple[int, int]:
        """Return the first layer of this rank's pipeline stage, and the one after its last.

        Stages have equally many layers, the first ones one more where these do not divide, unless
        VLLM_PP_LAYER_PARTITION names other numbers. ValueError: they are not this model's.
        """
        stages, num_layers = (
            parallel_config.pipeline_parallel_size,
            self.get_total_num_hidden_layers(),
        )
        layers, remainder = divmod(num_layers, stages)
        counts = envs.VLLM_PP_LAYER_PARTITION or [layers + (i < remainder) for i in range(stages)]
        if len(counts) != stages or sum(counts) != num_layers or 0 in counts:
            named = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))}: "
            raise ValueError(
                f"{named if envs.VLLM_PP_LAYER_PARTITION else ''}pipeline_parallel_size={stages} "
                f"needs {stages} stages of at least one layer, and {num_layers} layers together; "
                f"use at most {num_layers} stages, and numbers that add up"
            )
        start = sum(counts[: parallel_config.stage])
        return start, start + counts[parallel_config.stage]

    @property
    def use_mla(self) -> bool:
        """True if the model keeps one latent vector per token instead of keys and values."""
        return bool(self._stated("kv_lora_rank"))

    @property
    def _layer_kinds(self) -> frozenset[str]:
        """Kinds of layers, as the config names them; empty if it does not name any."""
        return frozenset(self._stated(*model_facts.LAYER_KINDS_NAMES) or ())

    @property
    def is_hybrid(self) -> bool:
        """True if some layer keeps a recurrent state."""
        return not model_facts.RECURRENT_KINDS.isdisjoint(self._layer_kinds)

    @property
    def has_mixed_attention(self) -> bool:
        """True if the model has both sliding-window and full attention layers."""
        kinds = self._layer_kinds
        slides = not self.disable_sliding_window and kinds & model_facts.SLIDING_KINDS
        return bool(slides and kinds & model_facts.FULL_KINDS)

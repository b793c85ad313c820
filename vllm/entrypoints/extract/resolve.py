"""Options -> their values for this model: layer ids, dtype, prompt options, dataset settings."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.identity import value_identity
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.prompts import PromptMaker
from vllm.hidden_states.layer_ids import Layers, convention_of, resolve_layer_ids
from vllm.hidden_states.metadata import REQUEST_TENSORS, ROW_TENSORS, DatasetSettings
from vllm.hidden_states.positions import parse_positions
from vllm.hidden_states.tensor_file import checksum, dtype_name
from vllm.hidden_states.units import UnitWriter, cut_at, writer_of
from vllm.logger import init_logger
from vllm.ops.sources import kernels_of
from vllm.transformers_utils.answer_masks import MaskRule
from vllm.transformers_utils.chat_template import load_chat_template
from vllm.transformers_utils.tokenizer import load_tokenizer, stated_in_full
from vllm.utils.boundaries import LayerId
from vllm.utils.checked import refuse_unless
from vllm.v1.rows.fields import BUILT_IN, StoredNames
from vllm.v1.rows.fields.activations import is_hook_name
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES
from vllm.v1.rows.fields.requested import requested_fields

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.hook_points import HookPoint
    from vllm.v1.rows.fields.activations import Activation

logger = init_logger(__name__)

_BYTES_CHANGE = (
    "input_format", "messages_column", "prompt_column", "token_ids_column", "mask_column",
    "id_column", "chat_template_kwargs", "add_generation_prompt", "max_samples", "shuffle_seed",
    "on_long", "keep_columns", "loss_mask", "add_special_tokens", "split_turns", "pack",
    "pack_separator", "pack_bos", "pack_last",
)  # fmt: skip
"""Options that the dataset depends on, except those with their own fields in its settings."""
_NOT_STATED: dict[str, Any] = {
    **dict.fromkeys(BUILT_IN, False),
    ROW_TENSORS: StoredNames(),
    REQUEST_TENSORS: {},
    "keep_columns": [],
    "loss_mask": True,
    "add_special_tokens": True,
    "mask": str(MaskRule()),
    "split_turns": False,
    "pack": None,
    "pack_separator": "eos",
    "pack_bos": False,
    "pack_last": "drop",
}
"""Values that settings leave out, as the settings of older datasets do."""
_OF_SERVERS = (
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "data_parallel_rank",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
)
"""Options that place the engines of a front end."""
_HAVE_A_PLACE = ("config", "hub_id", "hub_commit")
"""Entries of an identity that have their own fields in the settings."""
_ALWAYS_STATED = ("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
"""Options of the engine that settings have always stated, even if they are not set."""


@dataclass(frozen=True)
class Resolved:
    """The options and the values derived from them; raises ValueError if they do not fit the
    model."""

    options: ExtractOptions
    engine_args: EngineArgs

    @cached_property
    def vllm_config(self) -> VllmConfig:
        args = self.engine_args
        refuse_unless(args.data_parallel_size >= 1, args, "data_parallel_size", "use at least 1")
        is_one = args.nnodes == 1 or args.data_parallel_size == 1
        refuse_unless(is_one, args, "nnodes", "with data_parallel_size=1 only")
        shares_nothing = not args.enable_expert_parallel or args.data_parallel_size == 1
        name = "enable_expert_parallel"
        advice = "with data_parallel_size=1 only: processes with units of their own do not meet"
        refuse_unless(shares_nothing, args, name, advice)
        for name in _OF_SERVERS:
            is_left_out = getattr(args, name) == getattr(EngineArgs, name)
            refuse_unless(is_left_out, args, name, "with vllm serve and AsyncLLM only")
        is_ours = args.distributed_executor_backend != "external_launcher"
        name = "distributed_executor_backend"
        refuse_unless(is_ours, args, name, "each process would write the dataset; use 'mp'")
        config = self._make_config()
        if config.parallel_config.is_offline_engine:
            raise ValueError(
                "VLLM_DP_SIZE: unset it; vllm extract shares work by data_parallel_size"
            )
        return config

    def _make_config(self) -> VllmConfig:
        return dataclasses.replace(self.engine_args, data_parallel_size=1).create_engine_config()

    def check_model(self) -> None:
        """Raise ValueError if an engine would refuse the checkpoint, or ``verify`` compares rows
        with those of another model; reads no weights."""
        from vllm.model_report.checkpoint_report import report_checkpoint

        config = self._make_config()  # the model's layers enter it
        report_checkpoint(config)
        self.vllm_config.model_config.runs_as_module = config.model_config.runs_as_module
        others = self.vllm_config.model_config.computed_otherwise
        rounded = ", ".join(f"{k}={v!r}" for k, v in others.items() if k.endswith("quantization"))
        advice = f"{rounded} makes another model than transformers loads; leave one of them out"
        refuse_unless(not rounded or not self.options.verify, self.options, "verify", advice)

    @cached_property
    def layer_ids(self) -> tuple[LayerId, ...]:
        if self.options.layers is None and not self._writer.has_default_layers:  # only hooks
            return ()
        num_layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        layers: Layers = self.options.layers or self._writer.default_layers(num_layers)
        layer_ids = resolve_layer_ids(layers, num_layers)
        if self.options.pooling == "mean":
            self.vllm_config.model_config.check_means()
        return layer_ids

    @property
    def _writer(self) -> type[UnitWriter]:
        return writer_of(self.options.format)

    def _check_format(self, settings: DatasetSettings) -> None:
        """Raise ValueError if the format cannot store what the options ask for."""
        note = self._writer.check(settings)
        if note is not None:
            logger.warning("%s", note)
        writer, names = self._writer, settings.stored_names.tensors
        others = [] if writer.stores_fields else [*self.options.keep_columns]
        others += [
            name
            for name in names
            if not (writer.stores_hooks if is_hook_name(name) else writer.stores_fields)
        ]
        if others:
            raise ValueError(
                f"format={settings.format} does not store {', '.join(others)}; leave that out, or "
                "extract to format=sharded and convert a copy"
            )

    @cached_property
    def storage_dtype(self) -> str:
        """The dtype of stored rows, a key of ``STORAGE_DTYPES``."""
        option = self.options.storage_dtype
        model_dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        return self._writer.stored_dtype(model_dtype) if option == "auto" else option

    @cached_property
    def prompt_options(self) -> ExtractOptions:
        """The options with the chat template itself, and the most tokens of a sample."""
        model, template = self.vllm_config.model_config, self.options.chat_template
        if model.auto_fit_max_model_len:
            raise ValueError(
                "max_model_len=-1 depends on the free memory, and a dataset must not; use a "
                "number, or leave it out: engines are started for the longest sample"
            )
        most = model.max_model_len
        room = most - (self.options.max_tokens if self.options.generate else 0)
        advice = f"max_model_len={most}: leave room for the prompt"
        refuse_unless(room >= 1, self.options, "max_tokens", advice)
        longest: int | None = min(self.options.max_length or room, room)
        if self.options.pack is not None:
            fits = self.options.pack <= most
            refuse_unless(fits, self.options, "pack", f"it is longer than max_model_len={most}")
            longest = None  # texts of any length are divided
        return dataclasses.replace(
            self.options, chat_template=load_chat_template(template), max_length=longest
        )

    @cached_property
    def _tokenizer(self) -> tuple[Any, str]:
        return load_tokenizer(self.vllm_config.model_config)

    def prompt_maker(self, stores_loss_mask: bool) -> PromptMaker:
        """``stores_loss_mask``: what the options say, or the dataset that is continued."""
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        return PromptMaker(*self._tokenizer, vocab_size, self.prompt_options, stores_loss_mask)

    def settings(self, input_digest: str) -> DatasetSettings:
        """Return all settings that the bytes of the dataset depend on, without the counts."""
        model = self.vllm_config.model_config
        settings = DatasetSettings(
            model=model.model,
            layer_ids=self.layer_ids,
            num_hidden_layers=model.get_total_num_hidden_layers(),
            hidden_size=model.get_row_size(),
            dtype=self.storage_dtype,
            positions=str(parse_positions(self.options.positions)),
            pooling=self.options.pooling,
            format=self.options.format,
            shard_bytes=cut_at(self.options.format, int(self.options.shard_size_gib * 2**30)),
            num_units=0,
            num_samples=0,
            input_digest=input_digest,
            revision=model.hub_commit or model.revision or "",
            config_digest=self._identity["config"],
            tokenizer_digest=self._tokenizer_digest,
            options=self._other_options(),
            convention=convention_of(self.layer_ids),
        )
        self._check_format(settings)
        return settings

    @property
    def _request_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the tensors for which requests ask, as they are stored."""
        options, vocab_size = self.options, self.vllm_config.model_config.get_vocab_size()
        if options.top_logprobs > vocab_size:
            advice = f"the vocabulary has {vocab_size} tokens; ask for fewer"
            refuse_unless(False, options, "top_logprobs", advice)
        stored = {"top_logprobs": options.logprob_dtype}
        fields = requested_fields(options.top_logprobs, options.logprob_temperature, vocab_size)
        return {
            name: (stored.get(name, dtype_name(form.dtype)), form.shape)
            for field in (*self._activations, *fields)
            for name, form in field.forms.items()
        }

    @cached_property
    def _activations(self) -> list[Activation]:
        """The fields of the hooks, as the dataset stores them."""
        stored: torch.dtype | None = STORAGE_DTYPES[self.storage_dtype]
        if stored is FP8:  # means are in the model's dtype, other values as they are
            is_mean = self.options.pooling == "mean"
            stored = self.vllm_config.model_config.dtype if is_mean else None
        return [point.field(name, stored) for name, point in self.points.items()]

    @cached_property
    def points(self) -> dict[str, HookPoint]:
        """The hook points by the names in the options. ValueError: the model lacks one."""
        from vllm.model_report.hooks import hooks_of

        names = self.options.hook_names
        if not names:
            return {}
        points = hooks_of(self._make_config())
        return {name: points.find(name) for name in names}

    @property
    def _tokenizer_digest(self) -> str:
        tokenizer = self._tokenizer[0]
        return "" if tokenizer is None else checksum(stated_in_full(tokenizer).encode())

    @cached_property
    def _identity(self) -> dict[str, Any]:
        config = self.vllm_config
        return value_identity(config, kernels_of(config.device_config.device_type))

    def _other_options(self) -> dict[str, str]:
        model, args = self.vllm_config.model_config, self.engine_args
        values = {k: v for k, v in self._identity.items() if k not in _HAVE_A_PLACE}
        values |= {name: getattr(self.options, name) for name in _BYTES_CHANGE}
        values |= {name: getattr(args, name) for name in (*_ALWAYS_STATED, "hf_overrides")}
        values |= {
            "mask": str(self.options.mask_rule),
            "max_tokens": self.prompt_options.max_length,
            **{option: getattr(model, option) for option in BUILT_IN},
            ROW_TENSORS: StoredNames.of(model.row_field_classes).foreign,
            REQUEST_TENSORS: self._request_tensors,
            **self.options.request_options,
            "chat_template": self.prompt_options.chat_template,
        }
        if self.options.generate:
            values["sampling"] = True
            values |= {f"sampling.{name}": v for name, v in self.options.sampling.items()}
            values["sampling.seed"] = args.seed
            values["sampling.eos_token_ids"] = model.get_eos_token_ids()
        return {
            name: json.dumps(value, sort_keys=True, default=str)
            for name, value in values.items()
            if name not in _NOT_STATED or value != _NOT_STATED[name]
        }

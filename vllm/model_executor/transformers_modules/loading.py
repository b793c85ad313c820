"""Loads a module of transformers with its weights, by transformers' own loading, strictly."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.config.model_facts import config_value, num_decoder_layers
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.language_part import (
    is_language_part,
    name_in_language_part,
    running_config,
    tensors_of_language_part,
)
from vllm.model_executor.model_loader.checkpoint import (
    Wanted,
    checkpoint_folder,
    iterate_mapped_weights,
    iterate_shapes,
    iterate_weights,
)
from vllm.model_executor.model_loader.stored_weights import dequantise_all, stored_weights
from vllm.model_executor.model_loader.weight_utils import check_dtype, each_once, given_twice
from vllm.model_executor.models.utils import (
    BEFORE_CLASSIFIERS,
    DERIVED_SUFFIXES,
    is_zero_bias,
    other_heads,
)
from vllm.model_executor.transformers_modules.boundaries import (
    NotServableError,
    find_decoder_layers,
)
from vllm.model_executor.transformers_modules.choice import auto_class
from vllm.model_executor.transformers_modules.made_up import make_up
from vllm.utils.pipeline_stage import PipelineStage
from vllm.utils.weight_files import find_weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_MOST_NAMES_SHOWN = 8
_CONVERTED = re.compile(r"tensors destined for (\S+)\. Ckpt contains")
"""Parameters in transformers' report that it makes of several tensors."""


def load_causal_lm(vllm_config: VllmConfig, stage: PipelineStage) -> Any:
    """Load transformers' causal model of the config, in its dtype; ``load_format="dummy"`` gives
    weights as transformers initialises them.

    Layers of other stages have made-up values in little memory; their weights are not read.
    """
    model_config = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return _untrained(vllm_config)
    load_config = vllm_config.load_config
    files = find_weight_files(checkpoint_folder(model_config, load_config), load_config.load_format)
    with torch.device("meta"):
        untrained = _untrained(vllm_config)
    is_wanted = wanted_by(model_config, untrained)
    is_cut = get_tensor_model_parallel_world_size() > 1
    iterate = iterate_mapped_weights if is_cut else iterate_weights

    def load(others: OtherLayers) -> Any:
        def wanted(name: str) -> bool:
            return is_wanted(name) and not others.have(name)

        tensors = iterate(files, wanted)
        stored = stored_weights(model_config, files, tensors, wanted)
        weights: Iterable[tuple[str, torch.Tensor]] = dequantise_all(stored, model_config.dtype)
        if is_language_part(model_config):
            weights = tensors_of_language_part(weights)
        return _from_weights(model_config, untrained, weights, others)

    others = OtherLayers.of_stage(untrained, stage)
    model = None
    # A failure may come of layers that share a weight.
    with suppress(ValueError) if others else nullcontext():
        model = load(others)
    if model is None or _lacks_own(model, others):
        # The checkpoint has it by the name of another stage's layer.
        model = load(OtherLayers())
    make_up(model)
    return model


def outline_causal_lm(vllm_config: VllmConfig, files: list[Path] | None) -> Any:
    """Load the same model from the headers of the weights' files: values are made up, and all
    elements of a parameter share little memory. files: None for a model without a checkpoint;
    tensors of a quantised one are not read."""
    model_config = vllm_config.model_config
    config = _float_config(model_config)
    if model_config.quantization_config is not None:
        files = None
    with torch.device("meta"):
        untrained = _untrained(vllm_config)
    shapes: Iterable[tuple[str, torch.Tensor]] = untrained.state_dict().items()
    if files is not None:
        shapes = iterate_shapes(files, wanted_by(model_config, untrained))
    if files is not None and is_language_part(model_config):
        shapes = tensors_of_language_part(shapes)
    tensors: dict[str, torch.Tensor] = {name: shape.as_subclass(_Shape) for name, shape in shapes}
    model_class = type(untrained)
    model, report = _from_pretrained(model_config, model_class, config, tensors)
    if files is not None:
        _let_head_be_missing(model_config, model, tensors, report)
        _check_complete(report)
    make_up(model)
    return model


def _lacks_own(model: nn.Module, others: OtherLayers) -> bool:
    """Return whether some parameter that is not of other layers alone was not read."""
    parameters = model.named_parameters(remove_duplicate=False)
    return any(one.is_meta and not others.have(name) for name, one in parameters)


class OtherLayers:
    """The decoder layers of other pipeline stages, by the names of their tensors."""

    def __init__(self, path: str = "", indices: Collection[int] = ()) -> None:
        """path: that of the list of layers in the module."""
        self._path, self._indices = path, indices
        self._number = re.compile(rf"(?:^|\.){re.escape(path.rpartition('.')[2])}\.(\d+)\.")

    @classmethod
    def of_stage(cls, model: Any, stage: PipelineStage) -> OtherLayers:
        """Find those of a module. There are none if names do not tell which list is meant."""
        if stage.is_whole:
            return cls()
        try:
            layers = find_decoder_layers(model, stage.num_layers)
        except NotServableError:  # the model says so
            return cls()
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
        }
        path = next(name for name, module in lists.items() if module is layers)
        last = f".{path}".rpartition(".")[2]
        alike = [name for name in lists if f".{name}".endswith(f".{last}")]
        if alike != [path]:
            return cls()
        own = range(stage.first_layer, stage.end_layer)
        return cls(path, [index for index in range(stage.num_layers) if index not in own])

    def __bool__(self) -> bool:
        return bool(self._indices)

    def have(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint or a parameter of the module is theirs."""
        found = self._number.search(name) if self._indices else None
        return found is not None and int(found[1]) in self._indices

    def shapes(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return tensors without values for all of their parameters."""
        tensors = model.state_dict().items()
        return {name: one.as_subclass(_Shape) for name, one in tensors if self.have(name)}


def wanted_by(model_config: ModelConfig, model: Any) -> Wanted:
    """Return a function that tells whether the model reads a tensor of the checkpoint, by name.

    It does not read encoders, other heads, and layers that predict further tokens.
    """
    config = model_config.hf_text_config
    num_layers = num_decoder_layers(config)
    num_further = int(config_value(config, ("num_nextn_predict_layers",)) or 0)
    prefixes = ("", "model.", "model.language_model.")
    unused = tuple(f"{one}layers.{num_layers + i}." for one in prefixes for i in range(num_further))
    unused += other_heads(model_config.has_other_head)
    unused += BEFORE_CLASSIFIERS if model_config.has_other_head else ()
    # Its other patterns hold only for names that it has no place for.
    ignored = [one for one in model._keys_to_ignore_on_load_unexpected or () if "mtp" in one]
    is_part = is_language_part(model_config)

    def reads(name: str) -> bool:
        if name.startswith(unused) or any(re.search(pattern, name) for pattern in ignored):
            return False
        return not is_part or name_in_language_part(name) is not None

    return reads


def _let_head_be_missing(
    model_config: ModelConfig, model: Any, tensors: Collection[str], report: dict[str, Any]
) -> None:
    """Take the LM head out of a report's missing tensors if the checkpoint is that of a model
    without one, and note that in the model."""
    head, names = model.get_output_embeddings(), _outside_body(model)
    missing, known = set(report.get("missing_keys") or ()), dict(model.named_parameters())
    is_bare = model_config.has_other_head or not any(
        name.startswith(f"{model.base_model_prefix}.") for name in tensors
    )
    if missing and is_bare and all(id(known.get(name)) in names for name in missing):
        model.why_no_head = f"the checkpoint has no {', '.join(sorted(missing))}"
        embeddings = {id(one) for one in (head or nn.Module()).parameters()}
        model.lacks_head_layers = any(id(known[name]) not in embeddings for name in missing)
        report["missing_keys"] = []


def _outside_body(model: Any) -> set[int]:
    """Return the ids of the parameters of the LM head alone. Some heads have several layers."""
    body, head = model.base_model, model
    if body is model:
        body, head = model.get_input_embeddings(), model.get_output_embeddings() or nn.Module()
    return {id(one) for one in head.parameters()} - {id(one) for one in body.parameters()}


def _from_weights(
    model_config: ModelConfig,
    untrained: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    others: OtherLayers,
) -> Any:
    tensors = _each_once(weights, untrained)
    for name, parameter in untrained.named_parameters():
        if name in tensors and parameter.is_floating_point():
            check_dtype(name, tensors[name])
    tensors |= others.shapes(untrained)
    config = _float_config(model_config)
    model, report = _from_pretrained(model_config, type(untrained), config, tensors)
    if model_config.quantization_config is not None:
        unexpected = report.get("unexpected_keys") or ()
        kept = [name for name in unexpected if not is_zero_bias(name, tensors[name])]
        report["unexpected_keys"] = kept
    _let_head_be_missing(model_config, model, tensors, report)
    _check_complete(report)
    return model


def _each_once(weights: Iterable[tuple[str, torch.Tensor]], model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that they have in the checkpoint.

    ValueError: two of them stand for one parameter. transformers would take the last.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = model.state_dict()
    wholes: dict[str, str] = {}
    parts: dict[str, str] = {}

    def own_name(written: str) -> str:
        base = (model.base_model_prefix, known)
        name, part = rename_source_key(written, renamings, converters, *base)
        if name not in known and written in known:
            name, part = written, None
        (wholes if part is None else parts)[name] = written
        return name if part is None else written

    tensors = {one.written: one.weight for one in each_once(weights, own_name)}
    for name in wholes.keys() & parts.keys():
        raise given_twice(name, wholes[name], parts[name])
    return tensors


def _float_config(model_config: ModelConfig) -> Any:
    """The config of what runs, without a quantization_config."""
    config = copy.deepcopy(running_config(model_config))
    vars(config).pop("quantization_config", None)
    return config


def _from_pretrained(
    model_config: ModelConfig, model_class: Any, config: Any, tensors: dict[str, torch.Tensor]
) -> tuple[Any, dict[str, Any]]:
    """Return the module with its weights, and transformers' report on them."""
    with _failures_named(model_config):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
            **_options(model_config),
        )
    return model, report


class _Shape(torch.Tensor):
    """A tensor of the meta device that never leaves it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            kwargs.pop("device", None)
            args = tuple(arg for arg in args if not isinstance(arg, torch.device | str | int))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _untrained(vllm_config: VllmConfig) -> Any:
    model_config = vllm_config.model_config
    config = running_config(model_config)
    with _failures_named(model_config):
        return auto_class(config).from_config(
            config,
            trust_remote_code=model_config.trust_remote_code,
            **_options(model_config),
        )


def _options(model_config: ModelConfig) -> dict[str, Any]:
    return {"dtype": model_config.dtype, "attn_implementation": "eager"}


@contextmanager
def _failures_named(model_config: ModelConfig) -> Iterator[None]:
    """Turn transformers' errors into a ValueError that names the cause, if that is known."""
    log = _Log()
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
    try:
        yield
    except (RuntimeError, OSError, KeyError, AttributeError) as error:
        reason = str(error)
        if isinstance(error, KeyError):
            reason = _entry_named(model_config.hf_config.to_dict(), error.args[0]) or repr(error)
        elif targets := sorted(set(_CONVERTED.findall(log.text))):
            reason = (
                f"{_listing(targets)} cannot be made of the checkpoint's tensors: one is missing, "
                "or of another shape than the others"
            )
        raise ValueError(
            f"model={model_config.model!r}: transformers cannot load its weights: {reason}"
        ) from error
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


class _Log(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def _entry_named(config: Mapping[str, Any], value: object, path: str = "") -> str | None:
    """Name the entry of a config that has the unknown value; None: there is no such entry."""
    for key, entry in config.items():
        if isinstance(entry, Mapping):
            found = _entry_named(entry, value, f"{path}{key}.")
            if found is not None:
                return found
        elif entry == value and isinstance(value, str):
            return f"config.json: {path}{key}={value!r} is not known to it"
    return None


def _check_complete(report: dict[str, Any]) -> None:
    """ValueError names tensors that are missing, left over or of another shape. Masks and tables do
    not count."""
    unexpected = report.get("unexpected_keys") or ()
    report["unexpected_keys"] = [n for n in unexpected if not n.endswith(DERIVED_SUFFIXES)]
    complaints = []
    for key, said in (
        ("missing_keys", "is missing {} weight(s): {}"),
        ("unexpected_keys", "has {} weight(s) that the model has no place for: {}"),
        ("mismatched_keys", "has {} weight(s) of another shape: {}"),
        ("error_msgs", "cannot be loaded ({} errors): {}"),
    ):
        found = sorted(map(_in_words, report.get(key) or ()))
        if found:
            complaints.append(said.format(len(found), _listing(found)))
    if complaints:
        raise ValueError("the checkpoint " + "; and ".join(complaints))


def _in_words(entry: Any) -> str:
    """Return an entry's name, with both shapes if they differ."""
    if not isinstance(entry, tuple):
        return str(entry)
    name, shape, expected = entry
    return f"{name} is {tuple(shape)} in the file, expected {tuple(expected)}"


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

"""Recompute samples of a dataset with transformers, and compare."""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.summary import print_table
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import dtype_name
from vllm.utils.boundaries import NORM, LayerId
from vllm.v1.rows.fields.activations import layer_of, place_of
from vllm.v1.rows.fields.logprobs import TopLogprobs

if TYPE_CHECKING:
    from vllm.model_executor.hook_points import HookPoint

_FLOAT32_LIMIT = 1e-4
"""Limit of the error of a row that was computed in float32."""
_ROUNDING_FACTOR = 3.0
"""Limit of the error in other dtypes, as a multiple of the error of transformers in that dtype;
both are relative to float32. The two round at different places."""
_STORAGE_LIMITS = {"float16": 1e-3, "bfloat16": 4e-3, "fp8": 5e-2, "float8_e4m3fn": 5e-2}
"""Error that storing a row may add, by the names of settings and of torch; others add none."""


def verify_against(
    directory: Path,
    count: int,
    seed: int,
    *,
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Compare samples with what ``model`` gives, a folder or hub id, as :func:`verify_samples`.

    The dtype is the one in which the dataset was computed. ValueError: its rows cannot be those of
    this model.
    """
    dataset = HiddenStatesDataset(directory)
    settings = dataset.settings
    while settings is not None and settings.origin is not None:
        settings = settings.origin
    stated = {} if settings is None else settings.options
    hooks = () if dataset.settings is None else dataset.settings.request_options.get("hooks", ())
    vllm_config = EngineArgs(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=json.loads(stated.get("model_dtype", '"auto"')).removeprefix("torch."),
        hf_overrides=json.loads(stated.get("hf_overrides", "{}")),
        skip_tokenizer_init=True,
    ).create_engine_config()
    config = vllm_config.model_config
    # a dataset that was converted from a connector's files does not know it
    is_known = settings is not None and "model_dtype" in stated
    _check_model(dataset, config, settings.num_hidden_layers if settings and is_known else None)
    points: dict[str, HookPoint] = {}
    if hooks:
        from vllm.model_report.hooks import hooks_of

        of_model = hooks_of(vllm_config)
        points = {name: of_model.find(name) for name in hooks}
    return verify_samples(directory, count, seed, config, points)


def _check_model(dataset: HiddenStatesDataset, config: ModelConfig, of_layers: int | None) -> None:
    """of_layers: number of layers of the dataset's model, if it is known."""
    if dataset.settings is None and not dataset.layer_ids:
        raise ValueError(f"{dataset.path}: its files do not say which layers they have")
    if dataset.settings is not None and dataset.settings.pooling == "mean":
        raise ValueError(f"{dataset.path} has means of rows; only rows of tokens can be compared")
    num_layers, width = config.get_total_num_hidden_layers(), config.get_row_size()
    deepest = max((one for one in dataset.layer_ids if isinstance(one, int)), default=0)
    fits = deepest <= num_layers if of_layers is None else of_layers == num_layers
    if not fits or width != dataset.hidden_size:
        layers = f"layer {deepest}" if of_layers is None else f"{of_layers} layers"
        raise ValueError(
            f"{config.model} has {num_layers} layers of width {width}, but the dataset is of "
            f"{layers} of width {dataset.hidden_size}"
        )


def verify_samples(
    directory: Path,
    count: int,
    seed: int,
    model_config: ModelConfig,
    points: Mapping[str, HookPoint] | None = None,
) -> int:
    """Compare ``count`` samples drawn by ``seed``; returns 1 if an error is larger than rounding
    explains, or nothing can be compared, else 0. The model must fit in memory in float32, and once
    more in its dtype.

    points: the points of the dataset's hooks, by the names of their columns.
    """
    dataset = HiddenStatesDataset(directory)
    chosen = sorted(random.Random(seed).sample(range(len(dataset)), min(count, len(dataset))))
    columns = _columns_of(dataset, chosen, points or {})
    exact = _Reference(model_config, columns, torch.float32)
    is_rounded = model_config.dtype != torch.float32
    rounded = _Reference(model_config, columns, model_config.dtype) if is_rounded else None
    worst, usual = dict.fromkeys(columns, 0.0), dict.fromkeys(columns, 0.0)
    for index in chosen:
        sample = dataset[index]
        if int(sample.token_ids.max()) >= model_config.get_vocab_size():
            raise ValueError(
                f"sample {index} has token ids that {model_config.model} does not know"
            )
        expected = exact.of(sample.token_ids)
        again = {} if rounded is None else rounded.of(sample.token_ids)
        for column in exact.known:
            right = expected[column]
            worst[column] = _larger(worst[column], column.error(sample, right))
            if again:
                other = column.usual_error(sample, again[column], right)
                usual[column] = _larger(usual[column], other)
    lines, is_good = [], True
    for column in columns:
        if column not in exact.known:
            lines.append((column.title, "not compared: no module of transformers returns it"))
            continue
        rounding = max(usual[column] * _ROUNDING_FACTOR, column.least_limit)
        limit = rounding + column.storage_limit
        is_within = worst[column] <= limit  # false for NaN too
        verdict = "within" if is_within else "BEYOND"
        lines.append((column.title, f"{worst[column]:.2e}, {verdict} {limit:.2e}"))
        is_good &= is_within
    title = f"Worst errors of {len(chosen)} samples, against transformers in float32"
    print_table(title, lines)
    if not chosen or not exact.known:
        print("nothing was compared")
        return 1
    return 0 if is_good else 1


def _larger(one: float, other: float) -> float:
    """Return the larger number, or NaN if there is one."""
    return other if other > one or math.isnan(other) else one


class _Column(ABC):
    """Something that is stored with each row, and its comparison."""

    title: str
    least_limit = _FLOAT32_LIMIT
    storage_limit = 0.0

    @abstractmethod
    def error(self, sample: HiddenStatesSample, expected: torch.Tensor) -> float:
        """Return the worst error in a sample. expected: the exact values of all its tokens."""

    @abstractmethod
    def usual_error(
        self, sample: HiddenStatesSample, rounded: torch.Tensor, expected: torch.Tensor
    ) -> float:
        """Return the error that transformers makes in the model's dtype."""


class _Rows(_Column):
    """Rows [rows, width] of the stream or of a hook."""

    def __init__(self, title: str, storage_limit: float) -> None:
        self.title, self.storage_limit = title, storage_limit

    @abstractmethod
    def stored(self, sample: HiddenStatesSample) -> torch.Tensor: ...

    def error(self, sample: HiddenStatesSample, expected: torch.Tensor) -> float:
        return _worst(row_errors(self.stored(sample), expected[sample.positions]))

    def usual_error(
        self, sample: HiddenStatesSample, rounded: torch.Tensor, expected: torch.Tensor
    ) -> float:
        return _worst(row_errors(rounded[sample.positions], expected[sample.positions]))


class _Layer(_Rows):
    def __init__(self, place: int, layer_id: LayerId, storage_limit: float) -> None:
        super().__init__(f"layer {layer_id}", storage_limit)
        self.place, self.layer_id = place, layer_id

    def stored(self, sample: HiddenStatesSample) -> torch.Tensor:
        return sample.rows(torch.float32)[:, self.place]


class _Activation(_Rows):
    def __init__(self, name: str, point: HookPoint | None, storage_limit: float) -> None:
        super().__init__(name, storage_limit)
        self.names = (name,) if point is None else (name, *point.names)
        self.boundary = point.depth if point is not None and point.module is None else None

    def stored(self, sample: HiddenStatesSample) -> torch.Tensor:
        return sample.tensors[self.title].float()


class _Logprobs(_Column):
    """Log-probabilities; errors of values beyond 1 are relative to them."""

    title = "log-probabilities"

    def __init__(self, temperature: float, storage_limit: float) -> None:
        self.temperature, self.storage_limit = temperature, storage_limit
        self.least_limit = _FLOAT32_LIMIT * max(1.0, 1 / temperature)

    def error(self, sample: HiddenStatesSample, expected: torch.Tensor) -> float:
        ids, top, following = (sample.tensors[name] for name in TopLogprobs.tensor_names)
        right, next_ids = self._of_rows(sample, expected), _next_ids(sample)
        known = next_ids >= 0
        if not torch.equal(following.isnan(), ~known) or (ids < 0).any():
            return math.inf
        if (ids >= right.shape[1]).any():
            return math.inf
        return max(
            _deviation(top.float(), right.topk(ids.shape[1]).values),
            _deviation(top.float(), right.gather(1, ids.long())),
            _deviation(following[known], right[known].gather(1, next_ids[known, None])[:, 0]),
        )

    def usual_error(
        self, sample: HiddenStatesSample, rounded: torch.Tensor, expected: torch.Tensor
    ) -> float:
        ids = sample.tensors["top_token_ids"].long()
        ids = torch.cat([ids, _next_ids(sample)[:, None].clamp(min=0)], dim=1)
        one, other = self._of_rows(sample, rounded), self._of_rows(sample, expected)
        return _deviation(one.gather(1, ids), other.gather(1, ids))

    def _of_rows(self, sample: HiddenStatesSample, logits: torch.Tensor) -> torch.Tensor:
        return (logits[sample.positions] / self.temperature).log_softmax(-1)


def _columns_of(
    dataset: HiddenStatesDataset, chosen: Sequence[int], points: Mapping[str, HookPoint]
) -> list[_Column]:
    settings = dataset.settings
    if settings is not None:
        dtypes = [settings.dtype]
    else:  # each file of a plain folder may have another one
        dtypes = [dtype_name(dataset.stored(index).hidden_states.dtype) for index in chosen]
    limit = max((_STORAGE_LIMITS.get(name, 0.0) for name in dtypes), default=0.0)
    columns: list[_Column] = [
        _Layer(place, layer_id, limit) for place, layer_id in enumerate(dataset.layer_ids)
    ]
    if settings is None:
        return columns
    options = settings.request_options
    for name in options.get("hooks", ()):
        stored_as = dtype_name(settings.request_tensors[name].dtype)
        columns.append(_Activation(name, points.get(name), _STORAGE_LIMITS.get(stored_as, 0.0)))
    if "top_logprobs" in options:
        stored_as = dtype_name(settings.request_tensors["top_logprobs"].dtype)
        columns.append(
            _Logprobs(options["logprob_temperature"], _STORAGE_LIMITS.get(stored_as, 0.0))
        )
    return columns


def _next_ids(sample: HiddenStatesSample) -> torch.Tensor:
    """Return the token that follows each row, -1 for the last."""
    following = torch.cat([sample.token_ids[1:], torch.tensor([-1])])
    return following[sample.positions]


def _worst(errors: torch.Tensor) -> float:
    """Return the largest error, NaN if one is; 0 if there is none."""
    return float(errors.amax()) if errors.numel() else 0.0


def _deviation(found: torch.Tensor, right: torch.Tensor) -> float:
    return _worst((found - right).abs() / right.abs().clamp(min=1))


def row_errors(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [rows, ...], the norm of the difference, relative to the root mean square of the
    norms of all rows in this place, or to the row's own if it is larger, as rounding errors are."""
    difference = torch.linalg.vector_norm(rows - expected, dim=-1)
    lengths = torch.linalg.vector_norm(expected, dim=-1)
    usual = lengths.square().mean(dim=0).sqrt() if len(lengths) else lengths
    errors: torch.Tensor = difference / lengths.maximum(usual)
    return errors


class _Reference:
    """The values of columns as a model of transformers computes them."""

    def __init__(
        self, model_config: ModelConfig, columns: Sequence[_Column], dtype: torch.dtype
    ) -> None:
        self._kept: dict[object, torch.Tensor] = {}
        self.known: list[_Column] = []
        """The columns that it can compute."""
        causal_lm = _load(model_config, dtype)
        has_head = any(isinstance(one, _Logprobs) or _boundary(one) == NORM for one in columns)
        self._model = causal_lm if has_head else causal_lm.base_model
        layers = _decoder_layers(causal_lm.base_model, model_config.get_total_num_hidden_layers())
        modules = {place_of(name): module for name, module in causal_lm.named_modules()
                   if "vis" not in name and layer_of(name) is not None}  # fmt: skip
        for column in columns:
            boundary = _boundary(column)
            if isinstance(column, _Logprobs):
                self.known.append(column)
            elif boundary is not None:
                self._keep_boundary(column, boundary, causal_lm, layers)
            elif isinstance(column, _Activation):
                places = map(place_of, column.names)
                module = next((modules[one] for one in places if one in modules), None)
                if module is not None:
                    module.register_forward_hook(partial(self._keep_output, column))
                    self.known.append(column)

    def _keep_boundary(
        self, column: _Column, boundary: LayerId, causal_lm: Any, layers: Any
    ) -> None:
        self.known.append(column)
        if boundary == len(layers):
            layers[-1].register_forward_hook(partial(self._keep_output, column))
            return
        read_by = causal_lm.get_output_embeddings() if boundary == NORM else layers[boundary]
        keep = partial(self._keep_input, column)
        read_by.register_forward_pre_hook(keep, with_kwargs=True)

    def _keep_input(self, key: object, module: object, args: Any, keywords: Any) -> None:
        self._kept[key] = (args[0] if args else keywords["hidden_states"]).clone()

    def _keep_output(self, key: object, module: object, args: Any, output: Any) -> None:
        while isinstance(output, tuple | list):
            output = output[0]
        self._kept[key] = output.clone()

    @torch.inference_mode()
    def of(self, token_ids: torch.Tensor) -> dict[_Column, torch.Tensor]:
        """Return float32 [tokens, width] on the host for each column that is known."""
        output = self._model(input_ids=token_ids[None].to(self._model.device), use_cache=False)
        found = {}
        for column in self.known:
            kept = output.logits if isinstance(column, _Logprobs) else self._kept[column]
            found[column] = kept.reshape(len(token_ids), -1).float().cpu()
        return found


def _boundary(column: _Column) -> LayerId | None:
    """Return the boundary whose stream a column has; None: it has something else."""
    if isinstance(column, _Layer):
        return column.layer_id
    return column.boundary if isinstance(column, _Activation) else None


def _load(model_config: ModelConfig, dtype: torch.dtype) -> Any:
    import transformers

    (name, *_) = model_config.architectures or ["AutoModelForCausalLM"]
    known = hasattr(transformers, name)
    model_class = getattr(transformers, name) if known else transformers.AutoModelForCausalLM
    model = model_class.from_pretrained(
        model_config.model,
        config=model_config.hf_config,
        revision=model_config.revision,
        trust_remote_code=model_config.trust_remote_code,
        token=model_config.hf_token,
        dtype=dtype,
    )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _decoder_layers(model: Any, num_layers: int) -> Any:
    """Return the outermost list of ``num_layers`` modules that is not part of a vision tower."""
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        if is_list and "vis" not in name:
            return module
    raise ValueError(f"verify: {type(model).__name__} has no list of {num_layers} layers")

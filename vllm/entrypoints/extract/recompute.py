"""``--verify``: recompute samples of a finished dataset with transformers, and compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm.config import ModelConfig
from vllm.entrypoints.extract.summary import print_table
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.metadata import DatasetSettings
from vllm.utils.boundaries import NORM, LayerId

_FLOAT32_LIMIT = 1e-4
"""Limit of the error of a row that was computed in float32."""
_ROUNDING_FACTOR = 3.0
"""Limit of the error in other dtypes, as a multiple of the error of transformers in that dtype;
both are relative to float32. The two round at different places."""
_STORAGE_LIMITS = {"float32": 0.0, "float16": 1e-3, "bfloat16": 4e-3, "fp8": 5e-2}
"""Error that storing a row may add."""


def verify_samples(directory: Path, count: int, seed: int, model_config: ModelConfig) -> int:
    """Compare ``count`` samples drawn by ``seed``; returns 1 if an error is larger than rounding
    explains, else 0. The model must fit in memory in float32, and once more in its dtype."""
    dataset = HiddenStatesDataset(directory)
    settings = DatasetSettings.read(str(directory))
    layer_ids, dtype = settings.layer_ids, model_config.dtype
    exact = _Streams(model_config, layer_ids, torch.float32)
    rounded = None if dtype == torch.float32 else _Streams(model_config, layer_ids, dtype)
    worst, usual = torch.zeros(len(layer_ids)), torch.zeros(len(layer_ids))
    chosen = sorted(random.Random(seed).sample(range(len(dataset)), min(count, len(dataset))))
    for index in chosen:
        sample = dataset[index]
        expected = exact.of(sample.token_ids)[sample.positions]
        worst = worst.maximum(row_errors(sample.rows(torch.float32), expected).amax(dim=0))
        if rounded is not None:
            rows = rounded.of(sample.token_ids)[sample.positions]
            usual = usual.maximum(row_errors(rows, expected).amax(dim=0))
    limits = (usual * _ROUNDING_FACTOR).clamp(min=_FLOAT32_LIMIT) + _STORAGE_LIMITS[settings.dtype]
    is_good = worst <= limits  # false for NaN too
    lines = [
        (f"layer {layer_id}", f"{error:.2e}, {'within' if good else 'BEYOND'} {limit:.2e}")
        for layer_id, error, limit, good in zip(
            layer_ids, worst.tolist(), limits.tolist(), is_good.tolist(), strict=True
        )
    ]
    title = f"Worst row error of {len(chosen)} samples, against transformers in float32"
    print_table(title, lines)
    return 0 if is_good.all() else 1


def row_errors(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [rows, layers], the norm of the difference, relative to the root mean square of the
    norms of that layer's rows, or to the row's own norm if it is larger, as rounding errors are."""
    difference = torch.linalg.vector_norm(rows - expected, dim=-1)
    lengths = torch.linalg.vector_norm(expected, dim=-1)
    errors: torch.Tensor = difference / lengths.maximum(lengths.square().mean(dim=0).sqrt())
    return errors


class _Streams:
    """The residual stream of a transformers model at the boundaries of its layers."""

    def __init__(
        self, model_config: ModelConfig, layer_ids: Sequence[LayerId], dtype: torch.dtype
    ) -> None:
        self._layer_ids = layer_ids
        self._kept: dict[LayerId, torch.Tensor] = {}
        causal_lm = _load(model_config, dtype)
        self._model = causal_lm if NORM in layer_ids else causal_lm.base_model
        num_layers = model_config.get_total_num_hidden_layers()
        layers = _decoder_layers(causal_lm.base_model, num_layers)
        for layer_id in {*layer_ids} - {len(layers)}:
            keep = partial(self._keep_input, layer_id)
            read_by = causal_lm.get_output_embeddings() if layer_id == NORM else layers[layer_id]
            read_by.register_forward_pre_hook(keep, with_kwargs=True)
        layers[-1].register_forward_hook(partial(self._keep_output, len(layers)))

    def _keep_input(self, layer_id: LayerId, module: object, args: Any, keywords: Any) -> None:
        self._kept[layer_id] = (args[0] if args else keywords["hidden_states"])[0].clone()

    def _keep_output(self, layer_id: int, module: object, args: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        self._kept[layer_id] = hidden[0].clone()

    @torch.inference_mode()
    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [tokens, layers, hidden] on the host."""
        self._model(input_ids=token_ids[None].to(self._model.device), use_cache=False)
        return torch.stack([self._kept[one].float().cpu() for one in self._layer_ids], dim=1)


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

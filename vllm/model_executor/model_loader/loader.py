"""Builds the model of a config and loads its weights."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import prepare_heads
from vllm.model_executor.layers.weight import begin_weights, finish_weights, num_weight_bytes
from vllm.model_executor.model_loader.checkpoint import (
    check_sizes,
    checkpoint_folder,
    iterate_weights,
    stored_names,
)
from vllm.model_executor.model_loader.stored_weights import dequantise_all, stored_weights
from vllm.model_executor.model_loader.tensor_limit import TensorLimit
from vllm.model_executor.model_loader.weight_utils import log_skipped
from vllm.model_executor.models.interfaces import (
    DividesIntoStages,
    FindsWeights,
    SkipsWeights,
    VllmModelForTextGeneration,
)
from vllm.model_executor.transformers_modules.choice import make_model
from vllm.model_executor.utils import ElsewhereParameter, is_all_ours
from vllm.utils.mem_utils import format_bytes
from vllm.utils.progress import progress_bar
from vllm.utils.weight_files import find_weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_VECTOR_SPREAD = 0.1

# torch's default dtype belongs to the process, so one model is built at a time.
_build_lock = threading.Lock()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def initialize_model(
    vllm_config: VllmConfig,
    prefix: str = "",
    *,
    device: str | None = None,
    model_class: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Build the model, with parameters allocated once, in their dtype and on their device.

    Its attention and recurrent layers enter the config's ``static_forward_context``.
    device: overrides the config's; on "meta" parameters have shapes and no memory. model_class:
    the class to build; None: the class that runs the checkpoint.
    """
    model_config = vllm_config.model_config

    def make(model_class: Callable[..., nn.Module]) -> nn.Module:
        with (
            _build_lock,
            _default_dtype(model_config.dtype),
            torch.device(device or vllm_config.device_config.device_type),
            TensorLimit(vllm_config),
            set_current_vllm_config(vllm_config),
        ):
            model: nn.Module = model_class(vllm_config=vllm_config, prefix=prefix)
        return model.requires_grad_(False).eval()

    return make(model_class) if model_class is not None else make_model(vllm_config, make)


def _check_memory(vllm_config: VllmConfig) -> None:
    """ValueError: a model of these sizes cannot fit. This is checked before it is built."""
    model_config, platform = vllm_config.model_config, vllm_config.device_config.platform
    hidden_size, num_layers = (
        model_config.get_hidden_size(),
        model_config.get_total_num_hidden_layers(),
    )
    # All that holds for every family: a layer has at least one square matrix.
    values = model_config.get_vocab_size() * hidden_size + num_layers * hidden_size**2
    least_bytes, memory_bytes = values * model_config.dtype.itemsize, platform.total_memory_bytes()
    if least_bytes > memory_bytes:
        raise ValueError(
            f"config.json: a model of vocab_size={model_config.get_vocab_size()}, "
            f"hidden_size={hidden_size} and num_hidden_layers={num_layers} takes "
            f"{format_bytes(least_bytes)} or more; this machine has {format_bytes(memory_bytes)}"
        )


def find_weights(vllm_config: VllmConfig, *, fetches: bool = True) -> list[Path] | None:
    """The files of the weights; None: there are none to read (``load_format="dummy"``).

    fetches: missing files of a hub id come from the hub. ValueError: files are missing, or the
    config's sizes do not fit the files or this machine.
    """
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    files = None
    if load_config.load_format != "dummy":
        folder = checkpoint_folder(model_config, load_config, fetches=fetches)
        files = find_weight_files(folder, load_config.load_format)
        check_sizes(files, model_config)
    _check_memory(vllm_config)
    return files


def load_checkpoint(
    model: nn.Module,
    vllm_config: VllmConfig,
    files: list[Path],
    iterate: Callable[..., Iterator[tuple[str, torch.Tensor]]] = iterate_weights,
) -> None:
    """Fill ``model`` from these files, read by ``iterate``. What the model skips is not read.

    ValueError names a weight that is missing, left over or of another shape, or a file that is
    missing or damaged.
    """
    shown = progress_bar(
        files, desc="Loading weights", unit="file", disable=not shows_progress(files, vllm_config)
    )
    skipped = {}
    if isinstance(model, SkipsWeights):
        skipped_part = model.make_skipper()
        parts = ((name, skipped_part(name)) for name in stored_names(files))
        skipped = {name: part for name, part in parts if part is not None}
    log_skipped(Counter(skipped.values()))

    elsewhere = _weights_of_other_stages(model, files)

    def wanted(name: str) -> bool:
        return name not in skipped and name not in elsewhere

    tensors = iterate(shown, wanted)
    weights = stored_weights(vllm_config.model_config, files, tensors, wanted)
    if not is_all_ours(model):  # foreign models know tensors only
        weights = dequantise_all(weights, vllm_config.model_config.dtype)
    parameters = {
        name for name, one in model.named_parameters() if not isinstance(one, ElsewhereParameter)
    }
    loaded = cast(VllmModelForTextGeneration, model).load_weights(
        cast(Iterable[tuple[str, torch.Tensor]], weights)
    )
    unfilled = parameters - loaded
    if unfilled:
        raise ValueError(
            f"{type(model).__name__}.load_weights left parameters without values: "
            f"{', '.join(sorted(unfilled))}"
        )


def _weights_of_other_stages(model: nn.Module, files: list[Path]) -> set[str]:
    """Names in the files whose parameters another pipeline stage has."""
    if not any(isinstance(parameter, ElsewhereParameter) for parameter in model.parameters()):
        return set()
    if not isinstance(model, FindsWeights):  # it has loaded its weights already
        return set()
    find = model.weight_finder()

    def is_elsewhere(name: str) -> bool:
        # Scales and other parts of codes have no place of their own. bitsandbytes puts theirs below
        # the weight: NAME.weight.absmax.
        module, below = name.rpartition(".")[0], name.partition(".weight.")[0]
        places = map(find, (name, f"{module}.weight", f"{below}.weight"))
        return any(place and isinstance(place.param, ElsewhereParameter) for place in places)

    return {name for name in stored_names(files) if is_elsewhere(name)}


def shows_progress(files: list[Path], vllm_config: VllmConfig) -> bool:
    """Return whether to show a progress bar: for several files only."""
    return vllm_config.load_config.use_tqdm_on_load and len(files) > 1


def initialize_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from ``seed``, so that activations keep a reasonable scale.

    Matrices are uniform with variance 1 / fan-in. Vectors (norms, biases, decays) keep their
    initial values plus a little noise, so that no two layers are alike.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        device = parameter.device
        if isinstance(parameter, ElsewhereParameter):
            continue
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if parameter.dim() == 1:
            noise = torch.empty_like(parameter.data)
            noise.uniform_(-_VECTOR_SPREAD, _VECTOR_SPREAD, generator=generators[device])
            parameter.data.add_(noise)
        else:
            bound = math.sqrt(3.0 / parameter.shape[-1])
            parameter.data.uniform_(-bound, bound, generator=generators[device])


def _keep_stage(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Let a model keep what its pipeline stage runs. ValueError: it cannot be divided so."""
    parallel = vllm_config.parallel_config
    stage = vllm_config.model_config.stage_of(parallel)
    if stage.is_whole:
        return
    problem = f"{type(model).__name__} has modules of other packages, which are not divided"
    if isinstance(model, DividesIntoStages):
        try:
            model.keep_stage(stage)
        except ValueError as error:
            problem = str(error)
        else:
            return
    stages = parallel.pipeline_parallel_size
    raise ValueError(f"pipeline_parallel_size={stages}: {problem}, or use 1")


@torch.no_grad()
def get_model(*, vllm_config: VllmConfig) -> nn.Module:
    """Build the model of ``vllm_config``, load its weights (``load_format``) and finish them."""
    start = time.perf_counter()
    files = find_weights(vllm_config)
    model = initialize_model(vllm_config)
    _keep_stage(model, vllm_config)
    quantization = vllm_config.model_config.head_quantization
    parallel = vllm_config.parallel_config
    has_head = parallel.stage == parallel.pipeline_parallel_size - 1
    if files is None:
        initialize_dummy_weights(model, vllm_config.model_config.seed)
    else:
        if is_all_ours(model):  # foreign models may read weights while they load
            if has_head and quantization is None:
                prepare_heads(model, None)
            begin_weights(model)
        load_checkpoint(model, vllm_config, files)
    if has_head:  # again, because a checkpoint may tie it or bring codes
        prepare_heads(model, quantization)
    finish_weights(model)
    logger.info(
        "%s: %s of weights in %.1f s.",
        type(model).__name__,
        format_bytes(num_weight_bytes(model)),
        time.perf_counter() - start,
    )
    return model

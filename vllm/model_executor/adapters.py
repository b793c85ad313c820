"""Low-rank adapters of a model: the tensors of PEFT's modules, at their places in the weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import Experts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.low_rank import Adapter, LowRank
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.layers.weight_share import Share
from vllm.model_executor.model_loader.adapter_files import ModuleAdapter, read_adapter
from vllm.model_executor.models.interfaces import FindsWeights
from vllm.model_executor.models.utils import WeightPlace
from vllm.model_executor.utils import make_parameter


def check_takes_adapters(model: nn.Module) -> None:
    """Raise ValueError if requests cannot choose adapters (``enable_lora``)."""
    if not isinstance(model, FindsWeights):
        raise ValueError(
            f"enable_lora=True: {type(model).__name__} takes no adapters: only classes of this "
            "engine do (docs/supported_models.md); merge them into the checkpoint"
        )


def load_adapter(model: nn.Module, folder: Path, max_rank: int, device: torch.device) -> Adapter:
    """Read an adapter for a finished model. ValueError: it cannot be used, or does not fit."""
    assert isinstance(model, FindsWeights)
    files = read_adapter(folder, max_rank)
    find, shared = model.weight_finder(), shared_modules(model)
    parts: defaultdict[tuple[Weight, int], list[LowRank]] = defaultdict(list)
    for name, module in files.modules.items():
        place = find(f"{name}.weight")
        owner = None if place is None else find_owner(model, place, shared)
        if place is None or owner is None:
            raise ValueError(
                f"module {name!r} is not a linear layer of {type(model).__name__} that takes "
                "adapters"
            )
        share = _share(owner, place)
        _check_shapes(name, module, share)
        weight = weight_of(place.param)
        convert = _transposed(place.convert) if model.floats_are_transposed else place.convert
        parts[weight, share.table] += _low_ranks(module, share, convert, device)
        weight.is_adapted = True
    return Adapter(files.digest, parts)


def shared_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that several layers share. In transformers each use has an adapter."""
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in counts.items() if count > 1}


def find_owner(
    model: nn.Module, place: WeightPlace, shared: Collection[nn.Module]
) -> LinearBase | Experts | None:
    """Return the module that multiplies with the weight, if adapters can change its products."""
    module = model.get_submodule(place.param_name.rpartition(".")[0])
    if module in shared:
        return None
    if isinstance(module, LinearBase) and place.param is module.weight:
        return module
    if isinstance(module, Experts) and isinstance(place.shard_id, tuple):
        return module
    return None


def _share(owner: LinearBase | Experts, place: WeightPlace) -> Share:
    if isinstance(owner, Experts):
        return owner.share_of(place.param, place.shard_id)
    return owner.share_of(place.shard_id)


def _check_shapes(name: str, module: ModuleAdapter, share: Share) -> None:
    (outputs, inputs), rank = share.shape, len(module.down)
    if module.down.shape[1] != inputs or len(module.up) != outputs:
        raise ValueError(
            f"module {name!r} has lora_A {tuple(module.down.shape)} and lora_B "
            f"{tuple(module.up.shape)}; the model's weight [{outputs}, {inputs}] needs "
            f"[{rank}, {inputs}] and [{outputs}, {rank}]"
        )
    if rank > inputs:
        raise ValueError(f"module {name!r} has rank {rank}, more than its {inputs} inputs")


def _transposed(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: convert(weight.t())


def _low_ranks(
    module: ModuleAdapter,
    share: Share,
    convert: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Iterator[LowRank]:
    # As columns of a whole weight, since conversions may check its shape; they move rows.
    whole = torch.zeros(share.shape)
    whole[:, : len(module.down)] = module.up.float() * module.scale
    up = convert(whole)[:, : len(module.down)]
    inputs = module.down.float()
    if share.columns is not None:
        inputs = inputs.narrow(1, *share.columns)
    down = _weight(inputs, device)
    for run in share.runs:
        rows = up.narrow(0, run.source, run.length)
        yield LowRank(down, _weight(rows, device), run.target)


def _weight(values: torch.Tensor, device: torch.device) -> Weight:
    weight = Weight(make_parameter(values.contiguous().to(device)))
    weight.finish()
    return weight

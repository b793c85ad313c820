"""Low-rank adapters of a model: the tensors of PEFT's modules, at their places in the weights.

A rank takes of ``lora_B`` the rows that it has of the weight, and of ``lora_A`` the columns. What
an adapter adds is then cut over the ranks, or is a summand of the sum over them, as the product is.
All ranks check the whole adapter; a pipeline stage leaves out what belongs to other stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from vllm.model_executor.layers.attention.mla_attention import LatentExpansion, LatentFactors
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.low_rank import (
    EMBEDDING,
    Adapter,
    LowRank,
    LowRankHeads,
    LowRankRows,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.weight import Weight, weight_of
from vllm.model_executor.layers.weight_share import Share
from vllm.model_executor.model_loader.adapter_files import (
    AdapterFiles,
    ModuleAdapter,
    Pair,
    read_adapter,
)
from vllm.model_executor.models.interfaces import FindsWeights, SharesModules
from vllm.model_executor.models.utils import WeightPlace
from vllm.model_executor.utils import ElsewhereParameter, make_parameter

Owner = LinearBase | Experts | VocabParallelEmbedding | LatentExpansion
Change = LowRank | LowRankRows | LowRankHeads
Part = tuple[Weight, int, Change]
"""A weight, its table, and what is added to a product with it."""
_WRAPPED = ".base_layer"


def check_takes_adapters(model: nn.Module) -> None:
    """Raise ValueError if requests cannot choose adapters (``enable_lora``)."""
    if not isinstance(model, FindsWeights):
        raise ValueError(
            f"enable_lora=True: {type(model).__name__} takes no adapters: only classes of this "
            "engine do (docs/supported_models.md); merge them into the checkpoint"
        )


def load_adapter(model: nn.Module, folder: Path, max_rank: int, device: torch.device) -> Adapter:
    """Read an adapter for a finished model. ValueError: it cannot be used, or does not fit."""
    files, finder = read_adapter(folder, max_rank), _make_finder(model)
    for name, values in files.tables.items():
        _check_table(name, values, finder)
    parts: defaultdict[tuple[Weight, int, int], list[Change]] = defaultdict(list)
    for name, pair in files.pairs.items():
        for weight, table, part in _parts_of(name, pair, files, finder, device):
            known = weight.adapted_as or weight
            parts[known, table, finder.use_of(name)[1]].append(part)
            weight.is_adapted = known.is_adapted = True
    return Adapter(files.digest, parts, has_tables=bool(files.tables))


def _make_finder(model: nn.Module) -> _Finder:
    assert isinstance(model, FindsWeights)
    find, is_transposed = model.weight_finder(), model.floats_are_transposed
    if isinstance(model, SharesModules):
        return _Finder(model, find, model.use_of, (), is_transposed)
    return _Finder(model, find, lambda path: (path, 0), shared_modules(model), is_transposed)


class _Finder(NamedTuple):
    model: nn.Module
    place_of: Callable[[str], WeightPlace | None]
    use_of: Callable[[str], tuple[str, int]]
    shared: Collection[nn.Module]
    floats_are_transposed: bool

    def place(self, path: str) -> WeightPlace | None:
        """Return the place of a module's weight; a tied head has none in checkpoints."""
        head = dict(self.model.named_children()).get("lm_head")
        found = self.place_of(f"{self.use_of(path)[0]}.weight")
        if found is None and path == "lm_head" and isinstance(head, ParallelLMHead):
            return WeightPlace("lm_head.weight", head.weight, None, lambda weight: weight)
        return found

    def owner(self, place: WeightPlace | None) -> Owner | None:
        return None if place is None else find_owner(self.model, place, self.shared)


def _parts_of(
    name: str, pair: Pair, files: AdapterFiles, finder: _Finder, device: torch.device
) -> Iterator[Part]:
    """Yield what a module's pair adds, each with its weight and the table."""
    path = name
    while path.endswith(_WRAPPED):
        path = path.removesuffix(_WRAPPED)
    place = finder.place(path)
    owner = finder.owner(place)
    if pair.is_embedding and place is not None and type(owner) is VocabParallelEmbedding:
        yield from _rows_of_embedding(name, files.module(name, pair), owner, place, device)
        return
    if owner is None and files.leaves_of(path):
        yield from _parts_of_tables(name, path, pair, files, finder, device)
        return
    is_table = type(owner) is VocabParallelEmbedding
    if place is None or owner is None or is_table or pair.is_embedding:
        raise _unknown(name, finder.model)
    _check_reach(name, owner)
    module, share = files.module(files.key_of(path), pair), _share(owner, place)
    _check_shapes(name, module, share)
    if _is_elsewhere(place) or share.table not in _own_tables(owner):
        return
    is_transposed = finder.floats_are_transposed and isinstance(owner, LinearBase)
    convert = _transposed(place.convert) if is_transposed else place.convert
    weight = weight_of(place.param)
    if isinstance(weight, LatentFactors):
        yield weight, 0, _low_rank_of_heads(module, weight, share, device)
        return
    for part in _low_ranks(module, share, convert, device):
        yield weight, share.table, part


def _check_table(name: str, table: torch.Tensor, finder: _Finder) -> None:
    """Raise ValueError unless an embedding or a head has these values already."""
    place = finder.place(name)
    owner = finder.owner(place)
    if place is None or not isinstance(owner, VocabParallelEmbedding):
        raise ValueError(f"module {name!r} has a weight in adapter_model, which is not supported")
    fits = table.shape == owner.share.shape
    if fits and not _is_elsewhere(place):
        fits = owner.holds(table.to(owner.weight.device))
    if not fits:
        raise ValueError(
            f"module {name!r} has other values in adapter_model than in the model: trained tables "
            "are not supported"
        )


def _unknown(name: str, model: object) -> ValueError:
    return ValueError(
        f"module {name!r} is not a linear layer of {type(model).__name__} that takes adapters"
    )


def shared_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that several layers share. In transformers each use has an adapter.

    The expansion of latents is named twice in its layer.
    """
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    found = {module for module, count in counts.items() if count > 1}
    return {module for module in found if not isinstance(module, LatentExpansion)}


def find_owner(model: nn.Module, place: WeightPlace, shared: Collection[nn.Module]) -> Owner | None:
    """Return the module that multiplies with the weight, if adapters can change its products."""
    module = model.get_submodule(place.param_name.rpartition(".")[0])
    if module in shared:
        return None
    if isinstance(module, Experts) and isinstance(place.shard_id, tuple):
        return module
    owners = (LinearBase, VocabParallelEmbedding, LatentExpansion)
    return module if isinstance(module, owners) and place.param is module.weight else None


def _check_reach(name: str, owner: Owner) -> None:
    """Raise ValueError if other engines compute tokens of this one, whose adapters they lack."""
    if isinstance(owner, Experts) and owner.engines is not None:
        raise ValueError(
            f"module {name!r} changes experts, which with enable_expert_parallel "
            f"data_parallel_size={owner.engines.num_engines} engines share; use "
            "tensor_parallel_size instead, or an adapter without experts"
        )


def _is_elsewhere(place: WeightPlace) -> bool:
    """Return whether another pipeline stage has the weight."""
    return isinstance(place.param, ElsewhereParameter)


def _own_tables(owner: Owner) -> range:
    """Return the numbers of the tables that this rank has of its weights."""
    return range(len(owner.own)) if isinstance(owner, Experts) else range(1)


def _share(owner: Owner, place: WeightPlace) -> Share:
    if isinstance(owner, Experts):
        return owner.share_of(place.param, place.shard_id)
    return owner.share_of(place.shard_id) if isinstance(owner, LinearBase) else owner.share


def _check_shapes(name: str, module: ModuleAdapter, share: Share) -> None:
    (outputs, inputs), rank = share.shape, len(module.down)
    if module.down.shape[1] != inputs or len(module.up) != outputs:
        raise ValueError(
            f"module {name!r} has lora_A {tuple(module.down.shape)} and lora_B "
            f"{tuple(module.up.shape)}; the model's weight [{outputs}, {inputs}] needs "
            f"[{rank}, {inputs}] and [{outputs}, {rank}]"
        )


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
    # As columns of whole weights, since conversions may check their shapes; they move rows.
    converted = []
    for columns in torch.split(module.up.float() * module.scale, share.shape[1], dim=1):
        whole = torch.zeros(share.shape)
        whole[:, : columns.shape[1]] = columns
        converted.append(convert(whole)[:, : columns.shape[1]])
    up = torch.cat(converted, dim=1)
    inputs = module.down.float()
    if share.columns is not None:
        inputs = inputs.narrow(1, *share.columns)
    down = _weight(inputs, device)
    for run in share.runs:
        rows = up.narrow(0, run.source, run.length)
        yield LowRank(down, _weight(rows, device), run.target)


def _low_rank_of_heads(
    module: ModuleAdapter, weight: LatentFactors, share: Share, device: torch.device
) -> LowRankHeads:
    (run,), down = share.runs, module.down.float()
    up = (module.up.float() * module.scale).narrow(0, run.source, run.length).to(device)
    return LowRankHeads(_weight(down, device), _weight(down.t(), device), *weight.split(up))


def _rows_of_embedding(
    name: str,
    module: ModuleAdapter,
    owner: VocabParallelEmbedding,
    place: WeightPlace,
    device: torch.device,
) -> Iterator[Part]:
    rank, shape = len(module.down), (owner.num_embeddings, owner.embedding_dim)
    if (module.down.shape[1], len(module.up)) != shape:
        raise ValueError(
            f"module {name!r} has lora_embedding_A {tuple(module.down.shape)} and lora_embedding_B "
            f"{tuple(module.up.shape)}; the model's table {list(shape)} needs [{rank}, {shape[0]}] "
            f"and [{shape[1]}, {rank}]"
        )
    if _is_elsewhere(place):
        return
    table = torch.zeros(owner.rows_per_rank, rank, device=device)
    own = owner.num_own_rows
    table[:own] = module.down[:, owner.start : owner.start + own].t()
    rows = LowRankRows(table, _weight(module.up.float() * module.scale, device))
    yield weight_of(place.param), EMBEDDING, rows


# ---- parameters with a table for each expert


def _parts_of_tables(
    name: str,
    path: str,
    pair: Pair,
    files: AdapterFiles,
    finder: _Finder,
    device: torch.device,
) -> Iterator[Part]:
    """Find the parameter of a module whose sizes fit, among those with adapters.

    If both fit, in either direction, their order tells: the first one is the base of the second.
    """
    found = []
    for leaf in files.leaves_of(path):
        place = finder.place_of(f"{path}.{leaf}")
        if place is None or place.shard_id is not None:
            continue
        owner = finder.model.get_submodule(place.param_name.rpartition(".")[0])
        if isinstance(owner, Experts) and place.param.dim() > 2:
            found.append((place.param is owner.down_proj, leaf, place, owner))
    if not found:
        raise _unknown(name, finder.model)
    found.sort(key=lambda one: one[0])
    fits, seen, sizes = [], [], (pair.a.shape[1], pair.b.shape[0])
    for number, (_, leaf, place, owner) in enumerate(found):
        shares = owner.shares_of(place.param)
        outputs, inputs = len(shares) * shares[0].shape[0], shares[0].shape[1]
        seen.append(f"{leaf} [{owner.num_experts}, {outputs}, {inputs}]")
        if sizes in ((inputs, outputs), (outputs, inputs)):
            whole = (owner.num_experts, outputs, inputs)
            fits.append((number, f"{path}.{leaf}", place, owner, shares, whole))
    if not fits:
        raise ValueError(
            f"module {name!r} has lora_A {tuple(pair.a.shape)} and lora_B "
            f"{tuple(pair.b.shape)}, which fit none of {', '.join(seen)}"
        )
    by_order = len(found) - 1 - name.count(_WRAPPED)
    _, key, place, owner, shares, whole = next((one for one in fits if one[0] == by_order), fits[0])
    _check_reach(name, owner)
    mixture = finder.model.get_submodule(place.param_name.rpartition(".experts.")[0])
    if isinstance(mixture, FusedMoE) and mixture.num_identity_experts:
        pair = _of_experts(pair, files.rank_of(key), mixture)
    module = files.module(key, pair, whole[0])
    if not _is_elsewhere(place):
        yield from _low_ranks_of_tables(module, owner, place, shares, whole, files, device)


def _of_experts(pair: Pair, rank: int, mixture: FusedMoE) -> Pair:
    """Cut off what belongs to identity experts, which have tables in one of transformers'
    parameters, and do not read them."""
    num_tables, num_experts = mixture.num_experts, mixture.experts.num_experts
    if len(pair.a) != rank * num_tables or pair.b.shape[1] != rank * num_tables:
        return pair
    b = pair.b.view(len(pair.b), rank, num_tables)[:, :, :num_experts]
    return pair._replace(a=pair.a[: rank * num_experts], b=b.flatten(1))


def _low_ranks_of_tables(
    module: ModuleAdapter,
    owner: Experts,
    place: WeightPlace,
    shares: Sequence[Share],
    whole: tuple[int, int, int],
    files: AdapterFiles,
    device: torch.device,
) -> Iterator[Part]:
    experts, outputs, inputs = whole
    inputs_first = _has_inputs_first(place, whole)
    down = module.down.float().view(experts, -1, module.down.shape[1])
    up = (module.up.float() * module.scale).view(len(module.up), -1, experts).permute(2, 0, 1)
    is_swapped = down.shape[2] != inputs
    if inputs == outputs:
        is_swapped = files.swaps_squares and not inputs_first
    if is_swapped:
        down, up = up.transpose(1, 2), down.transpose(1, 2)
    up = _as_layers_have_it(up, place, whole, inputs_first=inputs_first)
    weight = weight_of(place.param)
    for table, expert in enumerate(owner.own):
        columns = shares[0].columns
        own = down[expert] if columns is None else down[expert].narrow(1, *columns)
        low = _weight(own, device)
        for part, share in enumerate(shares):
            for run in share.runs:
                first = part * share.shape[0] + run.source
                rows = _weight(up[expert, first : first + run.length], device)
                yield weight, table, LowRank(low, rows, run.target)


def _has_inputs_first(place: WeightPlace, whole: tuple[int, int, int]) -> bool:
    """Return whether checkpoints have the parameter as [experts, inputs, outputs]."""
    experts, outputs, inputs = whole
    numbers = torch.arange(inputs, dtype=torch.float32).view(1, inputs, 1)
    try:
        found: torch.Tensor = place.convert(numbers.expand(experts, inputs, outputs))
    except ValueError:
        return False
    return found.shape == whole and bool(found[0, 0, 0] != found[0, 0, -1])


def _as_layers_have_it(
    up: torch.Tensor, place: WeightPlace, whole: tuple[int, int, int], *, inputs_first: bool
) -> torch.Tensor:
    """Reorder outputs, [experts, outputs, rank], as the parameter's are when it loads."""
    experts, outputs, inputs = whole
    columns = []
    for column in up.unbind(2):
        if inputs_first:
            table = column[:, None].expand(experts, inputs, outputs)
        else:
            table = column[:, :, None].expand(whole)
        columns.append(place.convert(table)[:, :, 0])
    return torch.stack(columns, dim=2)


def _weight(values: torch.Tensor, device: torch.device) -> Weight:
    weight = Weight(make_parameter(values.contiguous().to(device)))
    weight.finish()
    return weight

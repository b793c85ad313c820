"""New weights for a model whose engine lives, and memory that it lends out while it sleeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import nn

from vllm.config.identity import config_for_values
from vllm.distributed.parallel_state import fails_on_all_ranks
from vllm.logger import init_logger
from vllm.model_executor.layers.weight import rehearsal, weight_storages, weights_of
from vllm.model_executor.model_loader.checkpoint import (
    iterate_mapped_weights,
    iterate_weights,
    stored_shapes,
)
from vllm.model_executor.model_loader.loader import find_weights, load_checkpoint
from vllm.model_executor.model_loader.stored_weights import check_stored_alike, join_given_weights
from vllm.model_executor.models.interfaces import (
    FindsWeights,
    MayKeepWeights,
    MayTieHead,
    SkipsWeights,
)
from vllm.model_executor.models.utils import other_heads
from vllm.model_executor.utils import LOADABLE_DTYPES
from vllm.utils.text import brief
from vllm.utils.weight_files import find_weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import VllmModelForTextGeneration

logger = init_logger(__name__)

_HEADS_STAY = (
    "cannot be replaced: classes and values come from the head with which the engine started; "
    "leave it out, or start another engine"
)
Named = Iterable[tuple[str, torch.Tensor]]
PlaceOf = Callable[[str], Hashable]


class _Lent(NamedTuple):
    storage: torch.UntypedStorage
    num_bytes: int
    content: torch.Tensor | None
    """Its bytes in host memory; None: they are lost."""


class _StartedWith(NamedTuple):
    """The checkpoint that the model was made from, with which updates are compared."""

    shapes: dict[str, Sequence[int]]
    """The shapes of all tensors, by name; empty: it has none."""
    heads: dict[str, torch.Tensor]
    """The heads that the front end reads, by name (``v1/engine/pooling_heads.py``)."""
    config: dict[str, Any]
    quantization: dict[str, Any] | None

    @classmethod
    def read(cls, vllm_config: VllmConfig) -> Self:
        model_config = vllm_config.model_config
        files = find_weights(vllm_config, fetches=False) or ()
        prefixes = other_heads(model_config.has_other_head)
        heads = dict(iterate_weights(files, lambda name: name.startswith(prefixes)))
        stated = model_config.of_checkpoint(model_config.model, model_config.revision)
        try:
            config = config_for_values(stated)
        except ValueError:  # a function in hf_overrides, which is not here, may have mended it
            config = config_for_values(model_config)
        return cls(stored_shapes(files), heads, config, model_config.quantization_config)


class WeightUpdates:
    """Replaces weights of one model. No step may run meanwhile."""

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, on_change: Callable[[], None]
    ) -> None:
        """on_change: called when weights were replaced."""
        self._model, self._vllm_config = model, vllm_config
        # Later the folder may hold another checkpoint, or be gone.
        self._started_with = _StartedWith.read(vllm_config)
        self.problem: str | None = None
        """The reason why the model computes nothing of use; None: its weights are whole."""
        self._on_change = on_change
        self._missing: set[Hashable] = set()  # places to replace until there is no problem
        self._left: set[Hashable] = set()  # places to replace until the update is whole
        self._is_begun = False  # whether the update has replaced a weight
        self._lent: list[_Lent] = []

    def load_folder(self, path: str | None) -> None:
        """Read the whole checkpoint in a folder; None: the engine's own.

        ValueError: it is another model's, or weights cannot be replaced. This is found before
        anything is replaced.
        """
        files = self.check_folder(path)
        with self._replacing():
            load_checkpoint(self._model, self._vllm_config, files)
        self.problem, self._missing, self._left = None, set(), set()

    def check_folder(self, path: str | None) -> list[Path]:
        """Return the files of a checkpoint for :meth:`load_folder`. ValueError: as there."""
        with fails_on_all_ranks():
            files = self._files_of(path)
            self.check(stored_shapes(files), is_whole=True)
            self._check_config(path)
            self._check_heads(iterate_weights(files, self._started_with.heads.__contains__))
            with rehearsal(self._model):
                load_checkpoint(self._model, self._vllm_config, files, iterate_mapped_weights)
        return files

    def _check_config(self, path: str | None) -> None:
        """Raise ValueError if a folder's config.json says that other values are computed."""
        model_config = self._vllm_config.model_config
        place, revision = model_config.model, model_config.revision
        if path is not None:
            place, revision = str(Path(path).expanduser()), None
            if not Path(place, "config.json").exists():
                return
        other = model_config.of_checkpoint(place, revision)
        found, own = config_for_values(other), self._started_with.config
        for name in sorted(own.keys() & found.keys()):
            if found[name] != own[name]:
                raise ValueError(
                    f"config.json of the weights has {name}={brief(found[name])}, and the engine "
                    f"started with {brief(own[name])}; start another engine, or mend the file"
                )
        stored, others = self._started_with.quantization, other.quantization_config
        if stored is not None and others is not None:
            check_stored_alike(stored, others, self._started_with.shapes.keys())

    def load(self, weights: Mapping[str, torch.Tensor] | Named) -> list[str]:
        """Replace some weights, by the names in the checkpoint; returns the parameters' names.

        ValueError: as for :meth:`load_folder`.
        """
        with fails_on_all_ranks():
            named = _by_name(weights)
            for name, tensor in named.items():
                _check_tensor(name, tensor, takes_codes=self._names is not None)
            self.check({name: tuple(tensor.shape) for name, tensor in named.items()})
            self._check_heads(named.items())
            # A trainer that sends one tensor at a time sends those of towers too.
            if not self._rehearse(named) and not all(map(self._skipped_part(), named)):
                names = ", ".join([*named][:5])
                raise ValueError(f"weights: the model has none of the names {names}")
        self._is_begun |= bool(named)
        with self._replacing():
            loaded = self._load(named)
        self._note_replaced(map(self._places(), named))
        return sorted(loaded)

    def check_forms(self, forms: Mapping[str, torch.Size | tuple[int, ...]]) -> None:
        """Raise the ValueError of :meth:`load` for floats of these shapes, by their names."""
        self.check(forms)
        for name in forms.keys() & self._started_with.heads.keys():
            raise ValueError(f"weight {name!r} {_HEADS_STAY}")
        nothing = torch.zeros(())
        self._rehearse({name: nothing.expand(shape) for name, shape in forms.items()})

    def _rehearse(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        with rehearsal(self._model):
            return self._load(named)

    def _load(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        model = cast("VllmModelForTextGeneration", self._model)
        weights: Iterable[tuple[str, Any]] = named.items()
        if self._names is not None:
            names = self._names | named.keys()
            weights = join_given_weights(self._vllm_config.model_config, names, named.items())
        return model.load_weights(weights)

    @property
    def _names(self) -> set[str] | None:
        """Names in the quantised checkpoint that the model was made from; None: it is not."""
        if self._started_with.quantization is None:
            return None
        return set(self._started_with.shapes)

    def _check_heads(self, weights: Named) -> None:
        """Raise ValueError if one of these heads is given with other values."""
        heads = self._started_with.heads
        for name, tensor in weights:
            if name in heads and not torch.equal(heads[name].to(tensor), tensor):
                raise ValueError(f"weight {name!r} has other values and {_HEADS_STAY}")

    def _files_of(self, path: str | None) -> list[Path]:
        if path is not None:
            folder = Path(path).expanduser()
            return find_weight_files(folder, self._vllm_config.load_config.load_format)
        files = find_weights(self._vllm_config)
        if files is None:
            raise ValueError('weights_path=None: load_format="dummy" has no checkpoint')
        return files

    def begin(self) -> None:
        """Note that an update by several calls of :meth:`load` begins."""
        self._left, self._is_begun = self._all_places(), False
        if isinstance(self._model, MayTieHead):
            self._model.begin_update()

    @property
    def is_whole(self) -> bool:
        """True if all weights were replaced since :meth:`begin`."""
        return not self._left

    def interrupt(self, reason: str) -> None:
        """Note that the update ends before its end: the weights are those of two models, unless
        all or none of them were replaced."""
        if self._left and self._is_begun:
            self._break(self.problem or f"its weights are mixed, because {reason}")

    def _all_places(self) -> set[Hashable]:
        return set(self._stored(self._places())) or {None}  # nothing stands for None

    def _note_replaced(self, places: Iterable[Hashable]) -> None:
        """Take places, and those of the same parameters in other layouts, from what is missing."""
        found = set(places)
        parameters = set(map(_parameter_of, found - self._all_places()))
        for missing in (self._missing, self._left):
            missing -= {
                place for place in missing if place in found or _parameter_of(place) in parameters
            }
        if not self._missing:
            self.problem = None

    def check(self, shapes: Mapping[str, Iterable[int]], *, is_whole: bool = False) -> None:
        """Compare shapes with those of the checkpoint that the model was made from.

        is_whole: its tensors have to be there, too. ValueError: they differ, or weights cannot be
        replaced.
        """
        if isinstance(self._model, MayKeepWeights) and self._model.why_weights_stay is not None:
            raise ValueError(f"weights cannot be replaced: {self._model.why_weights_stay}")
        for weight in weights_of(self._model):
            if weight.fixed_because is not None:
                raise ValueError(f"weights cannot be replaced: {weight.fixed_because}")
        place_of, given = self._places(), dict[Hashable, str]()
        for name in shapes:
            other = given.setdefault(place_of(name), name)
            if other != name:
                raise ValueError(f"weights {other!r} and {name!r} are the same weight of the model")
        stored = self._stored(place_of)
        for place in stored.keys() & given.keys():
            name, own = given[place], stored[place][1]
            if place == name and self._names is not None:
                continue  # a part of codes, which is checked with the others
            if tuple(shapes[name]) != own:
                raise ValueError(
                    f"weight {name!r} has the shape {tuple(shapes[name])}; the model's is {own}"
                )
        # A parameter may have another layout, such as all experts in one tensor.
        others = {_parameter_of(place) for place in given.keys() - stored.keys()}
        missing = [
            name
            for place, (name, _) in stored.items()
            if place not in given and _parameter_of(place) not in others
        ]
        if is_whole and missing:
            raise ValueError(
                f"weight {missing[0]!r} is missing, and the engine's checkpoint has it"
            )

    def _places(self) -> PlaceOf:
        """Return a function from the name of a tensor in a checkpoint to what stands for its place
        in the model, however the name is spelled."""
        if not isinstance(self._model, FindsWeights):
            return lambda name: name
        find = self._model.weight_finder()

        def place_of(name: str) -> Hashable:
            place = find(name)
            return name if place is None else (place.param_name, place.shard_id)

        return place_of

    def _stored(self, place_of: PlaceOf) -> dict[Hashable, tuple[str, tuple[int, ...]]]:
        """Return names and shapes in the model's checkpoint, by place; empty: it has none.

        Tensors that the model does not read, such as those of a tower or of a tied head, are left
        out.
        """
        skipped_part = self._skipped_part()
        is_plain = self._vllm_config.model_config.quantization_config is None
        found: dict[Hashable, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self._started_with.shapes.items():
            place = place_of(name)
            has_place = place != name or not (is_plain and isinstance(self._model, FindsWeights))
            if has_place and skipped_part(name) is None:
                found[place] = (name, tuple(shape))
        return found

    def _skipped_part(self) -> Callable[[str], str | None]:
        """Return a function that names the part of the checkpoint with a tensor that the model does
        not read."""
        if isinstance(self._model, SkipsWeights):
            return self._model.make_skipper()
        return lambda _: None

    def _break(self, problem: str) -> None:
        """Note that the model computes nothing of use until all tensors were replaced."""
        self.problem, self._missing = problem, self._all_places()

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Note that weights are mixed if their replacement ends in the middle."""
        try:
            with fails_on_all_ranks():
                yield
                self._on_change()
        except BaseException as error:
            self._break(f"a replacement of its weights failed ({error})")
            raise

    def lend(self, *, keeps: bool) -> None:
        """Free the memory of all weights. keeps: copy them to host memory before."""
        for storage in weight_storages(self._model):
            content = _bytes_of(storage).to("cpu", copy=True) if keeps else None
            self._lent.append(_Lent(storage, storage.nbytes(), content))
            storage.resize_(0)

    def take_back(self) -> None:
        """Allocate the memory again, and copy back what was kept."""
        for storage, num_bytes, content in self._lent:
            storage.resize_(num_bytes)
            if content is not None:
                _bytes_of(storage).copy_(content)
            else:
                self._break("its weights were discarded by sleep(level=2)")
        self._lent = []


def _parameter_of(place: Hashable) -> Hashable:
    return place[0] if isinstance(place, tuple) else place


def _by_name(weights: object) -> dict[str, torch.Tensor]:
    """Return tensors by name. ValueError: they are something else, or a name comes twice."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes | torch.Tensor):
        kind = type(weights).__name__
        raise ValueError(f"weights: a {kind} cannot be used; give a folder, or tensors by name")
    named: dict[str, torch.Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            kind = type(pair).__name__
            raise ValueError(f"weights: a {kind} is not the pair of a name and a tensor")
        name, tensor = pair
        if not isinstance(name, str) or not torch.is_tensor(tensor):
            raise ValueError(f"weights: {brief(name)} is not the name of a tensor")
        if name in named:
            raise ValueError(f"weights: {name!r} comes twice")
        named[name] = tensor
    return named


def _check_tensor(name: str, tensor: torch.Tensor, *, takes_codes: bool) -> None:
    """Raise ValueError unless a tensor has content, and a dtype of floats if it is no code."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if not is_plain or not (takes_codes or tensor.dtype in LOADABLE_DTYPES):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in LOADABLE_DTYPES)
        raise ValueError(
            f"weight {name!r} is of {tensor.dtype}, {tensor.layout} on {tensor.device}: use a "
            f"dense tensor with content, of {known}"
        )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""New weights for a model whose engine lives, and memory that it lends out while it sleeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.weight import weight_storages, weights_of
from vllm.model_executor.model_loader.checkpoint import find_weight_files, stored_shapes
from vllm.model_executor.model_loader.loader import find_weights, load_checkpoint
from vllm.model_executor.models.interfaces import MayKeepWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

Named = Iterable[tuple[str, torch.Tensor]]


class _Lent(NamedTuple):
    storage: torch.UntypedStorage
    num_bytes: int
    content: torch.Tensor | None
    """Its bytes in host memory; None: they are lost."""


class WeightUpdates:
    """Replaces weights of one model. No step may run meanwhile."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._model, self._vllm_config = model, vllm_config
        self.problem: str | None = None
        """The reason why the model computes nothing of use; None: its weights are whole."""
        self._lent: list[_Lent] = []

    def load_folder(self, path: str | None) -> None:
        """Read the whole checkpoint in a folder; None: the engine's own.

        ValueError: it is another model's, or weights cannot be replaced. Problems that the names
        and shapes show are found before anything is replaced.
        """
        if path is None:
            files = find_weights(self._vllm_config)
            if files is None:
                raise ValueError('weights_path=None: load_format="dummy" has no checkpoint')
        else:
            folder = Path(path).expanduser()
            files = find_weight_files(folder, self._vllm_config.load_config.load_format)
        self._check(stored_shapes(files), is_whole=True)
        with self._replacing():
            load_checkpoint(self._model, self._vllm_config, files)
        self.problem = None

    def load(self, weights: Mapping[str, torch.Tensor] | Named) -> list[str]:
        """Replace some weights, by the names in the checkpoint; returns the parameters' names.

        ValueError: as for :meth:`load_folder`.
        """
        named = dict(weights)
        for name, tensor in named.items():
            if not isinstance(name, str) or not torch.is_tensor(tensor):
                raise ValueError(f"weights: {name!r} is not the name of a tensor")
        self._check({name: tuple(tensor.shape) for name, tensor in named.items()})
        with self._replacing():
            loaded: set[str] = self._model.load_weights(named.items())  # type: ignore[operator]
        if not loaded and named:
            raise ValueError(f"weights: the model has none of the names {', '.join([*named][:5])}")
        return sorted(loaded)

    def _check(self, shapes: Mapping[str, Iterable[int]], *, is_whole: bool = False) -> None:
        """Compare shapes with those of the checkpoint that the model was made from.

        is_whole: its tensors have to be there, too.
        """
        if isinstance(self._model, MayKeepWeights) and self._model.why_weights_stay is not None:
            raise ValueError(f"weights cannot be replaced: {self._model.why_weights_stay}")
        for weight in weights_of(self._model):
            if weight.fixed_because is not None:
                raise ValueError(f"weights cannot be replaced: {weight.fixed_because}")
        files = find_weights(self._vllm_config, fetches=False)
        for name, own in stored_shapes(files or ()).items():
            given = shapes.get(name)
            if given is None and is_whole:
                raise ValueError(f"weight {name!r} is missing, and the engine's checkpoint has it")
            if given is not None and tuple(given) != tuple(own):
                raise ValueError(
                    f"weight {name!r} has the shape {tuple(given)}; the model's is {tuple(own)}"
                )

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Note that weights are mixed if their replacement ends in the middle."""
        try:
            yield
        except BaseException as error:
            self.problem = f"a replacement of its weights failed ({error})"
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
                self.problem = "its weights were discarded by sleep(level=2)"
        self._lent = []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

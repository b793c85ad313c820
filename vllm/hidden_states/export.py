"""The base of exporters: writers of units in the layouts of other programs."""

from __future__ import annotations

import contextlib
import io
import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm.hidden_states.layer_ids import resolve_layer_ids
from vllm.hidden_states.metadata import DatasetSettings, UnitRecord
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.hidden_states.tensor_file import file_checksum
from vllm.hidden_states.units import UnitWriter, file_stem
from vllm.utils.boundaries import NORM, LayerId

if TYPE_CHECKING:
    import numpy.typing as npt


class ExportedFile:
    """A new file in which an exporter may write anywhere."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def header_checksum(self) -> str:
        """The checksum of all of it."""
        return file_checksum(self.path)

    def discard(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


class Exporter(UnitWriter):
    """A writer of files for another program, which HiddenStatesDataset does not read."""

    def __init__(self, directory: str, unit: int, settings: DatasetSettings) -> None:
        super().__init__(directory, unit, settings)
        self._resources = ExitStack()
        """Closes what is open."""

    def _add_file(self, name: str) -> str:
        """Return the temporary path of a new file of the unit."""
        path = self._temporary_path(name)
        self._files[name] = ExportedFile(path)
        return path

    def commit(self) -> UnitRecord:
        self._resources.close()
        return super().commit()

    def abort(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._resources.close()
        super().abort()


class TorchFiles(Exporter):
    """A writer of one file of ``torch.save`` per sample, for a trainer of draft models.

    A sample has a row for each token. The draft's inputs are the layers of the dataset without the
    model's last one and the state after the final norm.
    """

    takes_names = True
    stores_fields = False
    stores_hooks = False
    has_default_layers = True
    dtypes = ("bfloat16", "float16", "float32")
    suffix: ClassVar[str]
    needs: ClassVar[tuple[LayerId, ...]] = ()
    """Layers that the trainer needs besides the draft's inputs."""
    preset: ClassVar[str]
    """Its usual inputs."""
    usual_state: ClassVar[tuple[LayerId, ...]] = ()
    """The last state that ``vllm extract`` stores besides them by default."""
    num_inputs: ClassVar[int | None] = None
    """Number of inputs that the trainer takes; None: any."""

    @classmethod
    def check(cls, settings: DatasetSettings) -> str | None:
        super().check(settings)
        inputs = cls.inputs(settings)
        problem = None
        if settings.selection != "all":
            problem = f"positions={settings.selection}, and it trains on every token of a sample"
        elif missing := [one for one in cls.needs if one not in settings.layer_ids]:
            problem = f"layers {list(settings.layer_ids)}, and it needs {_listed(missing)}, too"
        elif not inputs or len(set(inputs)) < len(inputs):
            problem = f"layers {list(settings.layer_ids)}, and it needs different draft inputs"
        elif cls.num_inputs not in (None, len(inputs)):
            problem = f"{len(inputs)} draft inputs {inputs}, and it takes {cls.num_inputs}"
        elif "loss_mask" in settings.options:
            problem = "loss_mask=False, and it trains on the tokens that the mask selects"
        if problem is not None:
            raise ValueError(refusal(settings, problem, cls.needed_layers(settings)))
        return None

    @classmethod
    def default_layers(cls, num_hidden_layers: int) -> list[LayerId]:
        return [*resolve_layer_ids(cls.preset, num_hidden_layers)[:-1], *cls.usual_state]

    @classmethod
    def needed_layers(cls, settings: DatasetSettings) -> str:
        """Return the layers of a dataset for this format, as text."""
        try:
            return _listed(cls.default_layers(settings.num_hidden_layers))
        except ValueError:  # the model is small
            return _listed(["IDS", *cls.usual_state])

    @classmethod
    def inputs(cls, settings: DatasetSettings) -> list[LayerId]:
        """Return the ids of the draft's inputs; the usual ones, if there are too many others."""
        others = (settings.num_hidden_layers, NORM)
        found = [one for one in settings.layer_ids if one not in others]
        if cls.num_inputs is not None and len(found) > cls.num_inputs:
            with contextlib.suppress(ValueError):
                usual = resolve_layer_ids(cls.preset, settings.num_hidden_layers)[:-1]
                return [*usual] if {*usual} <= {*found} else found
        return found

    def _inputs_of(self, stored: HiddenStatesSample) -> torch.Tensor:
        """Return [tokens, inputs * hidden], the draft's inputs side by side."""
        layer_ids = self._settings.layer_ids
        places = [layer_ids.index(one) for one in self.inputs(self._settings)]
        return stored.hidden_states[:, places].flatten(1)

    def _layer_of(self, stored: HiddenStatesSample, layer_id: LayerId) -> torch.Tensor:
        """Return a copy of one layer, [tokens, hidden]."""
        return stored.hidden_states[:, self._settings.layer_ids.index(layer_id)].clone()

    @abstractmethod
    def _content(self, stored: HiddenStatesSample) -> dict[str, Any]:
        """Return what is saved. No tensor may be a view: all of its storage would be saved."""

    def _write(self, stored: HiddenStatesSample, name: str | None) -> None:
        stem = f"{stored.index:08d}" if name is None else file_stem(name)
        buffer = io.BytesIO()  # the name of a file would be among its bytes
        torch.save(self._content(stored), buffer)
        with open(self._add_file(f"{stem}{self.suffix}"), "xb", buffering=0) as file:
            rest = buffer.getbuffer()
            while rest:
                rest = rest[file.write(rest) :]


def mask_of(stored: HiddenStatesSample) -> torch.Tensor:
    """Return int64 [tokens], 1 for each token that counts: all, if no mask is known."""
    if stored.loss_mask is None:
        return torch.ones(len(stored.token_ids), dtype=torch.int64)
    return stored.loss_mask.to(torch.int64)


def refusal(settings: DatasetSettings, problem: str, layers: str, *flags: str) -> str:
    """Return a message with the command that makes what the format needs."""
    command = ["vllm extract", settings.model or "MODEL", "--input FILE --layers", layers, *flags]
    return (
        f"format={settings.format}: the dataset has {problem}; make one with: "
        f"{' '.join(command)} --format {settings.format} --output FOLDER"
    )


def host_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a dense array; numpy has no bfloat16, so that becomes float32."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return tensor.contiguous().numpy()


def _listed(layers: Sequence[LayerId]) -> str:
    return ",".join(map(str, layers))

"""Shuffled activations as trainers of sparse autoencoders read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from vllm.hidden_states.batches import RowBatch, rows_of, shuffled
from vllm.hidden_states.sample import HiddenStatesSample, check_range
from vllm.training.order import epoch_seed
from vllm.utils.boundaries import LayerId
from vllm.utils.text import check_truth_values, whole_number


class ActivationBuffer:
    """Yields batches of rows that are drawn at random from ``num_rows`` rows of many samples.

    The batches end with the last epoch; the last batch of an epoch may be smaller, unless
    ``drop_last``. dictionary_learning's ``trainSAE`` takes the buffer as ``data``, SAELens'
    ``SAETrainer`` takes ``iter(buffer)`` as ``data_provider``.

    Args:
        samples: what can be iterated once for each epoch: an ``ExtractingDataset``, a
            ``HiddenStatesDataset``, or a list of samples.
        batch_size: rows of a batch.
        num_rows: rows to draw from. When half of them have left, the next ones take their place.
        layers: layer ids to take, such as ``[2, 12]``: batches are [rows, layers, hidden]. A single
            id, such as ``12`` or ``"norm"``: batches are [rows, hidden]. None: the only layer that
            the samples have.
        hook: the name of the hook point to take instead of hidden states: [rows, width].
        epochs: number of passes over the samples; None: without an end.
        only_masked: True to leave out tokens that the loss mask leaves out.
        dtype, device: of the batches; by default those of the rows.
        seed: decides what is drawn, with the number of the epoch.
    """

    def __init__(
        self,
        samples: Iterable[HiddenStatesSample],
        batch_size: int = 8192,
        num_rows: int = 1 << 18,
        *,
        layers: LayerId | Sequence[LayerId] | None = None,
        hook: str | None = None,
        epochs: int | None = None,
        only_masked: bool = False,
        drop_last: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        """ValueError: an argument cannot be used."""
        batch_size = whole_number("batch_size", batch_size, 1)
        num_rows = whole_number("num_rows", num_rows, 1)
        seed = whole_number("seed", seed)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype!r}: use a torch dtype, such as torch.float32, or None")
        try:
            torch.device(device or "cpu")
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: {str(error).partition(chr(10))[0]}") from None
        check_truth_values(only_masked=only_masked, drop_last=drop_last)
        if num_rows < 2 * batch_size:
            raise ValueError(
                f"num_rows={num_rows}: has to be at least twice batch_size={batch_size}"
            )
        if layers is not None and hook is not None:
            raise ValueError(f"layers={layers!r}: not together with hook={hook!r}; choose one")
        if epochs is not None:
            epochs = whole_number("epochs", epochs, 1)
        if isinstance(layers, Sequence) and not layers:
            raise ValueError(f"layers={layers!r}: name a layer, or set hook to leave layers out")
        if iter(samples) is samples and epochs != 1:
            raise ValueError("samples: can be iterated only once; pass epochs=1, or a dataset")
        self._samples = samples
        self._batch_size, self._num_rows = batch_size, num_rows
        self._layers, self._hook = layers, hook
        self._epochs, self._only_masked, self._drop_last = epochs, only_masked, drop_last
        self._dtype, self._device = dtype, device
        self._seed = seed
        self.config: dict[str, Any] = {
            "batch_size": batch_size,
            "num_rows": num_rows,
            "layers": layers,
            "hook": hook,
            "only_masked": only_masked,
            "seed": seed,
            "dtype": None if dtype is None else str(dtype),
        }
        """The settings, for the log of a trainer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for epoch in itertools.count() if self._epochs is None else range(self._epochs):
            is_empty = True
            seed = epoch_seed(self._seed, epoch)
            for batch in shuffled(self._rows(), self._batch_size, self._num_rows, seed):
                if len(batch.rows) == self._batch_size or not self._drop_last:
                    is_empty = False
                    rows = batch.rows.to(device=self._device, dtype=self._dtype)
                    check_range(rows, batch.rows, "samples")
                    yield rows
            if is_empty:
                raise ValueError(
                    f"samples: an epoch has fewer rows than batch_size={self._batch_size}; "
                    "pass drop_last=False, or a smaller batch_size"
                )

    def _rows(self) -> Iterator[RowBatch]:
        for sample in self._samples:
            rows = rows_of(sample)
            if self._hook is None:
                values = rows.rows[:, self._columns(sample.layer_ids)]
            elif self._hook in sample.activations:
                values = sample.activations[self._hook]
            else:
                known = ", ".join(sample.activations) or "none"
                raise ValueError(f"hook={self._hook!r}: samples have the activations {known}")
            if self._only_masked:
                if sample.loss_mask is None:
                    raise ValueError("only_masked=True: samples have no loss mask")
                values = values[sample.loss_mask]
            none = torch.empty(len(values), dtype=torch.int64)
            yield RowBatch(values, none, none, none, {}, {})

    def _columns(self, layer_ids: tuple[LayerId, ...]) -> int | list[int]:
        wanted = self._layers
        if wanted is None and len(layer_ids) != 1:
            raise ValueError(f"layers=None: samples have the layers {list(layer_ids)}; choose some")
        try:
            if wanted is None:
                return 0
            if isinstance(wanted, int | str):
                return layer_ids.index(wanted)
            return [layer_ids.index(one) for one in wanted]
        except ValueError:
            raise ValueError(
                f"layers={wanted!r}: samples have the layers {list(layer_ids)}"
            ) from None

"""Statistics of the rows of a dataset, and of the differences between two datasets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.sample import HiddenStatesSample
from vllm.v1.rows.fields.fp8 import row_parts

_ROWS_OF_A_SAMPLE = 256
_MOST_ROWS = 1 << 16
_MOST_POINTS = 1024
_MOST_LAYERS_OF_POINTS = 4
_MOST_TOKENS = 256
_TOKEN_SAMPLES = 3
_DEAD_RANGE = 1e-6
"""A dimension is dead if its range is at most this share of the layer's median range."""
_HUGE_RMS = 10.0
"""A dimension is huge if its root mean square is above this multiple of the layer's median."""


class TokenNorms(NamedTuple):
    """The beginning of a sample: token ids, and the norms of the rows at them."""

    sample: int
    token_ids: list[int]
    norms: torch.Tensor
    """float32 [tokens, layers]; NaN for a token without a row."""


class RowStatistics(NamedTuple):
    """Statistics of rows that were drawn from a dataset; rows that are not finite are left out."""

    num_samples: int
    norms: torch.Tensor
    """float32 [rows, layers], L2 norms of the rows"""
    cosines: torch.Tensor
    """float32 [layers, layers], means over the rows"""
    num_not_finite: int
    dead: list[list[int]]
    """Dimensions of each layer with the same value in all rows."""
    huge: list[list[tuple[int, float]]]
    """Dimensions of each layer with a large root mean square, as multiples of the median."""
    points: torch.Tensor
    """float32 [points, layers, hidden], directions (rows of length 1) at ``point_layers``."""
    point_layers: list[int]
    """Slots of the layers in ``points``."""
    point_samples: list[int]
    """Number in the dataset of the sample of each point."""
    tokens: list[TokenNorms]


class LayerDifferences(NamedTuple):
    """Differences between the rows of two datasets, one value for each layer."""

    num_rows: int
    largest: torch.Tensor
    """Largest difference of two values."""
    mean: torch.Tensor
    """Mean absolute difference of two values."""
    relative: torch.Tensor
    """Largest norm of a row's difference, relative to the row's norm in the second dataset."""
    cosine: torch.Tensor
    """Mean cosine between the rows."""


def draw_samples(dataset: HiddenStatesDataset, most: int, seed: int) -> list[int]:
    """Return the numbers of at most ``most`` samples, ascending."""
    return sorted(random.Random(seed).sample(range(len(dataset)), min(most, len(dataset))))


def measure_rows(dataset: HiddenStatesDataset, max_samples: int, seed: int = 0) -> RowStatistics:
    """Measure rows drawn by ``seed``: at most 256 of a sample, 65,536 in all (or one of each)."""
    chosen, generator = draw_samples(dataset, max_samples, seed), random.Random(seed)
    most = max(1, min(_ROWS_OF_A_SAMPLE, _MOST_ROWS // max(1, len(chosen))))
    step = -(-len(chosen) // _MOST_POINTS) or 1  # samples that have points
    points_of_a_sample = max(1, _MOST_POINTS * step // max(1, len(chosen)))
    layers, hidden = _num_layers(dataset), dataset.hidden_size
    sums = _Sums(layers, hidden)
    slots = [round((k + 1) * layers / _MOST_LAYERS_OF_POINTS) - 1 for k in range(4)]
    slots = sorted({max(slot, 0) for slot in slots}) if layers else []
    points, point_samples, tokens = list[torch.Tensor](), list[int](), list[TokenNorms]()
    for place, number in enumerate(chosen):
        sample = dataset.stored(number)
        rows = sorted(generator.sample(range(len(sample.positions)),
            min(most, len(sample.positions))))  # fmt: skip
        drawn = sample.take_rows(torch.tensor(rows, dtype=torch.int64))
        taken = 0
        for part in _float_parts(drawn):
            finite = sums.add(part)
            if place % step == 0 and taken < points_of_a_sample:
                some = finite[: points_of_a_sample - taken, slots]
                points.append(torch.nn.functional.normalize(some, dim=-1))
                point_samples += [number] * len(some)
                taken += len(some)
        if place < _TOKEN_SAMPLES and layers:
            tokens.append(_token_norms(sample, number))
    return RowStatistics(
        num_samples=len(chosen),
        norms=torch.cat(sums.norms) if sums.norms else torch.zeros(0, layers),
        cosines=(sums.cosines / max(1, sums.num_rows)).float(),
        num_not_finite=sums.num_not_finite,
        dead=sums.dead(),
        huge=sums.huge(),
        points=torch.cat(points) if points else torch.empty(0, len(slots), hidden),
        point_layers=slots,
        point_samples=point_samples,
        tokens=tokens,
    )


class _Sums:
    """Sums and extremes of the rows so far."""

    def __init__(self, layers: int, hidden: int) -> None:
        self.num_rows = self.num_not_finite = 0
        self.norms: list[torch.Tensor] = []
        self.cosines = torch.zeros(layers, layers, dtype=torch.float64)
        self._squares = torch.zeros(layers, hidden, dtype=torch.float64)
        self._least = torch.full((layers, hidden), torch.inf)
        self._most = torch.full((layers, hidden), -torch.inf)

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Add float32 [rows, layers, hidden]; returns the finite ones."""
        finite = rows[torch.isfinite(rows).flatten(1).all(1)]
        self.num_not_finite += len(rows) - len(finite)
        if not len(finite):
            return finite
        self.num_rows += len(finite)
        self.norms.append(finite.norm(dim=-1))
        unit = torch.nn.functional.normalize(finite, dim=-1)
        self.cosines += (unit @ unit.mT).double().sum(0)
        self._squares += finite.double().square().sum(0)
        self._least = self._least.minimum(finite.amin(0))
        self._most = self._most.maximum(finite.amax(0))
        return finite

    def dead(self) -> list[list[int]]:
        if self.num_rows < 2 or not self._least.numel():
            return [[] for _ in self._least]
        spread = self._most - self._least
        limits = _DEAD_RANGE * spread.median(-1, keepdim=True).values
        return [layer.nonzero().flatten().tolist() for layer in spread <= limits]

    def huge(self) -> list[list[tuple[int, float]]]:
        if not self.num_rows or not self._squares.numel():
            return [[] for _ in self._squares]
        rms = self._squares.sqrt()
        ratios = rms / rms.median(-1, keepdim=True).values
        found = []
        for layer in ratios:
            numbers = (layer > _HUGE_RMS).nonzero().flatten().tolist()
            pairs = [(number, float(layer[number])) for number in numbers]
            found.append(sorted(pairs, key=lambda pair: -pair[1]))
        return found


def compare_rows(
    dataset: HiddenStatesDataset, other: HiddenStatesDataset, max_samples: int, seed: int = 0
) -> LayerDifferences:
    """Compare all rows of samples drawn by ``seed``. ValueError: they are not of the same tokens
    and layers."""
    for name in ("layer_ids", "hidden_size"):
        mine, yours = getattr(dataset, name), getattr(other, name)
        if mine != yours:
            raise ValueError(f"--against {other.path}: its {name} are {yours}, not {mine}")
    if len(dataset) != len(other):
        raise ValueError(f"--against {other.path}: {len(other)} samples, not {len(dataset)}")
    layers = _num_layers(dataset)
    if layers != _num_layers(other):  # of files that do not name them
        raise ValueError(f"--against {other.path}: {_num_layers(other)} layers, not {layers}")
    count, worst, relative = 0, torch.zeros(layers), torch.zeros(layers)
    total, cosine = torch.zeros(2, layers, dtype=torch.float64)
    for number in draw_samples(dataset, max_samples, seed):
        one, two = dataset.stored(number), other.stored(number)
        for name in ("token_ids", "positions"):
            if not torch.equal(getattr(one, name), getattr(two, name)):
                raise ValueError(f"--against {other.path}: sample {number} has other {name}")
        for rows, right in zip(_float_parts(one), _float_parts(two), strict=True):
            difference = (rows - right).abs()
            count += len(rows)
            worst = worst.maximum(difference.amax((0, 2)))  # NaN stays
            total += difference.double().mean(-1).sum(0)
            ratio = difference.norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)
            relative = relative.maximum(ratio.amax(0))
            cosine += torch.cosine_similarity(rows, right, dim=-1).double().sum(0)
    return LayerDifferences(count, worst, total / max(1, count), relative, cosine / max(1, count))


class Components(NamedTuple):
    """Two principal components: coordinates [points, 2], and shares of the variance."""

    coordinates: torch.Tensor
    shares: list[float]


def principal_components(points: torch.Tensor) -> Components:
    """Project float [points, width] onto the two directions of the largest variance."""
    centred = points.double() - points.double().mean(0)
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    total = float(values.clamp(min=0).sum())
    largest = values[-2:].flip(0).clamp(min=0)
    found = vectors[:, -2:].flip(1) * largest.sqrt()
    signs = found.gather(0, found.abs().argmax(0, keepdim=True)).sign()
    return Components(found * signs, [float(v) / total if total > 0 else 0.0 for v in largest])


def _num_layers(dataset: HiddenStatesDataset) -> int:
    """Return the number of layers of a row, also if the files do not name them."""
    if dataset.layer_ids or not len(dataset):
        return len(dataset.layer_ids)
    return dataset.stored(0).hidden_states.shape[1]


def _float_parts(sample: HiddenStatesSample) -> Iterator[torch.Tensor]:
    """Yield the rows, some at a time, as float32 [rows, layers, hidden]."""
    for part in row_parts(sample.hidden_states):
        yield sample.take_rows(part).rows(torch.float32)


def _token_norms(sample: HiddenStatesSample, number: int) -> TokenNorms:
    ids = sample.token_ids[:_MOST_TOKENS].tolist()
    norms = torch.full((len(ids), sample.hidden_states.shape[1]), torch.nan)
    shown = sample.take_rows((sample.positions < len(ids)).nonzero().flatten())
    for part in row_parts(shown.hidden_states):
        rows = shown.take_rows(part)
        norms[rows.positions] = rows.rows(torch.float32).norm(dim=-1)
    return TokenNorms(number, ids, norms)

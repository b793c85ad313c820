"""``ActivationBuffer``: shuffled rows in batches."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from vllm.hidden_states import HiddenStatesSample
from vllm.training import ActivationBuffer

LAYER_IDS = (3, "norm", 0)
LENGTHS = [5, 1, 40, 17, 0, 12]


def make_samples(lengths: list[int] = LENGTHS) -> list[HiddenStatesSample]:
    """Values that name their sample, token and layer."""
    samples = []
    for index, length in enumerate(lengths):
        tokens = torch.arange(length)
        rows = (index * 1000 + tokens)[:, None, None] + torch.arange(3)[:, None] / 8
        tensors = {
            "hidden_states": rows.expand(-1, -1, 4).contiguous(),
            "blocks.0.hook_mlp_out": -rows[:, 0].expand(-1, 2).contiguous(),
            "loss_mask": tokens % 3 == 0,
        }
        samples.append(HiddenStatesSample(index, "", tokens, tokens, tensors, LAYER_IDS))
    return samples


def everything(buffer: ActivationBuffer) -> torch.Tensor:
    return torch.cat(list(buffer))


def in_order(rows: torch.Tensor) -> list[float]:
    return sorted(rows.flatten(1)[:, 0].tolist())


@pytest.mark.parametrize(("layers", "place"), [(3, 0), ("norm", 1), (0, 2)])
def test_each_epoch_has_each_row_once(layers: Any, place: int) -> None:
    samples = make_samples()
    rows = torch.cat([sample.hidden_states[:, place] for sample in samples])
    buffer = ActivationBuffer(samples, 8, 32, layers=layers, epochs=2, drop_last=False)
    batches = list(buffer)
    assert all(batch.shape == (8, 4) for batch in batches[: len(rows) // 8])
    found = torch.cat(batches)
    first, second = found.split(len(rows))
    assert in_order(first) == in_order(second) == in_order(rows)
    assert not torch.equal(first, second) and not torch.equal(first, rows)
    assert torch.equal(everything(buffer), found)  # the seed decides
    other = ActivationBuffer(samples, 8, 32, layers=layers, epochs=2, drop_last=False, seed=1)
    assert not torch.equal(everything(other), found)


def test_several_layers_and_hooks() -> None:
    samples = make_samples()
    rows = torch.cat([sample.hidden_states for sample in samples])
    buffer = ActivationBuffer(samples, 8, 32, layers=[0, 3], epochs=1, drop_last=False)
    found = everything(buffer)
    assert found.shape == (len(rows), 2, 4)
    assert torch.equal(found[:, 0] - found[:, 1], torch.full((len(rows), 4), 0.25))
    hook = "blocks.0.hook_mlp_out"
    buffer = ActivationBuffer(samples, 8, 32, hook=hook, epochs=1, drop_last=False)
    assert in_order(everything(buffer)) == in_order(-rows[:, 0])


def test_masked_rows_and_dtypes() -> None:
    samples = make_samples()
    rows = torch.cat([s.hidden_states[s.tensors["loss_mask"], 0] for s in samples])
    buffer = ActivationBuffer(
        samples, 4, 8, layers=3, epochs=1, only_masked=True, drop_last=False, dtype=torch.float64
    )
    found = everything(buffer)
    assert found.dtype is torch.float64
    assert in_order(found) == in_order(rows)
    assert buffer.config["only_masked"] is True and buffer.config["layers"] == 3


def test_values_beyond_the_range_of_a_dtype_are_an_error() -> None:
    samples = make_samples()
    options: dict[str, Any] = {"layers": 3, "epochs": 1, "dtype": torch.float16}
    assert everything(ActivationBuffer(samples, 8, 32, **options)).isfinite().all()
    samples[-1].hidden_states[0, 0, 1] = 7e4
    with pytest.raises(ValueError, match="beyond the range of float16, which ends at 65,504"):
        everything(ActivationBuffer(samples, 8, 32, **options))


def test_it_has_no_end_by_default() -> None:
    buffer = ActivationBuffer(make_samples(), 8, 16, layers=0)
    batches = list(islice(buffer, 40))
    assert all(batch.shape == (8, 4) for batch in batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": None}, r"layers=None: samples have the layers \[3, 'norm', 0\]"),
        ({"layers": [3, 4]}, r"layers=\[3, 4\]: samples have"),
        ({"layers": 3, "hook": "blocks.1.x"}, "layers=3: not together with hook='blocks.1.x'"),
        ({"layers": 3, "epochs": 0}, "epochs=0: has to be a whole number of at least 1"),
        ({"layers": 3, "epochs": 1.5}, "epochs=1.5: has to be a whole number"),
        ({"hook": "blocks.1.x"}, "hook='blocks.1.x': .*blocks.0.hook_mlp_out"),
        ({"layers": 3, "batch_size": 0}, "batch_size=0"),
        ({"layers": 3, "only_masked": "no"}, "only_masked='no': has to be true or false"),
        ({"layers": 3, "num_rows": 63, "batch_size": 32}, "num_rows=63: has to be at least twice"),
        ({"layers": 3, "dtype": "float32"}, "dtype='float32': use a torch dtype"),
        ({"layers": 3, "device": "gpu"}, "device='gpu': "),
        ({"layers": 3, "seed": "a"}, "seed='a': has to be a whole number"),
        ({"layers": []}, r"layers=\[\]: name a layer"),
        ({"layers": 3, "batch_size": 1000, "num_rows": 2000}, "fewer rows than batch_size=1000"),
    ],
)
def test_what_cannot_be_used_is_named(options: dict[str, Any], message: str) -> None:
    options = {"batch_size": 8, "num_rows": 32, **options}
    with pytest.raises(ValueError, match=message):
        list(ActivationBuffer(make_samples(), **{"epochs": 1, **options}))


def test_a_generator_gives_one_epoch() -> None:
    with pytest.raises(ValueError, match="can be iterated only once"):
        ActivationBuffer(iter(make_samples()), 8, 32)
    assert len(everything(ActivationBuffer(iter(make_samples()), 8, 32, layers=3, epochs=1))) == 72
    without = [
        HiddenStatesSample(
            0, "", torch.arange(2), torch.arange(2), {"hidden_states": torch.ones(2, 1, 4)}, (1,)
        )
    ]
    with pytest.raises(ValueError, match="samples have no loss mask"):
        list(ActivationBuffer(without, 1, 2, only_masked=True, epochs=1))

"""Layer ids as people write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.cli.main import main
from vllm.hidden_states.layer_ids import Layers, layer_items, resolve_layer_ids


@pytest.mark.parametrize(
    ("spec", "num_layers", "expected"),
    [
        ("2,12,21,last", 24, [2, 12, 21, 24]),
        ("embed, 3 ,3,0", 4, [0, 3, 3, 0]),
        ("0:24:4", 24, [0, 4, 8, 12, 16, 20]),
        ("0:25:4", 24, [0, 4, 8, 12, 16, 20, 24]),
        (":", 3, [0, 1, 2, 3]),
        ("::-2,1:", 3, [3, 1, 1, 2, 3]),
        ("-1,-2,-5", 4, [4, 3, 0]),
        ([7, "last", -2, "0:2"], 8, [7, 8, 7, 0, 1]),
        ([5], 5, [5]),
        # What speculators 0.9 derives: [2, n // 2, n - 3], and the last layer.
        ("eagle3", 36, [2, 18, 33, 36]),
        ("eagle3", 28, [2, 14, 25, 28]),
        # Published DFlash drafts: target_layer_ids [1, 9, 17, 25, 33] of Qwen3-8B (36 layers),
        # [1, 8, 15, 22, 29] of Qwen3.5-9B (32), [1, 16, 31, 46, 61] of Qwen3.6-27B (64),
        # counted from 0, so what leaves layer 1 is id 2.
        ("dflash", 36, [2, 10, 18, 26, 34, 36]),
        ("dflash", 32, [2, 9, 16, 23, 30, 32]),
        ("dflash", 64, [2, 17, 32, 47, 62, 64]),
        # Names say whose convention they follow.
        ("dflash", 24, [2, 7, 12, 17, 22, 24]),
        ("modelopt-dflash", 24, [1, 6, 11, 16, 21, 24]),
        ("speculators-eagle3", 24, [2, 12, 21, 24]),
        ("specforge-eagle3", 24, [2, 12, 21, 24]),
        ("modelopt-eagle3", 24, [1, 11, 20, 24]),
        ("modelopt-eagle3", 36, [1, 17, 32, 36]),
        ("eagle3", 24, [2, 12, 21, 24]),
        # One layer, and numbers of numpy.
        (5, 8, [5]),
        (-1, 8, [8]),
        (np.int64(3), 8, [3]),
        ([np.int64(3), 1], 8, [3, 1]),
        (range(0, 8, 3), 8, [0, 3, 6]),
        (np.array([2, 4]), 8, [2, 4]),
    ],
)
def test_what_it_means(spec: Layers, num_layers: int, expected: list[int]) -> None:
    assert resolve_layer_ids(spec, num_layers) == tuple(expected)


def test_items_are_of_python_s_own_classes() -> None:
    """They are keys of a cache, which would keep others alive."""

    class Number(int): ...

    class Text(str): ...

    items = layer_items([Number(3), Text("last"), np.int64(1)])  # type: ignore[list-item]
    assert items == (3, "last", 1)
    assert [type(item) for item in items] == [int, str, int]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("7", r"'7' does not exist in a model of 6 layers; use ids from 0 to 6 \(or -7 to -1\)"),
        ("-8", "layers: '-8' does not exist"),
        ("0:8", "layers: '0:8' does not exist"),
        ("3:3", "layers: '3:3' does not exist"),
        ("1:5:0", "layers: '1:5:0' does not exist"),
        ("1:2:3:4", "does not exist"),
        ("", "layers: '' does not exist"),
        ("1,,2", "layers: '' does not exist"),
        ("first", "layers: 'first' does not exist"),
        (True, "layers: True is not a layer id"),
        (9, "layers: '9' does not exist"),
        (
            "eagle",
            "does not exist .* speculators-eagle3, specforge-eagle3, modelopt-eagle3, dflash",
        ),
        ("modelopt-eagle3", r"layers=modelopt-eagle3 means \[1, 2, 2\] and the last layer"),
        ([True], "layers: True is not a layer id"),
        ([1.0], "layers: 1.0 is not a layer id"),
        ([[1, 2]], r"layers: \[1, 2\] is not a layer id"),
        (slice(0, 2), r"layers: slice\(0, 2, None\) is not a layer id"),
        (torch.tensor(1), r"layers: tensor\(1\) is not a layer id"),
        ([], r"layers=\[\] names no layer"),
        (
            "eagle3",
            r"layers=eagle3 means \[2, 3, 3\] and the last layer, which are not different ids of",
        ),
        ("dflash", "layers=dflash means"),
    ],
)
def test_what_is_refused(spec: Layers, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_layer_ids(spec, 6)


_END = st.one_of(st.none(), st.integers(-40, 40))


@given(st.integers(1, 30), _END, _END, st.one_of(st.none(), st.integers(-5, 5)))
def test_ranges_are_python_slices_or_an_error(
    last: int, start: int | None, stop: int | None, step: int | None
) -> None:
    text = ":".join("" if part is None else str(part) for part in (start, stop, step))
    inside = all(end is None or -last - 1 <= end <= last + 1 for end in (start, stop))
    expected = list(range(last + 1))[start:stop:step] if step != 0 else []
    if inside and expected:
        assert resolve_layer_ids(text, last) == tuple(expected)
    else:
        with pytest.raises(ValueError, match="layers"):
            resolve_layer_ids(text, last)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hidden-states", "layers", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "dflash              2, 7, 12, 17, 22, 24" in lines
    assert "modelopt-dflash     1, 6, 11, 16, 21, 24" in lines
    assert "modelopt-eagle3     1, 11, 20, 24" in lines
    assert "compute_hidden_states_vllm.py" in lines[-1]
    with pytest.raises(SystemExit, match="2"):
        main(["hidden-states", "layers", "0"])

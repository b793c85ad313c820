"""Released readers of exported folders, unmodified, on all values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hidden_states.test_export import EAGLE, NUM_LAYERS, make_dataset
from tests.integration.clients.environment import ClientEnvironment
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.convert import convert_dataset
from vllm.utils.boundaries import NORM

READER = Path(__file__).with_name("exports_reader.py")


@pytest.mark.parametrize(
    "fmt",
    ["specforge-eagle3", "specforge-dflash", "specforge-domino", "specforge-dspark", "modelopt",
     "modelopt-prenorm", "saelens", "huggingface", "parquet",
     "webdataset"],
)  # fmt: skip
def test_its_released_reader(tmp_path: Path, clients: ClientEnvironment, fmt: str) -> None:
    """Every value is as in the dataset, and no sample that the format took is refused."""
    name = fmt.removesuffix("-prenorm")
    if fmt == "saelens":
        path = make_dataset(tmp_path / "a", (0, 3), (8,) * 7, pack="8")
    else:
        last = NUM_LAYERS if fmt.endswith("prenorm") else NORM
        path = make_dataset(tmp_path / "a", (*EAGLE, last), keep_columns='["label"]')
    convert_dataset(str(path), str(tmp_path / "b"), name, shard_bytes=1400)
    expected: list[dict[str, Any]] = []
    for sample in HiddenStatesDataset(path):
        mask = sample.loss_mask
        assert mask is not None
        is_refused = "dflash" in fmt or "domino" in fmt or "dspark" in fmt
        if is_refused and not (mask[1:] & mask[:-1]).any():
            continue
        tensors = {name: getattr(sample, name).clone() for name in ("token_ids", "hidden_states")}
        expected.append({**tensors, "loss_mask": mask.clone(), "record": sample.record})
    torch.save(expected, tmp_path / "expected.pt")
    done = clients.run(
        "python", str(READER), fmt, str(tmp_path / "b"), str(tmp_path / "expected.pt"),
        SPECFORGE_VALIDATE_OFFLINE_FEATURES="1", WANDB_MODE="disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "compared " in done.stdout.splitlines()[-1]

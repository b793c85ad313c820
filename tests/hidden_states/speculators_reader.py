"""Run by a Python that has speculators 0.9: reads a folder with its own classes.

Arguments: the folder of a prepared dataset to make, the folder of hidden states, and a .pt file
with the expected samples, each ``{"token_ids": ..., "hidden_states": ...}`` or None where the
job skipped the record.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import Dataset
from hs_connectors import FileTransfer
from safetensors.torch import load_file
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.recovery import SampleUnavailable


def main(prepared: Path, hidden_states: Path, expected_path: Path) -> None:
    expected = torch.load(expected_path)
    make_prepared(prepared, expected)
    present = [i for i, sample in enumerate(expected) if sample is not None]
    assert get_existing_hidden_state_indices(hidden_states) == present
    assert find_corrupt_hidden_state_indices(hidden_states, present) == {}
    dataset = ArrowDataset(
        max_len=64,
        datapath=prepared,
        transfer=FileTransfer(hidden_states),
        on_missing="skip",
    )
    assert len(dataset) == len(expected)
    for index, sample in enumerate(expected):
        item = dataset[index]
        if sample is None:
            assert isinstance(item, SampleUnavailable), item
            continue
        stored = load_file(hidden_states / f"hs_{index}.safetensors")
        check_hidden_states(stored, sample["token_ids"].tolist())
        rows = sample["hidden_states"]
        assert torch.equal(item["input_ids"], sample["token_ids"])
        assert torch.equal(item["hidden_states"], rows[:, :-1].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], rows[:, -1])
    layers, hidden_size = expected[present[0]]["hidden_states"].shape[1:]
    collate = CollateFn(64, hidden_size, layers - 1)
    batch = collate([dataset[index] for index in present])
    rows = torch.cat([expected[index]["hidden_states"] for index in present])
    assert torch.equal(batch["hidden_states"][0, : len(rows)], rows[:, :-1].flatten(1))
    print("read", len(present), "samples")


def make_prepared(folder: Path, expected: list[dict[str, torch.Tensor] | None]) -> None:
    """The columns that its prepare-data makes."""
    ids = [[1, 2] if sample is None else sample["token_ids"].tolist() for sample in expected]
    dataset = Dataset.from_dict(
        {
            "input_ids": ids,
            "loss_mask": [[1] * len(one) for one in ids],
            "seq_len": [len(one) for one in ids],
        }
    )
    dataset.set_format(type="torch", columns=["input_ids", "loss_mask", "seq_len"])
    dataset.save_to_disk(folder)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))

"""Reads an exported folder with the released reader of its format, and compares all values.

    python exports_reader.py FORMAT FOLDER EXPECTED.pt

EXPECTED.pt has the samples that the reader has to find, in order, as dicts of tensors: token_ids,
hidden_states [rows, layers, hidden], loss_mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Sample = dict[str, Any]


def specforge(fmt: str, folder: str, samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Yield (found, expected) of SpecForge's offline reader, its store and its loader."""
    from specforge.algorithms.common import dflash_family_data as dflash
    from specforge.algorithms.eagle3 import data as eagle3
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    options: dict[str, Any] = {"run_id": "run", "ttt_length": 3, "max_len": 64}
    strategy = fmt.removeprefix("specforge-")
    if strategy == "eagle3":
        reader = eagle3.build_offline_reader(folder, **options)
        normalise = eagle3.build_offline_normalizer(64)
        collate = eagle3.build_offline_collator()
    elif strategy == "dspark":
        reader = dflash.build_dspark_offline_reader(strategy, folder, **options)
        normalise = dflash.build_dspark_offline_normalizer(64)
        collate = dflash.build_dspark_collator()
    else:
        reader = dflash.build_offline_reader(strategy, folder, **options)
        normalise = dflash.build_offline_normalizer(64)
        collate = dflash.build_collator()
    refs = reader.read()
    assert all(ref.feature_specs for ref in refs), "it validates the files"
    yield [ref.num_tokens for ref in refs], [len(sample["token_ids"]) for sample in samples]
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=refs, strategy=strategy, per_sample_transform=normalise,
        collate_fn=collate,
    )  # fmt: skip
    for batch, sample in zip(loader, samples, strict=True):
        found, rows = batch.tensors, sample["hidden_states"]
        yield found["input_ids"][0], sample["token_ids"]
        mask = sample["loss_mask"].long()
        if strategy == "eagle3":
            mask[-1] = 0  # its reader does so
            yield found["hidden_state"][0], rows[:, :3].flatten(1)
            yield found["target"][0], rows[:, 3]
        else:
            yield found["hidden_states"][0], rows[:, :3].flatten(1)
        if strategy == "dspark":
            yield found["target_last_hidden_states"][0], rows[:, 3]
        yield found["loss_mask"][0], mask


def modelopt(fmt: str, folder: str, samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Yield (found, expected) of Model-Optimizer's dataset and collator."""
    from modelopt.torch.speculative.eagle.utils import (
        EagleOfflineDataCollator,
        OfflineSupervisedDataset,
    )

    files = sorted(map(str, Path(folder).glob("*.pt")))
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    longest = max(len(sample["token_ids"]) for sample in samples)
    batch = EagleOfflineDataCollator(longest)([dataset[n] for n in range(len(dataset))])
    states = batch["base_model_outputs"]
    yield states["base_hidden_prenorm"], fmt == "modelopt-prenorm"
    yield len(dataset), len(samples)
    for number, sample in enumerate(samples):
        length, rows = len(sample["token_ids"]), sample["hidden_states"]
        yield batch["input_ids"][number, :length], sample["token_ids"]
        yield batch["loss_mask"][number, :length], sample["loss_mask"].long()
        yield states["base_model_hidden_states"][number, :length], rows[:, 3]
        yield states["aux_hidden_states"][number, :length], rows[:, :3].flatten(1)


def saelens(fmt: str, folder: str, samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Yield (found, expected) of SAELens' store of activations, for each hook point."""
    from sae_lens import ActivationsStore, CacheActivationsRunnerConfig
    from transformer_lens.hook_points import HookedRootModule

    context, _, width = samples[0]["hidden_states"].shape
    names = ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"]
    for place, name in enumerate(names):
        config = CacheActivationsRunnerConfig(
            dataset_path="", model_name="", model_batch_size=len(samples), hook_name=name,
            d_in=width, training_tokens=context * len(samples), context_size=context,
            new_cached_activations_path=folder, device="cpu",
        )  # fmt: skip
        store = ActivationsStore.from_config(HookedRootModule(), config)
        rows, token_ids = store.get_raw_llm_batch()
        yield token_ids, torch.cat([sample["token_ids"] for sample in samples])
        expected = torch.cat([sample["hidden_states"][:, place] for sample in samples])
        yield rows.reshape(-1, width), expected.float()


def huggingface(fmt: str, folder: str, samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Yield (found, expected) of datasets."""
    from datasets import load_dataset, load_from_disk

    if fmt == "parquet":
        files = f"{folder}/*.parquet"
        loaded = load_dataset("parquet", data_files=files, split="train")
        streamed = load_dataset("parquet", data_files=files, split="train", streaming=True)
        yield [one["sample"] for one in streamed], [one["sample"] for one in loaded]
    else:
        loaded = load_from_disk(folder)
    rows = loaded.with_format("torch")
    yield len(rows), len(samples)
    for row, sample in zip(rows, samples, strict=True):
        yield row["token_ids"], sample["token_ids"]
        yield row["loss_mask"], sample["loss_mask"]
        yield row["hidden_states"], sample["hidden_states"].float()


parquet = huggingface


def webdataset(fmt: str, folder: str, samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
    """Yield (found, expected) of webdataset, and of its loader with a worker."""
    from webdataset import WebDataset, WebLoader

    files = sorted(map(str, Path(folder).glob("*.tar")))
    dataset = WebDataset(files, shardshuffle=False).decode()
    for rows in (dataset, WebLoader(dataset, batch_size=None, num_workers=1)):
        for row, sample in zip(rows, samples, strict=True):
            yield torch.as_tensor(row["token_ids.npy"]), sample["token_ids"]
            yield torch.as_tensor(row["loss_mask.npy"]), sample["loss_mask"]
            states = torch.as_tensor(row["hidden_states.npy"])
            yield states, sample["hidden_states"].float()
            yield row["json"]["record"], sample["record"]


def main() -> None:
    """Print the number of values that were compared."""
    fmt, folder, expected_path = sys.argv[1:]
    samples = torch.load(expected_path)
    read = globals()[fmt.partition("-")[0]]
    count = 0
    for found, expected in read(fmt, folder, samples):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected), (found, expected)
            count += expected.numel()
        else:
            assert found == expected, (found, expected)
    print(f"compared {count} values")


if __name__ == "__main__":
    main()

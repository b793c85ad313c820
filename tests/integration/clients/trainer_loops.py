"""Train on an ExtractingDataset with transformers' Trainer and with accelerate; print JSON.

python trainer_loops.py MODEL FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

from vllm import AsyncEngineArgs
from vllm.hidden_states import HiddenStatesSample, pad_samples
from vllm.training import ExtractingDataset

NUM_PROMPTS, EPOCHS, BATCH = 40, 3, 8


class Probe(torch.nn.Module):
    """Predicts from the last state whether a prompt's last token is small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 2)
        self.seen: list[int] = []

    def forward(self, state: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Any:
        self.seen += index.tolist()
        logits = self.linear(torch.nn.functional.layer_norm(state, state.shape[-1:]))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def as_features(sample: HiddenStatesSample) -> dict[str, torch.Tensor]:
    return {
        "state": sample.hidden_states[-1, 0].float(),
        "labels": torch.tensor(sample.columns["label"]),
        "index": torch.tensor(sample.index),
    }


def make_dataset(model: str, **options: Any) -> ExtractingDataset:
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(2, 20))] for _ in range(NUM_PROMPTS)]
    labels = [int(prompt[-1] < 150) for prompt in prompts]
    args = AsyncEngineArgs(model, max_model_len=64, kv_cache_memory_bytes=2**24)
    columns = {"label": labels}
    return ExtractingDataset(args, prompts, [0], columns=columns, shuffle=True, **options)


def by_trainer(model: str, folder: str) -> dict[str, Any]:
    with make_dataset(model, positions="last", transform=as_features, cache=folder) as dataset:
        probe = Probe(next(iter(dataset))["state"].shape[0])
        dataset.set_epoch(0)
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=0.05,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=probe, args=arguments, train_dataset=dataset)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": [float(loss) for loss in losses], "seen": probe.seen}


def by_accelerate(model: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    with make_dataset(model) as dataset:
        probe = Probe(next(iter(dataset)).hidden_states.shape[-1])
        optimizer = torch.optim.AdamW(probe.parameters(), lr=0.05)
        loader = DataLoader(dataset, batch_size=BATCH, collate_fn=pad_samples)
        probe, optimizer, loader = accelerator.prepare(probe, optimizer, loader)
        losses = []
        for _ in range(EPOCHS):
            for batch in loader:
                last = batch.mask.sum(1) - 1
                states = batch.rows[torch.arange(len(last)), last, 0].float()
                output = probe(states, torch.tensor(batch.columns["label"]), batch.samples)
                optimizer.zero_grad()
                accelerator.backward(output["loss"])
                optimizer.step()
                losses.append(float(output["loss"]))
        return {"losses": losses, "seen": probe.seen}


if __name__ == "__main__":
    checkpoint, work = sys.argv[1:]
    print(json.dumps([by_trainer(checkpoint, work), by_accelerate(checkpoint)]))

"""Train a sparse autoencoder on shuffled rows that the engine extracts meanwhile.

    python examples/train_sae.py --model Qwen/Qwen3.5-0.8B --steps 5000

The autoencoder reads the stream that layer LAYER reads, and keeps the NUM_ACTIVE largest features
of each row (arXiv 2406.04093). The loss is the share of the rows' variance that it does not
explain. Trainers of SAELens and dictionary_learning take the same ActivationBuffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_checkpoint import demo_checkpoint, load_texts
from loss_curve import LossCurve, parse_options

from vllm import AsyncEngineArgs
from vllm.training import ActivationBuffer, ExtractingDataset

LAYER = 4
NUM_ACTIVE = 32
"""Features that are not zero in a row."""


class SparseAutoencoder(torch.nn.Module):
    """Rows [rows, hidden] -> features [rows, 4 * hidden], NUM_ACTIVE of them above zero -> rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(width, 4 * width)
        self.decoder = torch.nn.Linear(4 * width, width)
        with torch.no_grad():
            self.encoder.weight.copy_(self.decoder.weight.T)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = self.encoder(rows - self.decoder.bias).relu().topk(NUM_ACTIVE)
        features = torch.zeros(len(rows), self.encoder.out_features)
        features = features.scatter(1, largest.indices, largest.values)
        return self.decoder(features), features


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__, steps=200, arguments=arguments)
    torch.manual_seed(0)
    model = options.model or str(demo_checkpoint(options.cache_dir))
    args = AsyncEngineArgs(model, max_model_len=1024)
    with ExtractingDataset(args, load_texts(), layers=[LAYER], shuffle=True) as dataset:
        buffer = ActivationBuffer(dataset, batch_size=512, num_rows=2048, dtype=torch.float32)
        batches = iter(buffer)
        first = next(batches)
        mean, scale = first.mean(0), first.std()
        autoencoder = SparseAutoencoder(first.shape[1])
        curve = LossCurve([*autoencoder.parameters()], rate=2e-3)
        is_used = torch.zeros(autoencoder.encoder.out_features, dtype=torch.bool)
        for batch in itertools.islice(batches, options.steps):
            rows = (batch - mean) / scale
            again, features = autoencoder(rows)
            curve.step((rows - again).square().sum() / (rows - rows.mean(0)).square().sum())
            is_used |= (features > 0).any(0)
    print(f"{(~is_used).float().mean():.0%} of {len(is_used)} features were never active")
    curve.save("Variance not explained", options.plot or Path("train_sae-loss.png"))


if __name__ == "__main__":
    main()

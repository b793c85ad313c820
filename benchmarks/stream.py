"""Measure a stream of samples between two processes of this machine.

    python benchmarks/stream.py --megabytes 64 --num-samples 200

The publisher copies rows from its memory into shared memory; the reader reads every value, as a
trainer would that sums them, or only receives them (--no-read).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch

from vllm.hidden_states import HiddenStatesSample
from vllm.training import HiddenStatesStream, StreamedDataset

HIDDEN, LAYERS = 2048, 4


def publish(path: str, megabytes: float, num_samples: int, credit_bytes: int) -> None:
    """Publish samples of this size."""
    torch.set_num_threads(1)
    rows = max(1, int(megabytes * 1e6) // (HIDDEN * LAYERS * 2))
    sample = HiddenStatesSample(
        index=0,
        request_id="",
        token_ids=torch.arange(rows),
        positions=torch.arange(rows),
        tensors={"hidden_states": torch.randn(rows, LAYERS, HIDDEN).to(torch.bfloat16)},
        layer_ids=(0, 1, 2, 3),
    )
    with HiddenStatesStream(path, credit_bytes) as stream:
        stream.publish(sample for _ in range(num_samples))


def main() -> None:
    """Print the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64.0, help="of rows in a sample")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument("--credit-megabytes", type=float, default=512.0)
    parser.add_argument("--no-read", action="store_true", help="receive rows, but do not read them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.sock")
        settings = (path, args.megabytes, args.num_samples, int(args.credit_megabytes * 1e6))
        process = multiprocessing.get_context("spawn").Process(target=publish, args=settings)
        process.start()
        num_bytes, start, num_warm = 0, 0.0, args.num_samples // 4
        for number, sample in enumerate(StreamedDataset(path)):
            if number == num_warm:
                start, num_bytes = time.perf_counter(), 0
            num_bytes += sample.nbytes
            if not args.no_read:
                sample.hidden_states.view(torch.int64).sum()
        seconds = time.perf_counter() - start
        process.join()
        assert not Path(path).exists()
    what = "received" if args.no_read else "received and read"
    print(f"{num_bytes / seconds / 1e9:.2f} GB/s {what}, {args.megabytes:g} MB a sample")


if __name__ == "__main__":
    main()

"""Train a linear probe on hidden states, straight from the engine: no files, no server.

    python examples/extract_tensors.py --model Qwen/Qwen3.5-0.8B --layers 2 12 -1

The probe learns which half of the subjects a text is about, from the row of its last token. This
is always a full stop, so the embedding cannot know; layers that have seen the text can. Without
--model it uses the demo's small checkpoint (random weights), which it builds on the first run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_checkpoint import DEFAULT_CACHE, demo_checkpoint

from vllm import LLM

SUBJECTS = ["the tide", "a train to Ulm", "this function", "my cat", "the second law", "rain"]
VERBS = ["comes late", "stops here", "returns zero", "sleeps", "holds", "falls upwards"]
TEXTS = [f"{subject} {verb}." for subject in SUBJECTS for verb in VERBS]
IS_SECOND_HALF = torch.arange(len(TEXTS)) >= len(TEXTS) // 2


def train_probe(rows: torch.Tensor, labels: torch.Tensor) -> float:
    """Train a probe on ``rows`` [texts, hidden]; return the share of them that it gets right."""
    probe = torch.nn.Linear(rows.shape[1], 1)
    optimizer = torch.optim.Adam(probe.parameters(), lr=0.01)
    rows = torch.nn.functional.layer_norm(rows.float(), rows.shape[1:])
    for _ in range(200):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            probe(rows).squeeze(1), labels.float()
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return float(((probe(rows).squeeze(1) > 0) == labels).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the demo's checkpoint)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 4, -1], help="layer ids")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    with LLM(options.model or str(demo_checkpoint(options.cache_dir)), max_model_len=256) as llm:
        samples = list(llm.extract(TEXTS, options.layers, positions="last", ordered=True))
    rows = torch.cat([sample.hidden_states for sample in samples])  # [texts, layers, hidden]
    for column, layer_id in enumerate(samples[0].layer_ids):
        accuracy = train_probe(rows[:, column], IS_SECOND_HALF)
        print(f"layer {layer_id}: {accuracy:.0%} of {len(TEXTS)} texts")


if __name__ == "__main__":
    main()

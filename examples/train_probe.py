"""Train a linear probe on each layer, and test it on texts that it has not seen.

    python examples/train_probe.py --model Qwen/Qwen3.5-0.8B

The label is the adjective in the text. The row is that of the last token, a full stop, so a probe
on the embedding can only guess. All probes are trained at once, on their mean loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from demo_checkpoint import demo_checkpoint
from loss_curve import LossCurve, parse_options
from torch.nn import functional

from vllm import LLM

ADJECTIVES = ["old", "red", "late", "quiet", "cheap", "strange", "wet", "tall"]
NOUNS = ["train", "cat", "river", "theory", "kettle", "tower"]
VERBS = ["stops", "sleeps", "falls", "works"]
TEXTS = [f"The {a} {noun} {verb}." for a in ADJECTIVES for noun in NOUNS for verb in VERBS]
LABELS = torch.arange(len(ADJECTIVES)).repeat_interleave(len(NOUNS) * len(VERBS))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(__doc__, steps=200, arguments=arguments)
    torch.manual_seed(0)
    model = options.model or str(demo_checkpoint(options.cache_dir))
    with LLM(model, max_model_len=256) as llm:
        samples = [*llm.extract(TEXTS, layers=":", positions="last", dtype="float32")]
    rows = torch.cat([sample.hidden_states for sample in samples])  # [texts, layers, hidden]
    rows = functional.layer_norm(rows, rows.shape[2:])
    shuffled = torch.randperm(len(rows))
    test, train = shuffled[: len(rows) // 4], shuffled[len(rows) // 4 :]

    probes = torch.nn.Parameter(torch.zeros(rows.shape[1], rows.shape[2], len(ADJECTIVES)))
    curve = LossCurve([probes], rate=1e-3)
    for _ in range(options.steps):
        scores = torch.einsum("tlh,lhc->tcl", rows[train], probes)
        labels = LABELS[train, None].expand(-1, rows.shape[1])
        curve.step(functional.cross_entropy(scores, labels))

    found = torch.einsum("tlh,lhc->tlc", rows[test], probes).argmax(-1)
    accuracies = (found == LABELS[test, None]).float().mean(0)
    for layer_id, accuracy in zip(samples[0].layer_ids, accuracies.tolist(), strict=True):
        print(f"layer {layer_id}: {accuracy:.0%} of {len(test)} unseen texts")
    curve.save("Probes: cross-entropy", options.plot or Path("train_probe-loss.png"))


if __name__ == "__main__":
    main()

"""The options and the plot that the training examples share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_checkpoint import DEFAULT_CACHE


def parse_options(
    about: str | None, steps: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse ``--model``, ``--steps``, ``--plot`` and ``--cache-dir``."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the demo's checkpoint)")
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="PNG of the loss (default: NAME-loss.png)")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="for the checkpoint")
    return parser.parse_args(arguments)


class LossCurve:
    """Takes the optimiser's steps, prints the loss, and plots it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], rate: float) -> None:
        self.optimizer = torch.optim.Adam(parameters, lr=rate)
        self.losses: list[float] = []

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.losses.append(loss.item())
        if len(self.losses) % 20 == 1:
            print(f"step {len(self.losses) - 1}: loss {self.losses[-1]:.4f}")

    def save(self, title: str, path: Path) -> None:
        """Print the mean of the first and of the last steps, and write the plot."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        few = max(1, min(10, len(self.losses) // 4))
        first, last = (statistics.fmean(part) for part in (self.losses[:few], self.losses[-few:]))
        print(f"loss from {first:.4f} to {last:.4f} in {len(self.losses)} steps")
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(self.losses)
        axes.set(title=title, xlabel="step", ylabel="loss")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        print(f"plot in {path}")

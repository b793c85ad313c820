"""``speculators train`` on a CPU: its program, with the three places replaced that want a GPU.

The trainer moves the model and batches to device number 0, takes that for a CUDA device, and
synchronises it. Run by the interpreter of the clients' environment, with the arguments of
``speculators train``.
"""

from __future__ import annotations

import sys

import torch
from speculators.__main__ import app
from speculators.train import trainer

setup_trainer = trainer.Trainer.setup_trainer


def setup_trainer_on_cpu(self: trainer.Trainer) -> None:
    self.device_type = "cpu"
    setup_trainer(self)


# The loader's workers import this file too, and need none of this.
if __name__ == "__main__":
    trainer.get_local_rank = lambda: "cpu"
    trainer.Trainer.setup_trainer = setup_trainer_on_cpu
    torch.accelerator.synchronize = lambda: None
    sys.argv[1:1] = ["train"]
    app()

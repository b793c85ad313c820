"""``vllm bench extraction`` on both built-in shapes, with transformers beside it.

Checkpoints are kept in the repository's ``.cache``. Any option of the command may be given.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm.entrypoints.cli.bench import bench

DEFAULTS = [
    "extraction",
    *("--model", "qwen3.5-0.5b", "llama-1b"),
    *("--peer", "transformers"),
    *("--cache-dir", str(Path(__file__).resolve().parent.parent / ".cache")),
]

if __name__ == "__main__":
    sys.exit(bench([*DEFAULTS, *sys.argv[1:]]))

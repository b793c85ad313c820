"""Checkpoints with the shapes of real models and random weights, for measuring speed.

Built once into a cache folder. The vocabulary is reduced to 32,768 entries: embedding and
LM head play no part in extraction, and the file stays small.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache"
VOCABULARY = 32_768
DEFAULT_LAYERS = {"qwen3.5-0.5b": (2, 12, 21, 24), "llama-1b": (2, 8, 13, 16)}
"""Models there are, and the layer ids extracted unless others are named."""


def checkpoint(name: str, cache: Path = DEFAULT_CACHE) -> Path:
    """Folder of the bfloat16 checkpoint ``name``, built when it is not there yet."""
    folder = cache / f"benchmark-{name}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.bfloat16)
        model.save_pretrained(scratch)
        # Complete or not there at all: the folder gets its name last.
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _config(name: str) -> PretrainedConfig:
    from transformers import LlamaConfig, Qwen3_5TextConfig

    if name == "llama-1b":
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        )
    if name == "qwen3.5-0.5b":
        return Qwen3_5TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
            architectures=["Qwen3_5ForCausalLM"],
        )
    raise ValueError(f"model {name!r} is not one of {', '.join(DEFAULT_LAYERS)}")

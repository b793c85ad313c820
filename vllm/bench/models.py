"""The models of a benchmark: a local checkpoint, or the shape of a real model with random weights.

Built-in shapes have a vocabulary of 32,768 entries, because embedding and LM head play no part
in extraction, and the files stay small. They are built once into a cache folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_CACHE = Path.home() / ".cache" / "vllm" / "benchmarks"
_VOCABULARY = 32_768
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-0.5b": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h-0.5b": (
        "nemotron_h",
        {
            "hidden_size": 1024,
            "intermediate_size": 5376,
            "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "max_position_embeddings": 131_072,
        },
    ),
    "mamba2-370m": (
        "mamba2",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 48,
            "num_heads": 32,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "tie_word_embeddings": True,
        },
    ),
    "llama-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
    ),
}
"""Name -> transformers' model type and config settings. Weights are bfloat16."""


class BenchmarkModel(NamedTuple):
    """A checkpoint and the sizes that prompts and layer ids depend on."""

    name: str
    checkpoint: Path
    num_layers: int
    vocabulary: int

    @property
    def default_layer_ids(self) -> tuple[int, ...]:
        """Four boundaries (fewer in tiny models), including the one after the last layer."""
        last = self.num_layers
        return tuple(sorted({min(2, last), last // 2, max(last - 3, 0), last}))


def find_model(model: str, cache: Path = DEFAULT_CACHE) -> BenchmarkModel:
    """Find the built-in shape of that name (built if necessary), or the checkpoint in a folder."""
    checkpoint = Path(model)
    if model in BUILT_IN:
        checkpoint = _build(model, cache)
    elif not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"--model {model}: neither a folder with a config.json nor a built-in shape; "
            f"built in: {', '.join(BUILT_IN)}"
        )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint).get_text_config(decoder=True)
    name = model if model in BUILT_IN else checkpoint.resolve().name
    return BenchmarkModel(name, checkpoint, config.num_hidden_layers, config.vocab_size)


def _build(name: str, cache: Path) -> Path:
    folder = cache / f"benchmark-{name}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = BUILT_IN[name]
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, vocab_size=_VOCABULARY, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(scratch)
        # The folder gets its name last, so a folder of that name is complete.
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder

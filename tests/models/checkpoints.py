"""Tiny checkpoints with random weights, written by transformers itself.

Weights are drawn so that every part of a model shows in its hidden states: matrices keep
the scale of their input, norms and biases are random too. Imports nothing of vllm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
VOCAB_SIZE = 307
"""More than the tokenizer's 259 tokens, and odd."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """Names of transformers' classes, and a small config that is odd where it can be."""

    config_class: str
    model_class: str
    config: dict[str, Any]


_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": NUM_BYTES + 2,
    "bos_token_id": None,
    "pad_token_id": None,
}

_HYBRID: dict[str, Any] = {
    **_DENSE,
    "num_hidden_layers": 5,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}

_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 72,
    "num_position_embeddings": 16,
}

FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _DENSE),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_DENSE, "sliding_window": 24}),
    "qwen2": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_DENSE, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _DENSE),
    "qwen3_5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3_5_vl": Family("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _HYBRID),
}


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of ``family`` (a key of FAMILIES) and return its folder.

    overrides: entries of the (text) config. max_shard_size: e.g. "100KB" for several files
    with an index.
    """
    model = make_transformers_model(family, seed=seed, **overrides).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def make_transformers_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model of ``family`` with randomised weights."""
    import transformers

    names = FAMILIES[family]
    settings = {**names.config, **overrides}
    config_class = getattr(transformers, names.config_class)
    if family == "qwen3_5_vl":
        tied = settings.get("tie_word_embeddings", False)
        config = config_class(text_config=settings, vision_config=_VISION, tie_word_embeddings=tied)
    else:
        config = config_class(**settings)
    model = getattr(transformers, names.model_class)(config).float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Draw every weight of a transformers model by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            # Memory from a few tokens to a few hundred.
            weight.uniform_(math.log(0.005), math.log(0.5), generator=generator)
        elif weight.dim() == 1:
            centre = weight.float().mean().item() if weight.numel() else 0.0
            weight.normal_(round(centre), 0.2, generator=generator)
        elif name.endswith("embed_tokens.weight"):
            weight.normal_(0.0, 1.0, generator=generator)
        else:
            fan_in = weight[0].numel()
            weight.normal_(0.0, 1.2 * fan_in**-0.5, generator=generator)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token a byte, three special ones, a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2], pad_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

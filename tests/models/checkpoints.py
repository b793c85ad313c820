"""Tiny checkpoints with random weights, written by transformers itself.

Weights are drawn so that every part of a model shows in its hidden states: matrices keep
the scale of their input, norms and biases are random too. Imports nothing of vllm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.models.families import FAMILIES, NUM_BYTES, VOCAB_SIZE, Family

__all__ = ["FAMILIES", "NUM_BYTES", "VOCAB_SIZE", "Family", "make_checkpoint"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "embed_positions")
EMBEDDINGS += ("word_embeddings", "embeddings")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    if names.vision is not None:
        tied = settings.get("tie_word_embeddings", False)
        config = config_class(
            text_config=settings, vision_config=names.vision, tie_word_embeddings=tied
        )
    else:
        config = config_class(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some are drawn below around the mean of what they were
        model = getattr(transformers, names.model_class)(config).float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Draw every weight of a transformers model by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in _weights(model):
        last = name.split(".")[-2:]
        if name.endswith("A_log"):
            # Memory from a few tokens to a few hundred; a tenth of it where no norm follows.
            scale = 10.0 if weight.dim() in (2, 3) else 1.0
            low, high = math.log(0.005 * scale), math.log(0.5 * scale)
            weight.uniform_(low, high, generator=generator)
        elif "time_mix" in name:
            weight.uniform_(0.1, 0.9, generator=generator)
        elif weight.dim() == 1 or last[-1].endswith("_bias"):
            centre = weight.float().mean().item() if weight.numel() else 0.0
            weight.normal_(round(centre), 0.2, generator=generator)
        elif last[0] in EMBEDDINGS:
            weight.normal_(0.0, 1.0, generator=generator)
        else:
            is_conv = weight.dim() == 3 and weight.shape[1] == 1
            fan_in = weight[0].numel() if is_conv else weight.shape[-1]
            # Adapters are added to what they adapt, which would make scores steep; Zamba's steps
            # are exponents without a norm before them.
            scale = 0.5 if "adapter" in name or "dt_proj_weight" in name else 1.2
            weight.normal_(0.0, scale * fan_in**-0.5, generator=generator)


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and what a checkpoint holds beside them."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield name, buffer


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

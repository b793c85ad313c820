"""A small Qwen3.5-type checkpoint with random weights, built on the first run and kept in a cache.

The architecture, the files and the tokenizer are of the real kind; the size is not, and the weights
mean nothing. They are drawn so that every part of the model matters. With the usual tiny initial
weights, a wrong attention would hardly show in the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache"
TEXTS_FILE = Path(__file__).resolve().parent / "texts.jsonl"

_RECIPE = 1
"""Raised when what this file builds changes: an older cached checkpoint is then rebuilt."""
_MANIFEST = "manifest.json"
_END_OF_TURN = "<|im_end|>"
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", _END_OF_TURN]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_texts() -> list[str]:
    """Read the texts that come with the examples, short to long."""
    lines = TEXTS_FILE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def demo_checkpoint(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the folder of the checkpoint; build it unless it is there and intact."""
    folder = cache / "demo-qwen3.5"
    if _is_intact(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        _save_model(scratch)
        _save_tokenizer(scratch)
        manifest = {"recipe": _RECIPE, "sha256": _checksums(scratch)}
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _is_intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == {"recipe": _RECIPE, "sha256": _checksums(folder)})


def _save_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,  # full attention in layers 3 and 7, linear in the others
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        max_position_embeddings=8192,
        eos_token_id=_SPECIAL_TOKENS.index(_END_OF_TURN),
        dtype="float32",
    )
    model = Qwen3_5ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw(name, weight, generator)
    model.save_pretrained(folder)


def _draw(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one weight: matrices keep the scale of their input, vectors stay near their default."""
    if name.endswith("A_log"):
        # Decay rates from a few tokens to a few hundred: short and long memory.
        weight.uniform_(math.log(0.005), math.log(0.5), generator=generator)
    elif name.endswith("embed_tokens.weight"):
        weight.normal_(0.0, 1.0, generator=generator)
    elif weight.dim() == 1:
        # norm weights (zero-centred but for linear_attn.norm) and dt_bias
        centre = 1.0 if name.endswith(("linear_attn.norm.weight", "dt_bias")) else 0.0
        weight.normal_(centre, 0.1, generator=generator)
    else:
        inputs = weight[0].numel()
        weight.normal_(0.0, inputs**-0.5, generator=generator)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(load_texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END_OF_TURN, pad_token=_SPECIAL_TOKENS[0]
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    print(demo_checkpoint())

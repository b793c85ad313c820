"""Checkpoints of tests: weights that follow from their seed, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.models.checkpoints import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    make_transformers_model,
    save_tokenizer,
)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_weights_follow_from_the_seed_alone(family: str) -> None:
    models = []
    for drawn_before in range(4):
        torch.manual_seed(drawn_before)
        models.append(make_transformers_model(family).state_dict())
        assert torch.initial_seed() == drawn_before
    for other in models[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in models[0].items())
    seeded = make_transformers_model(family, seed=1).state_dict()
    assert not any(torch.equal(weight, seeded[name]) for name, weight in models[0].items())


def test_one_token_a_byte_and_a_chat_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße,  x = 1\n\t中"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS) <= VOCAB_SIZE
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat)["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.eos_token_id == 258

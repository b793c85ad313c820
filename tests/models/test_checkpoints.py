"""The byte-level tokenizer that test checkpoints carry."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.models.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer


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

"""Texts and bytes of single tokens: together they are the text that they were made of."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.frontend_harness import byte_fallback_tokenizer, byte_level_tokenizer
from tests.transformers_utils.test_answer_masks import RawBytes
from vllm.transformers_utils.token_texts import TextPlace, TokenTexts
from vllm.transformers_utils.tokenizer import make_decoder


def raw_bytes_tokenizer() -> RawBytes:
    words = [bytes([i]) for i in range(256)]
    return RawBytes([*words, b" \xf0\x9f", b"hello", b"\xe6\x9d\xb1\xe4", b"\x82\xac"])


MAKERS = [byte_fallback_tokenizer, byte_level_tokenizer, raw_bytes_tokenizer]
TEXTS = ["hello hello world", "a é€😀 b", " x\n\n  y ", "\ufffd é", "naïve 東京"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "make", [byte_fallback_tokenizer, byte_level_tokenizer, raw_bytes_tokenizer]
)
def test_tokens_are_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    texts, decode = TokenTexts(tokenizer), make_decoder(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.encode("hello", add_special_tokens=False)
    whole = decode(before + ids)
    place, joined = TextPlace(), b""
    place.add(whole[: len(decode(before))], None)
    for token in ids:
        num_bytes = len(decode(before).encode() + joined)
        assert len(whole[: place.offset].encode()) <= num_bytes
        assert num_bytes < len(whole[: place.offset + 1].encode())
        content = texts.bytes_of(token, texts.text(token))
        assert content is not None
        assert content.decode(errors="replace") == texts.text(token)
        place.add(texts.text(token), content)
        joined += content
    assert decode(before).encode() + joined == whole.encode()
    assert place.offset == len(whole)


def test_special_and_unknown_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    for token in tokenizer.all_special_ids:
        assert texts.text(token) == tokenizer.decode([token])
    assert texts.text(10**6) == "" and texts.bytes_of(10**6, "") == b""
    assert texts.bytes_of(10**6, "\ufffd") is None


def test_bytes_that_are_not_known() -> None:
    place = TextPlace()
    place.add("\ufffd", b"\xc3")
    assert place.offset == 0
    assert place.add("\ufffdx", None) == 1
    assert place.offset == 3


def test_places_behind_parts_of_characters() -> None:
    place = TextPlace()
    parts = [b"\xc3", b"k", b"\xc3", b"\xa9", b"\xa9", b"\xe2\x82", b"\xac", b"\xe2", b"\xc3", b""]
    whole = b"".join(parts).decode(errors="replace")
    starts = [place.add(part.decode(errors="replace"), part) for part in parts]
    assert whole == "\ufffdké\ufffd€\ufffd\ufffd"
    assert starts == [0, 1, 2, 2, 3, 4, 4, 5, 6, 7]


def test_special_tokens_have_the_space_that_their_text_has() -> None:
    words = {word: number for number, word in enumerate(["[UNK]", "a", "b", "[SEP]"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", sep_token="[SEP]")
    texts = TokenTexts(tokenizer)
    assert "".join(map(texts.text, [2, 0, 3, 1])) == " b [UNK] [SEP] a"
    assert texts.special_id("[SEP]") == 3

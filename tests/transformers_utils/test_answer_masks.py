"""Rules of masks, and the places of tokens that a tokenizer does not tell."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizer

from tests.engine.frontend_harness import byte_level_tokenizer
from tests.transformers_utils.test_answer_spans import CONVERSATIONS, LAST, LOOP, PROMPT
from vllm.transformers_utils.answer_masks import (
    MaskRule,
    encode_with_offsets,
    find_offsets,
    mask_tokens,
    parse_mask_rule,
)
from vllm.transformers_utils.answer_spans import render_masked

TEMPLATE = LAST + LOOP.replace("ANSWER", "{{ m.content }}") + PROMPT.replace("OPENING", "")


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, whose words are the longest that fit. Subclasses write bytes."""

    def __init__(self, words: list[Any], **options: Any) -> None:
        self.words = {word: i for i, word in enumerate(words)}
        super().__init__(pad_token=None, **options)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {**{str(word): i for word, i in self.words.items()}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        left, found = self.prepare(text), []
        while left:
            size = next(n for n in range(min(8, len(left)), 0, -1) if left[:n] in self.words)
            found.append(str(left[:size]))
            left = left[size:]
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return next(i for word, i in self.words.items() if str(word) == token)

    def _convert_id_to_token(self, index: int) -> str:
        return str([*self.words][index])

    def prepare(self, text: str) -> Any:
        raise NotImplementedError


class SlowBytes(Slow):
    """Its words are bytes, some of which share a character with their neighbours."""

    def prepare(self, text: str) -> bytes:
        return text.encode()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        by_name = {str(word): word for word in self.words}
        return b"".join(by_name.get(one, one.encode()) for one in tokens).decode(errors="replace")


class RawBytes(SlowBytes):
    """Its words are bytes for its callers, too, as those of Qwen's first tokenizer."""

    def get_vocab(self) -> dict[Any, int]:
        return dict(self.words)

    def _convert_id_to_token(self, index: int) -> Any:
        return [*self.words][index]

    def convert_tokens_to_string(self, tokens: list[Any]) -> str:
        return super().convert_tokens_to_string([str(one) for one in tokens])


class SlowPieces(Slow):
    """SentencePiece's way: a mark stands for a space, and the first one is lost again."""

    def prepare(self, text: str) -> str:
        return text.replace(" ", "▁")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").removeprefix(" ")


SPECIAL = ["<|im_start|>", "<|im_end|>"]
MORE = [b"\x82\xac a", "é".encode(), b"us", b"er\n", b"ass", b" \xf0\x9f", b"\n<", b"ca", b" b"]
BYTES = SlowBytes([bytes([i]) for i in range(256)] + MORE, additional_special_tokens=SPECIAL)
CHARACTERS = [*map(chr, range(32, 127)), *"\n▁é€🙂�"]
PIECES = SlowPieces(
    [*CHARACTERS, "▁a", "▁b", "us", "er\n", "a▁"], additional_special_tokens=SPECIAL
)


def places_of(tokenizer: Slow, text: str) -> list[tuple[int, int]]:
    """The characters of each token, from the words themselves."""
    places, place = [], 0
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        if part in SPECIAL:
            places.append((place, place + len(part)))
            place += len(part)
            continue
        owner = [i for i, c in enumerate(part) for _ in range(len(tokenizer.prepare(c)))]
        end = 0
        for name in tokenizer.tokenize(part) if part else []:
            size = len(next(word for word in tokenizer.words if str(word) == name))
            owned = owner[end : end + size]
            places.append((place + owned[0], place + owned[-1] + 1))
            end += size
        place += len(part)
    return places


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_places_of_tokens_are_found_from_their_texts(tokenizer: Slow) -> None:
    rng = random.Random(7)
    alphabet = ["a", "b", " ", "\n", "é", "€", "€ a", "🙂", " 🙂", "�", "user\n", "<", *SPECIAL]
    for length in (0, 1, 2, 3, 5, 40, 200):
        for _ in range(20):
            text = "".join(rng.choice(alphabet) for _ in range(length))
            token_ids, offsets = encode_with_offsets(tokenizer, text)
            assert offsets == places_of(tokenizer, text), text
            assert len(offsets) == len(token_ids)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("rule", ["answers", "last-answer,before", "answers,no-boilerplate"])
def test_masks_without_offsets(rule: str, conversation: str) -> None:
    """Mask by a tokenizer that tells the places of its tokens, character by character."""
    parsed, fast = parse_mask_rule(rule), byte_level_tokenizer()
    messages: Any = [{**m, "content": m["content"] + "€ a"} for m in CONVERSATIONS[conversation]]
    options: Any = {"chat_template": TEMPLATE, "add_generation_prompt": False}
    prompt, mask = render_masked(BYTES, messages, parsed, **options)
    text = prompt["prompt"]
    offsets = fast(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    _, expected = render_masked(fast, messages, parsed._replace(with_before=False), **options)
    kept_places = [place for place, kept in zip(offsets, expected, strict=True) if kept]
    characters = {c for start, end in kept_places for c in range(start, end)}
    places = places_of(BYTES, text)
    kept = [not characters.isdisjoint(range(*place)) for place in places]
    if parsed.with_before:
        kept = [one or after for one, after in zip(kept, [*kept[1:], False], strict=True)]
    assert mask.tolist() == kept and any(kept)


@pytest.mark.parametrize("rule", ["answers", "answers,before"])
def test_spaces_at_the_end_of_an_answer_count(rule: str) -> None:
    """Llama 3's tokenizer tells an empty place for a token of spaces, and these are its last."""
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{marked}\n{{% endfor %}}"
    whole, trimming = byte_level_tokenizer(), byte_level_tokenizer()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    contents = ["yes ", "  a  b  ", " ", "€ ", "no\n ", "x", ""]
    messages: Any = [{"role": "assistant", "content": content} for content in contents]
    options: Any = {"chat_template": template, "add_generation_prompt": False}
    parsed = parse_mask_rule(rule)
    _, expected = render_masked(whole, messages, parsed, **options)
    _, mask = render_masked(trimming, messages, parsed, **options)
    assert mask.tolist() == expected.tolist()


def test_a_space_that_a_tokenizer_puts_in_has_the_place_before_it() -> None:
    """As GPT-2's does behind special tokens; it tells a place behind the next token."""
    tokenizer = byte_level_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=True, add_prefix_space=True)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    messages = CONVERSATIONS["plain"]
    prompt, mask = render_masked(tokenizer, messages, MaskRule(), chat_template=TEMPLATE)
    ids = np.array(prompt["prompt_token_ids"])
    assert tokenizer.decode(ids[mask]).count("<|im_end|> \n") == 2
    assert len(np.flatnonzero(np.diff(mask.astype(int)))) == 4  # two runs


def test_texts_that_a_tokenizer_rewrites_are_refused() -> None:
    class Lower(SlowBytes):
        def prepare(self, text: str) -> bytes:
            return text.lower().encode()

    lower = Lower([bytes([i]) for i in range(256)])
    assert encode_with_offsets(lower, "abc")[1] == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match=r"token 1 \('b'\) does not stand at 'BC'.*mask column"):
        encode_with_offsets(lower, "aBC")
    with pytest.raises(ValueError, match="the tokens end before the text, at 'c'"):
        find_offsets(BYTES, "abc", BYTES.encode("ab", add_special_tokens=False))


def test_rules() -> None:
    assert parse_mask_rule("answers") == MaskRule()
    rule = parse_mask_rule("last-answer, no-boilerplate,before")
    assert rule == MaskRule(last_only=True, with_before=True, with_boilerplate=False)
    for text in ("answers", "last-answer", "answers,before", "last-answer,before,no-boilerplate"):
        assert str(parse_mask_rule(text)) == text
    for wrong in ("", "answer", "before", "answers,after", "answers,", None, 3, ["answers"]):
        with pytest.raises(ValueError, match=r"mask=.*: use answers or last-answer, followed by"):
            parse_mask_rule(wrong)


def test_the_token_before_each_run() -> None:
    offsets = [(i, i + 1) for i in range(9)]
    spans = [(0, 2), (4, 5), (6, 9)]
    assert mask_tokens(offsets, spans).tolist() == [1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert mask_tokens(offsets, spans, with_before=True).tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1]

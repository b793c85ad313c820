"""Text from tokens: incremental decoding equals decoding everything, stop strings are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.frontend_harness import byte_fallback_tokenizer, byte_level_tokenizer
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils import token_texts
from vllm.transformers_utils.tokenizer import make_decoder
from vllm.v1.engine.detokenizer import DecodeWindow, Detokenizer

MIXED = "Grüße, 世界! 👩‍👩‍👧‍👦 naïve — ½ \U0001f1e9\U0001f1ea hello world 好好 the end" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


def pieces(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    window = DecodeWindow(make_decoder(tokenizer), prompt)
    return [*(window.push([token]) for token in tokens), window.flush()]


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def test_multi_byte_characters_come_whole(tokenizer: Any) -> None:
    tokens = tokenizer.encode(MIXED)
    got = pieces(tokenizer, tokenizer.encode("prompt ✓ "), tokens)
    assert "".join(got) == MIXED
    assert not any("\ufffd" in piece for piece in got)
    assert got.count("") > 20  # bytes that waited for the rest of their character


@pytest.mark.parametrize("push", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_read_as_when_decoded_at_once(tokenizer: Any, seed: int, push: int) -> None:
    rng = random.Random(seed)
    high = [tokenizer.convert_tokens_to_ids(c) for c in "ÃĤģŁĢĳåĵ¤ð"]
    # Runs of invalid bytes, among them far more than a window holds, and common tokens.
    tokens = [rng.choice(high) for _ in range(300)]
    tokens += [rng.choice([rng.choice(high), rng.randrange(2, 290)]) for _ in range(700)]
    window = DecodeWindow(make_decoder(tokenizer), tokenizer.encode("abc"))
    got = [window.push(tokens[i : i + push]) for i in range(0, len(tokens), push)]
    assert "".join(got) + window.flush() == decode(tokenizer, tokens)


def test_without_tokens_nothing_is_decoded() -> None:
    def decode(token_ids: Any) -> str:
        raise AssertionError("there is no text")

    detokenizer = Detokenizer(decode, SamplingParams(max_tokens=0), [1, 2, 3])
    detokenizer.update([])
    detokenizer.finish()
    assert detokenizer.take_text(delta=False) == ""


def test_byte_fallback_and_leading_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    byte_ids = [ids(f"<0x{byte:02X}>") for byte in "好吗世界".encode()]
    tokens = [ids("▁world"), *byte_ids, ids("▁hello"), *byte_ids * 8, ids("a"), ids("▁world")]
    got = "".join(pieces(tokenizer, [ids("<s>"), ids("▁hello")], tokens))
    assert got == " world好吗世界 hello" + "好吗世界" * 8 + "a world"


FAMILY = "é👩‍👩‍👧‍👦世🇩🇪"  # characters of two, three and four bytes


@pytest.mark.parametrize("push", [1, 3, 16, 1000])
@pytest.mark.parametrize("before", ["", "a", "é", "世", "👩"])
def test_long_runs_of_bytes_keep_their_characters(before: str, push: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    text = before + FAMILY * 20
    tokens = [ids(f"<0x{byte:02X}>") for byte in text.encode()]
    for prompt in ([], [ids("▁hello")], tokens[-70:]):
        window = DecodeWindow(make_decoder(tokenizer), prompt)
        got = [window.push(tokens[i : i + push]) for i in range(0, len(tokens), push)]
        assert "".join(got) + window.flush() == text


@pytest.mark.parametrize("seed", range(4))
def test_text_of_random_bytes_does_not_depend_on_steps(seed: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    rng = random.Random(seed)
    choices = [*FAMILY.encode()] * 2 + [*b"ab\xff\xc3"]
    tokens = [ids(f"<0x{rng.choice(choices):02X}>") for _ in range(100)]
    tokens += [ids(f"<0x{byte:02X}>") for byte in (FAMILY * 4).encode()[1:]] + [ids("▁hello")]
    texts = set()
    for push in (1, 2, 7, 16, 1000):
        window = DecodeWindow(make_decoder(tokenizer), tokens[40:90])
        got = [window.push(tokens[i : i + push]) for i in range(0, len(tokens), push)]
        texts.add("".join(got) + window.flush())
    assert len(texts) == 1
    assert texts.pop().endswith(" hello")


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_prompt_may_end_within_a_character(make: Any) -> None:
    tokenizer = make()
    spell = "<0x{:02X}>".format if make is byte_fallback_tokenizer else byte_characters().get
    of = {byte: tokenizer.convert_tokens_to_ids(spell(byte)) for byte in range(256)}
    content = "世世👩".encode()
    data = [of[byte] for byte in content]
    for length in range(1, len(data)):
        # A character belongs to the output if its last byte does.
        wanted = "世世👩"[len(content[:length].decode(errors="ignore")) :]
        assert "".join(pieces(tokenizer, data[:length], data[length:])) == wanted
        # What is not completed belongs to the prompt.
        following = tokenizer.convert_tokens_to_ids("a")
        assert "".join(pieces(tokenizer, data[:length], [following])) == "a"


def byte_characters() -> dict[int, str]:
    return {byte: character for character, byte in token_texts._BYTE_OF.items()}


def test_an_unfinished_character_shows_when_nothing_follows(tokenizer: Any) -> None:
    tokens = tokenizer.encode("a好")[:-1]
    assert pieces(tokenizer, tokenizer.encode("x"), tokens)[-1] == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_end_in_text_that_was_held_back(tokenizer: Any, include: bool) -> None:
    params = SamplingParams(stop=["b\ufffd"], include_stop_str_in_output=include)
    detokenizer = Detokenizer.for_request(tokenizer, params, tokenizer.encode("x"))
    for token in tokenizer.encode("ab好")[:-1]:
        assert detokenizer.update([token]) is None
    detokenizer.finish()
    assert detokenizer.stop == "b\ufffd"
    assert detokenizer.take_text(delta=False) == ("ab\ufffd" if include else "a")


def feed(tokenizer: Any, text: str, **settings: Any) -> tuple[Detokenizer, str | None, int]:
    """Detokenizer, stop string and number of tokens taken, fed one token after another."""
    detokenizer = Detokenizer.for_request(
        tokenizer, SamplingParams(max_tokens=None, **settings), tokenizer.encode("x")
    )
    tokens = tokenizer.encode(text)
    for count, token in enumerate(tokens, 1):
        stop = detokenizer.update([token])
        if stop is not None:
            return detokenizer, stop, count
    return detokenizer, None, len(tokens)


def test_stop_string_over_several_tokens_is_cut(tokenizer: Any) -> None:
    detokenizer, stop, count = feed(tokenizer, "abc 世界 def", stop=["界 d", "nope"])
    assert stop == "界 d"
    assert detokenizer.take_text(delta=False) == "abc 世"
    assert decode(tokenizer, detokenizer.token_ids) == "abc 世界 d"
    assert count == len(detokenizer.token_ids)
    detokenizer.update([70, 71])
    assert len(detokenizer.token_ids) == count


@pytest.mark.parametrize("included", [False, True])
def test_a_special_token_as_a_stop_string(included: bool) -> None:
    """It ends the text although texts lack it; not before the minimum, and no other one does."""
    tokenizer = byte_level_tokenizer()
    special = tokenizer.convert_tokens_to_ids("<|im|>")
    other = tokenizer.convert_tokens_to_ids("<|end|>")
    params = SamplingParams(
        stop=["zz", "<|im|>"], min_tokens=4, max_tokens=9, include_stop_str_in_output=included
    )
    ids = [*tokenizer.encode("aé"), special, other, *tokenizer.encode("é")[:1], special, 70]
    detokenizer = Detokenizer.for_request(tokenizer, params, [70])
    stops = [detokenizer.update([token]) for token in ids]
    assert stops == [None] * 6 + ["<|im|>"] * 2
    assert detokenizer.token_ids == ids[:7]
    detokenizer.finish()
    assert detokenizer.take_text(delta=False) == "aé\ufffd" + "<|im|>" * included


def test_stop_string_may_be_included(tokenizer: Any) -> None:
    detokenizer, stop, _ = feed(
        tokenizer, "one two three", stop="two", include_stop_str_in_output=True
    )
    assert (stop, detokenizer.take_text(delta=False)) == ("two", "one two")


def test_the_stop_string_that_ends_first_wins(tokenizer: Any) -> None:
    # All of it arrives in one token: order of the list does not matter.
    token = tokenizer.encode(" there")
    assert len(token) == 1
    for stops in (["here", "the"], ["the", "here"]):
        detokenizer, stop, _ = feed(tokenizer, "hello there", stop=stops)
        assert (stop, detokenizer.take_text(delta=False)) == ("the", "hello ")


def test_text_that_may_become_a_stop_string_is_kept_back(tokenizer: Any) -> None:
    detokenizer = Detokenizer.for_request(
        tokenizer, SamplingParams(stop=["xyz"]), tokenizer.encode("p")
    )
    given = []
    for token in tokenizer.encode("abxyc"):
        detokenizer.update([token])
        given.append(detokenizer.take_text(delta=True))
    assert "".join(given) == "abx"
    detokenizer.finish()
    assert detokenizer.take_text(delta=True) == "yc"


def test_no_stop_string_before_the_minimum(tokenizer: Any) -> None:
    detokenizer, stop, count = feed(tokenizer, "aXbXcX", stop=["X"], min_tokens=3)
    assert (stop, count) == ("X", 4)
    assert detokenizer.take_text(delta=False) == "aXb"


def test_ending_token_is_no_text(tokenizer: Any) -> None:
    for include, text in ((False, "ab"), (True, "ab<|end|>")):
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
        detokenizer = Detokenizer.for_request(tokenizer, params, [70])
        detokenizer.update([*tokenizer.encode("ab"), tokenizer.eos_token_id], ended_by_token=True)
        detokenizer.finish()
        assert detokenizer.take_text(delta=False) == text
        assert detokenizer.token_ids[-1] == tokenizer.eos_token_id


def test_special_tokens_and_the_spaces_between_them() -> None:
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.WordLevel({"<a>": 0, "<b>": 1, "w": 2, "v": 3}, unk_token="<a>"))
    from transformers import PreTrainedTokenizerFast

    spaced = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<a>", eos_token="<b>")
    tokens = [2, 3, 0, 1, 3]
    assert make_decoder(spaced)(tokens) == "w v <a> <b> v"
    assert make_decoder(spaced, spaces_between_special_tokens=False)(tokens) == "w v<a><b>v"
    assert make_decoder(spaced, skip_special_tokens=True)(tokens) == "w v v"


def test_nothing_is_decoded_when_no_text_is_wanted(tokenizer: Any) -> None:
    for used, params in ((tokenizer, SamplingParams(detokenize=False)), (None, SamplingParams())):
        detokenizer = Detokenizer.for_request(used, params, [1])
        detokenizer.update([70, 71])
        detokenizer.finish()
        assert detokenizer.take_text(delta=False) == ""
        assert detokenizer.token_ids == [70, 71]

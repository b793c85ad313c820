"""The text and the bytes of single tokens, as they are behind other tokens of a text."""

from __future__ import annotations

import codecs
import re
from typing import Any
from weakref import WeakKeyDictionary

from vllm.transformers_utils.tokenizer import make_decoder

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""Character -> byte, in the vocabularies of byte-level tokenizers."""
_facts: WeakKeyDictionary[Any, tuple[list[int], str, frozenset[int]]] = WeakKeyDictionary()
"""A token to decode others behind, its text, and the special tokens, by tokenizer."""


class TokenTexts:
    """Texts of the tokens of one tokenizer.

    Many tokenizers drop the space before the first token of what they decode. So a token is
    decoded behind another one, whose text is then left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = make_decoder(tokenizer)
        if tokenizer not in _facts:
            ids = tokenizer.encode("a", add_special_tokens=False, verbose=False)[-1:]
            _facts[tokenizer] = ids, self._decode(ids), _special_ids(tokenizer)
        self._ids, self._before, self.special_ids = _facts[tokenizer]

    def text(self, token: int) -> str:
        """Return the token's text; parts of a character are replacement characters."""
        text = self._decode([*self._ids, token])
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode([token])

    def bytes_of(self, token: int, text: str) -> bytes | None:
        """Return the UTF-8 bytes of a token with this text, which may be a part of a character.

        None: they are not known.
        """
        if _REPLACEMENT not in text:
            return text.encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token) or ""
        if isinstance(spelled, bytes):  # words of Qwen's first tokenizer
            return spelled
        if match := _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(match[1], 16)])
        if not all(character in _BYTE_OF for character in spelled):
            return None
        found = bytes(_BYTE_OF[character] for character in spelled)
        return found if found.decode(errors="replace") == text else None

    def special_id(self, text: str) -> int | None:
        """Return the special token that is spelt so; None: there is none."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        is_it = token in self.special_ids and self._decode([token]) == text
        return token if is_it else None


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that texts without special tokens lack."""
    added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}
    special = {token for token, one in added.items() if one.special}
    return frozenset(special.union(tokenizer.all_special_ids))


class TextPlace:
    """The place in a text that grows by tokens: the number of characters that are complete."""

    def __init__(self) -> None:
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, text: str, content: bytes | None) -> int:
        """Go on by a token with this text, and return its place; ``content``: its bytes, if they
        are known."""
        continues = content is not None and 0x80 <= (content or b"\0")[0] < 0xC0
        if not continues:  # what is pending is no part of this token's character
            self.offset += len(self._decoder.decode(b"", final=True))
        start = self.offset
        self.offset += len(text) if content is None else len(self._decoder.decode(content))
        return start

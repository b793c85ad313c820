"""The tokens that ``--pack`` puts between texts, before windows and behind the last text."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.entrypoints.extract.options import ExtractOptions
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.utils.checked import refuse_unless

_INSTEAD = {
    "pack_separator": "use eos, bos, sep, none, or the id of a token",
    "pack_bos": "leave it out",
    "pack_last": "use drop",
}
"""Advice for options whose token does not exist."""


class PackTokens(NamedTuple):
    """Token ids; None: there is no such token in the windows."""

    separator: int | None
    bos: int | None
    padding: int | None


def find_pack_tokens(
    options: ExtractOptions, tokenizer: TokenizerLike | None, reason: str, vocab_size: int
) -> PackTokens:
    """Return the tokens for options with ``pack``.

    reason: the reason for having no tokenizer. ValueError: a token does not exist.
    """
    special: Any = tokenizer

    def named(option: str, *names: str) -> int:
        known = () if special is None else (getattr(special, f"{name}_token_id") for name in names)
        found: int | None = next((one for one in known if one is not None), None)
        why = reason if special is None else "the tokenizer has none"
        require(option, found is not None, f"there is no {names[-1].upper()} token: {why}")
        assert found is not None
        return found

    def require(option: str, holds: bool, problem: str) -> None:
        refuse_unless(holds, options, option, f"{problem}; {_INSTEAD[option]}")

    separator, text = None, options.pack_separator
    if text in ("eos", "bos", "sep"):
        separator = named("pack_separator", text)
    elif text != "none":
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        is_id = is_number and int(text) < vocab_size
        require("pack_separator", is_id, f"the model's ids are 0 to {vocab_size - 1}")
        separator = int(text)
    return PackTokens(
        separator,
        named("pack_bos", "bos") if options.pack_bos else None,
        named("pack_last", "pad", "eos") if options.pack_last == "pad" else None,
    )

"""Hashes of prompt prefixes: one per ``HASH_TOKENS`` tokens, independent of block sizes."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from vllm.v1.request import Request

HASH_TOKENS = 16
"""Tokens between two hashed positions: the grain of prefix-cache hits."""
DIGEST_BYTES = 16


def prefix_seed(request: Request) -> bytes:
    """Digest of what cached values depend on besides the tokens: the salt, the depth computed,
    and whether the model's rotation treats the sequence as a long one."""
    return _seed(request.cache_salt or "", request.num_layers_to_run, request.is_long)


@lru_cache(maxsize=64)  # mostly it is the same for all requests
def _seed(salt: str, num_layers_to_run: int | None, is_long: bool) -> bytes:
    text = f"{salt}\0{num_layers_to_run}"
    if is_long:
        text += "\0long"
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def extend_prefix_hashes(request: Request, num_tokens: int) -> None:
    """Hash the prefixes of ``request`` up to ``num_tokens`` tokens that are not hashed yet.

    Entry i covers the first ``HASH_TOKENS * (i + 1)`` tokens, and how those are steered.
    """
    hashes = request.prefix_hashes
    num_hashes = num_tokens // HASH_TOKENS
    if len(hashes) >= num_hashes:
        return
    digest = hashes[-1] if hashes else prefix_seed(request)
    start = len(hashes) * HASH_TOKENS
    token_ids = request.all_token_ids[start : num_hashes * HASH_TOKENS]
    tokens = struct.pack(f"{len(token_ids)}q", *token_ids)
    step = 8 * HASH_TOKENS
    for offset in range(0, len(tokens), step):
        chunk = tokens[offset : offset + step]
        if request.is_steered_by_part:  # the number of the prompt's tokens in it
            start = HASH_TOKENS * len(hashes)
            chunk += bytes([len(request.prompt_token_ids[start : start + HASH_TOKENS])])
        digest = hashlib.sha256(digest + chunk).digest()[:DIGEST_BYTES]
        hashes.append(digest)

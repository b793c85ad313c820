"""Changes of a pool's index, as the events that ``kv_events_config`` publishes.

Prefixes are reported in steps of ``HASH_TOKENS`` tokens, the grain of hits, independent of how many
tokens a group's block holds: ``block_size`` is that number. Each group has its own events
(``group_idx``); recurrent groups share those of the first, which tell where a state was kept. A
hash in an event is the last 8 bytes of the pool's hash.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.prefix_hash import HASH_TOKENS
from vllm.v1.request import Request

_HASH_BYTES = 8
CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Events of one pool, which calls :meth:`store` and :meth:`remove` for every key."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """The request whose content is entered."""
        self._events: list[CacheEvent] = []
        self._stored: set[tuple[int, bytes]] = set()
        self._grains: WeakKeyDictionary[Request, dict[bytes, int]] = WeakKeyDictionary()

    def store(self, group_id: int, digest: bytes) -> None:
        """Report that content of the current request can be found, once per grain of a group."""
        if (group_id, digest) in self._stored or self.request is None:
            return
        self._stored.add((group_id, digest))
        hashes, known = self.request.prefix_hashes, self._grains.setdefault(self.request, {})
        known.update({hashes[grain]: grain for grain in range(len(known), len(hashes))})
        if digest not in known:  # the request began again, under other hashes
            known.clear()
            known.update({one: grain for grain, one in enumerate(hashes)})
        grain = known[digest]
        parent = _external(hashes[grain - 1]) if grain else None
        tokens = self.request.all_token_ids[grain * HASH_TOKENS : (grain + 1) * HASH_TOKENS]
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.group_idx == group_id
            and last.block_hashes[-1] == parent
        ):
            last.block_hashes.append(_external(digest))
            last.token_ids.extend(tokens)
            return
        self._events.append(
            BlockStored(
                [_external(digest)],
                parent,
                list(tokens),
                HASH_TOKENS,
                medium=MEDIUM_GPU,
                group_idx=group_id,
            )
        )

    def remove(self, group_id: int, digest: bytes) -> None:
        """Report that this content can no longer be found."""
        if (group_id, digest) not in self._stored:
            return
        self._stored.discard((group_id, digest))
        self._events.append(BlockRemoved([_external(digest)], MEDIUM_GPU, group_id))

    def clear(self) -> None:
        """Report that nothing can be found any more."""
        self._stored.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _external(digest: bytes) -> int:
    return int.from_bytes(digest[-_HASH_BYTES:], "big")

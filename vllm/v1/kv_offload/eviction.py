"""The orders in which content is evicted, by the names of ``eviction_policy``.

A policy knows contents by a key and a size (in blocks), and never more of them than the capacity.
The caller that stores them says which ones are held at the moment: these stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable

from vllm.utils.text import did_you_mean

IsHeld = Callable[[Hashable], bool]


class EvictionPolicy(ABC):
    """An order of eviction. ``capacity``: blocks of all contents together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def admit(self, key: Hashable, size: int, is_held: IsHeld) -> list[Hashable]:
        """Take in a new content; returns those that are evicted. The caller has checked that there
        is room for it beside the held ones."""

    @abstractmethod
    def grow(self, key: Hashable, size: int, is_held: IsHeld) -> list[Hashable]:
        """Do the same for ``size`` more blocks of a content that is stored, and held."""

    @abstractmethod
    def use(self, key: Hashable) -> None:
        """Note that a content was found."""

    @abstractmethod
    def renew(self, key: Hashable) -> None:
        """Let a content that was not found be evicted later than all others of its kind."""

    @abstractmethod
    def discard(self, key: Hashable, size: int | None = None) -> None:
        """Forget ``size`` blocks of a content that are gone for another reason; None: all."""

    @abstractmethod
    def sizes(self) -> dict[Hashable, int]:
        """Return the sizes of the stored contents, by key."""


class _Contents(OrderedDict[Hashable, int]):
    """Sizes by key, the oldest first."""

    total = 0

    def put(self, key: Hashable, size: int) -> None:
        """Make a content the newest, with ``size`` more blocks."""
        self[key] = self.get(key, 0) + size
        self.move_to_end(key)
        self.total += size

    def take(self, key: Hashable, size: int | None = None) -> int:
        """Remove ``size`` blocks of a content, or all of them; returns how many."""
        size = self[key] if size is None else size
        self[key] -= size
        if not self[key]:
            del self[key]
        self.total -= size
        return size

    def oldest(self, is_held: IsHeld) -> Hashable | None:
        return next((key for key in self if not is_held(key)), None)


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the content first that was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._contents = _Contents()

    def admit(self, key: Hashable, size: int, is_held: IsHeld) -> list[Hashable]:
        evicted = []
        while self._contents.total + size > self.capacity:
            oldest = self._contents.oldest(is_held)
            assert oldest is not None, "the caller has checked the room"
            self._contents.take(oldest)
            evicted.append(oldest)
        self._contents.put(key, size)
        return evicted

    grow = admit

    def use(self, key: Hashable) -> None:
        self._contents.move_to_end(key)

    renew = use

    def discard(self, key: Hashable, size: int | None = None) -> None:
        self._contents.take(key, size)

    def sizes(self) -> dict[Hashable, int]:
        return dict(self._contents)


class AdaptiveReplacement(EvictionPolicy):
    """ARC: contents used once and contents used again share the room as the past suggests.

    ``_once`` and ``_again`` are stored; the keys evicted from them are remembered in ``_once_gone``
    and ``_again_gone``. A content that comes back shows which of the two should have been larger,
    and moves ``_target``, the number of blocks meant for ``_once``. So prompts that are never seen
    again do not push out those that are. Source: Megiddo and Modha, "ARC: a self-tuning, low
    overhead replacement cache", FAST 2003 (T1, T2, B1, B2 and p there). With contents of one block
    and nothing held, this is that algorithm.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._again = _Contents(), _Contents()
        self._once_gone, self._again_gone = _Contents(), _Contents()
        self._target = 0.0

    def admit(self, key: Hashable, size: int, is_held: IsHeld) -> list[Hashable]:
        was_once, was_again = self._once_gone, self._again_gone
        if key in was_once:
            step = max(1.0, was_again.total / was_once.total) * size
            self._target = min(float(self.capacity), self._target + step)
        elif key in was_again:
            step = max(1.0, was_once.total / was_again.total) * size
            self._target = max(0.0, self._target - step)
        else:
            evicted = self._limit_once(size, is_held) + self._make_room(size, False, is_held)
            self._once.put(key, size)
            return evicted
        evicted = self._make_room(size, key in was_again, is_held)
        for past in (was_once, was_again):
            if key in past:
                past.take(key)
        self._again.put(key, size)
        return evicted

    def _limit_once(self, size: int, is_held: IsHeld) -> list[Hashable]:
        """Limit known contents used once to the capacity, and all known contents to twice that."""
        evicted: list[Hashable] = []
        while self._once.total + self._once_gone.total + size > self.capacity:
            if self._once_gone:
                self._once_gone.take(next(iter(self._once_gone)))
                continue
            oldest = self._once.oldest(is_held)
            if oldest is None:
                break
            self._once.take(oldest)
            evicted.append(oldest)
        self._limit_past(size)
        return evicted

    def _limit_past(self, size: int) -> None:
        parts = (self._once, self._again, self._once_gone, self._again_gone)
        while sum(part.total for part in parts) + size > 2 * self.capacity and self._again_gone:
            self._again_gone.take(next(iter(self._again_gone)))

    def _make_room(self, size: int, was_again: bool, is_held: IsHeld) -> list[Hashable]:
        evicted = []
        while self._once.total + self._again.total + size > self.capacity:
            num_once = self._once.total
            from_once = num_once > self._target or (was_again and num_once == self._target)
            order = [(self._once, self._once_gone), (self._again, self._again_gone)]
            for here, past in order if from_once else reversed(order):
                oldest = here.oldest(is_held)
                if oldest is not None:
                    past.put(oldest, here.take(oldest))
                    evicted.append(oldest)
                    break
            else:
                raise AssertionError("the caller has checked the room")
        return evicted

    def grow(self, key: Hashable, size: int, is_held: IsHeld) -> list[Hashable]:
        evicted = self._make_room(size, False, is_held)
        here = self._once if key in self._once else self._again
        here.put(key, size)
        self._limit_past(0)
        return evicted

    def use(self, key: Hashable) -> None:
        here = self._once if key in self._once else self._again
        self._again.put(key, here.take(key))

    def renew(self, key: Hashable) -> None:
        (self._once if key in self._once else self._again).move_to_end(key)

    def discard(self, key: Hashable, size: int | None = None) -> None:
        (self._once if key in self._once else self._again).take(key, size)

    def sizes(self) -> dict[Hashable, int]:
        return {**self._once, **self._again}


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "arc": AdaptiveReplacement,
}


def find_policy(name: object) -> type[EvictionPolicy]:
    """Return the class that ``eviction_policy`` names. ValueError: there is none."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(
            f"eviction_policy={name!r} is not known{did_you_mean(str(name), POLICIES)}; "
            f"supported: {', '.join(map(repr, POLICIES))}"
        )
    return POLICIES[name]

"""The choice of an engine for a request. The same requests and ends lead to the same choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from vllm.v1.engine import EngineCoreRequest

PREFIX_TOKENS = 64
"""Prefixes are compared at multiples of this number of tokens."""
MOST_PREFIX_TOKENS = 16384
"""Number of tokens after which a prompt's tokens have no effect on the choice."""
MOST_PREFIXES = 2**16
"""Prefixes that are remembered. Those that no request had for longest are forgotten first."""
SPARE_REQUESTS = 4


class Balancer(ABC):
    """Chooses engines, which are numbers below ``len(loads)``."""

    @abstractmethod
    def choose(
        self, request: EngineCoreRequest, alive: Collection[int], loads: Sequence[int]
    ) -> int:
        """Return one of the engines ``alive``. loads: unfinished requests of each engine."""

    @abstractmethod
    def forget(self) -> None:
        """Take in that no engine has any prefix."""


class LeastLoaded(Balancer):
    """Chooses the engine with the fewest requests, of several the first."""

    def choose(
        self, request: EngineCoreRequest, alive: Collection[int], loads: Sequence[int]
    ) -> int:
        return min(alive, key=loads.__getitem__)

    def forget(self) -> None:
        """Do nothing: prefixes have no effect."""


class SharedPrefix(Balancer):
    """Chooses the engine that last got the longest known prefix of the prompt.

    If that has more than twice as many requests as the one with the fewest, and ``SPARE_REQUESTS``,
    or if no prefix is known, it chooses the one with the fewest.
    """

    def __init__(self) -> None:
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def choose(
        self, request: EngineCoreRequest, alive: Collection[int], loads: Sequence[int]
    ) -> int:
        chosen = least = min(alive, key=loads.__getitem__)
        keys = list(_prefixes(request))
        known = (self._engine_of[key] for key in reversed(keys) if key in self._engine_of)
        engine = next((one for one in known if one in alive), least)
        if loads[engine] <= 2 * loads[least] + SPARE_REQUESTS:
            chosen = engine
        for key in reversed(keys):  # short prefixes are remembered for longer
            self._engine_of[key] = chosen
            self._engine_of.move_to_end(key)
        while len(self._engine_of) > MOST_PREFIXES:
            self._engine_of.popitem(last=False)
        return chosen

    def forget(self) -> None:
        self._engine_of.clear()


def _prefixes(request: EngineCoreRequest) -> Iterator[int]:
    """Yield a hash of each prefix. It depends on what keeps requests from sharing, too."""
    tokens, lora = request.prompt_token_ids, request.lora_request
    key = hash((request.cache_salt, lora and lora.lora_name))
    for end in range(PREFIX_TOKENS, min(len(tokens), MOST_PREFIX_TOKENS) + 1, PREFIX_TOKENS):
        key = hash((key, *tokens[end - PREFIX_TOKENS : end]))
        yield key


BALANCERS: dict[str, type[Balancer]] = {"least-loaded": LeastLoaded, "prefix": SharedPrefix}
"""Values of data_parallel_balancing."""

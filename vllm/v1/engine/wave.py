"""The steps that engines which share experts take together, from the first one that has work to the
last.

An engine that has work and is in no wave begins one. Before each step the engines tell each other
whether they have work (``distributed.engine_group``). After a step to which none had any, all of
them have seen the end of the wave, and wait for requests. So a wave has the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.engine_group import EngineGroup, get_engine_group


class Wave:
    """One engine's part in the waves."""

    def __init__(self) -> None:
        group = get_engine_group()
        assert group is not None
        self._group: EngineGroup = group
        self._number, self.is_on = 0, False

    def begin(self) -> int | None:
        """Begin a wave, because this engine has work; returns its number. None: one is on."""
        if self.is_on:
            return None
        self.join(self._number + 1)
        return self._number

    def join(self, number: int) -> None:
        """Take part in a wave that another engine began; it may be over."""
        if number > self._number:
            self._number, self.is_on = number, True

    @contextmanager
    def step(self, *, has_work: bool) -> Iterator[None]:
        """Let the block be a step of the wave, which may end with it."""
        self._group.prepare_step(has_work=has_work)
        yield
        if self._group.step:  # the engines came to an agreement
            self.is_on = self._group.goes_on

    @property
    def has_tokens(self) -> bool:
        """True if some engine had tokens in the last step."""
        return self._group.has_tokens

"""Windows: texts that are joined and cut into pieces of one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class WindowPart(NamedTuple):
    """The tokens of one text in a window."""

    text: Any
    """Number of the text, or another name that it was given."""
    start: int
    """The tokens [start, end) of the window are those of the text from ``offset`` on."""
    end: int
    offset: int


class Window(NamedTuple):
    """Token ids of a fixed number, and the texts that they come from."""

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_] | None
    """Bool [tokens], false for padding and for tokens that the masks of the texts leave out. None:
    no text has a mask, and there is no padding."""
    parts: tuple[WindowPart, ...]


class WindowCutter:
    """Cuts windows of ``length`` tokens from texts that are added one by one.

    separator: token between two texts in a window. bos: first token of each window. Neither is
    added before a token that is the same. They count in the mask if the text behind them has none.
    """

    def __init__(self, length: int, separator: int | None = None, bos: int | None = None) -> None:
        if length < 2:
            raise ValueError(f"length={length}: a window has at least 2 tokens")
        self._length = length
        self._separator = separator
        self._bos = bos
        self._start()

    def _start(self) -> None:
        self._token_ids = np.empty(self._length, dtype=np.int32)
        self._mask = np.ones(self._length, dtype=np.bool_)
        self._has_mask = False
        self._parts: list[WindowPart] = []
        self.num_waiting = 0
        """Tokens of the window that is not full yet."""

    def add(
        self,
        text: Any,
        token_ids: npt.NDArray[np.integer[Any]],
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> Iterator[Window]:
        """Add a text and yield the windows that it fills."""
        offset, inserted = 0, np.array([mask is None])
        if self.num_waiting and len(token_ids) and self._separator not in (None, token_ids[0]):
            self._put(np.array([self._separator]), inserted)
            self._has_mask |= mask is not None
            yield from self._take_full()
        while offset < len(token_ids):
            if not self.num_waiting and self._bos not in (None, token_ids[offset]):
                self._put(np.array([self._bos]), inserted)
            end = min(len(token_ids), offset + self._length - self.num_waiting)
            start = self.num_waiting
            self._put(token_ids[offset:end], True if mask is None else mask[offset:end])
            self._parts.append(WindowPart(text, start, self.num_waiting, offset))
            self._has_mask |= mask is not None
            offset = end
            yield from self._take_full()

    def pad(self, token_id: int) -> Iterator[Window]:
        """Fill the last window with ``token_id`` and yield it, if there is one."""
        if self.num_waiting:
            self._mask[self.num_waiting :] = False
            self._token_ids[self.num_waiting :] = token_id
            self._has_mask, self.num_waiting = True, self._length
            yield from self._take_full()

    def _put(self, token_ids: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | bool) -> None:
        place = slice(self.num_waiting, self.num_waiting + len(token_ids))
        self._token_ids[place], self._mask[place] = token_ids, mask
        self.num_waiting = place.stop

    def _take_full(self) -> Iterator[Window]:
        if self.num_waiting == self._length:
            mask = self._mask if self._has_mask else None
            window = Window(self._token_ids, mask, tuple(self._parts))
            self._start()
            yield window


def cut_windows(
    texts: Iterable[Sequence[int]],
    length: int,
    *,
    separator: int | None = None,
    bos: int | None = None,
    padding: int | None = None,
) -> Iterator[Window]:
    """Join the token ids of texts and yield windows of ``length`` tokens.

    separator: token between two texts in a window. bos: first token of each window. padding: token
    that fills the last window; without one, the tokens that do not fill a window are left out.
    """
    cutter = WindowCutter(length, separator, bos)
    for number, token_ids in enumerate(texts):
        yield from cutter.add(number, np.asarray(token_ids, dtype=np.int32))
    if padding is not None:
        yield from cutter.pad(padding)

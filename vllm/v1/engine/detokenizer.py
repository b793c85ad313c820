"""Conversion of token ids to text, step by step, and the stop strings in that text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vllm.inputs import NO_TOKEN
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.token_texts import TokenTexts
from vllm.transformers_utils.tokenizer import TokenizerLike, make_decoder

_REPLACEMENT = "\ufffd"
_PREFIX_TOKENS = (6, 12, 18, 24)
_PUSH_TOKENS = 16
_RESTART_TOKENS = 32
_MAX_HELD_CHARS = 64
_MAX_WINDOW_TOKENS = 256
_UNFINISHED_CHARS = 4
"""An unfinished character shows as at most this many replacement characters at the end."""

Decode = Callable[[Sequence[int]], str]


class DecodeWindow:
    """Text of a growing sequence of tokens, of which only the last few are decoded.

    A token may hold part of a character, and its text may depend on the token before it.
    So a window of the last tokens is decoded as a whole; ``_num_read`` of its characters
    have been handed out. Replacement characters at the end are held back: the next token
    may complete them. Text that was handed out is final.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_read = 0
        tail = [token for token in prompt_token_ids[-_PREFIX_TOKENS[-1] :] if token != NO_TOKEN]
        self._restart_from(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became final."""
        starts = range(0, len(token_ids), _PUSH_TOKENS)
        return "".join(self._push_few(token_ids[i : i + _PUSH_TOKENS]) for i in starts)

    def _push_few(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        num_held = len(text) - len(text.rstrip(_REPLACEMENT))
        # No character is that long: the held text is invalid, not unfinished.
        is_overfull = num_held > _MAX_HELD_CHARS or len(self._ids) > _MAX_WINDOW_TOKENS
        if is_overfull:
            num_held = min(num_held, _UNFINISHED_CHARS)
        stable = text[: len(text) - num_held]
        new = stable[self._num_read :]
        self._num_read = max(self._num_read, len(stable))
        if is_overfull:
            self._ids = self._ids[-_RESTART_TOKENS:]
            self._num_read = max(0, len(self._decode(self._ids)) - num_held)
        elif not num_held and len(self._ids) > _RESTART_TOKENS:
            self._restart_from(self._ids)
        return new

    def flush(self) -> str:
        """Return the text that was held back, when no token follows."""
        text = self._decode(self._ids)
        new = text[self._num_read :]
        self._num_read = max(self._num_read, len(text))
        return new

    def _restart_from(self, token_ids: list[int]) -> None:
        """Keep the shortest tail of read tokens that decodes to proper text."""
        for length in _PREFIX_TOKENS:
            tail = token_ids[-length:]
            text = self._decode(tail)
            if text and not text.startswith(_REPLACEMENT):
                break
        self._ids = tail
        self._num_read = len(text.rstrip(_REPLACEMENT))


class StopMatch(NamedTuple):
    """A stop string and its place in the text."""

    stop: str
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], checked: int) -> StopMatch | None:
    """Find the stop string that ends first after ``checked`` characters; of several the longest."""
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, checked - len(stop) + 1))
        if start < 0:
            continue
        match = StopMatch(stop, start, start + len(stop))
        if best is None or (match.end, match.start) < (best.end, best.start):
            best = match
    return best


class Detokenizer:
    """Output tokens and text of one request.

    ``decode`` is None if no text is wanted or there is no tokenizer: then the text stays
    empty. Without stop strings nothing is decoded until the text is asked for.
    """

    def __init__(
        self,
        decode: Decode | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_tokens: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.token_ids: list[int] = []
        self.stop: str | None = None
        """The stop string that was found; nothing is added after it."""
        self._decode, self._prompt_token_ids = decode, prompt_token_ids
        self._window: DecodeWindow | None = None  # none is needed before there are tokens
        self._stops = params.stop_strings
        self._stop_tokens = stop_tokens  # those whose text is a stop string and left out
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._text = ""
        self._undecoded: list[int] = []
        self._num_handed_out = 0
        longest = max((len(stop) for stop in self._stops), default=1)
        self._num_kept_back = 0 if self._include_stop else longest - 1

    @classmethod
    def for_request(
        cls,
        tokenizer: TokenizerLike | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
    ) -> Detokenizer:
        decode = None
        if tokenizer is not None and params.detokenize:
            decode = make_decoder(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        stop_tokens: dict[int, str] = {}
        if decode is not None and params.skip_special_tokens and params.stop_strings:
            find = TokenTexts(tokenizer).special_id
            found = ((find(stop), stop) for stop in params.stop_strings)
            stop_tokens = {token: stop for token, stop in found if token is not None}
        return cls(decode, params, prompt_token_ids, stop_tokens)

    def update(self, token_ids: Sequence[int], ended_by_token: bool = False) -> str | None:
        """Add tokens up to the one that completes a stop string; returns that string.

        With ``ended_by_token`` the last token is the one that ended the output: it counts,
        but is not part of the text unless stop strings are to be included.
        """
        if self.stop is not None:
            return self.stop
        for position, token in enumerate(token_ids):
            self.token_ids.append(token)
            is_ending = ended_by_token and position == len(token_ids) - 1
            if is_ending and not self._include_stop:
                break
            if token in self._stop_tokens and len(self.token_ids) > self._min_tokens:
                self._stop_at(self._stop_tokens[token])
                break
            self._undecoded.append(token)
            if self._stops and self._decode is not None and self._check_stop():
                break
        return self.stop

    def _stop_at(self, stop: str) -> None:
        """End the text before a special token."""
        self.finish()
        self.stop = stop
        self._text += stop if self._include_stop else ""

    def finish(self) -> None:
        """End the text: no token follows, so text that was held back becomes final."""
        self._decode_pending()
        if self._window is not None and self.stop is None:
            self._text += self._window.flush()
        self._num_kept_back = 0

    def take_text(self, delta: bool) -> str:
        """Return the text so far, or its new part; what may become a stop string is held back."""
        self._decode_pending()
        end = max(len(self._text) - self._num_kept_back, 0)
        start = self._num_handed_out if delta else 0
        self._num_handed_out = max(self._num_handed_out, end)
        return self._text[start:end]

    def _decode_pending(self) -> None:
        if self._decode is not None and self._undecoded:
            if self._window is None:
                self._window = DecodeWindow(self._decode, self._prompt_token_ids)
            self._text += self._window.push(self._undecoded)
        self._undecoded = []

    def _check_stop(self) -> bool:
        """Look for stop strings that end in the newest text; cut the text at the first."""
        checked = len(self._text)
        self._decode_pending()
        match = find_stop(self._text, self._stops, checked)
        if match is None or len(self.token_ids) <= self._min_tokens:
            return False
        self.stop = match.stop
        self._text = self._text[: match.end if self._include_stop else match.start]
        self._num_kept_back = 0
        return True

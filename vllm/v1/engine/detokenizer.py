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
_PREFIX_TOKENS = (6, 7, 8, 9, 12, 18, 24)
"""Lengths of a window's beginning: four in a row, since a character has up to four bytes."""
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
    So a window of the last tokens is decoded as a whole; ``_read`` is the beginning of its text
    that was handed out. Replacement characters at the end are held back: the next token
    may complete them. Text that was handed out is final.

    Tokenizers with byte fallback turn a whole run of bytes into replacement characters if a part
    of it is invalid or unfinished. So windows begin with a character, and tokens whose text has
    replacement characters are added one by one.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = ""
        self._num_read_ids = 0
        """Tokens of the window whose whole text was handed out."""
        self._of_prompt = ""
        """Replacement characters at the end of the prompt, which the output may complete."""
        tail = [token for token in prompt_token_ids[-_PREFIX_TOKENS[-1] :] if token != NO_TOKEN]
        self._begin_behind(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became final."""
        starts = range(0, len(token_ids), _PUSH_TOKENS)
        return "".join(self._push_few(token_ids[i : i + _PUSH_TOKENS]) for i in starts)

    def _push_few(self, token_ids: Sequence[int]) -> str:
        text = self._decode([*self._ids, *token_ids])
        if len(token_ids) > 1 and _REPLACEMENT in text:
            return "".join(self._push_few([token]) for token in token_ids)
        self._ids.extend(token_ids)
        text = self._kept(text)
        num_held = len(text) - len(text.rstrip(_REPLACEMENT))
        # No character is that long: the held text is invalid, not unfinished.
        is_overfull = num_held > _MAX_HELD_CHARS or len(self._ids) > _MAX_WINDOW_TOKENS
        if is_overfull:
            num_held = min(num_held, _UNFINISHED_CHARS)
        new = self._hand_out(text[: len(text) - num_held])
        if is_overfull:
            self._ids = self._ids[-_RESTART_TOKENS:]
            text = self._decode(self._ids)
            self._read = text[: max(0, len(text) - num_held)]
            self._num_read_ids = len(self._ids)
        elif not num_held:
            self._num_read_ids = len(self._ids)
            if len(self._ids) > _RESTART_TOKENS:
                self._restart_from(self._ids)
        return new

    def flush(self) -> str:
        """Return the text that was held back, when no token follows."""
        return self._hand_out(self._kept(self._decode(self._ids)))

    def _kept(self, text: str) -> str:
        """Return the window's text. If an invalid byte changed what was handed out, the window
        begins behind that."""
        if _REPLACEMENT not in text or text.startswith(self._read):
            return text
        self._ids = self._ids[self._num_read_ids :]
        self._read, self._num_read_ids = "", 0
        return self._decode(self._ids)

    def _hand_out(self, text: str) -> str:
        """Return what is new in the final part of the window's text."""
        new = text[len(self._read) :]
        if new:
            new, self._of_prompt = new.removeprefix(self._of_prompt), ""
            self._read = text
        return new

    def _begin_behind(self, prompt: list[int]) -> None:
        """Begin behind a prompt, which may end within a character."""
        whole = self._decode(prompt)
        proper = whole.rstrip(_REPLACEMENT)
        for end in range(len(prompt) - 1, len(prompt) - _UNFINISHED_CHARS, -1):
            text = self._decode(prompt[: max(end, 0)])
            if len(text) > len(proper) and not text.endswith(_REPLACEMENT):  # of a run of bytes
                self._restart_from(prompt[:end])
                self._ids += prompt[end:]
                self._of_prompt = self._decode(prompt[end:])
                return
        self._restart_from(prompt)
        self._of_prompt = whole[len(proper) :]

    def _restart_from(self, token_ids: list[int]) -> None:
        """Keep the shortest tail of read tokens that decodes to proper text."""
        for length in _PREFIX_TOKENS:
            tail = token_ids[-length:]
            text = self._decode(tail)
            if text and not text.startswith(_REPLACEMENT):
                break
        self._ids, self._read = list(tail), text.rstrip(_REPLACEMENT)
        self._num_read_ids = len(tail)


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
        if self.stop is None:
            self.stop = stop
            self._text += stop if self._include_stop else ""

    def finish(self) -> None:
        """End the text: no token follows, so text that was held back becomes final."""
        self._decode_pending()
        if self._window is not None and self.stop is None:
            checked = len(self._text)
            self._text += self._window.flush()
            self._cut_at_stop(checked)
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
        return self._cut_at_stop(checked)

    def _cut_at_stop(self, checked: int) -> bool:
        match = find_stop(self._text, self._stops, checked)
        if match is None or len(self.token_ids) <= self._min_tokens:
            return False
        self.stop = match.stop
        self._text = self._text[: match.end if self._include_stop else match.start]
        self._num_kept_back = 0
        return True

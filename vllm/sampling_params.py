"""Settings of one generation: how tokens are chosen, when to stop, what to return."""

from __future__ import annotations

import copy
import enum
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_type_hints

import msgspec

from vllm.exceptions import VLLMValidationError
from vllm.inputs import ArrayNumber
from vllm.steering import SteeringSpec, lens, steering_specs
from vllm.utils.text import brief

if TYPE_CHECKING:
    from vllm.steering import SteeringType
else:  # the form in which a request carries it, for msgspec
    SteeringType = list[SteeringSpec]

_GREEDY_BELOW_TEMPERATURE = 1e-5
MAX_CHOICES = 16384
"""Most continuations of one request."""
ALL_LOGPROBS = -1
"""Value of ``logprobs`` and ``prompt_logprobs`` that requests the whole vocabulary."""


class RequestOutputKind(enum.IntEnum):
    """The part of the result that each ``RequestOutput`` of a request carries."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only the part that is new since the last output."""
    FINAL_ONLY = 2
    """One output, when the request has ended."""


class StructuredOutputsParams:
    """A name that clients import; there are no structured outputs, so making one is an error."""

    def __init__(self, **options: object) -> None:
        raise ValueError(
            f"structured outputs ({', '.join(options)}) are not supported; leave them out"
        )


class SamplingParams(msgspec.Struct, kw_only=True):
    """Settings of one request; names and defaults are upstream's.

    Wrong values raise ``ValueError`` here; limits that depend on the model (vocabulary,
    context length) are checked when the request enters the engine.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as fit the context. 0: nothing is generated (extraction only)."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens to report with the sampled one; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as leave room for output."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    steering: SteeringType | None = None
    """Vectors that are added to the stream: a :class:`vllm.SteeringVector`, or several."""

    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self._normalize()
        _check_types(self)
        _check_ranges(self)
        _check_combinations(self)
        self._all_stop_token_ids |= set(self.stop_token_ids or ())

    def _normalize(self) -> None:
        """Reduce the spellings that mean the same to one."""
        for name, holds, _ in _CHECKED_FIELDS:
            value = getattr(self, name)
            if not holds(value) and isinstance(value, ArrayNumber) and value.ndim == 0:
                setattr(self, name, value.item())
        self.stop = [self.stop] if isinstance(self.stop, str) else _as_list(self.stop)
        self.stop_token_ids = _as_list(self.stop_token_ids)
        self.bad_words = _as_list(self.bad_words)
        self._take_steering_of_lens()
        self.steering = self.steering_specs or None
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self.seed = None if _is_integer(self.seed) and self.seed == -1 else self.seed

    def _take_steering_of_lens(self) -> None:
        """Move vectors that stand in ``extra_args``, as vllm-lens has them, to ``steering``."""
        if not isinstance(self.extra_args, dict) or lens.STEERING not in self.extra_args:
            return
        self.extra_args = dict(self.extra_args)
        vectors = self.extra_args.pop(lens.STEERING)
        if vectors is not None:
            self.steering = [*self.steering_specs, *steering_specs(lens.steering_of(vectors))]

    @classmethod
    def from_optional(cls, **settings: Any) -> SamplingParams:
        """Build from a client's settings, in which None means the default.

        ``max_tokens=None`` keeps its meaning, and the keys of ``logit_bias`` may be
        strings, as they are in JSON.
        """
        options = {name: v for name, v in settings.items() if v is not None or name == "max_tokens"}
        bias = options.get("logit_bias")
        if bias is not None:
            try:
                options["logit_bias"] = {
                    _bounded(token): float(value) for token, value in bias.items()
                }
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"logit_bias={brief(bias)}: has to map token ids to numbers ({error})"
                ) from error
        return cls(**options)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW_TEMPERATURE

    @property
    def looks_back(self) -> bool:
        """True if the choice of a token depends on the tokens chosen before it."""
        penalties = (self.frequency_penalty, self.presence_penalty)
        return self.repetition_penalty != 1.0 or any((*penalties, self.bad_words_token_ids))

    @property
    def stop_strings(self) -> list[str]:
        """``stop``, which is always a list after construction."""
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def steering_specs(self) -> list[SteeringSpec]:
        """``steering`` in the form in which a request carries it; empty if there is none."""
        return [] if self.steering is None else steering_specs(self.steering)

    @property
    def all_stop_token_ids(self) -> set[int]:
        """``stop_token_ids`` and the model's end-of-sequence ids."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]]:
        """Token sequences of ``bad_words``: the last token may not follow the others."""
        return self._bad_words_token_ids

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | Sequence[int] | None = None
    ) -> None:
        """Add the end-of-sequence ids, so that ``min_tokens`` can hold them back."""
        for ids in (generation_config.get("eos_token_id"), eos_token_id):
            if ids is not None:
                self._all_stop_token_ids |= {ids} if isinstance(ids, int) else set(ids)

    def set_bad_words_token_ids(self, sequences: list[list[int]]) -> None:
        """Set the token sequences that the tokenizer makes of ``bad_words``."""
        self._bad_words_token_ids = sequences

    def copy(self) -> SamplingParams:
        """Return a copy whose settings can be replaced; nested values are shared."""
        fresh = copy.copy(self)
        fresh._all_stop_token_ids = set(self._all_stop_token_ids)
        return fresh

    def checked_copy(self) -> SamplingParams:
        """Return an independent copy, checked again: settings may be assigned at any time.

        ValueError: a setting is wrong, or cannot be sent to another process.
        """
        checked = self.copy()
        checked.__post_init__()
        try:
            message = msgspec.msgpack.encode(checked, enc_hook=_as_builtin)
            return msgspec.msgpack.decode(message, type=SamplingParams)
        except (TypeError, OverflowError, RecursionError, UnicodeError) as error:
            raise VLLMValidationError(
                f"sampling_params: {error}; extra_args have to consist of None, booleans, 64-bit "
                "numbers, valid text, lists and dicts",
                parameter="extra_args",
            ) from None

    def clone(self) -> SamplingParams:
        """Return an independent copy."""
        return copy.deepcopy(self)


def _bounded(token: Any) -> int:
    """Return a key of ``logit_bias`` as an integer. Those without bounds may all have one hash,
    with which a dict takes for ever."""
    number = int(token)
    if abs(number) >= 2**63:
        raise ValueError(f"{brief(token)} is not a token id")
    return number


def _as_builtin(value: object) -> object:
    """Return the number or text of a subclass of the builtin types, such as numpy's float64."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"values of type {type(value).__name__} are not supported")


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return list(value) if isinstance(value, tuple | set | frozenset) else value


_MOST_IDS = 2**20
"""More than any vocabulary has."""


class _ListRule(NamedTuple):
    item_type: type
    most: int
    most_bytes: int = 0

    def __str__(self) -> str:
        if self.item_type is int:
            return f"a list of at most {self.most} token ids (integers >= 0)"
        return (
            f"a list of non-empty strings, at most {self.most} of together {self.most_bytes} bytes"
        )


_LISTS = {
    "stop": _ListRule(str, 256, 2**16),
    "bad_words": _ListRule(str, 4096, 2**18),
    "stop_token_ids": _ListRule(int, 4096),
    "allowed_token_ids": _ListRule(int, _MOST_IDS),
}
_LARGEST = 1e15
"""Largest bias or penalty; logits stay finite with it at any temperature."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_CHOICES, f"at least 1 and at most {MAX_CHOICES}"),
    "presence_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "repetition_penalty": (1 / _LARGEST, _LARGEST, "greater than 0 (1e-15 to 1e15)"),
    "temperature": (0.0, math.inf, "0 (greedy) or more"),
    "top_p": (math.ulp(0.0), 1.0, "in (0, 1]"),
    "top_k": (-1, math.inf, "at least 1, or 0 or -1 for all tokens"),
    "min_p": (0.0, 1.0, "in [0, 1]"),
    "min_tokens": (0, math.inf, "at least 0"),
    "max_tokens": (0, math.inf, "at least 1, 0 to extract only, or None for the whole context"),
    "logprobs": (-1, math.inf, "at least 0, or -1 for the whole vocabulary"),
    "prompt_logprobs": (-1, math.inf, "at least 0, or -1 for the whole vocabulary"),
    "truncate_prompt_tokens": (-1, math.inf, "at least 1, or -1 for what fits"),
    "seed": (-(2**63), 2**64 - 1, "a 64-bit integer"),
}


def _fail(name: str, value: object, expected: str) -> NoReturn:
    raise VLLMValidationError(f"{name}={brief(value)}: has to be {expected}", parameter=name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, float) or _is_integer(value)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


_CHECKS: dict[Any, tuple[Callable[[object], bool], str]] = {
    float: (_is_number, "a finite number"),
    int: (_is_integer, "an integer"),
    int | None: (lambda value: value is None or _is_integer(value), "an integer or None"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
}
"""The check and the expected value, by the annotation of a field."""
_CHECKED_FIELDS = [
    (name, *_CHECKS[hint]) for name, hint in get_type_hints(SamplingParams).items()
    if hint in _CHECKS
]  # fmt: skip


def _check_types(params: SamplingParams) -> None:
    for name, holds, expected in _CHECKED_FIELDS:
        if not holds(getattr(params, name)):
            _fail(name, getattr(params, name), expected)
    for name, rule in _LISTS.items():
        _check_list(name, getattr(params, name), rule)
    _check_mappings(params)


def _check_list(name: str, values: object, rule: _ListRule) -> None:
    if values is None:
        return
    if not isinstance(values, list) or len(values) > rule.most:
        _fail(name, values, str(rule))
    num_bytes = 0
    for value in values:
        wrong = not isinstance(value, rule.item_type) or isinstance(value, bool)
        if wrong or value == "" or (rule.item_type is int and value < 0):
            _fail(name, values, f"{rule}; {brief(value)} is not one of them")
        if isinstance(value, str):
            try:
                num_bytes += len(value.encode())
            except UnicodeEncodeError:
                _fail(name, values, f"{rule}; {brief(value)} is not valid text")
    if num_bytes > rule.most_bytes:
        _fail(name, values, f"{rule}; these have {num_bytes}")


def _check_mappings(params: SamplingParams) -> None:
    kind: object = params.output_kind
    if not isinstance(kind, int) or kind not in list(RequestOutputKind):
        _fail("output_kind", kind, "a RequestOutputKind")
    params.output_kind = RequestOutputKind(kind)
    _check_logit_bias(params.logit_bias)
    extra: object = params.extra_args
    if extra is None:
        return
    if not isinstance(extra, dict):
        _fail("extra_args", extra, "a dict")
    transfer = extra.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, dict):
        _fail('extra_args["kv_transfer_params"]', transfer, "a dict")
    lens.check_options(extra)


def _check_logit_bias(logit_bias: object) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, dict) or len(logit_bias) > _MOST_IDS:
        _fail("logit_bias", logit_bias, f"a dict of at most {_MOST_IDS} token ids to numbers")
    for token, bias in logit_bias.items():
        if not _is_integer(token) or token < 0:
            _fail("logit_bias", logit_bias, f"keyed by token ids; {brief(token)} is not a token id")
        if not isinstance(bias, int | float) or not abs(bias) <= _LARGEST:
            expected = f"a dict of numbers of at most 1e15; {brief(bias)} is not one"
            _fail("logit_bias", logit_bias, expected)


def _check_ranges(params: SamplingParams) -> None:
    for name, (low, high, expected) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            _fail(name, value, expected)
    if params.truncate_prompt_tokens == 0:
        _fail("truncate_prompt_tokens", 0, _RANGES["truncate_prompt_tokens"][2])
    if params.allowed_token_ids == []:
        _fail("allowed_token_ids", [], "None, or name at least one token id")


def _check_combinations(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _fail("min_tokens", params.min_tokens, f"at most max_tokens={params.max_tokens}")
    if params.n > 1 and params.is_greedy:
        _fail("n", params.n, f"1 when temperature={params.temperature} (greedy: all n are equal)")
    if params.stop and not params.detokenize:
        _fail("stop", params.stop, "empty when detokenize=False: stop strings are found in text")

"""Records -> token ids, and masks of the tokens whose rows are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm.entrypoints.extract.generation import question_of
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.pack_tokens import PackTokens, find_pack_tokens
from vllm.entrypoints.extract.records import Record, Values
from vllm.hidden_states.positions import as_mask, flat_array
from vllm.logger import init_logger
from vllm.transformers_utils.answer_masks import Span, complete_offsets, mask_tokens
from vllm.transformers_utils.answer_spans import chat_answers
from vllm.transformers_utils.chat_template import ChatOptions, chat_text
from vllm.transformers_utils.tokenizer import (
    TokenizerLike,
    has_second_bos,
    is_certainly_longer,
    start_of,
)
from vllm.utils.text import parse_json

if TYPE_CHECKING:
    import numpy.typing as npt

logger = init_logger(__name__)

_MESSAGES = ("messages", "conversations")
_TEXT = ("prompt", "text")
_TOKEN_IDS = ("input_ids", "token_ids", "prompt_token_ids")
_MASK = ("loss_mask",)
_TOOLS, _VARIABLES = "tools", "chat_template_kwargs"
_BESIDE = {"prompt": "completion", "messages": "system", "conversations": "system"}
"""Columns, and what some data sets have beside them that is not read, but may be a part of it."""
_PADDING = "attention_mask"
_OTHER_MASKS = ("labels", "completion_mask", "assistant_masks")
"""Columns beside token ids that other programs read for a loss mask."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of ShareGPT records; others, such as "system" and "tool", have the usual names."""


class Prompt(NamedTuple):
    """The prompt of one record."""

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_] | None
    """bool [tokens]; None if no mask is wanted or known."""
    name: str
    is_truncated: bool
    source: Any = None
    """The conversation or the text that is continued; None for token ids, or if it is not needed"""


class _Text(NamedTuple):
    """Text that waits for the tokenizer, and spans of characters whose tokens are kept."""

    text: str
    has_special_tokens: bool
    spans: tuple[Span, ...] | None
    mask: object


class PromptMaker:
    """Makes prompts from records.

    tokenizer: None if there is none, for ``reason``; then records need token ids.
    options: ``chat_template`` must be the template itself, not the path of its file.
    stores_loss_mask: make masks where they are known, even if positions do not come from them.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike | None,
        reason: str,
        vocab_size: int,
        options: ExtractOptions,
        stores_loss_mask: bool = False,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._reason = reason
        self._vocab_size = vocab_size
        self.options = options
        self._needs_mask = options.positions == "mask"
        self._rule = options.mask_rule
        self.stores_loss_mask = stores_loss_mask
        self.makes_masks = self._needs_mask or (stores_loss_mask and not options.generate)
        # Also where none are stored, since the samples of a dataset must not depend on that.
        self._checks_masks = self.makes_masks or (options.stores_loss_mask and not options.generate)
        self.num_second_bos = 0
        """Texts that begin with two BOS tokens, one of them from the tokenizer."""
        self._named = (options.token_ids_column, options.messages_column, options.prompt_column)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that may be read."""
        options = self.options
        named = (*self._named, options.mask_column, options.id_column, *options.keep_columns)
        usual = (*_MESSAGES, *_TEXT, *_TOKEN_IDS, *_MASK, _TOOLS, _VARIABLES, *_BESIDE.values())
        usual += (_PADDING, *_OTHER_MASKS)
        return (*(name for name in named if name is not None), *usual)

    def pack_tokens(self) -> PackTokens:
        """Return the tokens that windows have besides those of texts."""
        return find_pack_tokens(self.options, self._tokenizer, self._reason, self._vocab_size)

    def split(self, record: Record) -> list[Record]:
        """Return the record, or with ``split_turns`` one for each answer of its conversation, which
        ends with that answer."""
        token_ids, messages, _ = self._sources(record.values)
        if not self.options.split_turns or token_ids is not None or not isinstance(messages, list):
            return [record]
        try:
            roles = [_as_message(message)["role"] for message in messages]
        except (KeyError, TypeError):
            return [record]  # it is refused as a whole
        column = next(name for name, one in record.values.items() if one is messages)
        return [
            record._replace(
                place=f"{record.place} message {turn}",
                values={**record.values, column: messages[: turn + 1]},
                turn=turn,
            )
            for turn, role in enumerate(roles)
            if role == "assistant"
        ] or [record]

    def make(self, records: Sequence[Record]) -> list[Prompt | str]:
        """Return a prompt for each record, or the reason for having none: ``kind: details``.

        Texts of all records are tokenised together, which uses every core. Raises ValueError if a
        prompt is too long and ``on_long`` is "error".
        """
        parts = [self._try_read(record) for record in records]
        for i, part in enumerate(parts):
            if isinstance(part, _Text):
                parts[i] = self._check_text(records[i], part)
        tokens = self._tokenize([part for part in parts if isinstance(part, _Text)])
        made: list[Prompt | str] = []
        for record, part in zip(records, parts, strict=True):
            found = next(tokens) if isinstance(part, _Text) else part
            made.append(found if isinstance(found, str) else self._finish(record, *found))
        return made

    def _check_text(self, record: Record, part: _Text) -> _Text | str:
        """Return the part with all of its text that can be used, or the reason to refuse it."""
        if problem := _not_unicode(part.text):
            return f"bad text: {problem}"
        most = self.options.max_length
        if most is None or not is_certainly_longer(self._tokenizer, part.text, most):
            return part
        if self.options.on_long == "truncate" and part.mask is None:
            return part._replace(text=start_of(self._tokenizer, part.text, most))
        if self.options.on_long == "truncate":
            return part  # its mask covers the whole text
        return self._too_long(record, f"{len(part.text)} characters, at most {most} tokens")

    def _too_long(self, record: Record, what: str) -> str:
        reason = f"too long: {what} are taken"
        if self.options.on_long == "error":
            raise ValueError(f"{record.place}: {reason} (--max-length, --on-long)")
        return reason

    def _try_read(self, record: Record) -> Any:
        try:
            return self._read(record)
        except Exception as error:  # any failure of a parser or template concerns this record only
            return f"unreadable: {type(error).__name__}: {error}"

    def _read(self, record: Record) -> Any:
        """Return the text, the (token ids, mask), or the reason why there is neither."""
        if record.problem:
            return f"unreadable: {record.problem}"
        options, values = self.options, self._values_of(record)
        mask = _column(values, options.mask_column, _MASK)
        token_ids, messages, text = self._sources(values)
        if token_ids is not None:
            self._warn_of_unread_masks(values, mask)
            return self._check_token_ids(token_ids, mask)
        if messages is None and text is None:
            named = [name for name in self._named if name]
            columns = named or (*_TOKEN_IDS, *_MESSAGES, *_TEXT)
            return f"no prompt: the record has none of {', '.join(columns)}"
        if self._tokenizer is None:
            return f"no tokenizer: {self._reason}"
        self._warn_of_unread(values)
        if messages is not None:
            return self._render(messages, self._chat_options(values), mask)
        if not isinstance(text, str) or not text:
            return f"bad text: {str(text)[:40]!r} is not a text with at least one character"
        return _Text(text, False, None, mask)

    def _warn_of_unread(self, values: Values) -> None:
        for name, beside in _BESIDE.items():
            if values.get(name) and values.get(beside):
                logger.warning_once(
                    "Records have a column %r beside %r, which is not part of the prompt: put it "
                    "into the text or the messages if it has to be",
                    *(beside, name),
                )

    def _warn_of_unread_masks(self, values: Values, mask: object) -> None:
        padding = flat_array(values.get(_PADDING), "biu")
        if padding is not None and not padding.all():
            logger.warning_once(
                "Records have token ids where their %s is 0, which are computed as all others: "
                "take padding away",
                _PADDING,
            )
        for name in _OTHER_MASKS:
            if mask is None and self._checks_masks and values.get(name) is not None:
                logger.warning_once(
                    "Records have a column %r beside their token ids, which is not read: "
                    "--mask-column names one with 0 for tokens that do not count",
                    name,
                )

    def _values_of(self, record: Record) -> Values:
        """Return the columns of a record; those for templates without the keys of other rows."""
        if not record.is_row:
            return record.values
        names = {*_MESSAGES, _TOOLS, _VARIABLES, self.options.messages_column}
        return {k: _without_nulls(v) if k in names else v for k, v in record.values.items()}

    def _sources(self, values: Values) -> tuple[Any, ...]:
        """Return the token ids, the messages and the text that a record has. Columns that options
        name replace the usual ones."""
        usual = (_TOKEN_IDS, _MESSAGES, _TEXT)
        return tuple(
            _column(values, name, () if any(self._named) else others)
            for name, others in zip(self._named, usual, strict=True)
        )

    def _source(self, record: Record) -> Any:
        """Return what a prompt was made of, to which its answer is appended."""
        token_ids, messages, text = self._sources(self._values_of(record))
        if not self.options.generate or token_ids is not None:
            return None
        return text if messages is None else question_of([_as_message(one) for one in messages])

    def _check_token_ids(self, value: Any, mask: object) -> Any:
        ids = flat_array(value, "iu")
        if ids is None or not ids.size:
            return "bad token ids: not a list of integers with at least one"
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            return (
                f"bad token ids: {ids.min()} to {ids.max()}, but the model's ids are 0 to "
                f"{self._vocab_size - 1}"
            )
        return ids.astype(np.int32), mask

    def _render(self, messages: Any, how: ChatOptions, mask: object) -> Any:
        try:
            conversation = [_as_message(message) for message in messages]
            if self.options.split_turns:
                self._check_turn(conversation, mask)
            if self.options.generate:
                conversation = question_of(conversation)
            if self.makes_masks and mask is None:
                text, spans = self._find_answers(conversation, how)
                return _Text(text, True, spans, None)
            return _Text(chat_text(self._tokenizer, conversation, **how), True, None, mask)
        except (ValueError, TypeError) as error:
            return f"bad messages: {error}"

    def _check_turn(self, messages: list[Any], mask: object) -> None:
        """Raise ValueError for a conversation that cannot be split, or whose mask cannot."""
        last = messages[-1] if messages else None
        if not isinstance(last, Mapping) or last.get("role") != "assistant":
            raise ValueError("there is no message of the assistant, and split_turns needs one")
        if mask is not None:
            raise ValueError("the record's own mask is for the whole conversation, not for a turn")

    def _find_answers(self, messages: list[Any], how: ChatOptions) -> tuple[str, tuple[Span, ...]]:
        """Return a conversation as text, and the spans of the assistant's answers in it."""
        try:
            text, spans = chat_answers(self._tokenizer, messages, rule=self._rule, **how)
        except ValueError:
            if self._needs_mask:
                raise
            text, spans = chat_text(self._tokenizer, messages, **how), ()
            self._warn_of_unlocated()
        return text, spans

    def _chat_options(self, values: Values) -> ChatOptions:
        """Return the options of a rendering: a record's variables win over the command's."""
        tools: Any = values.get(_TOOLS)
        if isinstance(tools, str):  # a table cannot hold dicts of different keys
            tools = parse_json(tools or "null")
        variables: Any = values.get(_VARIABLES)
        if variables is None:
            variables = self.options.chat_template_kwargs
        elif isinstance(variables, Mapping):
            variables = {**self.options.chat_template_kwargs, **variables}
        return {
            "chat_template": self.options.chat_template,
            "add_generation_prompt": self.options.add_generation_prompt or self.options.generate,
            "tools": tools,
            "chat_template_kwargs": variables,
        }

    def _tokenize(self, texts: Sequence[_Text]) -> Any:
        """Return an iterator over the (token ids, mask) of each text, in order."""
        found: list[Any] = [None] * len(texts)
        for has_special_tokens in (False, True):
            numbered = enumerate(texts)
            chosen = [(i, t) for i, t in numbered if t.has_special_tokens is has_special_tokens]
            if not chosen:
                continue
            encoded = self._tokenizer(
                [text.text for _, text in chosen],
                add_special_tokens=self.options.add_special_tokens and not has_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
                return_offsets_mapping=self._tokenizer.is_fast
                and any(text.spans is not None for _, text in chosen),
            )
            for row, (i, text) in enumerate(chosen):
                is_plain = self.options.add_special_tokens and not has_special_tokens
                if is_plain and has_second_bos(self._tokenizer, encoded["input_ids"][row]):
                    self.num_second_bos += 1
                token_ids = encoded["input_ids"][row]
                offsets = encoded.get("offset_mapping", [None] * len(chosen))[row]
                found[i] = self._with_mask(text, token_ids, offsets)
        return iter(found)

    def _with_mask(self, text: _Text, token_ids: Any, offsets: Sequence[Span] | None) -> Any:
        """Return (token ids, mask), or the reason why the mask cannot be told."""
        mask = text.mask
        if text.spans is not None:
            try:
                offsets = complete_offsets(self._tokenizer, text.text, token_ids, offsets)
            except ValueError as error:
                if self._needs_mask:
                    return f"bad messages: {error}"
                self._warn_of_unlocated()
                offsets = [(0, 0)] * len(token_ids)
            mask = mask_tokens(offsets, text.spans, self._rule.with_before)
        return np.array(token_ids, dtype=np.int32), mask

    def _warn_of_unlocated(self) -> None:
        logger.warning_once(
            "Answers in some conversations cannot be located, so their loss mask selects no "
            "token; mark them in the template with {% generation %}, or give masks"
        )

    def _finish(
        self, record: Record, token_ids: npt.NDArray[np.int32], raw_mask: object
    ) -> Prompt | str:
        options, mask = self.options, None
        if not token_ids.size:
            return "no prompt: the tokenizer makes no tokens from it"
        if self._needs_mask and raw_mask is None:
            return f"bad mask: there is none for {token_ids.size} tokens"
        if self._checks_masks and raw_mask is not None:
            try:
                mask = as_mask(raw_mask, token_ids.size)
            except ValueError as error:
                return f"bad mask: {error}"
        mask = mask if self.makes_masks else None
        most = options.max_length or token_ids.size
        is_long = token_ids.size > most
        if is_long and options.on_long != "truncate":
            return self._too_long(record, f"{token_ids.size} tokens, at most {most}")
        if mask is not None:
            mask = mask[:most]
            if self._needs_mask and not mask.any():
                return "bad mask: it selects no token"
        column = options.id_column
        value = None if column is None else record.values.get(column)
        name = "" if value is None else str(value)
        if column is not None and not name:
            return f"no id: there is nothing in column {column}"
        if name and record.turn is not None:
            name = f"{name}-{record.turn}"
        if problem := _not_unicode(name):
            return f"bad id: {problem}"
        return Prompt(token_ids[:most], mask, name, is_long, self._source(record))


def _not_unicode(text: str) -> str:
    """Return the error of a text that UTF-8 cannot hold (half of a surrogate pair), or ""."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return str(error)
    return ""


def _column(values: Values, named: str | None, usual: Sequence[str]) -> Any:
    names = usual if named is None else (named,)
    return next((values[name] for name in names if values.get(name) is not None), None)


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys of dicts in it that have None."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _as_message(message: Any) -> Any:
    """Drop the empty fields of a message, because tables have a value in every column; give the
    fields of ShareGPT (``from``, ``value``) the usual names."""
    if not isinstance(message, Mapping):
        return message
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "from" in kept and "role" not in kept:
        role, value = kept.pop("from"), kept.pop("value", None)
        value = kept.pop("content", None) if value is None else value
        if role == "function_call":
            return kept | {"role": "assistant", "tool_calls": _calls_in(value)}
        kept |= {"role": _SHAREGPT_ROLES.get(role, role), "content": value}
    elif "value" in kept and kept.get("content") is None:
        kept["content"] = kept.pop("value")
    return kept


def _calls_in(value: Any) -> Any:
    """Return the tool calls that ShareGPT's text states as JSON: one or a list. Another text is
    returned as a call, which the check of messages refuses."""
    try:
        stated = parse_json(value)
    except (ValueError, TypeError):
        return [value]
    calls = stated if isinstance(stated, list) else [stated]
    return [{"type": "function", "function": call} for call in calls]

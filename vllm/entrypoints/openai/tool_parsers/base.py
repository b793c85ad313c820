"""What a parser of tool calls does. One object reads one answer, as it comes."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import NamedTuple

from vllm.entrypoints.openai.responses import FunctionCall, ToolCall, ToolCallDelta


class FoundTools(NamedTuple):
    """A whole answer: its text (None where nothing but calls was said) and its tool calls."""

    content: str | None
    tool_calls: list[ToolCall]


class NewTools(NamedTuple):
    """What is new of an answer: text, and tool calls that are complete."""

    content: str
    tool_calls: list[ToolCallDelta]


class ToolParser(ABC):
    """Reads one answer."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Tool calls that were found."""

    @abstractmethod
    def push(self, text: str, is_last: bool) -> NewTools:
        """Add text. What may be part of a tool call is kept back until that is known."""

    @classmethod
    def parse(cls, text: str) -> FoundTools:
        """Read a whole answer."""
        found = cls().push(text, is_last=True)
        calls = [ToolCall(id=call.id, function=call.function) for call in found.tool_calls]
        content = found.content.strip() if calls else found.content
        return FoundTools(content or None if calls else content, calls)

    def _new_call(self, name: str, arguments: str) -> ToolCallDelta:
        """The next call of this answer. ``arguments``: JSON."""
        call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
        call = ToolCallDelta(
            index=self.num_calls, id=call_id, function=FunctionCall(name, arguments)
        )
        self.num_calls += 1
        return call


__all__ = ["FoundTools", "NewTools", "ToolParser"]

"""Tool calls as Hermes and Qwen models write them.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as there are calls.
"""

from __future__ import annotations

import json

from vllm.entrypoints.openai.responses import ToolCallDelta
from vllm.entrypoints.openai.tool_parsers.base import NewTools, ToolParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(ToolParser):
    """Text outside of the tags is content; so is a tag whose inside is no call."""

    def __init__(self) -> None:
        super().__init__()
        self._pending = ""

    def push(self, text: str, is_last: bool) -> NewTools:
        self._pending += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while True:
            before, tag, after = self._pending.partition(OPEN)
            if not tag:
                content.append(self._take_content(is_last))
                break
            inside, end, rest = after.partition(CLOSE)
            if not end and not is_last:
                content.append(before)
                self._pending = tag + after
                break
            content.append(before)
            call = self._read_call(inside)
            if call is None:
                content.append(tag + inside + end)
            else:
                calls.append(call)
            self._pending = rest
        return NewTools("".join(content), calls)

    def _take_content(self, is_last: bool) -> str:
        """Pending text, but for an end that may be the beginning of a tag."""
        keep = 0
        if not is_last:
            longest = min(len(OPEN) - 1, len(self._pending))
            keep = next((n for n in range(longest, 0, -1) if self._pending.endswith(OPEN[:n])), 0)
        end = len(self._pending) - keep
        content, self._pending = self._pending[:end], self._pending[end:]
        return content

    def _read_call(self, text: str) -> ToolCallDelta | None:
        """The call that ``text`` spells out; None: it does not."""
        try:
            call = json.loads(text)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return self._new_call(call["name"], arguments)


__all__ = ["HermesToolParser"]

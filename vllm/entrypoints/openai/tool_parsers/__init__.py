"""How models write tool calls into their text: name of the format -> its parser."""

from __future__ import annotations

from vllm.entrypoints.openai.tool_parsers.base import FoundTools, NewTools, ToolParser
from vllm.entrypoints.openai.tool_parsers.hermes import HermesToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesToolParser}
"""Values of ``tool_call_parser``."""

__all__ = ["TOOL_PARSERS", "FoundTools", "HermesToolParser", "NewTools", "ToolParser"]

"""Conversations as prepare-data reads them: both spellings, several turns, tools, odd letters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["state", "hidden", "größer", "日本", "layer\nblock", "🙂", "extract", "row", "pool", "x"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHAREGPT_ROLES = {"user": "human", "assistant": "gpt"}

Message = dict[str, Any]


def make_conversations(count: int, seed: int) -> list[list[Message]]:
    """One to three turns each, from a few tokens to more than a thousand."""
    rng = random.Random(seed)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 10, 40, 120])))

    return [
        [
            {"role": role, "content": text()}
            for _ in range(rng.randint(1, 3))
            for role in ("user", "assistant")
        ]
        for _ in range(count)
    ]


def tool_conversation(number: int) -> list[Message]:
    call = {"name": "add", "arguments": json.dumps({"a": number, "b": 2})}
    return [
        {"role": "user", "content": f"{number} + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": str(number + 2)},
        {"role": "assistant", "content": f"It is {number + 2}."},
    ]


def write_openai(path: Path, conversations: list[list[Message]]) -> Path:
    rows = [{"id": str(i), "conversations": turns} for i, turns in enumerate(conversations)]
    return write_rows(path, rows)


def write_sharegpt(path: Path, conversations: list[list[Message]]) -> Path:
    rows = [
        {
            "conversations": [
                {"from": SHAREGPT_ROLES[turn["role"]], "value": turn["content"]} for turn in turns
            ]
        }
        for turns in conversations
    ]
    return write_rows(path, rows)


def write_with_tools(path: Path, conversations: list[list[Message]]) -> Path:
    rows = [{"conversations": turns, "tools": json.dumps(TOOLS)} for turns in conversations]
    return write_rows(path, rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path

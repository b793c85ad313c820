"""Nulls of records: those that stand for keys which are not there are refused.

A table (the `datasets` library, Parquet) gives each dict all keys that another row's has, with
null. A template would write them, so the prompt of a row would depend on other rows. A null that
a conversation may have of its own is rendered: the default of a parameter, an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.utils.text import brief

logger = init_logger(__name__)

_ADVICE = (
    "leave keys without a value out (rows of a table have them with null where another row has a "
    "value; `vllm extract` drops those)"
)
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords of JSON Schema with a dict from names to schemas."""
_VALUES = ("default", "const", "example")
"""Keywords of JSON Schema whose values may be null. Those of ``x-...`` may, too."""
_LISTS_OF_VALUES = ("enum", "examples")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a null in a tool's parameters that no JSON Schema has."""
    for number, tool in enumerate(tools):
        for path in _nulls(_schema_of(tool)):
            raise ValueError(f"tools[{number}]: {path} of its parameters is null: {_ADVICE}")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise ValueError for a null: templates read it as a value, not as an absent variable."""
    for name, value in variables.items():
        if value is None:
            raise ValueError(f"chat_template_kwargs: {name!r} is null: {_ADVICE}")


def check_arguments(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError for a null argument that the called tool does not declare."""
    declared = {}
    for tool in tools:
        properties = _schema_of(tool).get("properties")
        if isinstance(properties, Mapping):
            declared[_function_of(tool).get("name")] = properties
    for position, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"].get("name"), call["function"].get("arguments")
            if not isinstance(arguments, Mapping) or not _has_null(arguments):
                continue
            for key, value in arguments.items():
                if value is None and isinstance(name, str) and key not in declared.get(name, {key}):
                    raise ValueError(
                        f"message {position}: argument {brief(key)} of the tool call {brief(name)} "
                        f"is null, and the tool has no such parameter: {_ADVICE}"
                    )
            logger.warning_once(
                "Arguments of tool calls have null, which is rendered as their value. If the "
                "conversations are rows of a table, the null may be another row's key: %s",
                _ADVICE,
            )


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _schema_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = _function_of(tool).get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def _nulls(schema: object, path: str = "") -> Iterator[str]:
    """Yield the paths of nulls where a schema has a keyword's value or another schema."""
    if isinstance(schema, list | tuple):
        for one in schema:
            yield from _nulls(one, path)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        inner = f"{path}.{key}" if path else str(key)
        if key in _VALUES or str(key).startswith("x-"):
            continue
        if value is None:
            yield brief(inner)
        elif key in _LISTS_OF_VALUES:
            continue
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            for name, one in value.items():
                if one is None:
                    yield brief(f"{inner}.{name}")
                else:
                    yield from _nulls(one, f"{inner}.{name}")
        else:
            yield from _nulls(value, inner)


def _has_null(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_has_null(one) for one in value.values())
    return value is None or (isinstance(value, list | tuple) and any(map(_has_null, value)))

"""Flags from a YAML file, for ``--config``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from vllm.utils.argparse_utils import FlexibleArgumentParser, json_object
from vllm.utils.text import did_you_mean


def flags_from_file(path: str, parser: FlexibleArgumentParser) -> list[str]:
    """The entries of a YAML file as command-line arguments.

    Keys are flags without their dashes; a mapping becomes JSON, a list several values, true
    and false ``--flag`` and ``--no-flag``; null leaves the default. ValueError: the file
    cannot be read, or has a key that is no flag.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"config={path!r} cannot be read: {error}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"config={path!r} is not a mapping of flags to values")
    arguments: list[str] = []
    for key, value in content.items():
        flag = f"--{str(key).replace('_', '-')}"
        option = parser.option(flag)
        if option is None or option.dest in ("config", "help"):
            raise ValueError(
                f"config={path!r}: there is no flag {str(key)!r}{did_you_mean(flag, parser.flags)}"
            )
        if value is not None:
            arguments += _arguments(flag, option, value)
    return arguments


def _arguments(flag: str, option: argparse.Action, value: Any) -> list[str]:
    """One entry as arguments; argparse checks the values themselves."""
    if isinstance(option, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{flag.strip('-')}={value!r} in the config is not true or false")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if option.type is json_object or isinstance(value, dict):
        return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]
    if isinstance(value, list):
        return [flag, *(_text(item) for item in value)]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    """As one would type it."""
    return value if isinstance(value, str) else json.dumps(value)


__all__ = ["flags_from_file"]

"""The package's logger: its level, its one handler, messages that are said once."""

from __future__ import annotations

import json
import logging
import re
import weakref
from datetime import datetime

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import VllmLogger, init_logger, set_log_format


def test_errors_that_are_logged_once_are_not_kept() -> None:
    """Their frames hold whatever was in memory when they were raised."""

    class Full(OSError):
        pass

    error = Full("full")
    gone = weakref.ref(error)
    logger = init_logger("vllm.tests.errors")
    logger.setLevel(logging.CRITICAL)  # what captures the log would keep them
    logger.warning_once("not stored: %s", error)
    del error
    assert gone() is None


def test_once_means_once_for_the_same_arguments(caplog: pytest.LogCaptureFixture) -> None:
    logger = init_logger("vllm.tests.once")
    with caplog.at_level(logging.INFO, logger="vllm"):
        for size in (1, 1, 2):
            logger.info_once("size %d", size)
            logger.warning_once("size %d", size)
    texts = [(record.levelname, record.getMessage()) for record in caplog.records]
    expected = [("INFO", "size 1"), ("WARNING", "size 1"), ("INFO", "size 2")]
    assert texts == [*expected, ("WARNING", "size 2")]
    assert {record.funcName for record in caplog.records} == {
        "test_once_means_once_for_the_same_arguments"
    }


def test_loggers_made_elsewhere_become_ours() -> None:
    made = logging.getLogger("vllm.tests.made_before")
    assert init_logger("vllm.tests.made_before") is made
    assert isinstance(made, VllmLogger)
    assert len(logging.getLogger("vllm").handlers) == 1


def test_quiet_beside_a_program_that_logs_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = init_logger("vllm.tests.quiet")
    logger.warning("to the root's handlers")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.warning("to stderr")
    written = capsys.readouterr().err
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} WARNING vllm.tests.quiet: to stderr\n"
    assert re.fullmatch(pattern, written)


def test_lines_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = init_logger("vllm.tests.json")
    set_log_format("json")
    try:
        logger.warning("two\nlines of %s", "ü")
        try:
            raise KeyError("gone")
        except KeyError:
            logger.exception("failed")
    finally:
        set_log_format("text")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["name"]) == ("WARNING", "vllm.tests.json")
    assert first["message"] == "two\nlines of ü"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "KeyError: 'gone'" in second["exception"]


@pytest.mark.parametrize("value", ["xml", 5])
def test_a_format_that_there_is_not(value: object) -> None:
    with pytest.raises(ValueError, match=f"log_format={value!r}: use 'text' or 'json'"):
        EngineArgs.from_kwargs(model="m", log_format=value).create_engine_config()

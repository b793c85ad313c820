"""The package's logger: its level, its one handler, messages that are said once."""

from __future__ import annotations

import logging

import pytest

from vllm.logger import VllmLogger, init_logger


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
    assert written.startswith("WARNING ")
    assert written.endswith("to stderr\n")

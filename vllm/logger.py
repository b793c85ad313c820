"""Logging of this package: one handler on the "vllm" logger, level from the environment.

A program that configures logging itself (its root logger has handlers) gets our
records through its own handlers, and ours stays silent.

    2026-03-01 14:05:09+0100 INFO vllm.v1.engine.core: what happened

or, with ``VLLM_LOG_FORMAT=json`` or ``--log-format json``, one object per line with ``time``,
``level``, ``name``, ``message`` and, if there is one, ``exception``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from functools import partialmethod
from typing import Literal, cast, get_args

from vllm import envs

LogFormat = Literal["text", "json"]
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S%z"

_lock = threading.Lock()


class VllmLogger(logging.Logger):
    """A standard logger that can also log a message only once per process."""

    def _once(self, level: int, msg: str, *args: object) -> None:
        """Log unless the same message with the same arguments was logged before."""
        key = (level, msg, tuple(map(str, args)))  # an error would keep what its frames hold
        with _lock:
            logged = self.__dict__.setdefault("_logged_once", set())
            if key in logged:
                return
            logged.add(key)
        self.log(level, msg, *args, stacklevel=2)

    debug_once = partialmethod(_once, logging.DEBUG)
    info_once = partialmethod(_once, logging.INFO)
    warning_once = partialmethod(_once, logging.WARNING)


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _QuietBesideRootHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current stderr, unless the root logger has its own handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # may have been replaced since
        super().emit(record)


_HANDLER = _QuietBesideRootHandler()


def set_log_format(log_format: LogFormat) -> None:
    """Set the format of all later logs of this process. ValueError: the format is unknown."""
    if log_format not in get_args(LogFormat):
        raise ValueError(f"log_format={log_format!r}: use 'text' or 'json'")
    text = logging.Formatter(_FORMAT, _DATE_FORMAT)
    _HANDLER.setFormatter(_JsonFormatter() if log_format == "json" else text)


def log_format() -> LogFormat:
    return "json" if isinstance(_HANDLER.formatter, _JsonFormatter) else "text"


def adopt_logger(name: str) -> None:
    """Give another package's logger our handler."""
    adopted = logging.getLogger(name)
    if _HANDLER not in adopted.handlers:
        adopted.addHandler(_HANDLER)


def _configure_package_logger() -> None:
    """Give the "vllm" logger its handler and level, once."""
    root = logging.getLogger("vllm")
    with _lock:
        if root.handlers:
            return
        root.addHandler(_HANDLER)
        set_log_format(envs.VLLM_LOG_FORMAT)
        if root.level == logging.NOTSET:
            root.setLevel(envs.VLLM_LOGGING_LEVEL)


def init_logger(name: str) -> VllmLogger:
    """The logger ``name``; also for modules of out-of-tree packages."""
    _configure_package_logger()
    logger = logging.getLogger(name)
    if not isinstance(logger, VllmLogger):
        # Another caller may have created the logger, so the class is set afterwards.
        logger.__class__ = VllmLogger
    return cast("VllmLogger", logger)

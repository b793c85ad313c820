"""Logging of this package: one handler on the "vllm" logger, level from the environment.

A program that configures logging itself (its root logger has handlers) gets our
records through its own handlers, and ours keeps quiet.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import cast

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"

_lock = threading.Lock()


class VllmLogger(logging.Logger):
    """A standard logger that can also say a thing only once in the life of the process."""

    _said: set[tuple[int, str, tuple[object, ...]]]

    def _first_time(self, level: int, msg: str, args: tuple[object, ...]) -> bool:
        key = (level, msg, args)
        with _lock:
            said = self.__dict__.setdefault("_said", set())
            if key in said:
                return False
            said.add(key)
        return True

    def debug_once(self, msg: str, *args: object) -> None:
        """Log at DEBUG unless the same message with the same arguments was logged before."""
        if self._first_time(logging.DEBUG, msg, args):
            self.debug(msg, *args, stacklevel=2)

    def info_once(self, msg: str, *args: object) -> None:
        """Log at INFO unless the same message with the same arguments was logged before."""
        if self._first_time(logging.INFO, msg, args):
            self.info(msg, *args, stacklevel=2)

    def warning_once(self, msg: str, *args: object) -> None:
        """Log at WARNING unless the same message with the same arguments was logged before."""
        if self._first_time(logging.WARNING, msg, args):
            self.warning(msg, *args, stacklevel=2)


class _QuietBesideRootHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current stderr, unless the root logger has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # may have been replaced since
        super().emit(record)


def _configure_package_logger() -> None:
    """Give the "vllm" logger its handler and level, once."""
    root = logging.getLogger("vllm")
    with _lock:
        if root.handlers:
            return
        handler = _QuietBesideRootHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        root.addHandler(handler)
        if root.level == logging.NOTSET:
            root.setLevel(envs.VLLM_LOGGING_LEVEL)


def init_logger(name: str) -> VllmLogger:
    """The logger ``name``; also for modules of out-of-tree packages."""
    _configure_package_logger()
    logger = logging.getLogger(name)
    if not isinstance(logger, VllmLogger):
        # Loggers are created by whoever asks first, so the class is set afterwards.
        logger.__class__ = VllmLogger
    return cast("VllmLogger", logger)

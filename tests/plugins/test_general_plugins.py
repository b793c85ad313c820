"""Plugins run once, filtered by name; one that fails is named and the rest still run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import vllm.plugins


class FakeEntryPoint:
    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._function = function

    def load(self) -> Callable[[], None]:
        return self._function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such backend")

    points = [
        FakeEntryPoint("first", lambda: made.append("first")),
        FakeEntryPoint("broken", fail),
        FakeEntryPoint("last", lambda: made.append("last")),
    ]
    monkeypatch.setattr(vllm.plugins, "entry_points", lambda group: points)
    monkeypatch.setattr(vllm.plugins, "_loaded", False)
    monkeypatch.setattr(vllm.plugins, "loaded_plugins", [])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return made


def test_all_run_once_and_the_broken_one_is_named(
    calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="vllm"):
        vllm.plugins.load_general_plugins()
        vllm.plugins.load_general_plugins()
    assert calls == ["first", "last"]
    assert "plugin broken (package:broken) failed" in caplog.text


def test_filter(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "last, other")
    vllm.plugins.load_general_plugins()
    assert calls == ["last"] and "['other']: not installed" in caplog.text

"""Prompt tokens that the engine counts while it computes them."""

from __future__ import annotations

from tests.core.test_scheduler import Engine


def test_prompt_tokens_are_counted_as_they_are_computed() -> None:
    engine = Engine("dense", max_model_len=400)
    engine.add("long", list(range(200)), max_tokens=2)
    counts = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        counts.append(engine.scheduler.stats().num_prompt_tokens)
    assert counts[:5] == [64, 128, 192, 200, 200], "not all at once, and none twice"

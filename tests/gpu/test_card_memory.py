"""An engine takes as much of a card's memory as was asked for; it has to be alone on the card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine
from vllm import LLM

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]
Report = Callable[[str], None]
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256}


def test_a_pool_that_leaves_no_room_for_steps_is_refused(checkpoint: Checkpoint) -> None:
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(ValueError, match=rf"kv_cache_memory_bytes={free} .* would fit"):
        LLM(str(checkpoint("llama")), max_model_len=512, kv_cache_memory_bytes=free)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_the_pool_leaves_the_memory_that_was_not_asked_for(
    eager: bool, checkpoint: Checkpoint, report: Report
) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.25
    options = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": None}
    with engine(checkpoint("qwen3_5"), enforce_eager=eager, **SMALL, **options) as llm:
        free, total = torch.cuda.mem_get_info()
        pool_bytes = core_of(llm).kv_cache_config.size_bytes
    used = (total - free) / total
    report(f"memory: asked {share:.3f}, used {used:.3f}, pool {pool_bytes / total:.3f}")
    assert share - 0.02 <= used <= share + 0.02

"""Checkpoints that hold encoders of something else beside their language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.harness import core_of, engine
from tests.models import multimodal
from vllm.engine.arg_utils import EngineArgs
from vllm.model_report.checkpoint_report import report_checkpoint

WAYS = {"glm4v": "packed", "mllama": "packed", "paligemma": "packed", "deepseek_vl": "own class"}


@pytest.mark.parametrize("model_type", WAYS)
def test_rows_and_tokens_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    report = multimodal.check_type(model_type, tmp_path)
    assert (report.outcome, report.way) == ("whole", WAYS[model_type]), report.reason
    assert report.same_bits


def test_what_text_skips_holds_no_memory(tmp_path: Path) -> None:
    """Encoders are left out; layers that read their output are there, and leave rows alone."""
    model = multimodal.make_checkpoint(tmp_path, "mllama")
    options = {"skip_tokenizer_init": True, "max_model_len": 64}
    with engine(tmp_path, **options) as llm:
        served = core_of(llm).executor.worker.model_runner.model
        assert not any("vision" in name for name, _ in served.named_parameters())
        (sample,) = llm.extract([{"prompt_token_ids": [5, 6, 7]}], layers=[0, 1, 2, 3])
        rows = sample.hidden_states
        assert torch.equal(rows[:, 1], rows[:, 2]) and not torch.equal(rows[:, 0], rows[:, 1])
    assert any("vision" in name for name, _ in model.named_parameters())


def test_one_that_computes_nothing_of_text_alone_is_refused(tmp_path: Path) -> None:
    multimodal.make_checkpoint(tmp_path, "blip-2")
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
    with pytest.raises(ValueError, match=r"Blip2For.*cannot be served.*required.*'pixel_values'"):
        report_checkpoint(args.create_engine_config())

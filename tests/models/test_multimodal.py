"""Checkpoints that hold encoders of something else beside their language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models import multimodal, zoo
from tests.models.every_family import greedy_tokens, streams_of
from tests.models.oracle import relative_error
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states import HiddenStatesDataset
from vllm.model_executor.language_part import name_in_language_part
from vllm.model_report.checkpoint_report import report_checkpoint

WAYS = {"glm4v": "packed", "mllama": "packed", "paligemma": "packed", "deepseek_vl": "own class"}


@pytest.mark.parametrize("model_type", WAYS)
def test_rows_and_tokens_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    report = multimodal.check_type(model_type, tmp_path)
    assert (report.outcome, report.way) == ("whole", WAYS[model_type]), report.reason
    assert report.same_bits


def test_transformers_module_runs_one_whose_text_model_is_no_causal_model_there(
    tmp_path: Path,
) -> None:
    report = multimodal.check_type("qwen3_vl", tmp_path, "transformers")
    assert (report.outcome, report.way) == ("whole", "packed"), report.reason


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


@pytest.mark.parametrize(
    "prefix", ["", "language_model.", "model.language_model."], ids=["none", "old", "nested"]
)
def test_the_head_of_the_language_model(prefix: str) -> None:
    """HyperCLOVA X keeps one that is not tied in the part ``model``."""
    assert name_in_language_part(f"{prefix}lm_head.weight") == "lm_head.weight"


def test_the_bare_model_names_its_language_model_as_idefics_does(tmp_path: Path) -> None:
    model = multimodal.make_checkpoint(tmp_path / "whole", "idefics3")
    model.base_model.save_pretrained(tmp_path / "bare")
    ids = [5, 6, 7, 80]
    with engine(tmp_path / "bare", skip_tokenizer_init=True, max_model_len=64) as llm:
        expected = streams_of(model, ids)
        (sample,) = llm.extract([{"prompt_token_ids": ids}], layers=list(range(len(expected))))
        for rows, stream in zip(sample.hidden_states.unbind(1), expected, strict=True):
            assert relative_error(rows, stream) <= 1e-4


def test_gemma_3n_as_published_hands_on_all_its_streams(tmp_path: Path) -> None:
    """A row is the four streams of a token, one after another; some layers read others' keys."""
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"num_kv_shared_layers": 2, "layer_types": kinds}
    model = zoo.make_checkpoint(tmp_path / "model", "gemma3n_text", **options)
    path, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    beside = ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x")
    save_file(tensors | {name: torch.ones(2) for name in beside}, path)
    text = json.loads(config.read_text())
    architectures = ["Gemma3nForConditionalGeneration"]
    whole = {"model_type": "gemma3n", "architectures": architectures, "text_config": text}
    config.write_text(json.dumps({**whole, "tie_word_embeddings": text["tie_word_embeddings"]}))

    prompts = random_prompts(2, [40, 9])
    arguments = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_batched_tokens": 16}
    layers = [3, 0, 4]
    with engine(
        tmp_path / "model", **arguments, **extraction_config(layers, tmp_path / "rows")
    ) as llm:
        outputs = llm.generate(prompts, with_output_tokens(4), use_tqdm=False)
    data = [prompt["prompt_token_ids"] for prompt in prompts]
    for ids, output in zip(data, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == greedy_tokens(model, ids, 4)
        expected = streams_of(model, [*ids, *tokens[:-1]])
        rows = rows_of(output)
        assert rows.shape[1:] == (3, 4 * 96)
        for column, layer in zip(rows.unbind(1), layers, strict=True):
            assert relative_error(column, expected[layer]) < 1e-4

    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input_ids": x}) + "\n" for x in data))
    job = ExtractOptions(
        input=[str(tmp_path / "data.jsonl")], output=str(tmp_path / "set"), layers="3,0,4"
    )
    assert run_job(job, EngineArgs(model=str(tmp_path / "model"), **arguments)) == 0
    for ids, sample in zip(data, HiddenStatesDataset(tmp_path / "set"), strict=True):
        expected = streams_of(model, ids)
        for column, layer in zip(sample.hidden_states.unbind(1), layers, strict=True):
            assert relative_error(column, expected[layer]) < 1e-4

"""transformers' own modules on the pool: values, what is refused, and how it is said."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models import zoo
from tests.models.checkpoints import make_checkpoint as make_own_checkpoint
from tests.models.every_family import MOST_ERROR, check_family, greedy_tokens, streams_of
from tests.models.oracle import reference_run, relative_error
from vllm.model_executor.transformers_modules import model as model_module
from vllm.model_executor.transformers_modules.boundaries import NotServableError
from vllm.model_executor.transformers_modules.one_by_one import OneByOne
from vllm.model_executor.transformers_modules.survey import window_of_mask
from vllm.v1.worker import self_check

PACKED = ["gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "cohere2", "mixtral"]
ONE_BY_ONE = ["bloom", "granitemoehybrid", "llama4_text"]
WITHOUT_CACHE = {
    "deepseek_v4": "DeepseekV4Attention attends with shapes .*no key and value for each token",
    "recurrent_gemma": "it keeps what it computed of a pass in .*recurrent_states",
    "rwkv": "it takes none of past_key_values",
}
"""Why nothing of it is cached."""
OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
}


@pytest.mark.parametrize("model_type", [*PACKED, *ONE_BY_ONE])
def test_rows_and_tokens_are_those_of_plain_transformers(model_type: str, tmp_path: Path) -> None:
    """One request alone, several together, in chunks, behind a prefix hit, stopped early."""
    report = check_family(model_type, tmp_path, bfloat16=False)
    assert report.outcome == "whole", report.reason
    assert report.way == ("packed" if model_type in PACKED else "one by one")
    if model_type in PACKED:
        assert report.same_bits, "bits depend on what runs beside a request"


def test_a_decoder_layer_may_have_several_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that stops early keeps those of all decoder layers that ran."""
    one_by_one = [way for way in model_module._WAYS if way[1] is OneByOne]
    monkeypatch.setattr(model_module, "_WAYS", one_by_one)
    report = check_family("longcat_flash", tmp_path, bfloat16=False)
    assert (report.outcome, report.way) == ("whole", "one by one"), report.reason


@pytest.mark.parametrize("model_type", WITHOUT_CACHE)
def test_what_has_no_place_in_the_pool_is_computed_again(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same, each step a pass over all tokens so far; the log says why."""
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        report = check_family(model_type, tmp_path, bfloat16=model_type == "deepseek_v4")
    assert (report.outcome, report.way) == ("whole", "no cache"), report.reason
    reason = WITHOUT_CACHE[model_type]
    assert re.search(rf"all of its tokens again in each step.*because: .*{reason}", caplog.text)


def test_what_is_computed_again_runs_on_one_token(tmp_path: Path) -> None:
    model = zoo.make_checkpoint(tmp_path, "rwkv")
    prompts = random_prompts(1, [1])
    with engine(tmp_path, **{**OPTIONS, "max_model_len": 1}) as llm:
        (sample,) = llm.extract(prompts, layers=[0, 2])
    streams = streams_of(model, prompts[0]["prompt_token_ids"])
    for column, layer_id in enumerate((0, 2)):
        assert relative_error(sample.hidden_states[:, column], streams[layer_id]) < MOST_ERROR


def test_lone_tokens_that_are_computed_wrong_are_noticed_in_16_bits(tmp_path: Path) -> None:
    """transformers' Bamba forgets its ``time_step_limit`` where it gets one token."""
    make_own_checkpoint(tmp_path, "bamba", seed=3)
    (prompt,) = random_prompts(3, [61])
    streams = reference_run(tmp_path, prompt["prompt_token_ids"]).streams
    one_token = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    with engine(tmp_path, **OPTIONS, **one_token, dtype="bfloat16") as llm:
        (sample,) = llm.extract([prompt], layers=range(6))
    for layer_id, stream in enumerate(streams):
        rows = sample.hidden_states[:, layer_id].float()
        errors = (rows - stream).square().mean(-1).sqrt() / stream.square().mean().sqrt()
        assert errors.max() < 0.1, layer_id


def test_what_is_computed_again_takes_no_embeddings(tmp_path: Path) -> None:
    zoo.make_checkpoint(tmp_path, "deepseek_v4")
    with (
        pytest.raises(ValueError, match=r"enable_prompt_embeds=True, but .*supports_prompt_embeds"),
        engine(tmp_path, **OPTIONS, enable_prompt_embeds=True),
    ):
        pass


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v4"])
def test_rows_in_files_survive_preemption_and_prefix_hits(model_type: str, tmp_path: Path) -> None:
    model = zoo.make_checkpoint(tmp_path / "model", model_type)
    prompts = random_prompts(5, [70, 41, 70])
    prompts[2] = prompts[0]
    blocks = 16 if model_type == "mixtral" else 40  # of few bytes: only the rows are large
    options = {**OPTIONS, "max_num_batched_tokens": 17, "num_gpu_blocks_override": blocks}
    config = extraction_config([4, 0, 2], tmp_path / "rows")
    with engine(tmp_path / "model", **options, **config) as llm:
        outputs = llm.generate(prompts, with_output_tokens(6))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens[:5] == greedy_tokens(model, prompt["prompt_token_ids"], 5)
        streams = streams_of(model, [*prompt["prompt_token_ids"], *tokens])
        rows = rows_of(output)
        for column, layer_id in enumerate((4, 0, 2)):
            assert relative_error(rows[:, column], streams[layer_id][: len(rows)]) < MOST_ERROR


def test_auto_takes_our_class_where_there_is_one(tmp_path: Path) -> None:
    make_own_checkpoint(tmp_path / "llama", "llama", tokenizer=False)
    zoo.make_checkpoint(tmp_path / "mpt", "mpt")
    classes = []
    for folder, implementation in (
        ("llama", "auto"),
        ("llama", "transformers"),
        ("mpt", "auto"),
    ):
        options = {"skip_tokenizer_init": True, "model_impl": implementation, "max_model_len": 64}
        with engine(tmp_path / folder, **options) as llm:
            runner = llm.llm_engine.engine_core.executor.worker.model_runner
            classes.append(type(runner.model).__name__)
            list(llm.extract(random_prompts(0, [5]), layers=[1]))
    assert classes == ["LlamaForCausalLM", "TransformersForCausalLM", "TransformersForCausalLM"]
    with (
        pytest.raises(
            ValueError, match=r"MptForCausalLM.*not supported; the nearest that are: .*OPT"
        ),
        engine(tmp_path / "mpt", **{**OPTIONS, "model_impl": "vllm"}),
    ):
        pass


def test_what_is_no_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    transformers.T5Config(num_layers=1, d_model=16).save_pretrained(tmp_path)
    options = {
        "model_impl": "auto",
        "load_format": "dummy",
        "hf_overrides": {"architectures": ["T5"]},
    }
    with (
        pytest.raises(ValueError, match=r"architectures=\['T5'\].*none for T5Config"),
        engine(tmp_path, skip_tokenizer_init=True, **options),
    ):
        pass


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("reformer", "rows of earlier tokens change with later ones"),
        ("xlm", "rows of earlier tokens change with later ones"),
        ("cpmant", "rows of earlier tokens change with later ones"),
    ],
)
def test_what_cannot_be_right_is_refused_at_the_start(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    zoo.make_checkpoint(tmp_path, model_type)
    with (
        pytest.raises(ValueError, match=rf"of transformers cannot be served.*{reason}"),
        engine(tmp_path, **{**OPTIONS, "max_model_len": 192 if model_type == "reformer" else 128}),
    ):
        pass


@pytest.mark.parametrize("prompt", [0, 1])
def test_one_number_that_is_not_finite_is_noticed_at_the_start(
    prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.make_checkpoint(tmp_path, "gpt2")
    computed = self_check._computed

    def spoiled(*arguments: Any) -> list[list[torch.Tensor]]:
        rows = computed(*arguments)
        rows[prompt][2][3, 5] = math.nan
        return rows

    monkeypatch.setattr(self_check, "_computed", spoiled)
    with (
        pytest.raises(ValueError, match=r"the rows of layer 2 differ"),
        engine(tmp_path, **OPTIONS),
    ):
        pass


@pytest.mark.parametrize("family", ["nemotron_h", "granite_moe_hybrid"])
def test_sixteen_bits_hide_no_wrong_way(family: str, tmp_path: Path) -> None:
    """Continuing these modules' states is wrong by a tenth where their limits of time bind."""
    folder = make_own_checkpoint(tmp_path / "checkpoint", family)
    ways = []
    for dtype in ("float32", "bfloat16"):
        with engine(folder, **OPTIONS, dtype=dtype) as llm:
            ways.append(core_of(llm).executor.worker.model_runner.model.way)
    assert ways[0] == ways[1]


def test_a_bidirectional_module_is_refused(tmp_path: Path) -> None:
    zoo.make_checkpoint(tmp_path, "bert", is_decoder=False)
    with (
        pytest.raises(ValueError, match=r"no window over earlier tokens: at position 0 it shows"),
        engine(tmp_path, **OPTIONS),
    ):
        pass


def test_lengths_that_change_the_rotation_of_earlier_tokens_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rope["original_max_position_embeddings"] = 48
    zoo.make_checkpoint(tmp_path, "llama", rope_parameters=rope)
    with (
        pytest.raises(ValueError, match=r"max_model_len=49 .*dynamic.*max_model_len<=48"),
        engine(tmp_path, **{**OPTIONS, "max_model_len": 49}),
    ):
        pass
    with engine(tmp_path, **{**OPTIONS, "max_model_len": 48}):
        pass


def test_why_requests_run_one_by_one_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zoo.make_checkpoint(tmp_path, "gptj")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"), engine(tmp_path, **OPTIONS):
        pass
    assert "GPTJForCausalLM of transformers runs one request after another." in caplog.text
    assert "attends by itself" in caplog.text


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    zoo.make_checkpoint(tmp_path, "olmo")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.9.extra.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.raises(ValueError, match=r"missing 1 .*layers\.1\.mlp\.up_proj.*layers\.9\.extra"),
        engine(tmp_path, **OPTIONS),
    ):
        pass


def test_the_logits_are_the_models_own(tmp_path: Path) -> None:
    """Operations after the LM head (here a soft cap) count too."""
    model = zoo.make_checkpoint(tmp_path, "gemma2", final_logit_softcapping=2.0)
    prompt = random_prompts(1, [12])[0]
    with engine(tmp_path, **OPTIONS) as llm:
        output = llm.generate([prompt], greedy(1, logprobs=3))[0].outputs[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt["prompt_token_ids"]])).logits[0, -1]
    expected = logits.log_softmax(-1)
    assert output.logprobs is not None
    for token, found in output.logprobs[0].items():
        assert abs(found.logprob - float(expected[token])) < 1e-4


@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_a_window_is_read_from_a_mask(window: int | None) -> None:
    def mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key <= query
        return seen if window is None else seen & (key > query - window)

    assert window_of_mask(mask, 64, torch.device("cpu")) == (None if window == 64 else window)


def test_chunked_masks_are_no_windows() -> None:
    def mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 16 == query // 16)

    with pytest.raises(NotServableError, match="no window over earlier tokens"):
        window_of_mask(mask, 64, torch.device("cpu"))

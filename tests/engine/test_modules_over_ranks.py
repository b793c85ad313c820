"""Modules of transformers on several ranks: the values of one process, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import rank_functions, test_ranks
from tests.engine.harness import engine, greedy
from tests.engine.test_heads import logits_of, make_head
from tests.engine.test_ranks import (
    OPTIONS,
    PROMPTS,
    SAMPLED,
    rank_processes,
    same_bits,
    tokens,
)
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM

Checkpoint = Callable[..., Path]
MODULES = {**OPTIONS, "model_impl": "transformers"}
FAMILY = "llama"
TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
results = partial(test_ranks.results, hooks=["blocks.2.hook_attn_out", "blocks.1.hook_mlp_out"])


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint(FAMILY), **MODULES) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint(FAMILY), **MODULES, **TENSOR) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


@pytest.fixture(scope="module")
def stages(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint(FAMILY), **MODULES, **STAGES) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


def check_like(llm: LLM, alone: LLM) -> None:
    """Rows, activations, steered and generated rows, log-probabilities and tokens are alike."""
    for ours, whole in zip(results(llm), results(alone), strict=True):
        assert relative_error(ours.hidden_states, whole.hidden_states) < 1e-5
        for name, values in whole.activations.items():
            assert relative_error(ours.activations[name], values) < 1e-5
        if whole.top_logprobs is not None:
            assert torch.equal(ours.top_token_ids, whole.top_token_ids)
            torch.testing.assert_close(ours.top_logprobs, whole.top_logprobs, atol=1e-4, rtol=0)
    for params in (greedy(9), SAMPLED, greedy(3, logprobs=2, prompt_logprobs=1)):
        assert tokens(llm, params) == tokens(alone, params)


def test_two_ranks_share_a_module_and_have_its_values(pair: LLM, alone: LLM) -> None:
    check_like(pair, alone)
    first, second = pair.collective_rpc(rank_functions.parameter_bytes)
    (whole,) = alone.collective_rpc(rank_functions.parameter_bytes)
    assert first == second < 0.65 * whole  # panels have a multiple of 64 outputs
    plans = [llm.llm_engine.engine_core.kv_cache_config for llm in (pair, alone)]
    assert plans[0].block_bytes * 2 == plans[1].block_bytes
    before = results(pair)
    pair.reset_prefix_cache()
    pair.collective_rpc(rank_functions.fail_in_next_pass, args=(1,))
    (failed,) = pair.extract(PROMPTS[:1], layers=[4], on_error="yield")
    assert "planted" in str(failed)
    assert same_bits(results(pair), before)


@pytest.mark.exhaustive
def test_two_stages_of_a_module_have_its_bits(stages: LLM, alone: LLM) -> None:
    assert same_bits(results(stages), results(alone))
    check_like(stages, alone)
    last, first = stages.collective_rpc(rank_functions.parameter_bytes)
    (whole,) = alone.collective_rpc(rank_functions.parameter_bytes)
    assert max(first, last) < 0.7 * whole
    stages.collective_rpc(rank_functions.count_layers)
    for layers, begun, ended in (([1], [0], []), ([3], [0, 1], [2]), (["norm"], [0, 1], [2, 3])):
        stages.reset_prefix_cache()
        list(stages.extract(PROMPTS, layers=layers))
        run_last, run_first = stages.collective_rpc(rank_functions.layers_run)
        # Layers of an earlier stage hand on what they get.
        assert [[layer for layer in run_last if layer > 1], run_first] == [ended, begun]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES, {**TENSOR, **STAGES}])
def test_chunks_and_a_tiny_pool_change_no_bit(
    ranks: dict[str, Any], checkpoint: Checkpoint
) -> None:
    found = []
    for blocks in ({}, {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 16}):
        with engine(checkpoint("gemma3"), **MODULES, **ranks, **blocks) as llm:
            plain = list(llm.extract(PROMPTS, layers=[0, 2, 4, "norm"]))
            found.append((plain, tokens(llm, SAMPLED)))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES, {**TENSOR, **STAGES}])
def test_choices_of_experts_are_those_of_one_process(
    ranks: dict[str, Any], checkpoint: Checkpoint
) -> None:
    found = []
    for options in ({}, ranks):
        with engine(checkpoint("qwen3_moe"), **MODULES, **options, expert_trace=True) as llm:
            found.append(list(llm.extract(PROMPTS, layers=[0, 3, "norm"])))
    for whole, ours in zip(*found, strict=True):
        assert relative_error(ours.hidden_states, whole.hidden_states) < 1e-4
        assert torch.equal(ours.tensors["expert_ids"], whole.tensors["expert_ids"])


@pytest.mark.exhaustive
def test_values_that_ranks_share_are_refused_by_name(checkpoint: Checkpoint) -> None:
    projection, output = (f"model.layers.1.self_attn.{name}" for name in ("q_proj", "o_proj"))
    found = []
    for options in ({}, TENSOR):
        with engine(checkpoint("llama4"), **MODULES, **options) as llm:
            found += list(llm.extract(PROMPTS[:1], layers=[1], hooks=[output]))
            if options:
                message = r"q_proj' is cut over the ranks.*tensor_parallel_size=1"
                with pytest.raises(ValueError, match=message):
                    list(llm.extract(PROMPTS[:1], layers=[1], hooks=[projection]))
    whole, ours = (sample.activations[output] for sample in found)
    assert relative_error(ours, whole) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES])
def test_prompts_as_embeddings(ranks: dict[str, Any], checkpoint: Checkpoint) -> None:
    prompt = {"prompt_embeds": torch.randn(19, 72, generator=torch.Generator().manual_seed(3))}
    found = []
    for options in ({}, ranks):
        with engine(checkpoint(FAMILY), **MODULES, **options, enable_prompt_embeds=True) as llm:
            found += list(llm.extract([prompt], layers=[0, 3, "norm"]))
    assert relative_error(found[1].hidden_states, found[0].hidden_states) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [FAMILY, "qwen3_5"])
def test_ranks_share_a_head_of_keys_and_values(family: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = make_checkpoint(tmp_path / "grouped", family, **heads)
    found = []
    for ranks in (1, 4):
        with engine(folder, **MODULES, tensor_parallel_size=ranks) as llm:
            found.append(list(llm.extract(PROMPTS, layers=[0, 3, 4, "norm"])))
    for whole, ours in zip(*found, strict=True):
        assert relative_error(ours.hidden_states, whole.hidden_states) < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES])
def test_classes_of_a_module_without_an_lm_head(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Ranks check their rows when they start, and not the logits of heads that nobody read."""
    model = make_head(tmp_path, FAMILY, "sequence")
    with engine(tmp_path, **MODULES, **ranks) as llm:
        for prompt, made in zip(PROMPTS, llm.reward(PROMPTS), strict=True):
            wanted = logits_of(model, prompt["prompt_token_ids"])
            assert relative_error(made.outputs.data, wanted) <= 1e-4
        with pytest.raises(ValueError, match=r"log-probabilities: the checkpoint has no lm_"):
            list(llm.extract(PROMPTS, layers=1, top_logprobs=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES])
def test_sleep_works_and_new_weights_are_refused(
    ranks: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder = checkpoint(FAMILY)
    with engine(folder, **MODULES, **ranks) as llm:
        before = results(llm)
        with pytest.raises(ValueError, match="transformers loaded them"):
            llm.update_weights(str(folder))
        llm.sleep(level=1)
        llm.wake_up()
        assert same_bits(results(llm), before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [TENSOR, STAGES])
@pytest.mark.parametrize("name", ["int4-asymmetric", "gptq-order", "fp8-block", "awq"])
def test_quantised_checkpoints(name: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", FAMILY)
    folder = quantise_checkpoint(plain, FORMATS[name]).stored
    found = []
    for options in ({}, ranks):
        with engine(folder, **MODULES, **options) as llm:
            found.append(list(llm.extract(PROMPTS, layers=[0, 3, 4, "norm"])))
    for whole, ours in zip(*found, strict=True):
        away = relative_error(ours.hidden_states, whole.hidden_states)
        assert away <= (1e-4 if ranks == TENSOR else 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [FAMILY, "qwen3_moe", "qwen3_next"])
def test_bfloat16(family: str, checkpoint: Checkpoint) -> None:
    found = []
    for ranks in ({}, TENSOR, STAGES):
        with engine(checkpoint(family), **MODULES, **ranks, dtype="bfloat16") as llm:
            (sample,) = llm.extract(PROMPTS[:1], layers=[0, 1, 3])
            found.append(sample.hidden_states.float())
    whole, cut, staged = found
    assert torch.equal(staged, whole)
    errors = (cut - whole).square().mean(-1).sqrt() / whole.square().mean(-1).sqrt()
    assert float(errors.median(0).values.max()) < 0.03  # roundings may choose other experts


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        at_night(FAMILY, {"tensor_parallel_size": 4}, r"=4: .*heads.*\(6\).*pipeline_parallel"),
        at_night("gpt2", TENSOR, "=2: .*has no tensor-parallel plan.*or pipeline_parallel_size"),
        at_night(
            "qwen3_moe", {**TENSOR, "enable_expert_parallel": True}, "=2: .*enable_expert_parallel"
        ),
        at_night(FAMILY, {**TENSOR, "load_format": "dummy"}, '=2: .*load_format="dummy"'),
        at_night("gemma4", STAGES, "=2: .*more of other layers than the stream.*PARTITION"),
        at_night(FAMILY, {**STAGES, "enable_lora": True}, "enable_lora=True: .*takes no adapters"),
    ],
)
def test_a_module_that_cannot_be_divided_is_refused_by_name(
    family: str, options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    others = rank_processes()
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint(family)), **{**MODULES, **options})
    assert rank_processes() == others

"""Pipeline stages: the bits of one process, layers that need not run, and failures."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import rank_functions, test_ranks
from tests.engine.harness import core_of, engine, extraction_config, failing_allocations, greedy
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
from tests.models.stored_formats import FORMATS, MULTIPLES, quantise_checkpoint
from vllm import LLM
from vllm.hidden_states import ExtractRequest

Checkpoint = Callable[..., Path]
FAMILY = "qwen3_5"
STAGES = {**OPTIONS, "pipeline_parallel_size": 2}
"""Layers 0, 1 and 2, then 3 and 4."""
results = partial(
    test_ranks.results,
    hooks=[
        "blocks.1.hook_attn_out",
        "blocks.4.hook_attn_out",
        "blocks.0.hook_resid_post",
        "blocks.1.attn.hook_z",
        "blocks.4.attn.hook_z",
    ],
)


@pytest.fixture(scope="module")
def stages(checkpoint: Checkpoint) -> Iterator[LLM]:
    """An engine of two stages, both of whose pools are NaN at the start."""
    with engine(checkpoint(FAMILY), **STAGES) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint(FAMILY), **OPTIONS) as llm:
        yield llm


def test_every_field_has_the_bits_of_one_process(stages: LLM, alone: LLM) -> None:
    found, expected = results(stages), results(alone)
    assert same_bits(found, expected)
    for ours, whole in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == whole.token_ids.tolist()
        if whole.top_logprobs is not None:
            assert torch.equal(ours.top_token_ids, whole.top_token_ids)
            assert torch.equal(ours.top_logprobs, whole.top_logprobs)


def test_plans_larger_than_the_memory_of_calls(checkpoint: Checkpoint) -> None:
    """They come while a stage waits for the last one. A step that fails takes the next one with it
    at most."""
    prompts = [
        {"prompt_embeds": torch.randn(n, 72, generator=torch.Generator().manual_seed(n))}
        for n in (700, 4100, 3900, 30)
    ]
    sizes = {"max_model_len": 4200, "kv_cache_memory_bytes": 2**25, "max_num_batched_tokens": 1024}
    options: dict[str, Any] = {**sizes, "max_num_seqs": 3, "enable_prompt_embeds": True}
    folder = checkpoint("llama", max_position_embeddings=8192)

    def texts(llm: LLM) -> list[list[int] | str]:
        made = [one.outputs[0] for one in llm.generate(prompts, greedy(3), use_tqdm=False)]
        return [
            one.token_ids if one.finish_reason == "length" else str(one.stop_reason) for one in made
        ]

    with engine(folder, **options) as llm:
        expected = texts(llm)
    timeout = {"distributed_timeout_seconds": 20, "pipeline_parallel_size": 2}
    with engine(folder, **options, **timeout) as llm:
        assert texts(llm) == expected
        for failing_rank in (0, 1):
            llm.collective_rpc(rank_functions.fail_in_next_pass, args=(failing_rank,))
            made = texts(llm)
            assert "planted" in made[0]
            assert made[3] == expected[3]
            assert texts(llm) == expected


def test_tokens_are_those_of_one_process(stages: LLM, alone: LLM) -> None:
    for params in (greedy(9), SAMPLED, greedy(3, logprobs=2, prompt_logprobs=1)):
        assert tokens(stages, params) == tokens(alone, params)


def test_stages_share_the_weights(stages: LLM, alone: LLM) -> None:
    last, first = stages.collective_rpc(rank_functions.parameter_bytes)
    (whole,) = alone.collective_rpc(rank_functions.parameter_bytes)
    assert max(first, last) < 0.75 * whole
    assert stages.collective_rpc(rank_functions.rank) == [1, 0]
    in_groups = [((0, 1), (number, 2), (number, 2)) for number in (1, 0)]
    assert stages.collective_rpc(rank_functions.groups) == in_groups


def test_stages_above_the_deepest_layer_do_not_run(stages: LLM) -> None:
    stages.collective_rpc(rank_functions.count_layers)
    for layers, first, last in (
        ([0, 1], [0], []),
        ([3], [0, 1, 2], []),  # the boundary between them: the second stage has it
        ([4], [0, 1, 2], [3]),
        (["norm"], [0, 1, 2], [3, 4]),
    ):
        stages.reset_prefix_cache()
        list(stages.extract(PROMPTS, layers=layers))
        assert stages.collective_rpc(rank_functions.layers_run) == [last, first]


def test_chunks_a_tiny_pool_and_starting_again_change_no_bit(
    stages: LLM, checkpoint: Checkpoint
) -> None:
    """Values of tokens that are computed again are not kept a second time."""
    blocks = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 16}
    with engine(checkpoint(FAMILY), **STAGES, **blocks) as llm:
        assert same_bits(results(llm), results(stages))
        assert tokens(llm, SAMPLED) == tokens(stages, SAMPLED)
        scheduler = core_of(llm).scheduler
        preempted = scheduler._totals.num_preemptions
        with failing_allocations(llm, most=20):
            assert same_bits(results(llm), results(stages))
        assert scheduler._totals.num_preemptions > preempted


@pytest.mark.exhaustive
def test_files_of_two_stages(stages: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = extraction_config([0, 2, 4, "norm"], tmp_path / "rows")
    with engine(checkpoint(FAMILY), **STAGES, **config) as llm:
        outputs = llm.generate(PROMPTS, greedy(1), use_tqdm=False)
    for output, sample in zip(outputs, results(stages), strict=False):
        params: Any = output.kv_transfer_params
        rows = load_file(params["hidden_states_path"])["hidden_states"]
        assert torch.equal(rows, sample.hidden_states)


def test_weights_change_in_all_stages(
    stages: LLM, alone: LLM, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", FAMILY, seed=77)
    before = results(stages)
    for llm in (stages, alone):
        llm.update_weights(str(other))
    assert same_bits(results(stages), results(alone))
    assert not same_bits(results(stages), before)
    stages.sleep(level=1)
    stages.wake_up()
    for llm in (stages, alone):
        llm.update_weights(load_file(checkpoint(FAMILY) / "model.safetensors"))
    assert same_bits(results(stages), before)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_step_that_fails_in_one_stage_does_not_end_the_engine(
    stages: LLM, failing_rank: int
) -> None:
    before = results(stages)
    stages.reset_prefix_cache()
    stages.collective_rpc(rank_functions.fail_in_next_pass, args=(failing_rank,))
    (failed,) = stages.extract(PROMPTS[:1], layers=["norm"], on_error="yield")
    assert "planted" in str(failed)
    assert same_bits(results(stages), before)


def test_an_interrupt_ends_the_requests_of_its_step(
    stages: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own part of a step runs when its result is asked for. Steps that follow it are
    given up, which is no failure."""
    before = results(stages)
    asked = [
        ExtractRequest(prompt, layers=["norm"], sampling_params=greedy(number))
        for prompt, number in zip(PROMPTS[:2], (1, 40), strict=True)
    ]
    running = iter(stages.extract(asked, ordered=False, on_error="yield"))
    next(running)
    stages.collective_rpc(rank_functions.fail_in_next_pass, args=(1, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(stages.extract([[5] * 90, *PROMPTS[2:]], layers=["norm"]))
    assert "interrupted" in str(next(running))
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    assert not core_of(stages).has_unfinished_requests()
    assert same_bits(results(stages), before)


@pytest.mark.exhaustive
def test_a_stage_killed_in_a_step_fails_its_requests(checkpoint: Checkpoint) -> None:
    others = rank_processes()
    with LLM(str(checkpoint(FAMILY)), **STAGES) as llm:
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(0,))
        (pid,) = rank_processes() - others
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
        assert "rank 0 ended with status -9" in str(failed)
    assert rank_processes() == others


@pytest.mark.parametrize(
    ("partition", "options"),
    [
        at_night("", {"pipeline_parallel_size": 4}),
        at_night("1,4", {}),
        at_night("4,1", {"tensor_parallel_size": 2}),
    ],
)
def test_other_stages(
    partition: str,
    options: dict[str, Any],
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several ranks a stage have the bits of as many ranks without stages."""
    ranks = {"tensor_parallel_size": options.get("tensor_parallel_size", 1)}
    with engine(checkpoint(FAMILY), **OPTIONS, **ranks) as llm:
        expected, expected_tokens = results(llm), tokens(llm, SAMPLED)
    if partition:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    with engine(checkpoint(FAMILY), **{**STAGES, **options}) as llm:
        assert same_bits(results(llm), expected)
        assert tokens(llm, SAMPLED) == expected_tokens


@pytest.mark.parametrize(
    ("options", "partition", "message"),
    [
        ({"pipeline_parallel_size": 6}, "", "at most 5 stages"),
        ({}, "1,2", r"VLLM_PP_LAYER_PARTITION=1,2: .* 5 layers together"),
        ({}, "1,x", "VLLM_PP_LAYER_PARTITION='1,x': use a number of layers"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    options: dict[str, Any],
    partition: str,
    message: str,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = rank_processes()
    if partition:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint(FAMILY)), **{**STAGES, **options})
    assert rank_processes() == others


@pytest.mark.exhaustive
def test_a_stage_between_two_hands_on_choices_of_experts(checkpoint: Checkpoint) -> None:
    folder, options = checkpoint("qwen3_moe"), {**OPTIONS, "expert_trace": True}
    found = []
    for stages in (1, 3):
        with engine(folder, **options, pipeline_parallel_size=stages) as llm:
            found.append(list(llm.extract(PROMPTS, layers=["norm"])))
    assert same_bits(*found)
    for ours, whole in zip(*found, strict=True):
        assert ours.tensors["expert_ids"].tolist() == whole.tensors["expert_ids"].tolist()


@pytest.mark.exhaustive
def test_a_killed_stage_ends_the_engine_while_another_waits_for_it(checkpoint: Checkpoint) -> None:
    """The first stage waits for the second, on a link that the engine's process has no end of."""
    others = rank_processes()
    with LLM(str(checkpoint(FAMILY)), **{**STAGES, "pipeline_parallel_size": 3}) as llm:
        ranks, pids = (llm.collective_rpc(one) for one in (rank_functions.rank, rank_functions.pid))
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
        threading.Timer(0.5, os.kill, (pids[ranks.index(1)], signal.SIGKILL)).start()
        (failed,) = llm.extract(PROMPTS[:1], layers=["norm"], on_error="yield")
        assert "rank 1 ended with status -9" in str(failed)
    assert rank_processes() == others


@pytest.mark.parametrize(
    "name", [name if name == "bnb-nf4-nested" else at_night(name) for name in FORMATS]
)
def test_stages_read_their_part_of_every_format(name: str, tmp_path: Path) -> None:
    """A tensor of codes or scales belongs to a stage by its module, however it is named."""
    sizes = {"hidden_size": 96, "intermediate_size": 160} if name in MULTIPLES else {}
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False, **sizes)
    checkpoint = quantise_checkpoint(plain, FORMATS[name]).stored
    rows = []
    for options in (OPTIONS, STAGES):
        with engine(checkpoint, **options) as llm:
            samples = llm.extract(PROMPTS, layers=[0, 2, 4], ordered=True)
            rows.append([sample.hidden_states for sample in samples])
    assert all(map(torch.equal, *rows))

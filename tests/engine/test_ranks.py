"""An engine of two ranks: the values of one rank, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, SteeringVector
from vllm.exceptions import FailureError
from vllm.hidden_states import ExtractRequest, HiddenStatesError, HiddenStatesSample
from vllm.utils import stop_watch
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.rank_clients import KEPT_ANSWERS, RankClient, RankProcess
from vllm.v1.executor.rank_messages import RankAnswer

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(7, [61, 5, 34])
SAMPLED = SamplingParams(max_tokens=7, temperature=0.9, seed=11, ignore_eos=True, n=2)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**23}
LAYERS: list[int | str] = [0, 2, 4, "norm"]
STEERING = [SteeringVector(torch.linspace(-1, 1, 72), [1], positions=[3, 4])]
SPREAD = {"decode_context_parallel_size": 2}
STORING = {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}
SHARED: dict[str, Any] = {"tensor_parallel_size": 2, "enable_sequence_parallel": True}
HOOKS = ["blocks.2.hook_attn_out", "blocks.1.hook_mlp_out", "blocks.1.attn.hook_z"]


@contextmanager
def sharing(folder: Path, **options: Any) -> Iterator[LLM]:
    """Start ranks that share tokens, and whose rows behind the last token are NaN."""
    with engine(folder, **{**OPTIONS, **SHARED, **options}) as llm:
        llm.collective_rpc(rank_functions.poison)
        llm.collective_rpc(rank_functions.poison_padding)
        try:
            yield llm
        finally:
            llm.collective_rpc(rank_functions.poison_padding, kwargs={"begins": False})


def results(
    llm: LLM, hooks: Sequence[str] = HOOKS, layers: Sequence[int | str] = LAYERS
) -> list[HiddenStatesSample]:
    plain = llm.extract(PROMPTS, layers=layers, hooks=hooks, top_logprobs=5)
    steered = llm.extract(PROMPTS, layers=layers, steering=STEERING)
    grown = llm.extract(PROMPTS, layers=layers, sampling_params=greedy(5), top_logprobs=3)
    return [*plain, *steered, *grown]


def same_bits(one: list[HiddenStatesSample], other: list[HiddenStatesSample]) -> bool:
    return all(
        torch.equal(a.hidden_states, b.hidden_states)
        and all(torch.equal(a.activations[name], b.activations[name]) for name in a.activations)
        for a, b in zip(one, other, strict=True)
    )


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def check_hit_inside_a_block(pair: LLM) -> None:
    """A prefix hit that ends inside a block of several ranks' tokens changes no token."""
    shared = random_prompts(23, [48 + 15])[0]["prompt_token_ids"]
    prompts = [shared, [*shared[:48], *range(100, 130)]]
    found, hits = [], []
    for salts in (("a", "a"), ("b", "c")):
        for ids, salt in zip(prompts, salts, strict=True):
            asked: Any = {"prompt_token_ids": ids, "cache_salt": salt}
            (output,) = pair.generate(asked, greedy(20), use_tqdm=False)
            found.append(output.outputs[0].token_ids)
            hits.append(output.num_cached_tokens)
    assert hits == [0, 48, 0, 0]
    assert found[:2] == found[2:]


def check_that_a_step_fails_alone(pair: LLM, failing_rank: int) -> None:
    """A step fails on one rank: its request ends, and later ones have the same values."""
    before = results(pair)
    pair.collective_rpc(rank_functions.fail_in_next_pass, args=(failing_rank,))
    (failed,) = pair.extract(PROMPTS[:1], layers=[4], on_error="yield")
    assert "planted" in str(failed)
    assert same_bits(results(pair), before)


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint) -> Iterator[LLM]:
    """An engine of two ranks, both of whose pools are NaN at the start."""
    with engine(checkpoint("llama"), tensor_parallel_size=2, **OPTIONS) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> Iterator[LLM]:
    with engine(checkpoint("llama"), **OPTIONS) as llm:
        yield llm


def test_every_field_has_the_values_of_one_rank(pair: LLM, alone: LLM) -> None:
    for ours, whole in zip(results(pair), results(alone), strict=True):
        assert relative_error(ours.hidden_states, whole.hidden_states) < 1e-5
        for name, values in whole.activations.items():
            assert relative_error(ours.activations[name], values) < 1e-5
        if whole.top_logprobs is not None:
            assert torch.equal(ours.top_token_ids, whole.top_token_ids)
            torch.testing.assert_close(ours.top_logprobs, whole.top_logprobs, atol=1e-4, rtol=0)


def test_ranks_form_the_same_logits_for_requests_that_differ(pair: LLM, alone: LLM) -> None:
    """Ranks without hidden states do not tell apart what the first one does."""
    prompts = [*PROMPTS, PROMPTS[0]]
    asked = [([0], 5, 1.0), ([2, 4], 5, 1.0), (["norm"], 3, 1.0), ([0], 5, 0.7)]
    requests = [
        ExtractRequest(prompt, layers=layers, top_logprobs=k, logprob_temperature=temperature)
        for prompt, (layers, k, temperature) in zip(prompts, asked, strict=True)
    ]
    for ours, whole in zip(pair.extract(requests), alone.extract(requests), strict=True):
        assert torch.equal(ours.top_token_ids, whole.top_token_ids)
        torch.testing.assert_close(ours.top_logprobs, whole.top_logprobs, atol=1e-4, rtol=0)


def test_one_request_of_a_batch_asks_for_values_that_are_cut(pair: LLM, alone: LLM) -> None:
    """Also in decode steps, and for the last row of a prompt only."""
    hooks = ["blocks.0.attn.hook_z", "blocks.3.attn.hook_z"]
    requests = [
        ExtractRequest(PROMPTS[0], layers=[1]),
        ExtractRequest(PROMPTS[1], layers=[2], hooks=hooks, positions="last"),
        ExtractRequest(PROMPTS[2], layers=[0], hooks=hooks, top_logprobs=2),
    ]
    for params in (None, greedy(3)):
        found, expected = (list(e.extract(requests, sampling_params=params)) for e in (pair, alone))
        for ours, whole in zip(found, expected, strict=True):
            assert ours.activations.keys() == whole.activations.keys()
            for name, values in whole.activations.items():
                assert values.shape[-1] == 96
                assert relative_error(ours.activations[name], values) < 1e-5


def test_tokens_are_those_of_one_rank(pair: LLM, alone: LLM) -> None:
    for params in (greedy(9), SAMPLED, greedy(3, logprobs=2, prompt_logprobs=1)):
        assert tokens(pair, params) == tokens(alone, params)


def test_ranks_share_the_weights_and_the_pool(pair: LLM, alone: LLM) -> None:
    first, second = pair.collective_rpc(rank_functions.parameter_bytes)
    (whole,) = alone.collective_rpc(rank_functions.parameter_bytes)
    assert first == second < 0.6 * whole
    assert pair.collective_rpc(rank_functions.rank) == [0, 1]
    plans = [core_of(llm).kv_cache_config for llm in (pair, alone)]
    assert plans[0].block_bytes * 2 == plans[1].block_bytes


def test_a_rank_imports_no_compiler(pair: LLM) -> None:
    """The config that it is sent would import them: a second and 138 MiB at every start."""
    _, modules = pair.collective_rpc(rank_functions.modules)
    assert "vllm.model_executor.models.llama" in modules
    assert not {"torch._dynamo", "torch.distributed.tensor", "sympy", "triton"} & modules


def test_chunks_and_a_tiny_pool_change_no_bit(pair: LLM, checkpoint: Checkpoint) -> None:
    blocks = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 16}
    with engine(checkpoint("llama"), tensor_parallel_size=2, **OPTIONS, **blocks) as llm:
        assert same_bits(results(llm), results(pair))
        assert tokens(llm, SAMPLED) == tokens(pair, SAMPLED)


def test_ranks_that_share_tokens_change_no_bit(pair: LLM, checkpoint: Checkpoint) -> None:
    hooks = [*HOOKS, "blocks.1.hook_resid_mid"]
    with sharing(checkpoint("llama")) as llm:
        assert same_bits(results(llm, hooks), results(pair, hooks))
        assert tokens(llm, SAMPLED) == tokens(pair, SAMPLED)


def test_files_of_two_ranks(pair: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = extraction_config([0, 2, 4, "norm"], tmp_path / "rows")
    with engine(checkpoint("llama"), tensor_parallel_size=2, **OPTIONS, **config) as llm:
        outputs = llm.generate(PROMPTS, greedy(1), use_tqdm=False)
        for output, sample in zip(outputs, results(pair), strict=False):
            params: Any = output.kv_transfer_params
            rows = load_file(params["hidden_states_path"])["hidden_states"]
            assert torch.equal(rows, sample.hidden_states)


def test_weights_change_on_all_ranks(pair: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=77)
    before = results(pair)
    pair.update_weights(str(other))
    with engine(other, **OPTIONS) as llm:
        for ours, whole in zip(results(pair), results(llm), strict=True):
            assert relative_error(ours.hidden_states, whole.hidden_states) < 1e-5
    pair.sleep(level=1)
    pair.wake_up()
    pair.update_weights(load_file(checkpoint("llama") / "model.safetensors"))
    assert same_bits(results(pair), before)


def test_an_update_that_fails_on_one_rank_leaves_no_mixed_weights(
    pair: LLM, checkpoint: Checkpoint
) -> None:
    before, weights = results(pair), load_file(checkpoint("llama") / "model.safetensors")
    for failing_rank in (0, 1):
        pair.collective_rpc(rank_functions.fail_in_next_update, args=(failing_rank,))
        with pytest.raises((MemoryError, FailureError), match="planted"):
            pair.update_weights(weights)
        with pytest.raises(ValueError, match=r"a replacement of its weights failed.*planted"):
            list(pair.extract(PROMPTS, layers=[4]))
        pair.update_weights(weights)
        assert same_bits(results(pair), before)


def test_functions_that_ranks_cannot_import_fail_alone(pair: LLM, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("class Value: pass\ndef call(worker): return 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        only_here = importlib.import_module("only_here")
        value = only_here.Value()
        for function, args in ((only_here.call, ()), (rank_functions.hang_in_next_pass, (value,))):
            with pytest.raises(ValueError, match=r"rank 1 cannot import .*'only_here'"):
                pair.collective_rpc(function, args=args)
        only_here.call.__module__ = "__main__"
        with pytest.raises(ValueError, match=r"collective_rpc: .* in the program that was started"):
            pair.collective_rpc(only_here.call)
    finally:
        sys.path.remove(str(tmp_path))
    assert pair.collective_rpc(rank_functions.rank) == [0, 1]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_step_that_fails_on_one_rank_fails_alone(pair: LLM, failing_rank: int) -> None:
    check_that_a_step_fails_alone(pair, failing_rank)


def test_what_ranks_cannot_do_is_refused_by_name(checkpoint: Checkpoint) -> None:
    for options, message in (({"distributed_executor_backend": "uni"}, "'uni' has one rank"),):
        with pytest.raises(ValueError, match=message):
            LLM(str(checkpoint("llama")), **{**OPTIONS, "tensor_parallel_size": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        at_night({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 and the 2 key/value heads"),
    ],
)
def test_a_model_that_cannot_be_cut(
    checkpoint: Checkpoint, options: dict[str, Any], message: str
) -> None:
    others = rank_processes()
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **{**OPTIONS, "tensor_parallel_size": 2, **options})
    assert rank_processes() == others


def rank_processes(parent: int | None = None) -> set[int]:
    """The processes of ranks below this one, or below ``parent``."""
    children = psutil.Process(parent).children(recursive=True)
    return {one.pid for one in children if "rank_process" in command_of(one)}


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_engine(checkpoint: Checkpoint) -> None:
    others = rank_processes()
    with LLM(str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS) as llm:
        assert len(list(llm.extract(PROMPTS, layers=[4]))) == 3
        (pid,) = rank_processes() - others
        assert llm.collective_rpc(rank_functions.pid) == [os.getpid(), pid]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rank_processes() == others)
        died = r"rank 1 ended with status -9"
        with pytest.raises((EngineDeadError, HiddenStatesError), match=died):
            list(llm.extract(PROMPTS, layers=[4]))
    assert rank_processes() == others


def test_a_rank_that_is_stopped_and_killed_in_a_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it while it is stopped; then it goes on, or its requests fail."""
    monkeypatch.setattr(stop_watch, "STOPPED_SECONDS", 0.1)
    others = rank_processes()
    with LLM(str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS) as llm:
        (expected,) = llm.extract(PROMPTS[:1], layers=[4])
        (pid,) = rank_processes() - others
        executor = core_of(llm).executor
        assert not executor.has_stopped_rank
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: executor.has_stopped_rank)
        threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        (stopped,) = llm.extract(PROMPTS[:1], layers=[4])
        assert torch.equal(stopped.hidden_states, expected.hidden_states)
        assert f"rank 1 (process {pid}) has been stopped for 0 s by SIGSTOP" in caplog.text
        wait_until(lambda: not executor.has_stopped_rank)
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
        assert "rank 1 ended with status -9" in str(failed)
    assert rank_processes() == others


def test_a_rank_killed_before_it_listens_ends_the_start(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes the first call then."""
    others = rank_processes()
    send = RankProcess.send

    def and_kill(process: RankProcess, settings: Any) -> None:
        send(process, settings)
        os.kill(process._process.pid, signal.SIGKILL)

    monkeypatch.setattr(RankProcess, "send", and_kill)
    with pytest.raises(FailureError, match="rank 1 ended with status -9"):
        LLM(str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS)
    assert rank_processes() == others


@pytest.mark.exhaustive
def test_a_rank_that_hangs_ends_the_engine(
    checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    limit = {"distributed_timeout_seconds": 20.0}  # a busy machine takes some to start a rank
    with LLM(str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS, **limit) as llm:
        llm.collective_rpc(rank_functions.hang_in_next_pass, args=(1,))
        (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
        assert "rank 1 has not answered for 20 s (distributed_timeout_seconds)" in str(failed)
    assert "rank_functions.py" in capfd.readouterr().err  # the stacks


def test_nothing_is_left_of_an_engine_in_another_process(checkpoint: Checkpoint) -> None:
    async def run() -> None:
        args = AsyncEngineArgs(str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS)
        llm = AsyncLLM.from_engine_args(args)
        (sample,) = [one async for one in llm.extract([PROMPTS[0]], layers=[4])]
        assert sample.hidden_states.shape == (61, 1, 72)
        (pid,) = rank_processes() - others
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: rank_processes() == others)
        with pytest.raises((EngineDeadError, HiddenStatesError)):  # its step may have begun
            await anext(aiter(llm.extract([PROMPTS[0]], layers=[4])))
        await llm.shutdown()

    others = rank_processes()
    asyncio.run(run())
    assert rank_processes() == others


def test_an_answer_waits_until_it_is_read() -> None:
    """Many adapters may be loaded between a step and its result."""
    sent = [pickle.dumps(RankAnswer(number)) for number in range(1, 40)]
    socket: Any = SimpleNamespace(poll=lambda *_: 1, recv=lambda: sent.pop(0))
    client: Any = SimpleNamespace(_socket=socket, _timeout_seconds=1.0, _answers={}, _read=set())
    for number in range(2, 40):
        assert RankClient.answer(client, number, []).number == number
    assert RankClient.answer(client, 1, []).number == 1
    assert len(client._answers) == len(client._read) <= KEPT_ANSWERS + 1

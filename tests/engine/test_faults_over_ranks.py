"""Ranks and stages: what other programs got wrong, and what is left when a process is killed."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import rank_functions
from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.engine.test_ranks import OPTIONS, PROMPTS, rank_processes, same_bits, wait_until
from tests.entrypoints.serve_process import ServeProcess, serve
from tests.extract.job_harness import digests, write_jsonl
from tests.extract.test_extract_cli import command, start, wait_for_units
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from vllm import LLM, ModelRegistry, plugins
from vllm.exceptions import FailureError
from vllm.v1.executor.rank_clients import RanksHere

pytestmark = pytest.mark.exhaustive

Checkpoint = Callable[..., Path]
TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
LAYERS: list[int | str] = [0, 2, 4, "norm"]


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files of processes that a test starts; paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def ask_for_long_texts(server: ServeProcess, model: str) -> list[str]:
    """Ask for files of several texts at once; returns how each request ended."""
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(31, [61, 5, 34, 17])]

    def ask(ids: list[int]) -> str:
        body = {"model": model, "prompt": ids, "max_tokens": 400, "ignore_eos": True}
        try:
            with server.client() as client:
                answer = client.post("/v1/completions", json=body)
            return f"{answer.status_code} {answer.text}"
        except httpx.TransportError as error:
            return f"gone {error}"

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, prompts))


@pytest.mark.parametrize("killed", ["rank", "core", "server"])
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_nothing_is_left_when_a_process_of_a_server_is_killed(
    flag: str, killed: str, checkpoint: Checkpoint, tmp_path: Path, scratch: Path
) -> None:
    """Its other processes end, and so do its requests. Visible files are whole."""
    folder, checked = tmp_path / "rows", checkpoint("llama")
    with serve(checked, folder, flag, "2") as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 1}
        with server.client() as client:
            for _ in range(3):
                client.post("/v1/completions", json=body).raise_for_status()
        core, (rank,) = server.core(), rank_processes(server.process.pid)
        processes = [core, psutil.Process(rank), psutil.Process(server.process.pid)]
        pids = {"core": core.pid, "rank": rank, "server": server.process.pid}
        assert list(scratch.iterdir())
        threading.Timer(0.2, os.kill, (pids[killed], signal.SIGKILL)).start()
        ends = ask_for_long_texts(server, str(checked))
        assert not any(end.startswith("200") for end in ends), ends
        status = server.wait(60)
        assert status == (-signal.SIGKILL if killed == "server" else 1)
        _, alive = psutil.wait_procs(processes[:2], 30)
        assert not alive
    wait_until(lambda: not [one for one in scratch.iterdir() if one.name.startswith("vllm")])
    files = list(folder.glob("*.safetensors"))
    assert len(files) >= 3
    for file in files:
        assert load_file(file)["hidden_states"].isfinite().all()


def test_a_dataset_resumes_after_a_killed_rank(checkpoint: Checkpoint, tmp_path: Path) -> None:
    texts: list[Any] = [{"text": "abcdefg" * (number % 23 + 1)} for number in range(300)]
    data = write_jsonl(tmp_path / "data.jsonl", texts)
    model = checkpoint("llama")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks = ("--tensor-parallel-size", "2")
    undisturbed = start(command(model, data, whole, *ranks))
    assert undisturbed.wait(120) == 0
    disturbed = start(command(model, data, broken, *ranks))
    wait_for_units(disturbed, broken, 2)
    (rank,) = rank_processes(disturbed.pid)
    os.kill(rank, signal.SIGKILL)
    _, log = disturbed.communicate(timeout=120)
    assert disturbed.returncode not in (0, None)
    assert b"rank 1 ended with status -9" in log
    assert not (broken / "manifest.json").exists()
    assert start(command(model, data, broken, *ranks)).wait(120) == 0
    assert digests(broken) == digests(whole)


PLUGIN = """
import os
from vllm import ModelRegistry
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.models.llama import LlamaForCausalLM

class PlugModel(LlamaForCausalLM):
    supports_ranks = True

    def __init__(self, **options):
        super().__init__(**options)
        if os.environ.get("FAILING_RANK") == str(get_world_group().rank):
            raise MemoryError("planted")

def register():
    ModelRegistry.register_model("FromPlugin", "plugged:PlugModel")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a plug-in that registers a model."""
    folder = tmp_path / "installed"
    about = folder / "plugged-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "plugged.py").write_text(PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    points = "[vllm.general_plugins]\nplugged = plugged:register\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.getcwd()]))
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(plugins, "loaded_plugins", [])
    monkeypatch.setattr(ModelRegistry, "_registered", {})


@pytest.mark.parametrize("sizes", [TENSOR, STAGES])
@pytest.mark.parametrize("way", ["FromPlugin", "FromProgram"])
def test_registered_models_reach_every_rank(
    way: str,
    sizes: dict[str, int],
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    plugin: None,
) -> None:
    """One rank may run out of memory while it starts, which leaves nothing of the other."""
    with engine(checkpoint("llama"), **OPTIONS, **sizes) as llm:
        expected = list(llm.extract(PROMPTS, layers=LAYERS))
    monkeypatch.setattr(plugins, "_loaded", False)
    if way == "FromProgram":
        monkeypatch.setenv("VLLM_PLUGINS", "")
        ModelRegistry.register_model(way, "plugged:PlugModel")
    options: dict[str, Any] = {**OPTIONS, **sizes, "hf_overrides": {"architectures": [way]}}
    with engine(checkpoint("llama"), **options) as llm:
        assert llm.collective_rpc(rank_functions.model_class) == ["plugged.PlugModel"] * 2
        assert same_bits(list(llm.extract(PROMPTS, layers=LAYERS)), expected)
    others = rank_processes()
    for failing_rank in (0, 1):
        monkeypatch.setenv("FAILING_RANK", str(failing_rank))
        with pytest.raises((MemoryError, FailureError), match="planted"):
            LLM(str(checkpoint("llama")), **options)
        assert rank_processes() == others


def test_stages_compute_at_the_same_time(checkpoint: Checkpoint) -> None:
    """Each stage sleeps in each step; one after the other they would sleep twice as long."""
    seconds, num_steps = 0.15, 12
    (prompt,) = random_prompts(3, [16 * num_steps])
    options = {**OPTIONS, "max_model_len": 16 * num_steps, "max_num_batched_tokens": 16}
    with engine(checkpoint("llama"), **options, **STAGES) as llm:
        expected = next(iter(llm.extract([prompt], layers=["norm"])))
        llm.collective_rpc(rank_functions.sleep_in_every_pass, args=(seconds,))
        begin = time.monotonic()
        found = next(iter(llm.extract([prompt], layers=["norm"])))
        taken = time.monotonic() - begin
    assert same_bits([found], [expected])
    assert seconds * num_steps < taken < 1.6 * seconds * num_steps


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_failed_step_ends_no_more_than_the_next(
    is_full: bool, failing_rank: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, and texts that end at different steps, around a step that fails."""
    if is_full:
        monkeypatch.setattr(RanksHere, "has_room", lambda self, message: False)
    prompts = random_prompts(3, [40, 3, 90, 17, 25, 6])
    params = [greedy(n) for n in (5, 20, 3, 11, 2, 9)]
    options = {**OPTIONS, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    with engine(checkpoint("llama"), **options, **STAGES) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        for num_passes in (1, 2, 4, 6, 9):
            how = (failing_rank, MemoryError, num_passes)
            llm.collective_rpc(rank_functions.fail_in_next_pass, args=how)
            made = [one.outputs[0] for one in llm.generate(prompts, params)]
            failed = [str(one.stop_reason) for one in made if one.finish_reason == "error"]
            assert 1 <= len(failed) <= 3
            known = ("planted", "the step before this one failed")
            assert all(one.endswith(known) for one in failed)
            for one, token_ids in zip(made, expected, strict=True):
                assert one.finish_reason == "error" or one.token_ids == token_ids
            assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize("sizes", [TENSOR, STAGES])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_vectors_choices_of_experts_and_prompts_as_embeddings(
    family: str, sizes: dict[str, int], checkpoint: Checkpoint
) -> None:
    folder, found = checkpoint(family), []
    has_experts = family == "qwen3_5_moe"
    embeddings = [
        {"prompt_embeds": torch.randn(n, 72, generator=torch.Generator().manual_seed(n))}
        for n in (19, 3)
    ]
    options = {**OPTIONS, "enable_prompt_embeds": True, "expert_trace": has_experts}
    for ranks in ({}, sizes):
        with engine(folder, **options, **ranks) as llm:
            vectors = llm.embed(PROMPTS, "last" if has_experts else "mean", as_tensor=True)
            samples = list(llm.extract(PROMPTS, layers=LAYERS))
            made = llm.generate(embeddings, greedy(6), use_tqdm=False)
            found.append((vectors, samples, [list(one.outputs[0].token_ids) for one in made]))
    (whole_vectors, whole, tokens), (vectors, samples, our_tokens) = found
    assert relative_error(vectors, whole_vectors) < 1e-4
    assert our_tokens == tokens
    for ours, one in zip(samples, whole, strict=True):
        assert relative_error(ours.hidden_states, one.hidden_states) < 1e-4
        if has_experts:
            assert torch.equal(ours.tensors["expert_ids"], one.tensors["expert_ids"])


@pytest.mark.parametrize(
    ("family", "module", "entries"),
    [
        ("deepseek_v3", "model.layers.4.mlp.up_proj", {"num_nextn_predict_layers": 1}),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj", {"mtp_num_hidden_layers": 1}),
    ],
)
@pytest.mark.parametrize("sizes", [TENSOR, STAGES, {**TENSOR, **STAGES}])
def test_layers_that_predict_more_tokens_are_no_layers_of_a_stage(
    family: str, module: str, entries: dict[str, int], sizes: dict[str, int], tmp_path: Path
) -> None:
    """Checkpoints that have them give the files of those that do not."""
    plain = make_checkpoint(tmp_path / "plain", family)
    longer = make_checkpoint(tmp_path / "longer", family, **entries)
    file = longer / "model.safetensors"
    save_file({**load_file(file), f"{module}.weight": torch.ones(3, 5)}, file)
    found = []
    for folder, ranks in ((plain, {}), (plain, sizes), (longer, sizes)):
        files = extraction_config(LAYERS, tmp_path / f"rows {len(found)}")
        with engine(folder, **OPTIONS, **ranks, **files, max_num_batched_tokens=32) as llm:
            found.append([rows_of(one) for one in llm.generate(PROMPTS, greedy(), use_tqdm=False)])
    one, several, with_more = found
    assert all(map(torch.equal, with_more, several))
    assert all(relative_error(*pair) < 1e-4 for pair in zip(several, one, strict=True))

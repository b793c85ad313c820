"""``vllm bench`` on a tiny checkpoint, and the measuring itself."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import vllm.ops
from benchmarks import scheduler_alone, targets
from tests.models.checkpoints import make_checkpoint
from vllm.bench import linear_weights, profile, rounds
from vllm.bench.contenders import (
    CONTENDERS,
    Prompts,
    Round,
    TransformersContender,
    Workload,
)
from vllm.bench.linear_weights import Form, LinearWeights, load_linear_weights
from vllm.bench.models import find_model
from vllm.entrypoints.cli.bench import bench
from vllm.ops.operation import all_operations


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return make_checkpoint(folder, "qwen3_5", dtype=torch.bfloat16, tokenizer=False)


def run_bench(checkpoint: Path, *options: str) -> int:
    model = () if "--model" in options else ("--model", str(checkpoint))
    return bench(["extraction", *model, *options])


def test_table_and_json_say_the_same_and_add_up(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, document = tmp_path / "rows", tmp_path / "result.json"
    storage.mkdir()
    options = [
        *("--prompts", "3", "--prompt-len", "37", "--output-len", "3", "--layers", "5", "1"),
        *("--rounds", "3", "--plain", "--max-num-batched-tokens", "64"),
        *("--json", str(document), "--storage", str(storage)),
    ]
    assert run_bench(checkpoint, *options) == 0

    (result,) = json.loads(document.read_text())["results"]
    contenders: dict[str, Any] = result["contenders"]
    assert list(contenders) == ["extraction", "plain", "bound"]
    ours = contenders["extraction"]
    assert ours["bytes_written"] > 3 * (37 * 2 * 72 * 2 + 37 * 8)  # rows and token ids
    assert contenders["plain"]["bytes_written"] == 0
    assert not list(storage.iterdir())
    for name, other in contenders.items():
        assert len(other["seconds"]) == 3
        speed = 3 * (37 + 2) / statistics.median(other["seconds"])
        assert other["tokens_per_second"] == pytest.approx(speed)
        if name != "extraction":
            pairs = zip(other["seconds"], ours["seconds"], strict=True)
            ratio = statistics.median(theirs / mine for theirs, mine in pairs)
            assert result["speed_ratios"][name] == pytest.approx(ratio)
    assert result["share_of_bound"] == result["speed_ratios"]["bound"]

    shares = result["profile"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values()), shares
    seconds = result["profile"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(result["profile"]["total_seconds"])

    table = capsys.readouterr().out
    machine = json.loads(document.read_text())["machine"]
    assert all(str(value) in table.splitlines()[0] for value in machine.values())
    assert "bfloat16, chunks of 64 tokens" in table
    assert f"share of the bound: {result['share_of_bound']:.1%}" in table
    for part, label in profile.PARTS.items():
        (line,) = (line for line in table.splitlines() if line.startswith(label))
        assert line.endswith(f"{shares[part]:.1%}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "6"], "--layers [6]: use ids from 0 to 5"),
        (["--rounds", "0"], "--rounds 0: use at least 1"),
        (["--storage", "/no/such"], "--storage /no/such: there is no folder /no/such"),
        (["--json", "/no/such/x.json"], "--json /no/such/x.json: there is no folder /no/such"),
        (["--peer", "transformers", "--output-len", "4"], "--output-len 4 with --peer"),
        (["--model", "nowhere"], "--model nowhere"),
        (["--peer-python", "/no/python"], "--peer-python /no/python: there is no interpreter"),
        (["--peer-python", "x", "--cpu-time"], "--peer-python x with --cpu-time: the seconds of"),
        (["--prompt-len", "99999999"], "--prompt-len 99999999 --output-len 1: max_model_len="),
    ],
)
def test_bad_options_are_named(
    checkpoint: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_bench(checkpoint, *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_vl"])
def test_the_bound_has_every_matrix_of_the_text_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path, family, tokenizer=False, max_shard_size="100KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = load_linear_weights(tmp_path)
    assert weights.num_elements == sum(module.weight.numel() for module in linear)
    num_layers = find_model(str(tmp_path), tmp_path).num_layers
    half = load_linear_weights(tmp_path, num_layers // 2)
    assert 0 < len(half.layers) < len(weights.layers)
    inputs = {width: torch.randn(5, width) for width in weights.widths}
    for form in get_args(Form):
        weights.in_form(form).multiply_layers(inputs, 5)


def test_a_form_that_is_slow_is_tried_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = 0.0, Counter[Form]()

    def multiply(weights: LinearWeights, inputs: dict[int, torch.Tensor], num_rows: int) -> None:
        nonlocal now
        now += {"plain order": 3.0, "oneDNN's order": 1.5, "panels": 1.0}[weights.form]
        tried[weights.form] += 1

    monkeypatch.setattr(linear_weights, "perf_counter", lambda: now)
    monkeypatch.setattr(LinearWeights, "multiply_layers", multiply)
    weights = load_linear_weights(checkpoint, dtype=torch.float32)
    assert weights.head.dtype is weights.layers[0].dtype is torch.float32
    inputs = {width: torch.randn(2, width) for width in weights.widths}
    assert weights.fastest_form(inputs) == "panels"
    assert tried == {"plain order": 1, "oneDNN's order": 5, "panels": 5}


@pytest.mark.exhaustive
def test_modules_of_transformers_by_cpu_time(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "result.json"
    options = [
        *("--prompts", "2", "--prompt-len", "9", "--output-len", "0", "--rounds", "1"),
        *("--model-impl", "transformers", "--cpu-time", "--json", str(document)),
        *("--bound-dtype", "float32"),
    ]
    assert run_bench(checkpoint, *options) == 0
    table = capsys.readouterr().out
    assert "CPU seconds (min-max)" in table
    (bound,) = (line for line in table.splitlines() if line.startswith("bound"))
    assert "M weights, float32, " in bound
    (result,) = json.loads(document.read_text())["results"]
    assert result["profile"]["seconds"]["recurrent"] == 0  # the module's own


def test_every_kernel_belongs_to_a_part() -> None:
    for module in pkgutil.iter_modules(vllm.ops.__path__, "vllm.ops."):
        if not module.ispkg and not module.name.startswith("vllm.ops._"):  # but for libraries
            importlib.import_module(module.name)
    operations = all_operations()
    modules = {operation.body.__module__.rpartition(".")[2] for operation in operations.values()}
    assert set(profile.OPERATION_PARTS) <= {*operations, *modules}
    ours = [one for one in operations.values() if one.body.__module__.startswith("vllm.ops.")]
    parts = {one.name: profile.part_of(one) for one in ours}
    others = {name for name, part in parts.items() if part == "other"}
    assert others == {"copy_blocks", "meet_ranks"}
    assert parts["norm_and_rotate"] == "attention"
    assert set(profile.OPERATION_PARTS.values()) < set(profile.PARTS)


def test_stopwatch_counts_inner_calls_once_and_puts_methods_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(profile, "perf_counter", lambda: now)

    class Machine:
        def outer(self) -> str:
            nonlocal now
            now += 2.0
            try:
                self.inner()
            except ValueError:
                now += 1.0
            return "done"

        def inner(self) -> None:
            nonlocal now
            now += 5.0
            raise ValueError

    machine, stopwatch = Machine(), profile.Stopwatch()
    with stopwatch.watch(machine, {"outer": "a", "inner": "b"}):
        assert machine.outer() == "done"
    machine.outer()
    assert stopwatch.seconds == {"a": 3.0, "b": 5.0}
    assert not vars(machine)


@pytest.mark.parametrize("num_recurrent_layers", [0, 18])
def test_scheduler_alone_keeps_a_floor(num_recurrent_layers: int) -> None:
    # Far below what any machine gives: it fails when a step grows with the queue. A machine that
    # others use too may delay a step of some runs.
    speeds = [scheduler_alone.run_queue(2000, num_recurrent_layers) for _ in range(3)]
    assert min(speed.requests_per_second for speed in speeds) > 300
    first = min(speed.first_step_seconds for speed in speeds)
    assert first < 20 * min(speed.last_step_seconds for speed in speeds)


def test_targets_exit_status_follows_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler_alone, "settle_garbage_collector", lambda: None)
    monkeypatch.setattr(scheduler_alone, "QUEUES", (100, 200))
    monkeypatch.setattr(scheduler_alone, "POOLS", {"dense": (0, 30_000)})
    document = tmp_path / "rows.json"
    status = targets.main(["--only", "scheduler", "--rounds", "1", "--json", str(document)])
    rows = json.loads(document.read_text())["rows"]
    rate, flatness = rows
    assert rate["is_met"] == (rate["measured"] >= 30_000)
    assert flatness["is_met"] == (flatness["measured"] >= scheduler_alone.LEAST_SHARE_OF_FASTEST)
    assert status == (0 if rate["is_met"] and flatness["is_met"] else 1)
    table = capsys.readouterr().out
    assert table.count("MISSED") == sum(not row["is_met"] for row in rows)


def test_transformers_is_asked_in_its_fastest_way(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the size of a batch, then all layers or selected ones, which are the same rows."""
    seconds = {(1, True): 3.0, (2, True): 2.0, (4, True): 4.0, (2, False): 1.0}
    asked: list[Any] = []

    def run(self: Any, prompts: Prompts) -> Round:
        asked.append(self._asked)
        return Round(seconds[self._batch_size, self._asked is True])

    with monkeypatch.context() as patched:
        patched.setattr(TransformersContender, "run", run)
        workload = Workload(checkpoint, 64, layer_ids=(3, 1), num_prompts=4, prompt_len=9)
        contender = TransformersContender(workload)
        assert contender.note == "batches of 2, selected layers" and contender._asked == [3, 1]
        assert asked.count([3, 1]) == 1
        seconds[2, False] = 5.0
        assert TransformersContender(workload).note == "batches of 2, all layers"
    assert contender.run(workload.prompts(1)).seconds > 0
    ids = torch.tensor(workload.prompts(1)[:2])
    selected, every = (
        contender._model(input_ids=ids, output_hidden_states=form).hidden_states
        for form in ([3, 1], True)
    )
    assert all(torch.equal(selected[i], every[i]) for i in (3, 1)) and selected[2] is None


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
def test_transformers_runs_with_settings_of_torch_of_its_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    workload = Workload(checkpoint, vocabulary=64, layer_ids=(1,), num_prompts=1, prompt_len=4)
    for kind, expected in (("transformers", b"0"), ("bound", b"1")):
        with rounds.ContenderProcess(rounds.Entry(kind, CONTENDERS[kind], workload)) as contender:
            # Only now is it certain that the child has replaced its parent's image by its own.
            contender.wait_until_loaded()
            variables = Path(f"/proc/{contender._process.pid}/environ").read_bytes().split(b"\0")
            assert b"THP_MEM_ALLOC_ENABLE=" + expected in variables
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"

"""``vllm extract`` as a person runs it, with the real engine."""

from __future__ import annotations

import importlib.metadata
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import extraction_config, greedy, rows_of
from tests.extract.job_harness import digests, write_jsonl
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.extract import parse_extract_arguments
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.resolve import Resolved
from vllm.hidden_states.dataset import HiddenStatesDataset

LAYERS = [0, 2, 4]
ENGINE: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}


def texts(seed: int, count: int, longest: int = 300) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdeπ \n", k=rng.randrange(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records: list[Any] = [{"text": text} for text in texts(1, 40)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", records)


def run_real(
    model: Path, data: Path, output: Path, max_model_len: int = 512, **options: Any
) -> int:
    settings = {"layers": "0,2,last", "shard_size_gib": 2e-4, **options}
    arguments = ExtractOptions(input=[str(data)], output=str(output), **settings)
    engine_args = {**ENGINE, "max_model_len": max_model_len, "kv_cache_memory_bytes": 2**27}
    return run_job(arguments, EngineArgs(model=str(model), **engine_args))


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "vllm.entrypoints.cli.main", "extract", str(model)]
    flags = {"input": data, "output": output, "layers": "0,2,last", "shard-size-gib": 2e-4}
    flags |= {"max-model-len": 512, "kv_cache_memory_bytes": "16MiB"}
    return [
        *start,
        *(
            part
            for name, value in flags.items()
            if f"--{name}" not in more
            for part in (f"--{name}", str(value))
        ),
        *more,
    ]


@pytest.fixture(scope="module")
def offline_rows(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The rows of the same prompts from LLM.generate with a connector."""
    folder = tmp_path_factory.mktemp("files")
    with LLM(str(tiny_llama), **ENGINE, **extraction_config(LAYERS, folder)) as llm:
        outputs = llm.generate(list(texts(1, 40)), greedy(), use_tqdm=False)  # type: ignore[arg-type]
    return [rows_of(output) for output in outputs]


@pytest.fixture(scope="module")
def undisturbed(
    tiny_llama: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    output = tmp_path_factory.mktemp("undisturbed")
    assert run_real(tiny_llama, data, output) == 0
    return digests(output)


@pytest.mark.parametrize("form", ["sharded", "files", "speculators"])
def test_rows_are_those_of_generate(
    form: str, tiny_llama: Path, data: Path, tmp_path: Path, offline_rows: list[torch.Tensor]
) -> None:
    run_real(tiny_llama, data, tmp_path, format=form)
    dataset = HiddenStatesDataset(tmp_path, verify="first_read")
    assert len(dataset) == len(offline_rows)
    for sample, rows in zip(dataset, offline_rows, strict=True):
        assert torch.equal(sample.hidden_states, rows)


def documentation(count: int) -> list[str]:
    """The beginnings of texts that came with the installed packages, 20 to 4,000 characters."""
    rng = random.Random(3)
    texts = [str(one.metadata.get_payload()) for one in importlib.metadata.distributions()]
    whole = sorted({text for text in texts if len(text) > 20})
    chosen = (rng.choice(whole) for _ in range(count))
    # Few are long: the logarithm of the length is even.
    return [text[: int(20 * 200 ** rng.random())].strip() or "-" for text in chosen]


@pytest.mark.parametrize("count", [50, at_night(1000)])
def test_documents(count: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=16384)
    prompts = documentation(count)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in prompts])
    assert run_real(model, data, tmp_path / "output", 16384, shard_size_gib=0.01) == 0
    dataset = HiddenStatesDataset(tmp_path / "output", verify="first_read")
    assert len(dataset) == count
    engine = {**ENGINE, "max_model_len": 16384, "kv_cache_memory_bytes": 2**27}
    with LLM(str(model), **engine, **extraction_config(LAYERS, tmp_path / "files")) as llm:
        for first in range(0, count, 100):  # not to have all files at once
            outputs = llm.generate(prompts[first : first + 100], greedy(), use_tqdm=False)  # type: ignore[arg-type]
            for index, output in enumerate(outputs, first):
                assert torch.equal(dataset[index].hidden_states, rows_of(output))
                Path(output.kv_transfer_params["hidden_states_path"]).unlink()  # type: ignore[index]


def test_rows_of_chosen_positions_in_fp8(
    tiny_llama: Path, data: Path, tmp_path: Path, offline_rows: list[torch.Tensor]
) -> None:
    run_real(tiny_llama, data, tmp_path, positions="last", storage_dtype="fp8")
    for sample, rows in zip(HiddenStatesDataset(tmp_path), offline_rows, strict=True):
        restored = sample.rows(torch.float32)
        assert sample.positions.tolist() == [len(rows) - 1]
        error = torch.linalg.vector_norm(restored - rows[-1:], dim=-1)
        assert (error / torch.linalg.vector_norm(rows[-1:], dim=-1)).max() <= 0.04
        assert torch.cosine_similarity(restored, rows[-1:], dim=-1).min() >= 0.999


def test_loss_masks_beside_all_rows(tiny_llama: Path, tmp_path: Path) -> None:
    masks = [[i % 3 == 0 for i in range(n)] for n in (5, 31, 2)]
    records = [{"input_ids": [7] * len(one), "loss_mask": [*map(int, one)]} for one in masks]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    assert run_real(tiny_llama, data, tmp_path / "output", positions="every:2") == 0
    for sample, mask in zip(HiddenStatesDataset(tmp_path / "output"), masks, strict=True):
        assert sample.loss_mask is not None and sample.loss_mask.tolist() == mask[::2]


def test_verify(
    tiny_llama: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_real(tiny_llama, data, tmp_path / "good", verify=4) == 0
    assert "within 1.00e-04" in capsys.readouterr().out
    other = make_checkpoint(tmp_path / "other", "llama", seed=3)
    options: dict[str, Any] = {"verify": 4, "storage_dtype": "bfloat16"}
    assert run_real(other, data, tmp_path / "rounded", **options) == 0
    weights = other / "model.safetensors"
    weights.write_bytes(make_checkpoint(tmp_path / "third", "llama", seed=4)
                        .joinpath("model.safetensors").read_bytes())  # fmt: skip
    from vllm.config import ModelConfig
    from vllm.entrypoints.extract.recompute import verify_samples

    assert verify_samples(tmp_path / "rounded", 4, 0, ModelConfig(model=str(other))) == 1
    assert "BEYOND" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["quantization", "head_quantization"])
def test_rounded_weights_are_not_compared(
    option: str, tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    message = f"verify=4 is not valid; {option}='int8' makes another model"
    arguments = command(tiny_llama, data, tmp_path / "o", f"--{option}", "int8", "--verify", "4")
    parsed = parse_extract_arguments(arguments[4:])
    with pytest.raises(ValueError, match=message):
        run_job(parsed.options, parsed.engine)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("storage_dtype", "limit"), [("float32", "1.00e-04"), ("float16", "1.10e-03")]
)
def test_verify_against_transformers(
    storage_dtype: str, limit: str, tiny_llama: Path, data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"layers": "0,2,last,norm", "storage_dtype": storage_dtype}
    assert run_real(tiny_llama, data, tmp_path / "output", **options) == 0
    capsys.readouterr()

    def verify(model: Path, directory: Path, *arguments: str) -> int:
        against = ["--against", "transformers", str(model)]
        return main(["hidden-states", "verify", *against, str(directory), *arguments])

    assert verify(tiny_llama, tmp_path / "output", "--samples", "3", "--seed", "1") == 0
    printed = capsys.readouterr().out
    assert "Worst errors of 3 samples" in printed
    assert printed.count(f"within {limit}") == 4
    files = ["convert", str(tmp_path / "output"), str(tmp_path / "files"), "--format", "files"]
    assert main(["hidden-states", *files]) == 0
    assert verify(tiny_llama, tmp_path / "files") == 0, "converted"
    for path in (tmp_path / "files").glob("*.json"):
        path.unlink()
    assert verify(tiny_llama, tmp_path / "files") == 0, "a plain folder of files"
    paths = sorted((tmp_path / "files").glob("*.safetensors"))
    for path, dtype in zip(paths[1:], (torch.bfloat16, torch.float64), strict=False):
        tensors = load_file(path)
        tensors["hidden_states"] = tensors["hidden_states"].to(dtype)
        save_file(tensors, path, {"layer_ids": '[0, 2, 4, "norm"]'})
    assert verify(tiny_llama, tmp_path / "files") == 0, "files of several dtypes"
    capsys.readouterr()
    assert verify(make_checkpoint(tmp_path / "other", "llama", seed=3), tmp_path / "output") == 1
    assert capsys.readouterr().out.count("BEYOND") == 4
    deeper = make_checkpoint(tmp_path / "deeper", "llama", num_hidden_layers=6)
    with pytest.raises(SystemExit) as ended:
        verify(deeper, tmp_path / "output")
    assert ended.value.code == 2
    assert "deeper has 6 layers of width" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gpt2", "openai_gpt", "rwkv", "xlstm"])
def test_verify_finds_the_layers_by_any_name(family: str, data: Path, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", family)
    options: dict[str, Any] = {"layers": ":", "on_long": "truncate", "max_samples": 3, "verify": 3}
    assert run_real(model, data, tmp_path / "output", 64, **options) == 0


def test_two_real_engines(
    tiny_llama: Path, data: Path, tmp_path: Path, undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    options = ExtractOptions(
        input=[str(data)], output=str(tmp_path), layers="0,2,last", shard_size_gib=2e-4
    )
    assert run_job(options, EngineArgs(model=str(tiny_llama), data_parallel_size=2, **ENGINE)) == 0
    assert digests(tmp_path) == undisturbed


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def wait_for_units(process: subprocess.Popen[bytes], output: Path, count: int) -> None:
    """Until so many units are committed, or the process has ended."""
    while process.poll() is None and len(list(output.glob("units/unit-*"))) < count:
        time.sleep(0.001)


@pytest.mark.parametrize(
    "signals",
    [
        [(4, signal.SIGINT)],
        [(4, signal.SIGTERM)],
        at_night([(1, signal.SIGKILL), (4, signal.SIGINT), (6, signal.SIGKILL)]),
    ],
    ids=["interrupted", "terminated", "killed and interrupted"],
)
def test_killed_and_interrupted(
    signals: list[tuple[int, signal.Signals]],
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
    undisturbed: dict[str, str],
) -> None:
    """``signals``: after how many units each process gets which."""
    arguments = command(tiny_llama, data, tmp_path)
    for count, number in signals:
        process = start(arguments)
        wait_for_units(process, tmp_path, count)
        process.send_signal(number)
        _, log = process.communicate(timeout=60)
        clean = {signal.SIGINT: 130, signal.SIGTERM: 143}
        assert process.returncode == clean.get(number, -number)
        assert b"Traceback" not in log and b"\r" not in log
        assert log.startswith(f"vllm extract: loading {tiny_llama}\n".encode())
        if number in clean:
            assert b"interrupted; run the same command again to resume\n" in log
            assert not list(tmp_path.rglob(".*.tmp"))
        assert not (tmp_path / "manifest.json").exists()
    assert run_real(tiny_llama, data, tmp_path) == 0
    assert digests(tmp_path) == undisturbed


@pytest.mark.exhaustive
def test_two_engines_are_terminated(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    arguments = command(tiny_llama, data, tmp_path, "--data-parallel-size", "2")
    process = start(arguments)
    wait_for_units(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 143, log
    assert b"Traceback" not in log and not list(tmp_path.rglob(".*.tmp"))


def test_mistakes_end_with_status_2(
    tiny_llama: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistakes = [
        (["--positions", "every"], "positions='every': use all, last, mask, generated, or every:K"),
        (["--format", "speculators", "--positions", "last"], "format='speculators' trains from"),
        (["--kv-transfer-config", "{}"], "unrecognized arguments: --kv-transfer-config"),
        (["--rank", "2", "--world-size", "2"], "rank=2 is not valid; world_size is 2"),
        (["--rank", "0", "--world-size", "2", "--verify", "1"], "verify=1 is not valid"),
        (["--merge", "--verify", "1"], "verify=1 is not valid; merge computes nothing"),
        (["--merge", "--dry-run"], "dry_run=True is not valid; merge computes nothing"),
        (["--merge", "--append"], "append=True is not valid; merge computes nothing"),
        (["--stream-timeout", "5"], "stream_timeout=5.0 is not valid; it belongs to stream"),
        (["--id-column", "id"], "id_column='id' is not valid"),
        (["--input", "a", "--input=b"], "--input is given more than once"),
        (["--mask-column", "m", "--no-loss-mask"], "mask_column='m' is not valid"),
        (["--shard-size-gib", "0"], "shard_size_gib=0.0 is not valid"),
        (["--shard-size-gib", "inf"], "shard_size_gib=inf is not valid; use a finite number"),
    ]
    for flags, message in mistakes:
        with pytest.raises(SystemExit) as ended:
            parse_extract_arguments(command(tiny_llama, data, tmp_path, *flags)[4:])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_extract_arguments([str(tiny_llama), "--output", "x", "--layers", "2"])
    assert "--input is missing" in capsys.readouterr().err
    merge = parse_extract_arguments(["--merge", "--output", "x"])
    assert merge.options.merge


@pytest.mark.parametrize("layers", ["-1", "-1,-2", "-4:", "-4:-1,last"])
def test_layers_from_the_end(layers: str) -> None:
    flags = ["m", "--input", "f", "--output", "o"]
    for given in (["--layers", layers], [f"--layers={layers}"]):
        assert parse_extract_arguments([*flags, *given]).options.layers == layers


def test_layers_that_are_not_there(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'7' does not exist in a model of 4 layers"):
        run_real(tiny_llama, data, tmp_path, layers="2,7")
    with pytest.raises(ValueError, match=r"end the list with 4 \('last'\)"):
        run_real(tiny_llama, data, tmp_path, layers="4,2", format="speculators")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-samples", "ten"], "'ten' is not a whole number; use one such as 1000 or 32k"),
        (["--output", "o", "--layers", "1"], "--input is missing; name files"),
        (["--output", "o", "--input", "f"], "--layers is missing; name layers"),
        (["--layers", "1", "--input", "f"], "--output is missing; name the folder"),
    ],
)
def test_what_a_wrong_command_is_told(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_extract_arguments(["m", *flags])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"distributed_executor_backend": "external_launcher"}, 1, "each process would write"),
        ({"nnodes": 2, "data_parallel_size": 2}, 1, "nnodes=2 .* with data_parallel_size=1 only"),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2},
            1,
            "enable_expert_parallel=True .* with data_parallel_size=1 only",
        ),
        ({}, 2, "VLLM_DP_SIZE: unset it"),
    ],
)
def test_launches_that_would_write_one_dataset_twice(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    size: int,
    message: str,
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", str(size))
    args = EngineArgs(model=str(tiny_llama), **options)
    resolved = Resolved(ExtractOptions(input=["data.jsonl"], output="out", layers="1"), args)
    with pytest.raises(ValueError, match=message):
        _ = resolved.vllm_config

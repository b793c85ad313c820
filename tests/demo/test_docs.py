"""Everything in README and docs can be pasted: code and commands run, links lead somewhere.

Blocks marked ``python`` and ``console`` run as they stand, apart from the checkpoint, the storage
folder and the port. Fragments are marked ``py``; commands that take long, or whose words stand for
others, are indented, and only parsed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from tests.models.checkpoints import make_checkpoint
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.entrypoints.cli.extract import parse_extract_arguments
from vllm.entrypoints.cli.hidden_states import build_hidden_states_parser
from vllm.entrypoints.cli.models import build_models_parser
from vllm.entrypoints.cli.serve_arguments import parse_serve_arguments
from vllm.entrypoints.extract.job import run_job
from vllm.hidden_states import HiddenStatesDataset
from vllm.v1.rows.file import write_hidden_states

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODELS = re.compile(r"Qwen/Qwen3[\w.-]*|path/or/hub-id|\bMODEL\b")
NUM_LAYERS = 24


class Block(NamedTuple):
    """Code of a page, and where it begins."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fenced(language: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            yield Block(page, text.count("\n", 0, found.start()) + 2, found[1])


def commands() -> Iterator[Block]:
    """Every command line of ours, fenced, indented, or quoted in a sentence."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        pattern = (
            r"^(?:    )?(vllm (?:serve|extract|models|hidden-states) [^`]*?)(?:  #.*)?$(?!\n {6})"
        )
        for found in re.finditer(pattern, text, re.MULTILINE):
            yield Block(page, text.count("\n", 0, found.start()) + 1, found[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages speak of: a model, prompts, a request's file, a dataset."""
    folder = tmp_path_factory.mktemp("docs")
    make_checkpoint(
        folder / "model", "llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=8192
    )
    lines = [json.dumps({"text": f"Text {number}."}) for number in range(8)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    path = folder / "hidden_states" / "request.safetensors"
    path.parent.mkdir()
    tensors = {"hidden_states": torch.ones(2, 3, 4), "token_ids": torch.arange(2)}
    write_hidden_states(str(path), tensors, {})
    Path(f"{path}.lock").touch()
    (block,) = [one for one in commands() if one.page == PAGES[0] and "extract" in one.code]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        arguments = parse_extract_arguments(shlex.split(adapted(block, folder))[2:])
        assert run_job(arguments.options, arguments.engine) == 0
    return folder


def adapted(block: Block, place: Path) -> str:
    code = MODELS.sub(str(place / "model"), block.code)
    return code.replace("/data/hidden_states", str(place / "files"))


@pytest.mark.parametrize("block", list(fenced("python")), ids=str)
def test_code_can_be_pasted(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = place / "block.py"
    script.write_text("\n" * (block.line - 1) + adapted(block, place))
    runpy.run_path(str(script), run_name="__main__")


SERVER = "http://localhost:8000"
CONSOLE = list(fenced("console"))
SECONDS = 180.0


def start(block: Block, place: Path, folder: Path, more: str = "") -> subprocess.Popen[str]:
    """Run a block in bash, with this interpreter's ``vllm``, in ``folder``."""
    command = folder / "bin" / "vllm"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
    command.chmod(0o755)
    variables = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["bash", "-ec", adapted(block, place).rstrip() + more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Run a block and return its output; a command that fails fails the test."""
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
def desk(place: Path, tmp_path: Path) -> Path:
    """A folder with the input and the dataset that blocks name; blocks may write here."""
    shutil.copy(place / "data.jsonl", tmp_path)
    lines = [json.dumps({"text": f"One more text: {number}."}) for number in range(3)]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    shutil.copytree(place / "out", tmp_path / "out")
    return tmp_path


@pytest.mark.parametrize(
    "block", [b for b in CONSOLE if "serve" not in b.code and SERVER not in b.code], ids=str
)
def test_commands_can_be_pasted(block: Block, place: Path, desk: Path) -> None:
    appends = "--append" in block.code
    if "vllm extract" in block.code and not appends:  # into a new folder
        shutil.rmtree(desk / "out")
    assert finished(start(block, place, desk))
    if "vllm extract" in block.code:
        dataset = HiddenStatesDataset(desk / "out")
        layers = re.search(r"--layers (\S+)", block.code)
        assert layers is not None and len(dataset) == (11 if appends else 8)
        assert len(dataset.layer_ids) == layers[1].count(",") + 1


@pytest.mark.parametrize("block", [b for b in CONSOLE if "vllm serve" in b.code], ids=str)
def test_servers_and_their_requests_can_be_pasted(block: Block, place: Path, desk: Path) -> None:
    """The requests below a server, up to the next server on the page, are sent to it."""
    below = [b for b in CONSOLE if b.page == block.page and b.line > block.line]
    requests = list(itertools.takewhile(lambda b: "vllm serve" not in b.code, below))
    requests = [b for b in requests if SERVER in b.code]
    assert requests and all(b.code.startswith("curl ") for b in requests)
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://localhost:{probe.getsockname()[1]}"
    server = start(block, place, desk, f" --port {url.rpartition(':')[2]} --max-model-len 512")
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(url):
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for request in requests:
            sent = request._replace(code=request.code.replace("curl ", "curl -sS ", 1))
            sent = sent._replace(code=sent.code.replace(SERVER, url))
            reply = json.loads(finished(start(sent, place, desk)))
            if "/v1/embeddings" in request.code:
                assert [len(item["embedding"]) > 1 for item in reply["data"]] == [True] * 2
                continue
            path = reply["kv_transfer_params"]["hidden_states_path"]
            assert load_hidden_states(path)["hidden_states"].shape[1] == 4
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        log = finished(server)
    assert "Application shutdown complete" in log


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_every_block_is_run_or_marked_as_a_fragment() -> None:
    for page in PAGES:
        marks = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert not set(marks[::2]) - {"python", "py", "console"}, page
        assert not set(marks[1::2]) - {""}, page
    assert len(CONSOLE) > 6 and any("vllm models" in block.code for block in CONSOLE)


@pytest.mark.parametrize("block", list(commands()), ids=str)
def test_commands_are_understood(block: Block, place: Path) -> None:
    code = adapted(block, place)
    if "hidden-states" in code:  # without what is optional, with the first of several values
        code = re.sub(r" \[.*?\]|\|\w+|DTYPE", "", code)
    _, command, *arguments = shlex.split(code)
    parse = {
        "serve": parse_serve_arguments,
        "extract": parse_extract_arguments,
        "models": build_models_parser().parse_args,
        "hidden-states": build_hidden_states_parser().parse_args,
    }
    parse[command](arguments)  # SystemExit: it does not know a flag


def test_files_that_are_named_exist() -> None:
    """Capitals in a name stand for others, as in ``csrc/cpu/TOPIC.cpp``."""
    elsewhere = "CHANGELOG.md", "upstream_tests.md"  # files of the past, and of another tree
    named = re.compile(r"`((?:vllm|tests|examples|benchmarks|csrc|docs|packaging)/[\w./*-]+)`")
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        if page.name not in elsewhere and "journal" not in page.parts
        for path in named.findall(page.read_text())
        if not re.search(r"[A-Z]{4}", path) and not list(ROOT.glob(path.rstrip("/")))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {
                re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads
            }
            assert anchor in anchors, target

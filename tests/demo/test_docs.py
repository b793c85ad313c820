"""Everything in README and docs can be pasted: code runs, commands parse, links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.models.checkpoints import make_checkpoint
from vllm.entrypoints.cli.extract import parse_extract_arguments
from vllm.entrypoints.cli.hidden_states import build_hidden_states_parser
from vllm.entrypoints.cli.models import build_models_parser
from vllm.entrypoints.cli.serve_arguments import parse_serve_arguments
from vllm.entrypoints.extract.job import run_job
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

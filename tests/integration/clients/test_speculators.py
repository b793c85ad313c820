"""speculators 0.9 from the registry, unmodified, against ``vllm serve``.

About 70 s for each model on two cores, half of it training, once the clients' environment is there
(a minute).
Training goes as far as a CPU allows: unmodified up to where the trainer moves its model to device
number 0, before the first request; with three places replaced (train_on_cpu.py) all the way:
loader workers that extract while it trains, validation, a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.engine.harness import greedy, rows_of
from tests.entrypoints.serve_process import ServeProcess
from tests.integration.clients.conversations import (
    TOOLS,
    Message,
    make_conversations,
    tool_conversation,
    write_openai,
    write_sharegpt,
    write_with_tools,
)
from tests.integration.clients.environment import ClientEnvironment, as_arguments
from tests.integration.launcher import LAYERS, engine_options, make_verifier, serve
from vllm import LLM

SEQ_LENGTH = 700
CONCURRENCY = 32
TRAIN_STEPS = 4
READ_DATASET = """
import json, sys
from datasets import load_from_disk
rows = load_from_disk(sys.argv[1]).with_format(None)
print(json.dumps([[row["input_ids"], row["loss_mask"]] for row in rows]))
"""


@dataclass
class Site:
    """A server and what its clients work on."""

    model: Path
    folder: Path
    server: ServeProcess
    clients: ClientEnvironment
    conversations: list[list[Message]]
    with_tools: list[list[Message]]

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def endpoint(self) -> str:
        return f"{self.server.url}/v1"


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    clients: ClientEnvironment,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_verifier(folder / "model", request.param)
    conversations = make_conversations(60, seed=3)
    with_tools = [tool_conversation(number) for number in range(8)]
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--api-server-count", "4", "--renderer-num-workers", "2")
    with serve(model, folder / "storage", *flags) as server:
        yield Site(model, folder, server, clients, conversations, with_tools)


@pytest.fixture(scope="module")
def dataset(site: Site) -> list[tuple[list[int], list[int]]]:
    """Ids and loss mask of each row that ``prepare-data`` makes of the conversations."""
    folder = site.folder
    files = [
        write_openai(folder / "openai.jsonl", site.conversations[:40]),
        write_sharegpt(folder / "sharegpt.jsonl", site.conversations[40:]),
        write_with_tools(folder / "tools.jsonl", site.with_tools),
    ]
    site.clients.speculators(
        "prepare-data", model=site.model, data=files, output=folder / "data",
        seq_length=SEQ_LENGTH, render_endpoint=site.server.url, num_preprocessing_workers=2,
    )  # fmt: skip
    read = site.clients.run("python", "-c", READ_DATASET, str(folder / "data"))
    assert read.returncode == 0, read.stdout
    return [(ids, mask) for ids, mask in json.loads(read.stdout.splitlines()[-1])]


def rendered_turns(site: Site) -> set[tuple[tuple[int, ...], int]]:
    """For each assistant's turn: ids up to its end (cut to SEQ_LENGTH), where its answer begins."""
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    turns = set()
    for conversation in site.conversations + site.with_tools:
        tools = TOOLS if conversation in site.with_tools else None
        messages = [parsed_arguments(message) for message in conversation]
        for end, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            options: dict[str, Any] = {"tools": tools, "tokenize": True, "return_dict": False}
            prompt = tokenizer.apply_chat_template(
                messages[:end], add_generation_prompt=True, **options
            )
            whole = tokenizer.apply_chat_template(messages[: end + 1], **options)
            if len(prompt) < SEQ_LENGTH:
                turns.add((tuple(whole[:SEQ_LENGTH]), len(prompt)))
    return turns


def parsed_arguments(message: Message) -> Message:
    calls = [
        {"function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def test_prepare_data(site: Site, dataset: list[tuple[list[int], list[int]]]) -> None:
    """Every turn is there, as transformers renders it, and only its answer is trained on."""
    found = {(tuple(ids), mask.index(1)) for ids, mask in dataset}
    assert found == rendered_turns(site)
    for ids, mask in dataset:
        assert len(mask) == len(ids) <= SEQ_LENGTH
        assert mask == sorted(mask)
    assert len(dataset) > 80 and max(len(ids) for ids, _ in dataset) == SEQ_LENGTH


def test_generate_offline_data(site: Site, dataset: list[tuple[list[int], list[int]]]) -> None:
    """Every file that the client keeps is bit for bit what the offline engine writes."""
    output = site.folder / "hidden_states"
    printed = site.clients.speculators(
        "generate-offline-data", model=site.model, preprocessed_data=site.folder / "data",
        endpoint=site.endpoint, output=output, concurrency=CONCURRENCY, validate_outputs=True,
        max_retries=0, fail_on_error=True,
    )  # fmt: skip
    assert f"Saved {len(dataset)} new data points" in printed
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids, _ in dataset]
    reference = site.folder / "reference"
    with LLM(str(site.model), **engine_options(reference)) as llm:
        expected = llm.generate(prompts, greedy(1), use_tqdm=False)
    for index, (ids, _) in enumerate(dataset):
        tensors = load_file(output / f"hs_{index}.safetensors")
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert tensors["token_ids"].tolist() == ids
        assert tensors["hidden_states"].shape[:2] == (len(ids), len(LAYERS))
        assert torch.equal(tensors["hidden_states"], rows_of(expected[index]))
    assert list(site.storage.iterdir()) == [], "the client took every file and every lock"


def test_regenerate_responses(site: Site, dataset: list[tuple[list[int], list[int]]]) -> None:
    """Answers to every turn; they are training rows that prepare-data takes as they are."""
    outfile = site.folder / "regenerated.jsonl"
    # Otherwise answers of random weights end for their length, and then so does the conversation.
    sampling = {"stop_token_ids": list(range(0, 256, 2)), "min_tokens": 8, "temperature": 1.0}
    printed = site.clients.speculators(
        "regenerate-responses", endpoint=f"{site.endpoint}/chat/completions",
        dataset=site.folder / "openai.jsonl", concurrency=CONCURRENCY, max_tokens=200,
        sampling_params=json.dumps(sampling), outfile=outfile, max_retries=0,
    )  # fmt: skip
    assert "40 conversations (40 ok, 0 errors, " in printed
    rows = [json.loads(line) for line in outfile.read_text().splitlines()]
    num_turns = sum(len(turns) // 2 for turns in site.conversations[:40])
    # The client ends a conversation whose answer it finds cut off.
    assert 40 < len(rows) <= num_turns
    assert {row["primary_id"] for row in rows} == {str(number) for number in range(40)}
    tokenizer = AutoTokenizer.from_pretrained(site.model)
    for row in rows:
        if row["id"].endswith("_gen0"):
            first = site.conversations[int(row["primary_id"])][:1]
            prompt = tokenizer.apply_chat_template(
                first, add_generation_prompt=True, return_dict=False
            )
            assert row["input_ids"][: len(prompt)] == prompt
            assert row["loss_mask"].index(1) == len(prompt)
        assert sum(row["loss_mask"]) == row["metadata"]["usage"]["completion_tokens"] >= 8
    remove_files(site.storage)


def train_arguments(site: Site) -> list[str]:
    return as_arguments(
        {
            "speculator_type": "eagle3",
            "verifier_name_or_path": site.model,
            "data_path": site.folder / "data",
            "hidden_states_path": site.folder / "nothing_cached",
            "vllm_endpoint": site.endpoint,
            "on_missing": "generate",
            "on_generate": "delete",
            "total_seq_len": SEQ_LENGTH,
            "draft_attn_impl": "eager",
            "loss_implementation": "eager",
            "num_workers": 2,
            "prefetch_factor": 1,
            "epochs": 1,
            "max_steps": TRAIN_STEPS,
            "log_freq": 1,
            "save_path": site.folder / "draft",
        }
    )


@pytest.mark.usefixtures("dataset")
def test_online_training(site: Site) -> None:
    unmodified = site.clients.run("speculators", "train", *train_arguments(site))
    assert "Cannot access accelerator device when none is available" in unmodified.stdout
    program = str(Path(__file__).with_name("train_on_cpu.py"))
    before = files_written(site)
    done = site.clients.run("python", program, *train_arguments(site), TORCH_COMPILE_DISABLE="1")
    assert done.returncode == 0, done.stdout
    assert f"global_step={TRAIN_STEPS - 1}" in done.stdout
    assert done.stdout.count("train/error_records=0.00e+00") == TRAIN_STEPS
    assert files_written(site) >= before + TRAIN_STEPS
    assert list((site.folder / "draft").glob("*/model.safetensors"))


def files_written(site: Site) -> int:
    name = "vllm:hidden_states_files_written_total{"
    with site.server.client() as http:
        (line,) = [s for s in http.get("/metrics").text.splitlines() if s.startswith(name)]
    return int(float(line.split()[-1]))


def remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()

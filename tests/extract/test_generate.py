"""``vllm extract --generate``: on-policy data, with the same bytes from any worker."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine
from tests.extract.job_harness import digests, write_jsonl
from tests.grids import at_night
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.extract.generation import params_of
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states import HiddenStatesDataset, HiddenStatesSample, pad_samples
from vllm.hidden_states.convert import convert_dataset

Checkpoint = Callable[..., Path]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
QUESTION = {"role": "user", "content": "One?"}
RECORDS: list[Any] = [
    {"messages": [QUESTION, {"role": "assistant", "content": "Of others."}], "label": 1},
    {"text": "Once upon a time", "label": 2},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0], "label": 3},
    {"messages": [{"role": "assistant", "content": "No question."}]},
    {"conversations": [{"from": "human", "value": "Two?"}], "label": 4},
    *({"input_ids": list(range(10, 30 + count))} for count in range(9)),
]
SAMPLING: dict[str, Any] = {
    "max_tokens": 13,
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 50,
    "n": 2,
}
UNSET = {"max_tokens": 256, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 1}
LAYERS: list[Any] = ["norm", 1]


def generate(
    model: Path,
    data: Path,
    output: Path,
    data_parallel_size: int = 1,
    seed: int = 7,
    **options: Any,
) -> HiddenStatesDataset:
    """Run a job with the real engine."""
    merged: dict[str, Any] = {
        "input": [str(data)],
        "output": str(output),
        "layers": "norm,1",
        "generate": True,
        "chat_template": TEMPLATE,
        "shard_size_gib": 2e-5,
        **SAMPLING,
        **options,
    }
    args = EngineArgs(
        model=str(model),
        data_parallel_size=data_parallel_size,
        seed=seed,
        max_model_len=128,
        kv_cache_memory_bytes=2**22,
    )
    assert run_job(ExtractOptions(**merged), args) == 0
    return HiddenStatesDataset(output, verify="first_read")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", RECORDS)


@pytest.mark.parametrize("form", ["sharded", "files"])
def test_texts_rows_and_columns(
    form: str, checkpoint: Checkpoint, data: Path, tmp_path: Path
) -> None:
    model = checkpoint("qwen3_5")
    dataset = generate(model, data, tmp_path / "out", format=form, keep_columns=["label"])
    samples = list(dataset)
    assert [sample.record for sample in samples] == [r for r in range(14) if r != 3 for _ in "ab"]
    assert [sample.columns["choice"] for sample in samples] == [0, 1] * 13
    with engine(model, chat_template=TEMPLATE) as llm:
        tokenizer: Any = llm.get_tokenizer()
        for sample in samples:
            assert 0 < sample.num_generated_tokens <= 13
            (whole,) = llm.extract(sample.token_ids.tolist(), LAYERS)
            assert torch.equal(sample.hidden_states, whole.hidden_states)
            ids = sample.token_ids[sample.num_prompt_tokens :]
            answer = tokenizer.decode(ids, skip_special_tokens=True)
            check_columns(sample, answer, RECORDS[sample.record or 0])
            assert sample.loss_mask is not None
            places = torch.arange(len(sample.token_ids))
            assert sample.loss_mask.tolist() == (places >= sample.num_prompt_tokens).tolist()
            params = params_of(
                SamplingParams(**{**SAMPLING, "n": 1}), 7, sample.record or 0, sample.columns
            )
            prompt = sample.token_ids[: sample.num_prompt_tokens].tolist()
            (again,) = llm.extract(prompt, LAYERS, sampling_params=params)
            assert torch.equal(again.token_ids, sample.token_ids)
    texts = {tuple(sample.token_ids.tolist()) for sample in samples}
    assert len(texts) == len(samples)
    assert dataset["label"][:6] == [1, 1, 2, 2, 3, 3]
    assert pad_samples(samples[:3]).columns["finish_reason"][0] == "length"
    other = {"sharded": "files", "files": "sharded"}[form]
    convert_dataset(str(tmp_path / "out"), str(tmp_path / "other"), fmt=other)
    for one, sample in zip(HiddenStatesDataset(tmp_path / "other"), samples, strict=True):
        assert one.num_generated_tokens == sample.num_generated_tokens
        assert one.columns == sample.columns and torch.equal(one.token_ids, sample.token_ids)
    for command in ("verify", "inspect"):
        assert main(["hidden-states", command, str(tmp_path / "out")]) == 0


def check_columns(sample: HiddenStatesSample, answer: str, record: Any) -> None:
    columns = dict(sample.columns)
    assert columns["finish_reason"] in ("length", "stop")
    assert columns["num_generated_tokens"] == sample.num_generated_tokens
    messages = record.get("messages") or record.get("conversations")
    assert ("messages" in columns) == bool(messages)
    assert ("text" in columns) == ("text" in record)
    if messages:
        question, own = columns["messages"]
        assert question == {"role": "user", "content": messages[0].get("value", "One?")}
        assert own == {"role": "assistant", "content": answer}
    if "text" in record:
        assert columns["text"] == record["text"] + answer


@pytest.mark.parametrize("form", [at_night("sharded"), at_night("files")])
def test_any_worker_and_a_second_run_make_the_same_bytes(
    form: str, checkpoint: Checkpoint, data: Path, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    options: dict[str, Any] = {"format": form, "shuffle_seed": 3, "keep_columns": ["label"]}
    output = tmp_path / "out"
    generate(model, data, output, **options)
    expected = digests(output)
    generate(model, data, tmp_path / "two", data_parallel_size=2, **options)
    assert digests(tmp_path / "two") == expected
    victim = sorted(output.glob("*.safetensors"))[3]
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2])
    generate(model, data, output, **options)
    assert digests(output) == expected
    for name, value in (("temperature", 0.9), ("max_tokens", 12), ("n", 1), ("stop", ["x"])):
        there, now = (re.escape(json.dumps(one)) for one in (SAMPLING.get(name, []), value))
        with pytest.raises(ValueError, match=rf"sampling.{name}: '{there}' there, '{now}' now"):
            generate(model, data, output, **{**options, name: value})
    with pytest.raises(ValueError, match=r"sampling.seed: '7' there, '8' now"):
        generate(model, data, output, seed=8, **options)
    with pytest.raises(ValueError, match=r"sampling: 'true' there, None now"):
        generate(model, data, output, generate=False, **options, **UNSET)
    other = generate(model, data, tmp_path / "seeds", seed=8, **options)
    pairs = zip(other, HiddenStatesDataset(output), strict=True)
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in pairs)


def test_positions_stops_and_added_inputs(
    checkpoint: Checkpoint, data: Path, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    whole = list(generate(model, data, tmp_path / "all"))
    for positions, pooling in (("generated", "none"), ("last", "none"), ("generated", "mean")):
        output = tmp_path / f"{positions}-{pooling}"
        some = list(generate(model, data, output, positions=positions, pooling=pooling))
        for sample, full in zip(some, whole, strict=True):
            assert torch.equal(sample.token_ids, full.token_ids)
            rows = full.hidden_states[full.num_prompt_tokens :]
            if pooling == "mean":
                torch.testing.assert_close(sample.hidden_states, rows.mean(0, keepdim=True))
                continue
            rows = rows if positions == "generated" else rows[-1:]
            assert torch.equal(sample.hidden_states, rows)
            assert sample.loss_mask is not None and sample.loss_mask.all()
    letters = {text for one in whole for text in one.columns.get("text", "")[20:]}
    stops = sorted(letter for letter in letters if letter.isascii())
    cut = list(generate(model, data, tmp_path / "stop", stop=stops))
    assert {one.columns["finish_reason"] for one in cut} == {"length", "stop"}
    for sample, full in zip(cut, whole, strict=True):
        assert torch.equal(sample.hidden_states, full.hidden_states[: len(sample.token_ids)])
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "Another"}])
    generate(model, more, tmp_path / "all", append=True)
    assert len(HiddenStatesDataset(tmp_path / "all")) == len(whole) + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"generate": False, "temperature": 0.0},
            "temperature=0.0 is not valid; it needs generate",
        ),
        ({"generate": False, "stop": ["x"]}, "it needs generate"),
        ({"generate": False, "positions": "generated"}, "nothing is generated: use generate"),
        (
            {"generate": False, "keep_columns": ["num_generated_tokens"]},
            "keep_columns=.* rename it",
        ),
        ({"n": 2, "temperature": 0.0}, "n=2: has to be 1 when temperature=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 2.0}, "top_p=2.0: has to be in"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"positions": "mask"}, "positions='mask'.*use positions='generated'"),
        ({"mask_column": "m"}, "mask_column='m'"),
        ({"on_long": "truncate"}, "on_long='truncate'"),
        ({"keep_columns": ["text"]}, "keep_columns"),
        ({"format": "speculators"}, "format='speculators'"),
        ({"pack": 16}, "pack=16"),
        ({"split_turns": True}, "split_turns=True"),
        ({"mask": "last-answer"}, "mask='last-answer'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"input": ["x"], "output": "y", "layers": "1", "generate": True}
    with pytest.raises(ValueError, match=message):
        ExtractOptions(**{**given, **options})


def test_no_room_for_the_output(checkpoint: Checkpoint, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_tokens=128 is not valid; max_model_len=128"):
        generate(checkpoint("llama"), data, tmp_path / "out", max_tokens=128)
    dataset = generate(checkpoint("llama"), data, tmp_path / "few", max_tokens=104, temperature=1.0)
    index = json.loads((tmp_path / "few" / "index.json").read_text())
    reasons = [one["reason"] for one in index["skipped"]]
    assert any("at most 24" in reason for reason in reasons)
    assert all(sample.num_prompt_tokens <= 24 for sample in dataset)

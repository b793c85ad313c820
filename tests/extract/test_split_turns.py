"""``--split-turns``: a sample of each answer, with the history as the template renders it then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.extract.job_harness import check_rows, digests, run, write_jsonl
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.inspection import describe
from vllm.hidden_states.manifest import read_skipped
from vllm.hidden_states.mapped_file import MappedFile
from vllm.transformers_utils.tokenizer import get_tokenizer

REASONED = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""History loses its reasoning."""


def answer(text: str, reasoning: str = "") -> dict[str, str]:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CHATS: list[list[dict[str, str]]] = [
    [ask("a?"), answer("A.", "why a"), ask("b?"), answer("B.", "why b"), ask("c?")],
    [ask("d?"), answer("D.", "why d"), answer("E.", "why e")],
    [ask("f?"), answer("F.")],
]
RECORDS: list[Any] = [
    {"messages": CHATS[0], "id": "x", "label": 1},
    {"text": "A text.", "id": "t", "label": 2},
    {"conversations": CHATS[1], "id": "y", "label": 3},
    {"messages": [ask("no answer")], "id": "z"},
    {"messages": CHATS[2], "id": "w", "label": 4},
]
TURNS = [
    (0, 1, "<u>a?<a><think>why a</think>A."),
    (0, 3, "<u>a?<a>A.<u>b?<a><think>why b</think>B."),
    (1, None, "A text."),
    (2, 1, "<u>d?<a><think>why d</think>D."),
    (2, 2, "<u>d?<a><think>why d</think>D.<a><think>why e</think>E."),
    (4, 1, "<u>f?<a><think></think>F."),
]
"""Record, message, and a shorthand of the text; its last answer counts."""


def texts_of(shorthand: str) -> tuple[str, str]:
    """Split a rendered text into the part before the last answer, and the answer."""
    written = shorthand.replace("<u>", "\0user\n").replace("<a>", "\0assistant\n")
    written = written.replace("\0", "<|im_end|>\n<|im_start|>").removeprefix("<|im_end|>\n")
    written = written.replace("<think>", "<think>\n").replace("</think>", "\n</think>\n\n")
    before, header, last = written.rpartition("<|im_start|>assistant\n")
    return before + header, last + "<|im_end|>\n"


def expected(model: Path, before: int = 0, boilerplate: bool = True) -> list[tuple[Any, ...]]:
    """(record, turn, token ids, mask) of each sample."""
    encode = get_tokenizer(str(model)).encode
    samples = []
    for record, turn, shorthand in TURNS:
        parts = ("", "A text.") if turn is None else texts_of(shorthand)
        ids = [encode(part, add_special_tokens=False, verbose=False) for part in parts]
        start = len(ids[0]) if turn is None else len(ids[0]) - before
        if not boilerplate and turn is not None and "<think></think>" in shorthand:
            start += len("<think>\n\n</think>\n\n")
        tokens = [*ids[0], *ids[1]]
        samples.append((record, turn, tokens, [i >= start for i in range(len(tokens))]))
    return samples


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", RECORDS)


@pytest.mark.parametrize("form", ["sharded", "files"])
@pytest.mark.parametrize(
    ("rule", "before", "boilerplate"),
    [
        ("answers", 0, True),
        ("last-answer", 0, True),
        ("answers,before", 1, True),
        ("last-answer,before,no-boilerplate", 1, False),
    ],
)
def test_each_answer_is_a_sample(
    rule: str,
    before: int,
    boilerplate: bool,
    form: str,
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    options: dict[str, Any] = {"chat_template": REASONED, "split_turns": True, "mask": rule}
    options |= {"format": form, "keep_columns": ["label"]}
    options |= {"id_column": "id"} if form == "files" else {}
    assert run(tiny_llama, data, output, **options) == 0
    wanted = expected(tiny_llama, before, boilerplate)
    dataset = HiddenStatesDataset(output)
    check_rows(output, [tokens for _, _, tokens, _ in wanted])
    for sample, (record, turn, _, mask) in zip(dataset, wanted, strict=True):
        assert sample.record == record
        assert sample.columns == {"label": RECORDS[record]["label"], "turn": turn}
        assert sample.loss_mask is not None and sample.loss_mask.tolist() == mask
    (skipped,) = read_skipped(str(output))
    assert skipped.record == 3 and "no message of the assistant" in skipped.reason
    said = rule.replace("answers", "last-answer") if "last" not in rule else rule
    assert dataset.settings is not None and dataset.settings.mask_rule == said
    names = sorted(output.glob("*.safetensors"))
    assert {MappedFile(str(path)).metadata["mask"] for path in names} == {said}
    assert re.search(rf"loss mask +{said}\n", describe(dataset))
    if form == "files":
        assert [path.stem for path in names] == sorted(["x-1", "x-3", "t", "y-1", "y-2", "w-1"])
    before_bytes = digests(output)
    names[0].unlink()
    assert run(tiny_llama, data, output, **options) == 0
    assert digests(output) == before_bytes
    with pytest.raises(ValueError, match="split_turns: 'true' there, None now"):
        run(tiny_llama, data, output, **{**options, "split_turns": False})
    with pytest.raises(ValueError, match="made with split_turns, so a sample is not a record"):
        convert_dataset(str(output), str(tmp_path / "speculators"), "speculators")


def test_rows_of_the_answers_alone(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"chat_template": REASONED, "split_turns": True}
    run(tiny_llama, data, tmp_path / "output", positions="mask", **options)
    found = {
        (one.record, one.columns["turn"]): one.positions.tolist()
        for one in HiddenStatesDataset(tmp_path / "output")
    }
    assert found == {
        (record, turn): [i for i, counts in enumerate(mask) if counts]
        for record, turn, _, mask in expected(tiny_llama)
        if turn is not None
    }


def test_with_shuffling_windows_and_other_inputs(
    tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"chat_template": REASONED, "split_turns": True}
    run(tiny_llama, data, tmp_path / "shuffled", shuffle_seed=1, **options)
    order = [
        (one.record, one.columns["turn"]) for one in HiddenStatesDataset(tmp_path / "shuffled")
    ]
    turns = [(record, turn) for record, turn, _ in TURNS]
    assert sorted(order, key=turns.index) == turns != order
    assert order.index((0, 3)) == order.index((0, 1)) + 1
    run(tiny_llama, data, tmp_path / "packed", pack=16, **options)
    texts = [t for one in HiddenStatesDataset(tmp_path / "packed") for t in one.columns["texts"]]
    assert [*dict.fromkeys((t["record"], t.get("turn")) for t in texts)] == turns
    run(tiny_llama, data, tmp_path / "shuffled", append=True, shuffle_seed=1, **options)
    assert len(HiddenStatesDataset(tmp_path / "shuffled")) == len(TURNS)


def test_what_cannot_be_split(tiny_llama: Path, tmp_path: Path) -> None:
    records = [
        {"messages": CHATS[2], "loss_mask": [1] * 40},
        {"messages": [*CHATS[2], 5]},
        {"messages": 5},
        {"conversations": [{"from": ["gpt"], "value": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": CHATS[2], "input_ids": [5, 6]},
    ]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    run(tiny_llama, data, tmp_path / "output", split_turns=True)
    check_rows(tmp_path / "output", [[5, 6]])
    reasons = [one.reason for one in read_skipped(str(tmp_path / "output"))]
    assert "own mask is for the whole conversation" in reasons[0]
    assert all(reason.startswith("bad messages") for reason in reasons)
    for wrong, message in (
        ({"keep_columns": ["turn"]}, "keep_columns=.* split_turns makes it"),
        ({"format": "speculators"}, "split_turns=True is not valid; format='speculators'"),
        ({"mask": "all"}, "mask='all': use answers or last-answer"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tiny_llama, data, tmp_path / "other", **{"split_turns": True, **wrong})

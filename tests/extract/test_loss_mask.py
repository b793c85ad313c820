"""The loss mask beside the rows: from conversations and columns, in every format and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extract.job_harness import LAYERS, digests, run, token_lists, write_jsonl
from tests.extract.test_prompts import CHAT, COUNTING
from vllm.entrypoints.extract.plan import PLAN_FOLDER
from vllm.hidden_states import HiddenStatesDataset, HiddenStatesSample, pack_samples, pad_samples
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.verify import verify_dataset
from vllm.transformers_utils.tokenizer import get_tokenizer

LISTS = token_lists(3, 12)
CHATS = [
    [
        {"role": "user", "content": "Why π?" * (1 + i % 3)},
        {"role": "assistant", "content": f"Because {i}."},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Sö." * (i % 2)},
    ]
    for i in range(7)
]
RECORDS: list[Any] = [
    *({"messages": chat, "label": i} for i, chat in enumerate(CHATS)),
    *({"input_ids": ids, "loss_mask": [i % 3 for i in ids]} for ids in LISTS),
    {"text": "A text of which every token counts."},
]


def expected_masks(model: Path) -> list[list[bool]]:
    tokenizer = get_tokenizer(str(model))
    masks = []
    for chat in CHATS:
        mask: list[bool] = []
        for message in chat:
            is_answer = message["role"] == "assistant"
            for text, counts in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>\n", is_answer),
            ):
                ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
                mask += [counts] * len(ids)
        masks.append(mask)
    text = tokenizer.encode(RECORDS[-1]["text"], add_special_tokens=True, verbose=False)
    return [*masks, *([i % 3 != 0 for i in ids] for ids in LISTS), [True] * len(text)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", RECORDS)


def mask_of(sample: HiddenStatesSample) -> list[bool]:
    assert sample.loss_mask is not None
    assert sample.loss_mask.dtype == torch.bool
    return sample.loss_mask.tolist()


@pytest.mark.parametrize("positions", ["all", "every:3", "last"])
@pytest.mark.parametrize("form", ["sharded", "files"])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_it_is_stored_with_the_rows(
    form: str, positions: str, dtype: str, tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    output, converted = tmp_path / "output", tmp_path / "converted"
    options = {"format": form, "positions": positions, "storage_dtype": dtype}
    assert run(tiny_llama, data, output, **options) == 0
    convert_dataset(str(output), str(converted), "sharded" if form == "files" else "files")
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in (output if form == "files" else converted).glob("*.safetensors"):
        (plain / path.name).write_bytes(path.read_bytes())
    convert_dataset(str(plain), str(tmp_path / "from_plain"), "sharded")
    masks = expected_masks(tiny_llama)
    for folder in (output, converted, plain, tmp_path / "from_plain"):
        assert list(verify_dataset(str(folder))) == []
        dataset = HiddenStatesDataset(folder)
        assert len(dataset) == len(masks)
        for sample, mask in zip(dataset, masks, strict=True):
            assert len(mask) == len(sample.token_ids)
            assert mask_of(sample) == [mask[p] for p in sample.positions.tolist()]
    before = digests(output)
    assert run(tiny_llama, data, output, **options) == 0
    next(output.glob("*.safetensors")).unlink()
    assert run(tiny_llama, data, output, **options) == 0
    assert digests(output) == before


def test_batches_carry_masks_and_columns(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    run(tiny_llama, data, tmp_path / "output", keep_columns=["label"])
    dataset = HiddenStatesDataset(tmp_path / "output")
    masks = expected_masks(tiny_llama)
    labels = [record.get("label") for record in RECORDS]
    padded = pad_samples(list(dataset))
    assert padded.columns == {"label": labels}
    assert padded.loss_mask is not None
    for line, mask in enumerate(masks):
        rest = padded.loss_mask.shape[1] - len(mask)
        assert padded.loss_mask[line].tolist() == mask + [False] * rest
    whole = [flag for mask in masks for flag in mask]
    of_rows = [label for label, mask in zip(labels, masks, strict=True) for _ in mask]
    for batches in ([pack_samples(list(dataset))], list(dataset.iter_rows(16))):
        assert [flag for batch in batches for flag in batch.tensors["loss_mask"].tolist()] == whole
        assert [label for batch in batches for label in batch.columns["label"]] == of_rows
    assert len(dataset) == len(labels) and pad_samples([dataset[0]]).columns == {"label": [0]}


def test_rows_of_the_mask_alone(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """Nothing is stored that follows from the positions; the reader says it."""
    data = write_jsonl(tmp_path / "some.jsonl", RECORDS[:-1])
    run(tiny_llama, data, tmp_path / "output", positions="mask", format="files")
    dataset = HiddenStatesDataset(tmp_path / "output")
    masks = [mask for mask in expected_masks(tiny_llama) if any(mask)]
    for sample, mask in zip(dataset, masks, strict=False):
        assert sample.positions.tolist() == [i for i, flag in enumerate(mask) if flag]
        assert mask_of(sample) == [True] * sum(mask)
    run(tiny_llama, data, tmp_path / "mean", pooling="mean")
    assert HiddenStatesDataset(tmp_path / "mean")[0].loss_mask is None


def test_where_no_mask_is_known_or_wanted(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"input_ids": ids} for ids in LISTS])
    run(tiny_llama, texts, tmp_path / "texts")
    run(tiny_llama, data, tmp_path / "off", loss_mask=False)
    run(tiny_llama, data, tmp_path / "speculators", format="speculators")
    for name in ("texts", "off", "speculators"):
        assert {one.loss_mask for one in HiddenStatesDataset(tmp_path / name)} == {None}
    run(tiny_llama, data, tmp_path / "on")
    convert_dataset(str(tmp_path / "on"), str(tmp_path / "converted"), "speculators")
    assert HiddenStatesDataset(tmp_path / "converted")[0].loss_mask is None
    with pytest.raises(ValueError, match="loss_mask: None there, 'false' now"):
        run(tiny_llama, data, tmp_path / "on", loss_mask=False)


def test_answers_that_cannot_be_located(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """The record is kept, and no token of it counts."""
    records = [{"messages": CHAT}, {"input_ids": [5, 6], "loss_mask": [0, 1]}]
    data = write_jsonl(tmp_path / "some.jsonl", records)
    run(tiny_llama, data, tmp_path / "output", chat_template=COUNTING)
    first, second = HiddenStatesDataset(tmp_path / "output")
    assert len(first.token_ids) > 1 and not any(mask_of(first))
    assert mask_of(second) == [False, True]


@pytest.mark.parametrize(
    "records",
    [
        [{"messages": CHAT}],  # with the template of the test, answers cannot be located
        [{"messages": CHATS[0][:1]}, {"text": "A text."}],
        [{"input_ids": [5, 6], "loss_mask": [0, 0]}],
    ],
)
def test_masks_that_select_no_token(records: list[Any], tiny_llama: Path, tmp_path: Path) -> None:
    """They are stored, and a conversion has the masks of the layout that is written directly."""
    data = write_jsonl(tmp_path / "some.jsonl", records)
    options = {"layers": "2,1,3,norm", "chat_template": COUNTING if len(records) == 1 else None}
    run(tiny_llama, data, tmp_path / "output", **options)
    dataset = HiddenStatesDataset(tmp_path / "output")
    assert [any(mask_of(sample)) for sample in dataset] == ["text" in one for one in records]
    run(tiny_llama, data, tmp_path / "direct", format="modelopt", **options)
    convert_dataset(str(tmp_path / "output"), str(tmp_path / "converted"), "modelopt")
    for path in (tmp_path / "direct").glob("*.pt"):
        direct, converted = (
            torch.load(path.parent.with_name(name) / path.name) for name in ("direct", "converted")
        )
        assert direct["loss_mask"].tolist() == converted["loss_mask"].tolist()


@pytest.mark.parametrize("pack", [None, 8])
def test_bad_masks_are_left_out_again(tiny_llama: Path, tmp_path: Path, pack: int | None) -> None:
    """The samples of a resumed dataset are the same, though it stores no masks."""
    records: list[Any] = [{"input_ids": ids} for ids in LISTS]
    records[:0] = [{"input_ids": [1, 2, 3], "loss_mask": [1]}] * 2
    data = write_jsonl(tmp_path / "data.jsonl", records)
    output = tmp_path / "output"
    assert run(tiny_llama, data, output, pack=pack) == 0
    made = digests(output)
    for shard in sorted(output.glob("shard-*"))[::2]:
        shard.unlink()
    assert run(tiny_llama, data, output, pack=pack) == 0
    assert digests(output) == made


def test_a_dataset_with_other_samples_is_not_continued(tiny_llama: Path, tmp_path: Path) -> None:
    """An older version may have read the records in another way."""
    records: list[Any] = [{"input_ids": ids} for ids in LISTS]
    data = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1], "loss_mask": []}, *records])
    output = tmp_path / "output"
    run(tiny_llama, data, output, loss_mask=False)
    path = output / "settings.json"
    settings = json.loads(path.read_text())
    del settings["checksum"], settings["options"]["loss_mask"]
    path.write_text(json.dumps(settings))
    (output / "shard-00001.safetensors").unlink()
    made = digests(output)
    with pytest.raises(ValueError, match=r"12 samples in .* the dataset was begun with 13 in "):
        run(tiny_llama, data, output)
    assert digests(output).items() >= made.items()


def test_units_that_would_begin_elsewhere_are_not_made_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a conversation may depend on the day."""
    chats = [[{"role": "user", "content": "a" * size}] for size in (14, 10, 10, 20)]
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": chat} for chat in chats])
    first = 10
    monkeypatch.setattr(
        "vllm.entrypoints.extract.prompts.chat_text",
        lambda tokenizer, messages, **_: messages[0]["content"].replace("a" * 10, "b" * first, 1),
    )
    options: dict[str, Any] = {"loss_mask": False}
    output = tmp_path / "output"
    assert run(tiny_llama, data, output, **options) == 0
    made = sorted(output.glob("shard-*"))
    made[0].unlink()
    first = 12
    with pytest.raises(
        ValueError, match=r" 4 samples in 3 units, .* with 4 in 3, which begin else"
    ):
        run(tiny_llama, data, output, **options)
    assert not (output / PLAN_FOLDER).exists()
    first = 10
    assert run(tiny_llama, data, output, **options) == 0
    assert len(HiddenStatesDataset(output, verify="first_read")) == len(chats)
    assert sorted(output.glob("shard-*")) == made


def test_a_dataset_from_before_masks_were_stored(
    tiny_llama: Path, data: Path, tmp_path: Path
) -> None:
    """It is continued as it was begun."""
    output = tmp_path / "output"
    run(tiny_llama, data, output, loss_mask=False)
    path = output / "settings.json"
    settings = json.loads(path.read_text())
    del settings["checksum"], settings["options"]["loss_mask"]
    settings["engine_version"] = "0.0.9"
    path.write_text(json.dumps(settings))
    shard = output / "shard-00001.safetensors"
    before = HiddenStatesDataset(output, allow_incomplete=True)[5].hidden_states.clone()
    shard.unlink()
    assert run(tiny_llama, data, output) == 0
    sample = HiddenStatesDataset(output, verify="first_read")[5]
    assert sample.loss_mask is None and sample.layer_ids == LAYERS
    assert torch.equal(sample.hidden_states, before)

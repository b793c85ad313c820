"""``--pack``: the texts of the input as windows of one length."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extract.job_harness import check_rows, digests, run, token_lists, write_jsonl
from tests.extract.test_kill import in_child
from tests.extract.test_loss_mask import CHATS, expected_masks
from tests.hidden_states.test_export import read_arrow, skipped_of
from tests.hidden_states.test_windows import windows_of
from vllm.hidden_states import HiddenStatesDataset, pad_samples
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.manifest import read_skipped
from vllm.hidden_states.verify import verify_dataset

LENGTH = 16
BOS, EOS, PAD = 7, 258, 256
TEXTS = [[BOS, *ids] for ids in token_lists(3, 30, 50)]
RECORDS: list[Any] = [{"input_ids": ids} for ids in TEXTS]
RECORDS[4:4] = ["{broken"]
NUMBERS = [number for number, record in enumerate(RECORDS) if isinstance(record, dict)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", RECORDS)


OPTIONS: list[tuple[dict[str, Any], int | None]] = [
    ({}, EOS),
    ({"pack_separator": "none"}, None),
    ({"pack_separator": "7"}, BOS),
]


@pytest.mark.parametrize("form", ["sharded", "files"])
@pytest.mark.parametrize(("options", "separator"), OPTIONS)
def test_windows(
    options: dict[str, Any],
    separator: int | None,
    form: str,
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    assert run(tiny_llama, data, output, pack=LENGTH, format=form, **options) == 0
    windows, rest = windows_of(TEXTS, LENGTH, separator, None)
    assert rest
    check_rows(output, windows)
    dataset = HiddenStatesDataset(output)
    tokens: dict[int, list[int]] = {}
    for sample in dataset:
        for part in sample.columns["texts"]:
            assert part["offset"] == len(tokens.setdefault(part["record"], []))
            tokens[part["record"]] += sample.token_ids[part["start"] : part["end"]].tolist()
        assert sample.record == sample.columns["texts"][0]["record"]
    for number, found in tokens.items():
        text = TEXTS[NUMBERS.index(number)]
        assert found == text or (number == max(tokens) and found == text[: len(found)])
    assert {one.loss_mask for one in dataset} == {None}
    assert [one.record for one in read_skipped(str(output))] == [4]
    assert list(verify_dataset(str(output))) == []
    other = "files" if form == "sharded" else "sharded"
    convert_dataset(str(output), str(tmp_path / "converted"), other)  # type: ignore[arg-type]
    for sample, same in zip(dataset, HiddenStatesDataset(tmp_path / "converted"), strict=True):
        assert sample.columns == same.columns
    with pytest.raises(ValueError, match="made with pack, so a sample is not a record"):
        convert_dataset(str(output), str(tmp_path / "speculators"), "speculators")


def test_bos_of_the_tokenizer(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """At the start of each window, between texts, and both, as SAELens has it."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    names = {"bos_token": "<|im_start|>", "sep_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config | names))
    for i, (separator, token, has_bos) in enumerate(
        [("eos", EOS, True), ("bos", 257, False), ("bos", 257, True), ("sep", 256, True)]
    ):
        output, options = tmp_path / str(i), {"pack_separator": separator, "pack_bos": has_bos}
        run(model, data, output, pack=LENGTH, **options)
        check_rows(output, windows_of(TEXTS, LENGTH, token, 257 if has_bos else None)[0])


def test_the_last_window_may_be_padded(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """With masks, padding is told; with positions=mask it has no rows."""
    windows, rest = windows_of(TEXTS, LENGTH, EOS, None)
    expected = [*windows, rest + [PAD] * (LENGTH - len(rest))]
    run(tiny_llama, data, tmp_path / "output", pack=LENGTH, pack_last="pad")
    check_rows(tmp_path / "output", expected)
    dataset = HiddenStatesDataset(tmp_path / "output")
    masks = [[True] * LENGTH] * len(windows) + [[i < len(rest) for i in range(LENGTH)]]
    assert pad_samples(list(dataset)).loss_mask.tolist() == masks  # type: ignore[union-attr]
    masked = write_jsonl(
        tmp_path / "masked.jsonl",
        [{"input_ids": ids, "loss_mask": [i % 4 for i in ids]} for ids in TEXTS],
    )
    options = {"pack": LENGTH, "pack_last": "pad", "pack_separator": "none"}
    run(tiny_llama, masked, tmp_path / "masked", positions="mask", **options)
    joined = [token for ids in TEXTS for token in ids]
    wanted = [[i % 4 > 0 for i in joined[n : n + LENGTH]] for n in range(0, len(joined), LENGTH)]
    kept = [[i for i, flag in enumerate(mask) if flag] for mask in wanted if any(mask)]
    found = [one.positions.tolist() for one in HiddenStatesDataset(tmp_path / "masked")]
    assert found == kept
    for pooling in ("mean", "last"):
        with pytest.raises(ValueError, match=r"pack_last='pad' is not valid; the loss mask tells"):
            run(tiny_llama, data, tmp_path / "x", pack=LENGTH, pack_last="pad", pooling=pooling)


@pytest.mark.parametrize("separator", ["eos", "none"])
@pytest.mark.parametrize("has_masks", [False, True])
def test_padding_alone_keeps_a_window_from_saelens(
    separator: str, has_masks: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    """Texts begin anywhere in a window and go on in others; separators end some windows."""
    texts = [list(range(100, 99 + LENGTH)), *TEXTS]
    masks = [{"loss_mask": [i % 3 for i in ids]} if has_masks else {} for ids in texts]
    records = [{"input_ids": ids, **mask} for ids, mask in zip(texts, masks, strict=True)]
    data, exported = write_jsonl(tmp_path / "data.jsonl", records), tmp_path / "exported"
    windows, rest = windows_of(texts, LENGTH, EOS if separator == "eos" else None, None)
    assert len(rest) < LENGTH - 1
    ends_in_separator = [window[-1] == EOS for window in windows]
    assert any(ends_in_separator) == (separator == "eos")
    options: dict[str, Any] = {"pack": LENGTH, "pack_last": "pad", "pack_separator": separator}
    run(tiny_llama, data, tmp_path / "direct", format="saelens", layers="0,3", **options)
    run(tiny_llama, data, tmp_path / "output", layers="0,3", **options)
    convert_dataset(str(tmp_path / "output"), str(exported), "saelens")
    for folder in (tmp_path / "direct", exported):
        assert read_arrow(folder)["token_ids"].to_pylist() == windows
        reason = f"format: only {len(rest)} of its {LENGTH} tokens are of texts"
        assert skipped_of(folder) == {len(windows): reason}


def test_windows_without_a_token_that_counts_are_left_out(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks = [[1] * 10 + [0] * 50, [0] * 9 + [1]]
    records = [{"input_ids": [5] * len(mask), "loss_mask": mask} for mask in masks]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    options = {"pack": 10, "pack_separator": "none", "positions": "mask"}
    run(tiny_llama, data, tmp_path / "output", **options)
    found = [(one.record, len(one.positions)) for one in HiddenStatesDataset(tmp_path / "output")]
    assert found == [(0, 10), (1, 1)]
    assert "5 windows, in which no token counts" in capsys.readouterr().out


def test_masks_of_conversations(tiny_llama: Path, tmp_path: Path) -> None:
    """Answers count, and separators and BOS do not; texts count whole, with their separators."""
    text = "A text of which every token counts."
    records = [*({"messages": chat} for chat in CHATS), {"text": text}, {"input_ids": [5, 6]}]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    run(tiny_llama, data, tmp_path / "output", pack=LENGTH, pack_last="pad")
    joined: list[bool] = []
    for mask in expected_masks(tiny_llama)[: len(CHATS)]:
        joined += [False] * bool(len(joined) % LENGTH) + mask
    for count in (len(text), 2):
        joined += [True] * (bool(len(joined) % LENGTH) + count)
    joined += [False] * (-len(joined) % LENGTH)
    dataset = HiddenStatesDataset(tmp_path / "output")
    assert [flag for one in dataset for flag in one.loss_mask.tolist()] == joined  # type: ignore[union-attr]
    assert dataset.settings is not None and dataset.settings.mask_rule == "answers"


def test_shuffled_windows(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    run(tiny_llama, data, tmp_path / "output", pack=LENGTH, shuffle_seed=3)
    windows, _ = windows_of(TEXTS, LENGTH, EOS, None)
    order = np.argsort(np.random.RandomState(3).permutation(len(windows)))
    check_rows(tmp_path / "output", [windows[i] for i in order])


def test_killed_and_continued_by_others(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pack": LENGTH, "pack_last": "pad", "shuffle_seed": 1}
    whole = tmp_path / "whole"
    status, num_calls = in_child(None, lambda: run(tiny_llama, data, whole, **options))
    assert status == 0
    for moment in range(num_calls // 7, num_calls, num_calls // 5):
        output = tmp_path / f"at_{moment}"
        status, _ = in_child(moment, lambda out=output: run(tiny_llama, data, out, **options))
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert run(tiny_llama, data, output, **options) == 0
        assert digests(output) == digests(whole)
    next(whole.glob("*.safetensors")).unlink()
    assert run(tiny_llama, data, whole, **options) == 0
    assert digests(output) == digests(whole)
    for rank in (1, 0):
        run(tiny_llama, data, tmp_path / "ranks", rank=rank, world_size=2, **options)
    run(tiny_llama, data, tmp_path / "ranks", merge=True)
    assert digests(tmp_path / "ranks") == digests(whole)
    with pytest.raises(ValueError, match=r"pack: '16' there, '17' now"):
        run(tiny_llama, data, output, **{**options, "pack": 17})


@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize("form", ["sharded", "files"])
def test_added_records(form: str, last: str, tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    """Numbers of records go on behind the last text, which has no window of its own."""
    output, options = tmp_path / "output", {"pack": LENGTH, "pack_last": last, "format": form}
    more = write_jsonl(tmp_path / "more.jsonl", [{"input_ids": ids} for ids in TEXTS[:7]])
    run(tiny_llama, data, output, **options)
    first = len(HiddenStatesDataset(output))
    run(tiny_llama, more, output, append=True, **options)
    old, new = HiddenStatesDataset(output)[:first], HiddenStatesDataset(output)[first:]
    numbers = {part["record"] for sample in old for part in sample.columns["texts"]}
    later = [part["record"] for sample in new for part in sample.columns["texts"]]
    assert min(later) == max(numbers) + 1 and later == sorted(later)
    windows = windows_of(TEXTS[:7], LENGTH, EOS, None)[0]
    assert [sample.token_ids.tolist() for sample in new][: len(windows)] == windows
    if last == "pad":
        assert all(sample.loss_mask is not None for sample in new)


def test_texts_longer_than_the_model_takes(tiny_llama: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "abcd" * 5000}])
    run(tiny_llama, data, tmp_path / "output", pack=100, pack_separator="none")
    assert len(HiddenStatesDataset(tmp_path / "output")) == 200
    with pytest.raises(ValueError, match=r"pack=100000 is not valid; it is longer than max_model"):
        run(tiny_llama, data, tmp_path / "other", pack=100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack": 1}, "pack=1 is not valid; use at least 2"),
        ({"pack_bos": True}, "pack_bos=True is not valid; it needs pack"),
        ({"pack_separator": "none"}, "pack_separator='none' is not valid; it needs pack"),
        ({"pack_last": "pad"}, "pack_last='pad' is not valid; it needs pack"),
        (
            {"pack": 8, "pack_separator": "bos"},
            "pack_separator='bos' is not valid; there is no",
        ),
        ({"pack": 8, "pack_separator": "x"}, "pack_separator='x' is not valid; the model's ids"),
        ({"pack": 8, "pack_separator": "999"}, "pack_separator='999' is not valid; the model's"),
        ({"pack": 8, "pack_bos": True}, "pack_bos=True is not valid; there is no BOS token"),
        ({"pack": 8, "keep_columns": ["a"]}, "keep_columns=.* a window has texts of several"),
        ({"pack": 8, "id_column": "a", "format": "files"}, "id_column='a' is not valid; a window"),
        ({"pack": 8, "max_length": 5}, "max_length=5 is not valid; pack is the length"),
        ({"pack": 8, "on_long": "truncate"}, "on_long='truncate' is not valid; pack divides"),
        ({"pack": 8, "format": "speculators"}, "pack=8 is not valid; format='speculators'"),
        ({"pack": 512}, "they have .* tokens, fewer than one window"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str, tiny_llama: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", RECORDS[:4])
    with pytest.raises(ValueError, match=message):
        run(tiny_llama, data, tmp_path / "output", **options)
    assert not (tmp_path / "output").exists()

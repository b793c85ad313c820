"""``--append``: records added to a finished dataset, in new units."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extract import job_harness as harness
from tests.extract.fake_engine import FAILING_TOKEN
from tests.extract.job_harness import (
    check_rows,
    digests,
    run,
    token_lists,
    write_jsonl,
    write_token_ids,
)
from tests.extract.test_kill import VARYING, in_child
from vllm.exceptions import FailureError
from vllm.hidden_states import HiddenStatesDataset
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.manifest import read_skipped
from vllm.hidden_states.verify import verify_dataset

FIRST, SECOND, THIRD = token_lists(1, 31), token_lists(2, 23), token_lists(3, 9)
ALL = [*FIRST, *SECOND, *THIRD]


def records_of(lists: list[list[int]]) -> list[Any]:
    """With a bad record at both ends, and one that fails."""
    return [{}, *({"input_ids": ids} for ids in lists), {"input_ids": [FAILING_TOKEN]}, {}]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    return [
        write_jsonl(tmp_path / f"{number}.jsonl", records_of(lists))
        for number, lists in enumerate((FIRST, SECOND, THIRD))
    ]


@pytest.mark.parametrize("form", ["sharded", "files"])
def test_new_units_come_after_the_old_ones(
    form: str, tiny_llama: Path, inputs: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    options = {"format": form, "append": True}
    assert run(tiny_llama, inputs[0], output, format=form) == 0
    old = digests(output)
    for number, data in enumerate(inputs[1:], 1):
        assert run(tiny_llama, data, output, **options) == 0
        check_rows(output, [ids for lists in (FIRST, SECOND, THIRD)[: number + 1] for ids in lists])
    assert list(verify_dataset(str(output))) == []
    whole = digests(output)
    changed = {name for name in old if whole[name] != old[name]}
    assert changed == {"settings.json", "index.json", "manifest.json"}
    starts = [0, len(FIRST) + 3, len(FIRST) + len(SECOND) + 6]
    expected = [
        start + 1 + i
        for start, lists in zip(starts, (FIRST, SECOND, THIRD), strict=True)
        for i in range(len(lists))
    ]
    dataset = HiddenStatesDataset(output)
    assert [sample.record for sample in dataset] == expected
    skipped = [one.record for one in read_skipped(str(output))]
    assert sorted([*skipped, *expected]) == list(range(len(ALL) + 9))
    # The same commands again change nothing, with or without the option; damage is mended.
    for again in ({"append": True}, {}):
        for data in inputs:
            assert run(tiny_llama, data, output, format=form, **again) == 0
            assert digests(output) == whole
    lost = [sorted(output.glob("*.safetensors"))[number] for number in (0, -1)]
    for path in lost:
        path.unlink()
    for data, other in ((inputs[0], lost[1]), (inputs[1], lost[1])):
        with pytest.raises(FailureError, match=f"of other inputs are missing.*{other.name}"):
            run(tiny_llama, data, output, format=form)
    assert run(tiny_llama, inputs[2], output, format=form) == 0
    assert digests(output) == whole
    fourth = write_token_ids(tmp_path / "fourth.jsonl", THIRD)
    lost[0].unlink()
    with pytest.raises(ValueError, match=f"append: a file of .*{lost[0].name}.* run the command"):
        run(tiny_llama, fourth, output, **options)
    assert run(tiny_llama, inputs[0], output, format=form) == 0
    assert digests(output) == whole
    convert_dataset(str(output), str(tmp_path / "converted"), "sharded")
    check_rows(tmp_path / "converted", ALL)
    convert_dataset(str(output), str(tmp_path / "converted"), "sharded")


def test_killed_at_random_moments(tiny_llama: Path, inputs: list[Path], tmp_path: Path) -> None:
    def begin(output: Path) -> Path:
        run(tiny_llama, inputs[0], output)
        return output

    def append(output: Path) -> int:
        return run(tiny_llama, inputs[1], output, append=True)

    undisturbed = begin(tmp_path / "undisturbed")
    status, num_calls = in_child(None, lambda: append(undisturbed))
    assert status == 0
    rng = random.Random(5)
    for moment in sorted(rng.sample(range(num_calls - VARYING), 12)):
        output = begin(tmp_path / f"at_{moment}")
        status, _ = in_child(moment, lambda out=output: append(out))
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert append(output) == 0
        assert digests(output) == digests(undisturbed), f"killed before call {moment}"


def test_ranks(tiny_llama: Path, inputs: list[Path], tmp_path: Path) -> None:
    for name in ("alone", "ranks"):
        run(tiny_llama, inputs[0], tmp_path / name)
    run(tiny_llama, inputs[1], tmp_path / "alone", append=True)
    for rank in (1, 0):
        options = {"append": True, "rank": rank, "world_size": 2}
        run(tiny_llama, inputs[1], tmp_path / "ranks", **options)
    run(tiny_llama, inputs[1], tmp_path / "ranks", merge=True)
    assert digests(tmp_path / "ranks") == digests(tmp_path / "alone")


def test_what_cannot_be_added(
    tiny_llama: Path, inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    run(tiny_llama, inputs[0], output, append=True)  # a new dataset
    before = digests(output)

    def refuse(message: str, data: Path = inputs[1], **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run(tiny_llama, data, output, **options)
        assert digests(output) == before

    refuse("input_digest: .* there, .* now")
    refuse(r"layer_ids: \[0, 3, 4\] there, \[0, 3\] now", append=True, layers="0,3")
    refuse(r"max_tokens: '\d+' there, '9' now \(--max-length\)", append=True, max_length=9)
    refuse("positions: 'all' there, 'last' now", append=True, positions="last")
    useless = write_jsonl(tmp_path / "useless.jsonl", [{}])
    refuse("none of 1 records can be used", useless, append=True)
    usage = SimpleNamespace(total=10**6, used=10**6 - 1000, free=1000)
    with monkeypatch.context() as small_disk:
        small_disk.setattr("shutil.disk_usage", lambda path: usage)
        refuse("--no-check-disk to continue", append=True)
        refuse("--no-check-disk to continue", append=True, dry_run=True)
    monkeypatch.setattr("vllm.entrypoints.extract.job.run_worker", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny_llama, inputs[1], output, append=True)
    before = digests(output)
    refuse("output is not complete", inputs[2], append=True)
    with pytest.raises(ValueError, match="is not complete"):
        HiddenStatesDataset(output)
    assert len(HiddenStatesDataset(output, allow_incomplete=True)) == len(FIRST)


def test_a_dry_run_of_an_addition(
    tiny_llama: Path, inputs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    run(tiny_llama, inputs[0], output)
    before = digests(output)
    capsys.readouterr()
    assert run(tiny_llama, inputs[1], output, append=True, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"added after +{len(FIRST) + 1} samples\n", printed)
    assert f"{len(SECOND) + 1} of {len(SECOND) + 3} records" in printed
    assert digests(output) == before


def test_names_of_samples(tiny_llama: Path, tmp_path: Path) -> None:
    """A name that is in the dataset would replace a file of it."""
    output = tmp_path / "output"
    named = [{"id": f"n{i}", "input_ids": ids} for i, ids in enumerate(FIRST[:6])]
    options = {"format": "files", "id_column": "id"}
    run(tiny_llama, write_jsonl(tmp_path / "a.jsonl", named[:3]), output, **options)
    more = write_jsonl(tmp_path / "b.jsonl", [*named[3:], named[1]])
    with pytest.raises(ValueError, match=r"two samples would be in n1.safetensors"):
        run(tiny_llama, more, output, append=True, **options)
    more = write_jsonl(tmp_path / "b.jsonl", named[3:])
    run(tiny_llama, more, output, append=True, **options)
    (output / "n4.safetensors").unlink()
    run(tiny_llama, more, output, append=True, **options)
    check_rows(output, FIRST[:6])


def test_a_damaged_index(tiny_llama: Path, inputs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "output"
    run(tiny_llama, inputs[0], output)
    run(tiny_llama, inputs[1], output, append=True)
    path = output / "index.json"
    path.write_text(path.read_text().replace("1", "2", 3))
    with pytest.raises(ValueError, match=r"index.json is damaged, .* several inputs; restore"):
        run(tiny_llama, inputs[1], output)


def test_masks_of_added_records(tiny_llama: Path, tmp_path: Path) -> None:
    """Stored if those of the dataset are, also where no record has one; otherwise refused."""
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"input_ids": ids} for ids in FIRST[:4]])
    masked = write_jsonl(tmp_path / "masked.jsonl", [{"input_ids": [5, 6], "loss_mask": [0, 1]}])
    output = tmp_path / "output"
    run(tiny_llama, masked, output)
    run(tiny_llama, plain, output, append=True)
    assert list(verify_dataset(str(output))) == []
    added = HiddenStatesDataset(output)[-1]
    assert added.loss_mask is not None and added.loss_mask.all()
    rows = harness.fake_rows(added.token_ids.tolist(), harness.LAYERS, harness.HIDDEN_SIZE)
    assert torch.equal(added.hidden_states, rows)

    none = tmp_path / "none"
    run(tiny_llama, plain, none)
    before = digests(none)
    with pytest.raises(ValueError, match="append: 1 of the new samples have a loss mask, and"):
        run(tiny_llama, masked, none, append=True)
    assert digests(none) == before
    more = write_jsonl(tmp_path / "more.jsonl", [{"input_ids": [7, 8]}])
    run(tiny_llama, more, none, append=True)
    assert {sample.loss_mask for sample in HiddenStatesDataset(none)} == {None}
    run(tiny_llama, masked, tmp_path / "mean", pooling="mean")
    run(tiny_llama, more, tmp_path / "mean", pooling="mean", append=True)
    off = {"loss_mask": False}
    run(tiny_llama, plain, tmp_path / "off", **off)
    run(tiny_llama, masked, tmp_path / "off", append=True, **off)
    assert HiddenStatesDataset(tmp_path / "off")[-1].loss_mask is None

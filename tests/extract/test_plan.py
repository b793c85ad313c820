"""The plan: units, order, memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.extract.job_harness import digests, token_lists, write_jsonl, write_token_ids
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.plan import Plan, has_plan, make_plan
from vllm.entrypoints.extract.prompts import PromptMaker
from vllm.entrypoints.extract.records import find_sources
from vllm.hidden_states.metadata import DatasetSettings

LISTS = token_lists(2, 200, longest=40)
TOKEN_BYTES = 8


def settings_of(input_digest: str = "k", unit_bytes: int = 5000) -> DatasetSettings:
    """100 bytes a row."""
    return DatasetSettings(
        model="tiny",
        layer_ids=(4,),
        num_hidden_layers=4,
        hidden_size=25,
        dtype="float32",
        positions="all",
        format="sharded",
        shard_bytes=unit_bytes,
        num_units=0,
        num_samples=0,
        input_digest=input_digest,
    )


def plan_of(data: Path, folder: Path, key: str = "k", unit_bytes: int = 5000, **asked: Any) -> Plan:
    options = ExtractOptions(
        input=[str(data)], output=str(folder), layers="last", max_length=100, **asked
    )
    maker = PromptMaker(None, "", 307, options)
    settings = settings_of(key, unit_bytes)
    return make_plan(folder, find_sources([str(data)], "auto"), maker, settings)


@pytest.mark.parametrize("unit_bytes", [1, 900, 5000, 10**9])
@pytest.mark.parametrize("positions", ["all", "last", "every:7"])
def test_every_sample_is_in_one_unit(tmp_path: Path, unit_bytes: int, positions: str) -> None:
    data = write_token_ids(tmp_path / "a.jsonl", LISTS)
    plan = plan_of(data, tmp_path / "plan", positions=positions, unit_bytes=unit_bytes)
    numbers = [number for unit in plan.units for number in plan.samples_of(unit)]
    assert numbers == list(range(len(LISTS)))
    samples = [plan.sample(number) for number in numbers]
    assert [sample.token_ids for sample in samples] == LISTS
    assert [sample.record for sample in samples] == numbers
    rows = {"all": lambda n: n, "last": lambda n: 1, "every:7": lambda n: -(-n // 7)}[positions]
    assert [sample.num_rows for sample in samples] == [rows(len(ids)) for ids in LISTS]
    sizes = [sample.num_rows * 100 + len(sample.token_ids) * TOKEN_BYTES for sample in samples]
    for unit in plan.units:
        unit_sizes = [sizes[number] for number in plan.samples_of(unit)]
        assert len(unit_sizes) == 1 or sum(unit_sizes) <= unit_bytes
    assert plan.totals.num_bytes == sum(sizes)
    assert plan.totals.num_tokens == sum(map(len, LISTS))


def test_a_plan_is_a_function_of_input_and_rules(tmp_path: Path) -> None:
    data = write_token_ids(tmp_path / "a.jsonl", LISTS)
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        plan_of(data, tmp_path / name, shuffle_seed=seed)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert contents[0]["samples.bin"] != contents[2]["samples.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.jsonl", "b", "c"]


def test_shuffling_and_choosing(tmp_path: Path) -> None:
    records: list[Any] = [{"input_ids": ids} for ids in LISTS]
    records[3] = "{"
    data = write_jsonl(tmp_path / "a.jsonl", records)
    everything = plan_of(data, tmp_path / "all", shuffle_seed=5)
    order = [everything.sample(i).record for i in range(everything.totals.num_samples)]
    assert sorted(order) == [i for i in range(len(LISTS)) if i != 3]
    assert all(everything.sample(i).token_ids == LISTS[one] for i, one in enumerate(order))
    part = plan_of(data, tmp_path / "part", shuffle_seed=5, max_samples=40)
    chosen = [part.sample(i).record for i in range(part.totals.num_samples)]
    assert chosen == order[: len(chosen)]
    assert part.totals.num_records == 40
    first = plan_of(data, tmp_path / "first", max_samples=6)
    assert first.totals.num_samples == 5
    assert [one.record for one in first.skipped()] == [3]


def test_a_plan_of_something_else_is_not_used(tmp_path: Path) -> None:
    data = write_token_ids(tmp_path / "a.jsonl", LISTS)
    plan_of(data, tmp_path / "plan")
    assert has_plan(tmp_path / "plan", settings_of("k"))
    assert has_plan(tmp_path / "plan", settings_of("k").with_plan(3, 200, True))
    assert not has_plan(tmp_path / "plan", settings_of("other"))
    plan_of(data, tmp_path / "plan", key="other")
    assert has_plan(tmp_path / "plan", settings_of("other"))
    assert not has_plan(tmp_path / "plan", settings_of("k"))


@pytest.mark.parametrize("damage", ["pipe", "folder", "cut", "changed", "missing"])
def test_a_damaged_plan_is_made_again(tmp_path: Path, damage: str) -> None:
    data = write_token_ids(tmp_path / "a.jsonl", LISTS)
    folder = tmp_path / "plan"
    plan_of(data, folder)
    whole = digests(folder)
    for name in whole:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if damage == "pipe":
            os.mkfifo(folder / name)
        elif damage == "folder":
            (folder / name).mkdir()
        elif damage != "missing":
            (folder / name).write_bytes(content[:-1] + b"x" * (damage == "changed"))
        is_whole = not content and damage == "cut"
        assert has_plan(folder, settings_of("k")) is is_whole, name
        plan_of(data, folder)
        assert digests(folder) == whole


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for count in (500, 2000):
        data = write_token_ids(tmp_path / f"{count}.jsonl", token_lists(1, count, longest=90))
        tracemalloc.start()
        plan = plan_of(data, tmp_path / str(count))
        for number in range(plan.totals.num_samples):
            plan.sample(number)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * 1500, peaks

"""Connectors on several ranks: each has its share of the caches, and all of them count as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.grids import at_night
from tests.kv_connector import rank_connector
from tests.kv_connector.counting_connector import CountingConnector
from tests.kv_connector.loading import (
    OFFLOADING,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from tests.kv_connector.rank_connector import Address, connector
from tests.kv_connector.test_shared_storage import storing
from vllm import LLM

Checkpoint = Callable[..., Path]
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(17, [230])]
PROMPTS = [TEXT[:n] + [n % 300] * 19 for n in (183, 61, 15, 117)]
LONGER = [prompt + [len(prompt) % 7] * 33 for prompt in PROMPTS]
FOUND = [(len(prompt) - 1) // 16 * 16 for prompt in LONGER]
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64}
TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
RANKS = [
    ("llama", TENSOR),
    ("qwen3_5", STAGES),
    at_night("qwen2", TENSOR),
    at_night("qwen3_5", TENSOR),
    at_night("llama", STAGES),
    at_night("qwen3_moe", TENSOR | {"enable_expert_parallel": True}),
    at_night("llama", TENSOR | {"enable_sequence_parallel": True}),
    at_night("qwen3_5", TENSOR | STAGES),
]


@contextmanager
def ranks(folder: Path, sizes: dict[str, int], arguments: dict[str, Any]) -> Iterator[LLM]:
    """An engine of several ranks, all of whose pools are NaN at the start."""
    with engine(folder, **OPTIONS, **sizes, **arguments) as llm:
        llm.collective_rpc(rank_functions.poison)
        yield llm


def forget_everything(llm: LLM) -> None:
    """Nothing can be found in the pool, and on no rank there is anything but NaN."""
    while core_of(llm).has_unfinished_requests():  # blocks that are held
        core_of(llm).step()
    forget(llm)
    llm.collective_rpc(rank_functions.poison)


def remove_blocks(folder: Path) -> None:
    for file in folder.rglob("*.block"):
        file.unlink()


def damage(folder: Path, part_of_name: str) -> None:
    """Damage what one rank has stored."""
    files = [f for f in folder.rglob("*.block") if part_of_name in f.parent.name]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()
        file.write_bytes(content)


def another_rank(sizes: dict[str, int]) -> str:
    """Return what the folder of a rank that is not the driver has in its name."""
    tensor, stages = (sizes.get(f"{n}_parallel_size", 1) for n in ("tensor", "pipeline"))
    return f"tensor-{tensor - 1}-of-{tensor}-stage-0-of-{stages}"


def layers_of(names: Sequence[str]) -> set[int]:
    return {int(name.split("layers.")[1].split(".")[0]) for name in names}


def outcomes(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[str | None, list[int]]]:
    outputs = llm.generate([list(p) for p in prompts], greedy(3), use_tqdm=False)
    return [(o.outputs[0].finish_reason, list(o.outputs[0].token_ids)) for o in outputs]


@pytest.mark.parametrize(("family", "sizes"), RANKS)
def test_every_rank_has_its_connectors(
    family: str, sizes: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arguments = beside_extraction(
        tmp_path,
        storing(tmp_path),
        OFFLOADING,
        connector("RankConnector"),
        kv_load_failure_policy="recompute",
    )
    with ranks(checkpoint(family), sizes, arguments) as llm:
        *_, offloading, watching = core_of(llm).scheduler.connector._connectors
        expected = ask(llm, LONGER)
        check_what_ranks_saw(llm)
        check_that_reports_wait_for_all(watching)
        for _ in range(2):  # from files, then from host memory
            forget_everything(llm)
            loaded = ask(llm, LONGER)
            same(loaded, expected)
            assert num_cached(loaded) == FOUND
            remove_blocks(tmp_path)
        offloading.reset_cache()
        forget_everything(llm)
        ask(llm, PROMPTS)
        damage(tmp_path, another_rank(sizes))
        for _ in range(3):  # what could not be loaded is computed, and nothing wrong is stored
            offloading.reset_cache()
            forget_everything(llm)
            again = ask(llm, LONGER)
            same(again, expected)
        assert num_cached(again) == FOUND
        forget_everything(llm)


def check_what_ranks_saw(llm: LLM) -> None:
    core = core_of(llm)
    parallel = core.vllm_config.parallel_config
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    order = [parallel.driver_rank, *(r for r in range(size * stages) if r != parallel.driver_rank)]
    all_layers = set(range(core.vllm_config.model_config.get_total_num_hidden_layers()))
    by_stage: dict[int, set[int]] = {}
    for rank, one in zip(order, llm.collective_rpc(rank_connector.seen, args=(3,)), strict=True):
        assert one["places"] == {(rank, rank % size, size, rank // size)}
        rows = [name for name in one["registered"] if "cache_only" in name]
        assert len(rows) == (rank == parallel.driver_rank)
        others = set(one["registered"]) - set(rows)
        assert set(one["registered"]) == {name for names in one["planned"] for name in names}
        assert by_stage.setdefault(rank // size, layers_of(list(others))) == layers_of(list(others))
        hooks = one["hooks"]
        assert set(hooks["save_kv_layer"]) == set(one["registered"])
        assert set(hooks["wait_for_layer_load"]) == set(one["registered"])
        assert len(hooks["get_finished"]) >= len(hooks["wait_for_save"]) > 0
    assert set.union(*by_stage.values()) == all_layers
    assert sum(map(len, by_stage.values())) == len(all_layers)
    kinds = [one["kind"] for one in llm.collective_rpc(rank_connector.seen, args=(3,))]
    assert set(kinds) == {"RankConnector"}
    addresses = core.scheduler.connector._connectors[3].addresses
    assert addresses == {
        divmod(rank, size): Address((rank, rank % size, size, rank // size)) for rank in order
    }


def check_that_reports_wait_for_all(part: Any) -> None:
    """A request has been sent when the last rank says so, and not before."""
    ranks = set(range(part._vllm_config.parallel_config.world_size))
    told: dict[str, set[int]] = {}
    done: set[str] = set()
    for output in part.outputs:
        sent = output.kv_connector_worker_meta.sent
        assert set(sent) == ranks
        stats = output.kv_connector_stats.data["RankConnector"].data
        assert stats == {f"rank {rank}": [len(names)] for rank, names in sent.items()}
        for rank, names in sent.items():
            for name in names:
                told.setdefault(name, set()).add(rank)
        for name in output.finished_sending:
            assert told[name] == ranks
        done |= output.finished_sending
        if all(sent.values()):
            events = output.kv_cache_events
            assert [e.block_hashes for e in events.counts.get_common_events()] == [[b"all"]]
    assert len(done) == len(PROMPTS)
    assert any(
        any(o.kv_connector_worker_meta.sent.values()) > bool(o.finished_sending)
        for o in part.outputs
    )


SIZES = [TENSOR, STAGES, TENSOR | STAGES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_blocks_are_for_the_same_ranks(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A later engine of these sizes loads them; engines of other sizes find nothing."""
    folder = checkpoint(family)
    for number, sizes in enumerate([{}, *SIZES]):
        rows_alone = beside_extraction(tmp_path / str(number))
        with ranks(folder, sizes, rows_alone | {"enable_prefix_caching": False}) as llm:
            expected = ask(llm, LONGER)
        arguments = beside_extraction(tmp_path, storing(tmp_path)) | {
            "enable_prefix_caching": False
        }
        for found in (0, FOUND[0]):
            with ranks(folder, sizes, arguments) as llm:
                outputs = ask(llm, LONGER[:1])
                assert num_cached(outputs) == [found]
                outputs += ask(llm, LONGER[1:])
                same(outputs, expected)
        assert num_cached(outputs) == FOUND
    folders = {file.parent.name for file in (tmp_path / "blocks").rglob("*.block")}
    assert len(folders) == 1 + 2 + 2 + 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", SIZES)
def test_a_pool_that_preempts(
    sizes: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Chunks, preemptions, hits in the pool and loads at once."""
    folder, prompts = checkpoint("qwen3_5"), [TEXT[:n] + [n % 300] * 9 for n in range(30, 160, 13)]
    with ranks(folder, sizes, beside_extraction(tmp_path / "a")) as llm:
        expected = ask(llm, prompts, 60)
    small = {"num_gpu_blocks_override": 60}
    connectors = (storing(tmp_path), OFFLOADING, connector("RankConnector"))
    for _ in range(2):
        with ranks(folder, sizes, small | beside_extraction(tmp_path, *connectors)) as llm:
            outputs = ask(llm, prompts, 60)
            same(outputs, expected)
    assert sum(found > 0 for found in num_cached(outputs)) > len(prompts) // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("fault", ["raise", "late", "damage"])
def test_a_load_fails_on_one_rank(
    fault: str, policy: str, sizes: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The requests that load fail or are computed; all others go on, and later ones load again."""
    faulty = connector("FaultyConnector", tmp_path)
    arguments = only(faulty, kv_load_failure_policy=policy)
    with ranks(checkpoint("llama"), sizes, arguments) as llm:
        right = outcomes(llm, LONGER)
        forget_everything(llm)
        assert outcomes(llm, LONGER) == right
        if fault == "damage":
            damage(tmp_path, another_rank(sizes))
        else:
            (tmp_path / "fault").write_text(fault)
        forget_everything(llm)
        *outputs, beside = llm.generate([*LONGER, [11] * 40], greedy(3), use_tqdm=False)
        assert beside.outputs[0].finish_reason == "length"
        for output, (reason, token_ids) in zip(outputs, right, strict=True):
            choice = output.outputs[0]
            if policy == "fail":
                assert choice.finish_reason == "error"
                assert any(one in str(choice.stop_reason) for one in ("did not come", "planted"))
            else:
                assert (choice.finish_reason, list(choice.token_ids)) == (reason, token_ids)
        (tmp_path / "fault").unlink(missing_ok=True)
        for _ in range(4):
            forget_everything(llm)
            last = outcomes(llm, LONGER)
            assert policy == "fail" or last == right
        assert last == right


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_fails_on_one_rank(
    sizes: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Reports of that step are not lost, and stored blocks are right."""
    arguments = beside_extraction(
        tmp_path, storing(tmp_path), OFFLOADING, connector("RankConnector")
    )
    with ranks(checkpoint("qwen3_5"), sizes, arguments) as llm:
        expected = ask(llm, LONGER)
        world = core_of(llm).vllm_config.parallel_config.world_size
        for rank in range(world):
            core_of(llm).scheduler.reset_prefix_cache(reset_connector=True)
            remove_blocks(tmp_path)
            forget_everything(llm)
            llm.collective_rpc(rank_functions.fail_in_next_pass, args=(rank,))
            outputs = ask(llm, LONGER)
            assert any(one.outputs[0].finish_reason == "error" for one in outputs)
            for _ in range(2):
                forget_everything(llm)
                again = ask(llm, LONGER)
                same(again, expected)
            assert num_cached(again) == FOUND
        forget_everything(llm)


@pytest.mark.exhaustive
def test_one_rank_reports_for_all(checkpoint: Checkpoint) -> None:
    with ranks(checkpoint("llama"), TENSOR, only(connector("FirstRankConnector"))) as llm:
        outcomes(llm, PROMPTS)
        forget_everything(llm)
        for output in core_of(llm).scheduler.connector.outputs:
            assert output.finished_sending >= set(output.kv_connector_worker_meta.sent[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        at_night("FirstRankConnector", r"FirstRankConnector\.get_finished_count is 1"),
        at_night("RowsElsewhereConnector", r"rank 1 .*takes_rows_only"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    name: str, message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arguments = beside_extraction(tmp_path, connector(name))
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint("llama")), **OPTIONS, **TENSOR, **arguments)


def test_handshakes_of_stages_need_a_connector_that_knows_stages() -> None:
    taken: dict[int, Any] = {}

    class OfTensorRanks(CountingConnector):
        def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
            taken.update(metadata)

    own = object.__new__(OfTensorRanks)
    own.set_xfer_handshake_metadata_pp_aware({(0, 0): Address((0,)), (0, 1): Address((1,))})
    assert taken == {0: Address((0,)), 1: Address((1,))}
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: OfTensorRanks takes"):
        own.set_xfer_handshake_metadata_pp_aware({(0, 0): Address((0,)), (1, 0): Address((1,))})

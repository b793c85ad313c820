"""Recurrent states go out and come in as every kernel reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.harness import engine, greedy, random_prompts
from tests.grids import at_night
from tests.kv_connector.checkpoint_connector import checkpoint_connector
from tests.kv_connector.loading import ask, beside_extraction
from vllm.ops.operation import source_of
from vllm.v1.cache_kinds.recurrent import join_halves, part_halves

Checkpoint = Callable[..., Path]
PROMPT = random_prompts(101, [200])[0]["prompt_token_ids"]
TAIL = [7] * 20


@pytest.mark.parametrize("dk", [8, 7])
def test_halves_keep_every_bit(dk: int) -> None:
    torch.manual_seed(1)
    plain = torch.randn(3, dk, 5) * torch.logspace(-30, 30, 5)
    stored = part_halves(plain)
    assert torch.equal(join_halves(stored).view(torch.int32), plain.view(torch.int32))
    rounded = stored[:, : dk // 2].contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2))
    # Ties go away from zero there, to even here: both are next to the value.
    expected = plain[:, : dk // 2 * 2].unflatten(1, (-1, 2)).transpose(2, 3)
    torch.testing.assert_close(rounded.float(), expected, rtol=2**-8, atol=0)


def run(folder: Path, storage: Path, isa: str | None, connector: str) -> tuple[int, torch.Tensor]:
    """Tokens found and rows of a process that may use these instructions."""
    target = storage / f"{isa}.pt"
    code = f"from tests.kv_connector.test_state_layout import serve; serve({str(folder)!r}, "
    code += f"{str(storage)!r}, {str(target)!r}, {connector!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if isa is not None:
        environment["VLLM_CPU_ISA"] = isa
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), torch.load(target)


def serve(folder: str, storage: str, target: str, connector: str) -> None:
    shared = {
        "kv_connector": connector,
        "kv_connector_extra_config": {
            "shared_storage_path": f"{storage}/blocks",
            "mixed_kernels": True,
        },
    }
    if connector == "CheckpointConnector":
        shared = checkpoint_connector(Path(storage) / "blocks")
    arguments = beside_extraction(Path(storage) / "rows", shared)
    with engine(Path(folder), block_size=256, **arguments) as llm:
        from tests.engine.harness import rows_of

        (output,) = ask(llm, [PROMPT + TAIL])
        llm.generate([[1, 2]], greedy(1), use_tqdm=False)
        torch.save(rows_of(output), target)
    print(json.dumps(output.num_cached_tokens))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root of the mean square."""
    return float((one.float() - other.float()).square().mean().sqrt())


@pytest.mark.skipif(source_of("cpu").name == "plain", reason="one layout only")
@pytest.mark.parametrize(
    "family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    ("connector", "isa"),
    [
        pytest.param("SharedStorageConnector", "avx2", marks=pytest.mark.exhaustive),
        pytest.param("SharedStorageConnector", "baseline", marks=pytest.mark.exhaustive),
        ("CheckpointConnector", "avx2"),
        pytest.param("CheckpointConnector", "baseline", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("way", ["there", at_night("back")])
def test_states_of_one_machine_load_on_another(
    connector: str, isa: str, family: str, way: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Also by a connector of another package: the rows behind a loaded state differ as those
    computed there do."""
    folder = checkpoint(family, dtype=torch.bfloat16)
    first, second = (None, isa) if way == "there" else (isa, None)
    found, saved = run(folder, tmp_path, first, connector)
    assert found == 0
    found, again = run(folder, tmp_path, first, connector)
    assert found >= 192
    assert torch.equal(again, saved)
    found, rows = run(folder, tmp_path, second, connector)
    assert found >= 192
    assert torch.equal(rows[:found], saved[:found])
    (tmp_path / "alone").mkdir()
    _, computed = run(folder, tmp_path / "alone", second, connector)
    usual = difference(saved, computed)
    assert difference(rows[found:], computed[found:]) <= 1.5 * usual

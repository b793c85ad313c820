"""A server of several engines and ranks in a container whose /dev/shm is tiny."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.entrypoints.serve_process import serve
from tests.models.oracle import relative_error
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = pytest.mark.exhaustive

SHARED_BYTES = 2**16
"""Less than one tensor of a step: containers have 64 MiB."""
MOUNT = f"mount -t tmpfs -o size={SHARED_BYTES} none /dev/shm"
PROMPTS = [one["prompt_token_ids"] for one in random_prompts(5, [301, 5, 400, 33, 77, 250])]


def test_tensors_need_no_room_in_shared_memory(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A namespace of its own has the small file system; nothing is ever put there."""
    in_container = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*in_container, MOUNT], check=False).returncode:
        pytest.skip("this machine does not let a user mount (unprivileged user namespaces)")
    folder = checkpoint("llama")
    with engine(folder, **extraction_config([0, 2, 4], tmp_path / "one")) as llm:
        outputs = llm.generate(PROMPTS, greedy(1), use_tqdm=False)
        expected = [rows_of(output) for output in outputs]
    sizes = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    before = (*in_container, f'{MOUNT} && exec "$@"', "sh")
    with serve(folder, tmp_path / "several", *sizes, before=before) as server:
        with server.client() as client, ThreadPoolExecutor(len(PROMPTS)) as threads:

            def ask(ids: list[int]) -> torch.Tensor:
                asked = {"model": str(folder), "prompt": ids, "max_tokens": 1}
                reply = client.post("/v1/completions", json=asked).raise_for_status().json()
                path = reply["kv_transfer_params"]["hidden_states_path"]
                return load_hidden_states(path)["hidden_states"]

            found = list(threads.map(ask, PROMPTS))
        shared = Path(f"/proc/{server.process.pid}/root/dev/shm")
        room = os.statvfs(shared)
        assert room.f_blocks * room.f_frsize == SHARED_BYTES
        assert not list(shared.iterdir())
    for rows, whole in zip(found, expected, strict=True):
        assert relative_error(rows, whole) < 1e-4

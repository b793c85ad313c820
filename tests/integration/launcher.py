"""Models as people train draft models for, and ``vllm serve`` on them in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import extraction_config
from tests.entrypoints.serve_process import ServeProcess, wait_for_url
from tests.models.checkpoints import make_checkpoint

NUM_LAYERS = 8
LAYERS = [2, NUM_LAYERS // 2, NUM_LAYERS - 3, NUM_LAYERS]
"""Layers that speculators' trainer derives from the number of layers, and the final state."""
MAX_MODEL_LEN = 4096
POOL_BYTES = 64 * 2**20
SHUTDOWN_SECONDS = 30.0

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }};"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}call {{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}"
    "{% endfor %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reads arguments of tool calls as an object, which clients send as a string."""


def make_verifier(folder: Path, family: str) -> Path:
    """A bfloat16 checkpoint of NUM_LAYERS layers with a context of MAX_MODEL_LEN tokens."""
    overrides: dict[str, Any] = {
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    if family == "qwen3_5":
        period = ["linear_attention"] * 3 + ["full_attention"]
        overrides["layer_types"] = period * (NUM_LAYERS // len(period))
    make_checkpoint(folder, family, dtype=torch.bfloat16, **overrides)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def engine_options(folder: Path, **connector: Any) -> dict[str, Any]:
    """Arguments of LLM, and flags of ``vllm serve``, that extract LAYERS into ``folder``."""
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": POOL_BYTES}
    options |= extraction_config(LAYERS, folder)
    options["kv_transfer_config"] |= connector
    return options


@contextmanager
def serve(
    checkpoint: Path, folder: Path, *flags: str, python_path: Path | None = None, **connector: Any
) -> Iterator[ServeProcess]:
    """A server with one thread that extracts LAYERS into ``folder``, on a free port.

    python_path: where it finds modules beside its own. connector: entries of kv_transfer_config
    in place of the usual ones. Ended by SIGTERM, and it has to end well.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    for option, value in engine_options(folder, **connector).items():
        # With underscores, as the launcher of speculators writes them.
        command += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    command += ["--host", "127.0.0.1", "--port", "0", "--disable-uvicorn-access-log", *flags]
    paths = [os.getcwd(), *([str(python_path)] if python_path else [])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    log_file = folder.with_suffix(".log")
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    server = ServeProcess(process, log_file, "")
    try:
        server.url = wait_for_url(server)
        yield server
        server.signal(signal.SIGTERM)
        assert server.wait(SHUTDOWN_SECONDS) == 0, server.log
    finally:
        process.kill()
        process.wait(SHUTDOWN_SECONDS)


__all__ = ["LAYERS", "MAX_MODEL_LEN", "engine_options", "make_verifier", "serve"]

"""hs-connectors 0.9 from the registry, unmodified: loaded by the server, read by its own client.

About 20 s for each model on two cores.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import greedy, random_prompts, rows_of
from tests.integration.clients.environment import ClientEnvironment, hs_connectors_folder
from tests.integration.launcher import engine_options, make_verifier, serve
from vllm import LLM

CONNECTOR = {
    "kv_connector": "FP8HiddenStatesConnector",
    "kv_connector_module_path": "hs_connectors.fp8_hidden_states_connector",
}
READ_AND_DELETE = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from hs_connectors.transfer import FP8Transfer
transfer = FP8Transfer(Path("unused"))
for index, params in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    sample = transfer.get_generated(params)
    save_file(sample, f"{sys.argv[2]}/{index}.safetensors")
    transfer.delete(params["hidden_states_path"])
"""


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_fp8_files(family: str, tmp_path: Path, clients: ClientEnvironment) -> None:
    """Files hold the offline engine's rows in eight bits; the client gets them back from there."""
    model = make_verifier(tmp_path / "model", family)
    prompts = random_prompts(5, [1, 2, 17, 300, 33, 900, 64, 128])
    with LLM(str(model), **engine_options(tmp_path / "reference")) as llm:
        outputs = llm.generate(prompts, greedy(1), use_tqdm=False)
        expected = [rows_of(output) for output in outputs]
    storage = tmp_path / "storage"
    package = hs_connectors_folder(tmp_path / "package")
    with serve(model, storage, python_path=package, **CONNECTOR) as server:

        def ask(prompt: dict[str, Any]) -> dict[str, Any]:
            body = {"prompt": prompt["prompt_token_ids"], "max_tokens": 1}
            reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
            params: dict[str, Any] = reply.raise_for_status().json()["kv_transfer_params"]
            return params

        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(ask, prompts))
        quantised = [quantise(rows) for rows in expected]
        for params, prompt, (eights, scales) in zip(replies, prompts, quantised, strict=True):
            assert Path(params["hidden_states_path"] + ".lock").exists()
            tensors = load_file(params["hidden_states_path"])
            assert set(tensors) == {"hidden_states", "hidden_states_scales", "token_ids"}
            assert tensors["token_ids"].tolist() == prompt["prompt_token_ids"]
            assert torch.equal(tensors["hidden_states"].float(), eights.float())
            assert torch.equal(tensors["hidden_states_scales"], scales)
        (tmp_path / "replies.json").write_text(json.dumps(replies))
        (tmp_path / "read").mkdir()
        program = (READ_AND_DELETE, str(tmp_path / "replies.json"), str(tmp_path / "read"))
        done = clients.run("python", "-c", *program)
        assert done.returncode == 0, done.stdout
        assert list(storage.iterdir()) == []
    for index, (eights, scales) in enumerate(quantised):
        read = load_file(tmp_path / "read" / f"{index}.safetensors")["hidden_states"]
        assert torch.equal(read, eights.bfloat16() * scales.bfloat16())


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` [tokens, layers, hidden] in float8_e4m3fn, and one float32 scale a token."""
    largest = rows.float().abs().amax(dim=(1, 2), keepdim=True)
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales

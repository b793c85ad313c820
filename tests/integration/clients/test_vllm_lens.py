"""vllm-lens' client, unmodified, against ``vllm serve``: rows and steering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.entrypoints.serve_process import serve
from tests.integration.clients.environment import LENS, ClientEnvironment
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, SamplingParams, SteeringVector

CLIENT = """
import json, sys
sys.path.append(sys.argv[1])
import torch
from safetensors.torch import load_file, save_file
from vllm_lens import Hook, SteeringVector
from vllm_lens.client import VLLMLensClient

client = VLLMLensClient(sys.argv[2])
drawn = load_file(sys.argv[3])["drawn"]
steering = [
    SteeringVector(activations=drawn[:, 0], layer_indices=[0, 2], scale=0.5),
    SteeringVector(activations=drawn[:1].bfloat16(), layer_indices=[1], norm_match=True),
    SteeringVector(activations=drawn[1:], layer_indices=[1], position_indices=[9, 2, 14]),
]
message = [{"role": "user", "content": "Why?"}]
texts, rows = [], {}
for vectors in (None, steering):
    options = {"capture_layers": [2, 0], "steering_vectors": vectors, "max_tokens": 9}
    for transport in (None, "binary"):
        answer = client.generate("A text.", activations_transport=transport, **options)
        rows[str(len(texts))] = answer.activations["residual_stream"]
        texts.append(answer.text)
    answer = client.chat(message, **options)
    rows[str(len(texts))] = answer.activations["residual_stream"]
    texts.append(answer.text)
texts.append(client.generate("A text.").activations)
try:
    client.generate("A text.", hooks=[Hook(fn=print, layer_indices=[0])])
except RuntimeError as error:
    texts.append(str(error))
save_file({name: tensor.contiguous() for name, tensor in rows.items()}, sys.argv[4])
print(json.dumps(texts))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_steering(dtype: str, tmp_path: Path, clients: ClientEnvironment) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5")
    drawn = torch.randn(2, 3, 72, generator=torch.Generator().manual_seed(4))
    save_file({"drawn": drawn}, tmp_path / "drawn.safetensors")
    paths = [str(tmp_path / name) for name in ("drawn.safetensors", "rows.safetensors")]
    with serve(folder, None, "--dtype", dtype) as server:
        done = clients.run("python", "-c", CLIENT, str(LENS), server.url, *paths)
    assert done.returncode == 0, done.stdout
    *texts, nothing, refusal = json.loads(done.stdout.splitlines()[-1])
    assert nothing is None and "apply_hooks" in refusal
    rows = load_file(paths[1])
    steering = [
        SteeringVector(drawn[:, 0], [1, 3], 0.5),
        SteeringVector(drawn[:1].bfloat16(), [2], positions=[0, 1, 2], norm_match=True),
        SteeringVector(drawn[1:], [2], positions=[9, 2, 14]),
    ]
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    with LLM(str(folder), dtype=dtype, **options) as llm:
        for index, text in enumerate(texts):
            params = SamplingParams(
                max_tokens=9,
                temperature=0,
                steering=steering if index >= 3 else None,  # type: ignore[arg-type]
            )
            messages = [{"role": "user", "content": "Why?"}]
            prompt = messages if index % 3 == 2 else "A text."
            (sample,) = llm.extract(prompt, layers=[1, 3], sampling_params=params)
            assert sample.output is not None and sample.output.text == text
            found = rows[str(index)]
            assert found.dtype == getattr(torch, dtype)
            assert torch.equal(found, sample.hidden_states[:-1].transpose(0, 1))
    assert len(texts) == 6 and texts[:3] != texts[3:]

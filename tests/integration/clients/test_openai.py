"""openai's client, unmodified, against ``vllm serve``: vectors."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.harness import random_prompts
from tests.entrypoints.serve_process import serve
from tests.integration.clients.environment import ClientEnvironment
from tests.models.checkpoints import make_checkpoint
from vllm import LLM

EMBED = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="EMPTY", max_retries=0)
name = client.models.list().data[0].id
made = []
for inputs in json.loads(sys.argv[2]):
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=name, input=inputs, **options)
        made.append([answer.usage.prompt_tokens, [item.embedding for item in answer.data]])
try:
    client.embeddings.create(model=name, input="")
except openai.BadRequestError as error:
    made.append(str(error.body["message"]))
print(json.dumps(made))
"""


def test_embeddings(tmp_path: Path, clients: ClientEnvironment) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5")
    ids = [one["prompt_token_ids"] for one in random_prompts(8, [3, 90], vocabulary=250)]
    inputs = ["A text.", ["A text.", "é" * 40], ids[0], ids]
    with serve(folder, None) as server:
        done = clients.run("python", "-c", EMBED, server.url, json.dumps(inputs))
    assert done.returncode == 0, done.stdout
    made = json.loads(done.stdout.splitlines()[-1])
    with LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
        for index, prompts in enumerate(inputs):
            outputs = llm.embed(prompts)
            vectors = [one.outputs.embedding for one in outputs]
            num_tokens = sum(len(one.prompt_token_ids) for one in outputs)
            assert made[2 * index : 2 * index + 2] == [[num_tokens, vectors]] * 2
    assert made[-1] == "input: a text or token ids are needed"

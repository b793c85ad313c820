"""SpecForge's client of a capturing server and its Mooncake store, unmodified; prints JSON.

python specforge_online.py MODEL FOLDER

The store's client is the double of the tests, whose objects are in another process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from specforge.inference.adapters.server_capture import (
    ServerCaptureFailure,
    ServerCaptureSchema,
    SGLangServerCaptureAdapter,
)
from specforge.inference.capture import CaptureConfig
from specforge.runtime.contracts import PromptTask
from specforge.runtime.data_plane.mooncake_store import MooncakeFeatureStore

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import live_server
from tests.models.oracle import reference_run, relative_error
from tests.training.store_double import StoreDouble, install_client
from vllm.entrypoints.openai.cli_args import ServerSettings

AUX = (0, 2)
LENGTHS = [7, 1, 40]
SCHEMA = ServerCaptureSchema(
    aux_feature="hidden_state",
    last_hidden_feature="target",
    passthrough=(("input_ids", "input_ids", ()), ("loss_mask", "loss_mask", ())),
    attention_mask_feature="attention_mask",
)
"""The layers that EAGLE-3 reads."""


def make_tasks() -> list[PromptTask]:
    tasks = []
    for index, prompt in enumerate(random_prompts(5, LENGTHS, 250)):
        ids = prompt["prompt_token_ids"]
        payload = {"input_ids": ids, "loss_mask": [position % 2 for position in range(len(ids))]}
        tasks.append(PromptTask(f"task-{index}", "run", "source", payload, 64))
    return tasks


def check_values(model: str, store: MooncakeFeatureStore, task: PromptTask, ref: Any) -> None:
    found, handle = store.get(ref)
    ids = task.payload["input_ids"]
    expected = reference_run(Path(model), ids)
    aux = torch.cat([expected.streams[layer + 1] for layer in AUX], dim=-1)
    assert relative_error(found["hidden_state"], aux[None]) < 1e-4
    assert relative_error(found["target"], expected.head_input[None]) < 1e-4
    assert found["input_ids"].tolist() == [ids]
    assert found["loss_mask"].tolist() == [task.payload["loss_mask"]]
    assert found["attention_mask"].tolist() == [[1] * len(ids)]
    store.release(handle)


def run(model: str, url: str, width: int, double: StoreDouble) -> None:
    store = MooncakeFeatureStore(store_id="run", store=double)
    adapter = SGLangServerCaptureAdapter(
        url, store, run_id="run", algorithm="eagle3", schema=SCHEMA
    )
    capture = CaptureConfig.from_strategy(
        {"hidden_state", "target", "input_ids", "loss_mask", "attention_mask"},
        AUX,
        target_repr="hidden_state",
        target_hidden_size=width,
    )
    tasks = make_tasks()
    lost = tasks[1]  # the reply to its first attempt is lost
    adapter.produce_refs([lost], capture=capture)
    (refused,) = adapter.produce_refs([lost], capture=capture)
    assert isinstance(refused, ServerCaptureFailure) and refused.retryable
    assert "exists in the store already" in refused.reason
    double.end_leases()
    tasks[1] = dataclasses.replace(lost, attempt=1)
    for task, ref in zip(tasks, adapter.produce_refs(tasks, capture=capture), strict=True):
        assert not isinstance(ref, ServerCaptureFailure), ref
        check_values(model, store, task, ref)
    double.end_leases()
    store.drain_pending_removals(retry_interval_s=0.0)
    print(json.dumps(double.all_keys()))


def main(model: str, folder: str) -> None:
    double = StoreDouble()
    settings = ServerSettings(mooncake_store={}, spec_capture_aux_layer_ids=list(AUX))
    with pytest.MonkeyPatch.context() as patch:
        install_client(patch, double)
        with live_server(Path(model), Path(folder), layers=None, settings=settings) as server:
            width = server.state.engine.model_config.get_hidden_size()
            run(model, server.url, width, double)
    double.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

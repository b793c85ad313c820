"""Kernels that an option names are used, or the engine does not start and says why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.fake_card import fake_card
from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.worker.test_recorded_steps import Recorder
from vllm.config.identity import value_identity
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import attention
from vllm.ops.attention import paged_attention
from vllm.ops.backends import check_attention_backend
from vllm.ops.cuda import fla_recurrent
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import AskedBackend
from vllm.v1.worker import gpu_model_runner, gpu_worker

Checkpoint = Callable[..., Path]
ON_A_CARD: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "enforce_eager": True,
    # The largest step is run once to measure memory, by plain kernels and in emulated bfloat16.
    "max_model_len": 32,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 2,
}


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = property(lambda self: ("TRITON_ATTN", "FLASHINFER"))
    monkeypatch.setattr(CudaPlatform, "attention_backends", backends)
    monkeypatch.setattr(fla_recurrent, "why_unavailable", lambda: None)


def refused(message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    with (
        fake_card(monkeypatch),
        pytest.raises(ValueError, match=re.escape(message)),
        engine(folder, **arguments),
    ):
        pass


def starts(folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    with fake_card(monkeypatch), engine(folder, **arguments) as llm:
        (output,) = llm.generate(random_prompts(3, [9]), greedy(2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", ["TRITON", "FLA"])
def test_kernels_of_recurrent_layers(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_5")
    monkeypatch.setenv("VLLM_GDN_BACKEND", name)
    starts(folder, monkeypatch, **ON_A_CARD)
    starts(checkpoint("llama"), monkeypatch)  # has no layer that it could be about
    here = f"VLLM_GDN_BACKEND='{name}' cannot be used: "
    refused(here + "it names kernels of CUDA, not of device='cpu'", folder, monkeypatch)
    if name == "FLA":
        message = "chunks are for 16-bit models, not for dtype='float32'; use TRITON, or dtype="
        start = here + "flash-linear-attention's "
        refused(start + message, folder, monkeypatch, **ON_A_CARD | {"dtype": "float32"})
        missing = "No module named 'fla'"
        monkeypatch.setattr(fla_recurrent, "why_unavailable", lambda: missing)
        message = f"{missing}; use TRITON, or leave it unset"
        refused(here + message, folder, monkeypatch, **ON_A_CARD)
    else:
        starts(folder, monkeypatch, **ON_A_CARD | {"dtype": "float32"})
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: "Triton is not installed")
    message = "Triton is not installed; fix that, or leave VLLM_GDN_BACKEND unset"
    refused(here + message, folder, monkeypatch, **ON_A_CARD)
    monkeypatch.setenv("VLLM_KERNELS", "plain")
    message = "VLLM_KERNELS=plain computes in plain torch; unset one of the two"
    refused(here + message, folder, monkeypatch, **ON_A_CARD)


@pytest.mark.parametrize("from_variable", [False, True])
@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASHINFER"])
def test_attention(
    name: str, from_variable: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def get_paged_attention(device_type: str, backend: str) -> Any:
        used.append(backend)
        return paged_attention

    monkeypatch.setattr(attention, "get_paged_attention", get_paged_attention)
    folder, large = checkpoint("llama"), checkpoint("llama", head_dim=64)
    asked: dict[str, Any] = {} if from_variable else {"attention_backend": name}
    if from_variable:
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
    option = "VLLM_ATTENTION_BACKEND" if from_variable else "attention_backend"
    here = f"{option}='{name}' cannot be used"
    starts(large, monkeypatch, **asked, **ON_A_CARD)
    assert set(used) == {name}
    refused(here + " on CPU", folder, monkeypatch, **asked)
    if name == "FLASHINFER":
        message = ": FlashInfer does not take dtype='float32'; use TRITON_ATTN, or dtype="
        refused(here + message, large, monkeypatch, **asked, **ON_A_CARD | {"dtype": "float32"})
        message = ": it supports heads of 64, 128, 256 elements, this model has heads of 16; use TR"
        refused(here + message, folder, monkeypatch, **asked, **ON_A_CARD)
    else:
        starts(folder, monkeypatch, **asked, **ON_A_CARD | {"dtype": "float32"})
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: "Triton is not installed")
    message = f": Triton is not installed; fix that, or leave {option} unset"
    refused(here + message, large, monkeypatch, **asked, **ON_A_CARD)
    monkeypatch.setenv("VLLM_KERNELS", "plain")
    message = f": VLLM_KERNELS=plain computes in plain torch; unset one of the two ({option})"
    refused(here + message, large, monkeypatch, **asked, **ON_A_CARD)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASHINFER"])
def test_latent_attention(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("minicpm3", kv_lora_rank=56, qk_rope_head_dim=8)  # 64 are kept of a token
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: None)
    if name == "TRITON_ATTN":
        starts(folder, monkeypatch, attention_backend=name, **ON_A_CARD)
        return
    message = f"attention_backend='{name}' cannot be used: it does not support latent attention"
    refused(message, folder, monkeypatch, attention_backend=name, **ON_A_CARD)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASHINFER"])
def test_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: None)
    asked = AskedBackend("attention_backend", name)
    message = f"attention_backend='{name}' cannot be used: FlashInfer does not support sinks"
    with pytest.raises(ValueError, match=message) if name == "FLASHINFER" else nullcontext():
        check_attention_backend(asked, "cuda", torch.bfloat16, 64, True)
    check_attention_backend(asked, "cuda", torch.bfloat16, 64, False)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASHINFER"])
def test_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: None)
    asked = AskedBackend("attention_backend", name)
    message = "FlashInfer does not support this model's attention inside chunks; use TRITON_ATTN"
    with pytest.raises(ValueError, match=message) if name == "FLASHINFER" else nullcontext():
        check_attention_backend(asked, "cuda", torch.bfloat16, 64, False, has_chunks=True)


def test_nothing_is_checked_when_nothing_was_asked_for(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.ops.backends.why_no_triton", lambda: "Triton is not installed")
    monkeypatch.setattr(fla_recurrent, "why_unavailable", lambda: "No module named 'fla'")
    starts(checkpoint("qwen3_5"), monkeypatch, **ON_A_CARD)


@pytest.mark.parametrize(("name", "times"), [("TRITON_ATTN", 0), ("FLASHINFER", 1)])
def test_what_recorded_steps_do_instead_is_said_once(
    name: str,
    times: int,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(attention, "get_paged_attention", lambda *_: paged_attention)
    for module in (gpu_model_runner, gpu_worker):
        monkeypatch.setattr(module, "record_cuda_graph", Recorder)
    arguments = ON_A_CARD | {"enforce_eager": False, "attention_backend": name}
    folder = checkpoint("llama", head_dim=64)
    with (
        caplog.at_level(logging.INFO, logger="vllm"),
        fake_card(monkeypatch),
        engine(folder, **arguments) as llm,
    ):
        assert core_of(llm).executor.worker.model_runner.recorded_steps is not None
        llm.generate(random_prompts(3, [9, 8]), greedy(4), use_tqdm=False)
    assert caplog.text.count("recorded decode steps attend through TRITON_ATTN") == times


def test_identity_of_values(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are asked for change it; the usual ones are left out, asked for or not."""
    hybrid, llama = checkpoint("qwen3_5"), checkpoint("llama", head_dim=64)

    def of(folder: Path, **arguments: Any) -> dict[str, Any]:
        with fake_card(monkeypatch):
            arguments = {"model": str(folder), **ON_A_CARD, **arguments}
            return value_identity(EngineArgs(**arguments).create_engine_config(), "triton")

    usual = {folder: of(folder) for folder in (hybrid, llama)}
    assert of(llama, attention_backend="TRITON_ATTN") == usual[llama]
    asked = {"attention_backend": "FLASHINFER"}
    assert of(llama, **asked) == {**usual[llama], **asked}
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    assert of(llama) == {**usual[llama], **asked}
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    for name, found in (("FLA", {"delta_rule_backend": "FLA"}), ("TRITON", {})):
        monkeypatch.setenv("VLLM_GDN_BACKEND", name)
        assert of(hybrid) == {**usual[hybrid], **found}
        assert of(llama) == usual[llama]

"""Facts about the device."""

from __future__ import annotations

import os
import runpy

import pytest
import torch

from vllm import platforms
from vllm.platforms import get_platform
from vllm.platforms import interface as interface_module


def test_current_platform_is_the_best_one_here() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert platforms.current_platform.device_type == expected
    assert platforms.current_platform is get_platform("auto")


def test_cpu_memory() -> None:
    cpu = get_platform("cpu")
    assert cpu.is_cpu()
    assert not cpu.is_cuda()
    assert 0 < cpu.available_memory_bytes() <= cpu.total_memory_bytes()
    assert cpu.kv_cache_budget_bytes(0.5) <= cpu.total_memory_bytes() // 4


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_cpu_asks_torch_for_large_pages_unless_the_user_said(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", before)
    runpy.run_path(str(interface_module.__file__))  # as when it is imported
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == after


def test_cpu_dtypes() -> None:
    cpu = get_platform("cpu")
    cpu.check_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype='float64' is not supported on CPU .* bfloat16"):
        cpu.check_dtype(torch.float64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match=r"device='cuda': torch finds no CUDA device"):
        get_platform("cuda").check_dtype(torch.float32)


def test_attention_backend_is_the_one_asked_for_or_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = get_platform("cpu")
    assert cpu.choose_attention_backend(None) == "CPU_ATTN"
    assert cpu.choose_attention_backend("CPU_ATTN") == "CPU_ATTN"
    with pytest.raises(ValueError, match=r"attention_backend='FLASHINFER' .* use CPU_ATTN"):
        cpu.choose_attention_backend("FLASHINFER")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "triton_attn")
    with pytest.raises(ValueError, match=r"VLLM_ATTENTION_BACKEND='TRITON_ATTN' .* use CPU_ATTN"):
        cpu.choose_attention_backend(None)
    assert cpu.choose_attention_backend("CPU_ATTN") == "CPU_ATTN"


def test_flashinfer_can_be_asked_for_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = get_platform("cuda")
    found: list[object] = [None]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0])
    assert cuda.attention_backends == ("TRITON_ATTN",)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    with pytest.raises(ValueError, match=r"='FLASHINFER' .* a card: FlashInfer is not installed; "):
        cuda.choose_attention_backend("FLASHINFER")
    with pytest.raises(ValueError, match=r"='CPU_ATTN' .* another kind of device; use TRITON_ATTN"):
        cuda.choose_attention_backend("CPU_ATTN")
    found[0] = object()
    assert cuda.choose_attention_backend(None) == "TRITON_ATTN"
    assert cuda.choose_attention_backend("FLASHINFER") == "FLASHINFER"


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="device='tpu' is not supported; use 'auto', 'cpu' or"):
        get_platform("tpu")


def test_threads_follow_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = get_platform("cpu")
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert cpu.set_num_threads() == torch.get_num_threads() == 1
        monkeypatch.setenv("VLLM_CPU_THREADS", "2")
        assert cpu.set_num_threads() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ranks_share_the_cores_or_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, before = get_platform("cpu"), torch.get_num_threads()
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    monkeypatch.delenv("VLLM_CPU_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("vllm.platforms.cpu.usable_core_count", lambda: 9)
    try:
        assert cpu.set_num_threads(1, 2) == 4
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")
        assert [cpu.set_num_threads(0, ranks) for ranks in (1, 2, 8)] == [6, 3, 1]
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"9999-10001,10003|{one}")
        assert cpu.set_num_threads(1, 2) == 1
        assert os.sched_getaffinity(0) == {one}
        with pytest.raises(ValueError, match=r"rank 0 cannot run on the CPUs \[9999, 10000,"):
            cpu.set_num_threads(0, 2)
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{one},9999-10001|{one}")
        assert cpu.set_num_threads(0, 2) == 1  # threads of CPUs that are not there would only wait
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"0-{10**15}")
        with pytest.raises(ValueError, match="use numbers of CPUs up to 65,535"):
            cpu.set_num_threads()
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"9999-10001,10003|{one}")
        with pytest.raises(ValueError, match="has 2 lists of CPUs for 3 ranks"):
            cpu.set_num_threads(0, 3)
        for value in ("auto", "nobind"):
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", value)
            assert cpu.set_num_threads(0, 3) == 2
        for value in ("3-1", "a", "1|", "-2"):
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", value)
            with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND.* use auto, nobind"):
                cpu.set_num_threads()
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(before)


def test_the_environment_states_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_platform("cpu").stated_pool_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert get_platform("cpu").stated_pool_bytes == 3 * 2**29
    for value in ("0", "-1", "much", "nan"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
        with pytest.raises(ValueError, match=r"VLLM_CPU_KVCACHE_SPACE.* above 0"):
            _ = get_platform("cpu").stated_pool_bytes


def test_engines_share_threads_or_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("VLLM_CPU_THREADS", "5")
        assert get_platform("cpu").share_of_machine(1, 2) == {"VLLM_CPU_THREADS": "2"}
        assert get_platform("cpu").share_of_machine(1, 9) == {"VLLM_CPU_THREADS": "1"}
    finally:
        torch.set_num_threads(before)
    cuda = get_platform("cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda.share_of_machine(1, 2) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert cuda.share_of_machine(1, 2) == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(ValueError, match="data_parallel_size=3: there are 2 devices"):
        cuda.share_of_machine(0, 3)


@pytest.mark.gpu
def test_cuda_memory() -> None:
    cuda = get_platform("cuda")
    assert cuda.is_cuda()
    assert 0 < cuda.available_memory_bytes() <= cuda.total_memory_bytes()
    assert cuda.kv_cache_budget_bytes(1.0) <= cuda.available_memory_bytes()

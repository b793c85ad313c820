"""The other config objects: values, derived values, and errors a user can act on."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    get_current_vllm_config,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)

IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def extraction(layer_ids: Any, **options: Any) -> dict[str, Any]:
    draft = {"hf_config": {IDS_KEY: layer_ids}}
    return {"method": "extract_hidden_states", "draft_model_config": draft, **options}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("512M", 512 << 20), ("2GB", 2 * 10**9), ("1.5k", 1500), (77, 77)],
)
def test_sizes_as_text(text: str | int, num_bytes: int) -> None:
    assert CacheConfig(kv_cache_memory_bytes=text).kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(block_sise=16), r"'block_sise' \(did you mean 'block_size'\?\)"),
        (lambda: CacheConfig(block_size=24), "block_size=24 is not a positive multiple of 16"),
        (lambda: CacheConfig(block_size=0), "block_size=0 is not a positive multiple of 16"),
        (lambda: CacheConfig(block_size=2**30), "block_size=1073741824 .* use at most 65536"),
        (lambda: CacheConfig(mamba_block_size=40), "mamba_block_size=40 .* use for instance 32"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "utilization=1.5 .* less than or equal"),
        (lambda: CacheConfig(gpu_memory_utilization=0), "utilization=0 .* greater than 0"),
        (
            lambda: CacheConfig(kv_cache_memory_bytes="4 elephants"),
            "'4 elephants' is not valid; use",
        ),
        (lambda: CacheConfig(kv_cache_memory_bytes=0), "kv_cache_memory_bytes=0 is not a size"),
        (lambda: CacheConfig(cache_dtype="fp8"), "kv_cache_dtype='fp8' .* supported: 'auto'"),
        (lambda: CacheConfig(attn_pack_size=0), "attn_pack_size=0 .* greater than or equal to 1"),
        (lambda: CacheConfig(kv_offloading_backend="native"), "no effect without kv_offloading_s"),
        (lambda: CacheConfig(kv_offloading_size=float("inf")), "size=inf .* a finite number"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs=0 is not valid"),
        (lambda: SchedulerConfig(max_num_batched_tokens="many"), "batched_tokens='many' is not"),
        (
            lambda: SchedulerConfig(policy="lifo"),
            "^scheduling_policy='lifo' .* 'fcfs' or 'priority'",
        ),
        (lambda: ParallelConfig(tensor_parallel_size=0), "tensor_parallel_size=0 is not valid"),
        (lambda: LoadConfig(load_format="gguf"), "load_format='gguf' .* 'pt' or 'dummy'"),
        (lambda: DeviceConfig(device="tpu"), "device='tpu' .* 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_bad_values_say_what_would_work(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_token_budget_without_chunked_prefill() -> None:
    assert SchedulerConfig().max_num_batched_tokens == 2048
    whole = SchedulerConfig(enable_chunked_prefill=False, max_model_len=9000)
    assert whole.max_num_batched_tokens == 9000
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=8999 .* use at least 9000"):
        SchedulerConfig(
            enable_chunked_prefill=False, max_model_len=9000, max_num_batched_tokens=8999
        )


def test_world_size_counts_ranks_of_one_engine() -> None:
    config = ParallelConfig(
        tensor_parallel_size=3,
        pipeline_parallel_size=2,
        data_parallel_size=5,
        decode_context_parallel_size=3,
        prefill_context_parallel_size=7,
    )
    assert config.world_size == 42


# Extraction


@pytest.mark.parametrize("num_speculative_tokens", [0, 1])
def test_layer_ids_keep_order_and_duplicates(num_speculative_tokens: int) -> None:
    given = extraction([3, 0, 3, 1], num_speculative_tokens=num_speculative_tokens)
    config = SpeculativeConfig(**given)
    assert config.hidden_state_layer_ids == (3, 0, 3, 1)
    assert config.draft_model_config is not None
    assert config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids == [3, 0, 3, 1]


def test_draft_model_config_may_be_objects() -> None:
    hf_config = SimpleNamespace(**{IDS_KEY: [2]})
    draft = SimpleNamespace(hf_config=hf_config)
    config = SpeculativeConfig(method="extract_hidden_states", draft_model_config=draft)
    assert config.hidden_state_layer_ids == (2,)
    assert config.draft_model_config.hf_config is hf_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "method=None is not supported; supported: 'extract_hidden_states'"),
        ({"method": "eagle3"}, "method='eagle3' is not supported; supported: 'extract_hidden_st"),
        (extraction([1], num_speculative_tokens=2), r"num_speculative_tokens=2 .* use 1 \(or 0\)"),
        (extraction([1], model="some/draft"), "model='some/draft' .* leave it out"),
        (extraction([1], methd="x"), r"speculative_config: unknown key 'methd' \(did you mean 'm"),
        (extraction([]), r"layer_ids=\[\] is not a list of at least one"),
        (extraction("123"), "layer_ids='123' is not a list"),
        (extraction([1, True]), "holds True; use whole numbers"),
        (extraction([1, 2.0]), "holds 2.0; use whole numbers"),
        ({"method": "extract_hidden_states"}, f"hf_config.{IDS_KEY} is missing; give the list"),
        (
            {
                "method": "extract_hidden_states",
                "draft_model_config": {"hf_config": {IDS_KEY[:-1]: [1]}},
            },
            rf"is missing \(there is '{IDS_KEY[:-1]}'",
        ),
        (
            {"method": "extract_hidden_states", "draft_model_config": {"hf_confg": {}}},
            r"draft_model_config: unknown key 'hf_confg' \(did you mean 'hf_config'\?\)",
        ),
    ],
)
def test_bad_speculative_config(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**options)


@pytest.mark.parametrize("layer_id", [-1, 6])
def test_layer_id_out_of_range(llama: str, layer_id: int) -> None:
    with pytest.raises(ValueError, match=rf"{IDS_KEY} holds {layer_id}, .* from 0 .* to 5 "):
        VllmConfig(
            model_config=ModelConfig(model=llama),
            speculative_config=SpeculativeConfig(**extraction([0, 5, layer_id])),
        )


def test_layer_ids_at_both_ends_are_valid(llama: str) -> None:
    config = VllmConfig(
        model_config=ModelConfig(model=llama),
        speculative_config=SpeculativeConfig(**extraction([5, 0])),
    )
    assert config.speculative_config is not None
    assert config.speculative_config.hidden_state_layer_ids == (5, 0)


# Connectors


def test_roles() -> None:
    roles = {
        role: KVTransferConfig(kv_connector="C", kv_role=role)
        for role in ("kv_producer", "kv_consumer", "kv_both")
    }
    assert [config.is_kv_producer for config in roles.values()] == [True, False, True]
    assert [config.is_kv_consumer for config in roles.values()] == [False, True, True]
    assert not KVTransferConfig().is_kv_transfer_instance
    assert roles["kv_both"].engine_id != roles["kv_producer"].engine_id


def test_extra_config_has_defaults() -> None:
    config = KVTransferConfig(
        kv_connector="C", kv_role="kv_both", kv_connector_extra_config={"a": 0}
    )
    assert (config.get_from_extra_config("a", 5), config.get_from_extra_config("b", 5)) == (0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_conector": "C"}, r"kv_transfer_config: unknown key 'kv_conector' \(did you mean"),
        ({"kv_connector": "C"}, "kv_role is missing for kv_connector='C'; use 'kv_producer'"),
        (
            {"kv_connector": "C", "kv_role": "both"},
            "kv_transfer_config.kv_role='both' .* 'kv_both'",
        ),
        ({"kv_role": "kv_both"}, "kv_transfer_config.kv_connector is missing"),
        ({"kv_port": 65536}, "kv_transfer_config.kv_port=65536 .* less than or equal to 65535"),
    ],
)
def test_bad_kv_transfer_config(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVTransferConfig(**options)
    with pytest.raises(ValueError, match=message):
        VllmConfig(kv_transfer_config=options)  # type: ignore[arg-type]


# VllmConfig


def test_config_without_a_model() -> None:
    config = VllmConfig(cache_config=CacheConfig(block_size=48))
    assert config.cache_config.block_size == 48
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert dataclasses.replace(config.cache_config, block_size=32).block_size == 32


def test_auto_fit_keeps_both_lengths_in_step(llama: str) -> None:
    config = VllmConfig(model_config=ModelConfig(model=llama, max_model_len=-1))
    config.set_max_model_len(320)
    assert config.model_config.max_model_len == config.scheduler_config.max_model_len == 320


def test_layers_by_type_and_name() -> None:
    config = VllmConfig()
    layers: dict[str, object] = {"a": 1, "b": "text", "c": 2}
    config.compilation_config.static_forward_context.update(layers)
    assert get_layers_from_vllm_config(config, int) == {"a": 1, "c": 2}
    assert get_layers_from_vllm_config(config, int, ["c", "b"]) == {"c": 2}
    with pytest.raises(ValueError, match="no layers named d"):
        get_layers_from_vllm_config(config, int, ["a", "d"])


def test_current_config_is_per_thread_and_nests() -> None:
    outer, inner = VllmConfig(), VllmConfig()
    seen_by_thread: list[str] = []

    def look() -> None:
        try:
            get_current_vllm_config()
        except RuntimeError as error:
            seen_by_thread.append(str(error))

    with set_current_vllm_config(outer):
        with set_current_vllm_config(inner):
            assert get_current_vllm_config() is inner
        assert get_current_vllm_config() is outer
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen_by_thread == ["no current VllmConfig: build models inside set_current_vllm_config"]
    with pytest.raises(RuntimeError, match="no current VllmConfig"):
        get_current_vllm_config()

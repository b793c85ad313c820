"""EngineArgs: one list of options for Python and for the command line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser

CONFIGS = (
    AttentionConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    LoadConfig,
    DeviceConfig,
)
SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 0]}},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 5000,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


def parse(*args: str) -> EngineArgs:
    parser = FlexibleArgumentParser(prog="test")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(args))


def test_defaults_are_those_of_the_configs(model: str) -> None:
    config = EngineArgs(model=model).create_engine_config()
    assert config.model_config == ModelConfig(model=model)
    assert config.cache_config == CacheConfig(kv_cache_layout="NHD")
    assert config.parallel_config == ParallelConfig()
    assert config.load_config == LoadConfig()
    assert config.device_config == DeviceConfig()
    assert config.attention_config == AttentionConfig()
    filled = {
        "max_model_len": 5000,
        "max_num_batched_tokens": 4096,
        "disable_hybrid_kv_cache_manager": False,
        "async_scheduling": False,
    }
    assert config.scheduler_config == SchedulerConfig(**filled)


def test_none_is_the_default_of_every_option(model: str) -> None:
    left_out = EngineArgs(model=model)
    for kind in (EngineArgs, AsyncEngineArgs):
        for option in kind.options():
            if option.name != "model":
                args = kind.from_kwargs(model=model, **{option.name: None})
                assert vars(args) == vars(left_out), option.name
    without = EngineArgs(model=model, pipeline_parallel_size=None, enable_prefix_caching=None)
    made, wanted = without.create_engine_config(), left_out.create_engine_config()
    assert made.cache_config == wanted.cache_config
    assert made.parallel_config == wanted.parallel_config


def test_options_of_vllm_without_effect_are_named(model: str, caplog: Any) -> None:
    """Scripts and tools for vLLM pass them, and no value depends on them."""
    plain = EngineArgs(model=model).create_engine_config()
    assert "without effect" not in caplog.text
    given: dict[str, Any] = {
        "disable_custom_all_reduce": True,
        "swap_space": 4,
        "limit_mm_per_prompt": {"image": 1},
    }
    args = EngineArgs.from_kwargs(model=model, **given, compilation_config=3)
    config = args.create_engine_config()
    assert vars(config.cache_config) == vars(plain.cache_config)
    assert (
        "disable_custom_all_reduce, swap_space, compilation_config, limit_mm_per_prompt: accepted"
        in caplog.text
    )
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", model, "--swap-space", "4", "--disable-log-requests"]
    EngineArgs.from_cli_args(parser.parse_args(flags)).create_engine_config()
    assert "swap_space, disable_log_requests: accepted" in caplog.text


def test_every_field_of_the_configs_is_an_option() -> None:
    options = {f.name for f in fields(EngineArgs)}
    options |= {"cache_dtype", "policy", "backend", "external_rank"}
    derived = {
        "max_model_len",
        "rank",
        "data_parallel_rank",
        "machine_rank",
        "ranks_on_machine",
        "is_offline_engine",
        "num_cpus",
        "ray_place",
        "engine_files",
    }
    for config_class in (ModelConfig, *CONFIGS):
        names = {f.name for f in fields(config_class) if f.init} - derived
        assert names <= options


def test_python_options_reach_their_config(model: str) -> None:
    config = EngineArgs(
        model=model,
        dtype="float16",
        max_model_len=4321,
        max_num_batched_tokens=77,
        max_num_seqs=5,
        block_size=32,
        kv_cache_memory_bytes="64M",
        enable_prefix_caching=False,
        attn_pack_size=2,
        seed=9,
        load_format="dummy",
        device="cpu",
        scheduling_policy="priority",
        hf_overrides={"num_hidden_layers": 4},
        speculative_config=SPECULATIVE,
    ).create_engine_config()
    assert config.model_config.dtype == torch.float16
    assert config.model_config.get_total_num_hidden_layers() == 4
    assert config.model_config.seed == 9
    assert config.scheduler_config.max_num_batched_tokens == 77
    assert config.scheduler_config.max_num_seqs == 5
    assert config.scheduler_config.max_model_len == 4321
    assert config.scheduler_config.policy == "priority"
    assert config.cache_config.block_size == 32
    assert config.cache_config.kv_cache_memory_bytes == 64 << 20
    assert config.cache_config.enable_prefix_caching is False
    assert config.cache_config.attn_pack_size == 2
    assert config.load_config.load_format == "dummy"
    assert config.device_config.device_type == "cpu"
    assert config.speculative_config is not None
    assert config.speculative_config.hidden_state_layer_ids == (2, 0)


@pytest.mark.parametrize(("kind", "tokens"), [(EngineArgs, 4096), (AsyncEngineArgs, 2048)])
def test_steps_of_servers_are_shorter(kind: type[EngineArgs], tokens: int, model: str) -> None:
    """Requests that decode there wait for a step's prompts."""
    config = kind(model=model, device="cpu").create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == tokens


@pytest.mark.parametrize(("asked", "tokens"), [({}, 512), ({"max_num_batched_tokens": 700}, 700)])
def test_steps_of_stages_are_shorter(asked: dict[str, int], tokens: int, model: str) -> None:
    """A stage is idle while the first step fills the stages before it."""
    args = EngineArgs(model=model, device="cpu", pipeline_parallel_size=2, **asked)
    assert args.create_engine_config().scheduler_config.max_num_batched_tokens == tokens


def test_steps_of_small_models_are_longer_on_a_card(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launching kernels takes as long for few tokens as for many."""
    tokens_of = CudaPlatform.max_num_batched_tokens_of
    assert [tokens_of(CudaPlatform(), size) for size in (1024, 2048, 4096)] == [16384, 16384, 8192]
    monkeypatch.setattr(CpuPlatform, "max_num_batched_tokens_of", lambda _, size: 7000 + size)
    config = EngineArgs(model=model, device="cpu").create_engine_config()
    hidden_size = config.model_config.get_hidden_size()
    assert config.scheduler_config.max_num_batched_tokens == 7000 + hidden_size


def test_no_chunked_prefill_raises_the_budget_to_the_model_length(model: str) -> None:
    config = EngineArgs(model=model, enable_chunked_prefill=False).create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens == 5000
    short = EngineArgs(model=model, enable_chunked_prefill=False, max_num_batched_tokens=4999)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=4999 .* use at least 5000"):
        short.create_engine_config()


@pytest.mark.parametrize("form", ["dict", "json", "object"])
def test_configs_in_three_forms(model: str, form: str) -> None:
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    forms: dict[str, tuple[Any, Any]] = {
        "dict": (SPECULATIVE, transfer),
        "json": (json.dumps(SPECULATIVE), json.dumps(transfer)),
        "object": (SpeculativeConfig(**SPECULATIVE), KVTransferConfig(**transfer)),
    }
    speculative, kv_transfer = forms[form]
    config = EngineArgs(
        model=model, speculative_config=speculative, kv_transfer_config=kv_transfer
    ).create_engine_config()
    assert config.speculative_config is not None
    assert config.speculative_config.hidden_state_layer_ids == (2, 0)
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == "ExampleHiddenStatesConnector"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size=2 does not divide tensor_parallel_size=1; use 1",
        ),
        (
            {"distributed_executor_backend": "spark"},
            "='spark' .* use None or 'uni' or 'mp' or 'ray'",
        ),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend='ray' .* use 'mp'"),
        ({"speculative_config": "{"}, "speculative_config='{' is not valid JSON"),
        ({"kv_transfer_config": 5}, "kv_transfer_config=5 .* or a KVTransferConfig"),
        ({"kv_transfer_config": {"kv_rol": "x"}}, r"'kv_rol' \(did you mean 'kv_role'\?\)"),
        ({"max_model_len": 5001}, "max_model_len=5001 .* use at most 5000"),
    ],
)
def test_bad_options_are_named(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(model=model, **options).create_engine_config()


def test_from_kwargs_names_the_nearest_option() -> None:
    with pytest.raises(ValueError, match=r"'max_modle_len' \(did you mean 'max_model_len'\?\)"):
        EngineArgs.from_kwargs(model="m", max_modle_len=5)
    with pytest.raises(ValueError, match="model is missing"):
        EngineArgs.from_kwargs()
    args = AsyncEngineArgs.from_kwargs(model="m", seed=3)
    assert isinstance(args, AsyncEngineArgs)
    assert args.seed == 3


def test_flags_of_the_command_line() -> None:
    args = parse(
        *("--model", "m", "--max_model_len", "2k", "--max-num-seqs=3", "--dtype", "float32"),
        *(
            "--no-enable-prefix-caching",
            "--enforce-eager",
            "-tp",
            "1",
            "--gpu_memory_utilization=0.5",
        ),
        *("--kv_cache_memory_bytes", "1GiB", "--served-model-name", "a", "b"),
        *("--speculative_config", json.dumps(SPECULATIVE), "--hf-overrides", '{"a_b": 1}'),
    )
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("m", 2000, 3)
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert (args.gpu_memory_utilization, args.kv_cache_memory_bytes) == (0.5, 1 << 30)
    assert args.served_model_name == ["a", "b"]
    assert args.speculative_config == SPECULATIVE
    assert args.hf_overrides == {"a_b": 1}
    assert parse("--model", "m", "--max-model-len", "-1").max_model_len == -1
    for accepted in (["--enable-sleep-mode"], ["--language-model-only"], ["--runner", "pooling"]):
        parse("--model", "m", *accepted)
    assert parse("--model", "m") == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-modle-len", "5"], "did you mean '--max-model-len'?"),
        (["--block-size", "few"], "'few' is not a whole number"),
        (["--kv-transfer-config", "[1]"], "'[1]' is not a JSON object"),
        (["--load-format", "gguf"], "invalid choice: 'gguf'"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--model", "m", *flags)
    assert message in capsys.readouterr().err


def test_model_is_required_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="--model is missing"):
        parse()

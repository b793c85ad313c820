"""``vllm models``: the list of families, and what would run of a checkpoint and how."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import zoo
from tests.models.checkpoints import make_checkpoint
from tests.models.stored_formats import FORMATS, quantise_checkpoint, set_config
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.model_executor.layers.weight import find_weight
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_report import checkpoint_report
from vllm.model_report.checkpoint_report import CheckpointReport, report_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def report(folder: Path, **options: Any) -> CheckpointReport:
    return report_checkpoint(EngineArgs(model=str(folder), **options).create_engine_config())


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["models", str(folder), "--json", *flags]) == 1
    printed = capsys.readouterr()
    reason: str = json.loads(printed.out)["refused"]
    assert f"{folder} would be refused: {reason}" in printed.err
    return reason


def test_the_list_has_every_class_and_says_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {one["architecture"] for one in listed["native"]} == set(
        ModelRegistry.get_supported_archs()
    )
    for family in listed["native"]:  # one line of a table
        assert 3 < len(family["models"]) <= 110 and "|" not in family["models"], family
    assert {"BloomForCausalLM", "Glm4vForConditionalGeneration"} <= set(
        listed["transformers"]["architectures"]
    )
    assert "LlamaForCausalLM" not in listed["transformers"]["architectures"]
    assert main(["models"]) == 0
    assert "GPT-NeoX-20B, Pythia" in capsys.readouterr().out


def test_the_page_of_supported_models_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "update_tables.py"))
    page = (ROOT / "docs" / "supported_models.md").read_text(encoding="utf-8")
    assert page == script["updated"](page), "run: python docs/update_tables.py"


def bytes_in_rows(parameter: torch.nn.Parameter) -> int:
    """Without the padding of panels, whose size depends on the kernels."""
    weight = find_weight(parameter)
    return parameter.nbytes if weight is None else math.prod(weight.shape) * parameter.itemsize


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {}),
        ("gemma3", {"dtype": "bfloat16"}),
        ("qwen3_moe", {}),
        ("gpt2", {"model_impl": "transformers"}),
        ("qwen3_moe", {"model_impl": "transformers"}),
        ("falcon", {"model_impl": "transformers", "block_size": 32}),
    ],
)
def test_the_report_is_what_an_engine_does(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    found = report(folder, **options)
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=200, **options)
    core: Any = llm.llm_engine.engine_core
    plan = core.kv_cache_config
    runner = core.executor.worker.model_runner
    assert found.block_bytes == plan.block_bytes
    assert sum(group.layers for group in found.groups) == len(runner._cache_layers)
    assert {(group.kind, group.tokens_per_block) for group in found.groups} == {
        (spec.kind, None if spec.is_recurrent else spec.block_size)
        for spec in (group.kv_cache_spec for group in plan.kv_cache_groups)
    }
    held = [
        g.kv_cache_spec.max_blocks_per_request(llm.llm_engine.vllm_config)
        for g in plan.kv_cache_groups
    ]
    assert found.request_bytes == sum(held) * plan.block_bytes
    if options.get("model_impl") == "transformers":
        assert found.way == runner.model.way_in_words
    else:
        assert found.model_class.endswith(type(runner.model).__name__)
    assert (found.experts is not None) is ("moe" in family)
    assert found.num_layers == llm.model_config.get_total_num_hidden_layers()
    llm.shutdown()
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    loaded = get_model(vllm_config=config)
    assert found.weight_bytes == sum(bytes_in_rows(one) for one in loaded.parameters())
    tensors = load_file(folder / "model.safetensors").values()
    assert found.stored_bytes == sum(tensor.nbytes for tensor in tensors)


def test_what_an_engine_would_compute_again_in_each_step_is_known(tmp_path: Path) -> None:
    """Its cache has no place in the pool, and its tables of experts are buffers."""
    zoo.make_checkpoint(tmp_path, "deepseek_v4")
    found = report(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=200)
    core: Any = llm.llm_engine.engine_core
    assert found.way == core.executor.worker.model_runner.model.way_in_words
    assert "all of its tokens again" in found.way and "keeps buffer_kv" in found.way
    assert found.block_bytes == core.kv_cache_config.block_bytes == 16 * 4
    llm.shutdown()


def test_rows_that_an_engine_would_keep_and_presets_are_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=9)
    layers = "--speculative-config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids"
    flags = ["--speculative-config.method=extract_hidden_states", layers, "[2, 9]"]
    assert main(["models", str(folder), "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layer_kinds"] == {"attention": 9, "hidden states": 1}
    assert found["layer_presets"]["speculators-eagle3"] == [2, 4, 6, 9]
    assert main(["models", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM (model_impl=vllm)" in text and "2, 4, 6, 9" in text


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_quantised_checkpoint_names_its_format(
    model_impl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    folder = quantise_checkpoint(plain, FORMATS["fp8-block"]).stored
    found = report(folder, model_impl=model_impl)
    floats = report(plain, model_impl=model_impl)
    assert (found.storage, found.groups) == ("fp8", floats.groups)
    assert found.stored_bytes is not None and floats.stored_bytes is not None
    assert found.stored_bytes < floats.stored_bytes
    quantised = report(plain, quantization="int8", model_impl="vllm")
    assert quantised.storage == "floating point, quantised to int8 while it loads"
    set_config(folder, {"quant_method": "none-such"})
    assert "none-such" in refusal(folder, capsys, "--model-impl=vllm")


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    path = folder / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    poisoned = bytearray(path.read_bytes())
    poisoned[header:] = b"\xff" * (len(poisoned) - header)  # NaN
    path.write_bytes(poisoned)
    for model_impl in ("vllm", "transformers"):
        outlines: list[Any] = []
        outline_model = checkpoint_report.outline_model

        def kept(config: Any, outline_model: Any = outline_model, to: Any = outlines) -> Any:
            to.append(outline_model(config))
            return to[-1]

        monkeypatch.setattr(checkpoint_report, "outline_model", kept)
        report(folder, model_impl=model_impl)
        monkeypatch.undo()
        (outline,) = outlines
        real = [p for p in outline.model.parameters() if p.device.type != "meta"]
        assert all(p.isfinite().all() for p in real)
        assert all(p.untyped_storage().nbytes() < 4096 for p in real), "memory of their size"


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_refused_checkpoint_says_why(
    model_impl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path, "mistral", tokenizer=False)
    path = folder / "model.safetensors"
    weights = load_file(path)
    lost = "model.layers.1.mlp.up_proj.weight"
    others = {name: tensor for name, tensor in weights.items() if name != lost}
    flag = f"--model-impl={model_impl}"
    save_file({**others, "model.layers.0.extra": torch.ones(3)}, path)
    reason = refusal(folder, capsys, flag)
    assert lost in reason and "model.layers.0.extra" in reason
    save_file({**others, lost: torch.ones(3, 5)}, path)
    assert lost in refusal(folder, capsys, flag)
    path.write_bytes(path.read_bytes()[:100])
    assert "not a whole safetensors file" in refusal(folder, capsys, flag)
    path.unlink()
    assert "no .safetensors or .bin files" in refusal(folder, capsys, flag)


def test_what_the_flags_make_impossible_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    assert "attn_pack_size=2" in refusal(folder, capsys, "--attn-pack-size=2")
    assert "dtype" in refusal(folder, capsys, "--dtype=float8")
    assert "expert_trace=True" in refusal(folder, capsys, "--expert-trace")
    gemma = make_checkpoint(tmp_path / "gemma", "gemma4", tokenizer=False)
    assert "need token ids beside" in refusal(gemma, capsys, "--enable-prompt-embeds")
    (folder / "config.json").write_text(json.dumps({"model_type": "none_such"}))
    assert "none_such" in refusal(folder, capsys)
    assert "is not a folder" in refusal(tmp_path / "nowhere", capsys)
    with pytest.raises(SystemExit) as ended:
        main(["models", str(folder), "--no-such-flag"])
    assert ended.value.code == 2

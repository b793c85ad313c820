"""Quantised checkpoints against the dequantised ones in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import (
    FORMATS,
    MULTIPLES,
    Checkpoints,
    Packed,
    compressed,
    fp8_block,
    fp8_tensor,
    gptq,
    int8_channel,
    mxfp4,
    quantise_checkpoint,
    set_config,
)
from tests.models.test_models import NUM_TOKENS, prompt
from vllm import LLM
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.quantization import read_quantization
from vllm.model_executor.layers.weight import num_weight_bytes
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.stored_weights import join_stored_weights
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.model_report.outline import outline_model
from vllm.ops.packed_linear import PackedExperts, PackedWeight, unpacks_weights

FAMILIES = ("llama", "qwen3_5")


def sizes(format_name: str) -> dict[str, Any]:
    """Entries of the config: odd sizes, or those that the format can have."""
    multiple = MULTIPLES.get(format_name)
    if multiple is None:
        return {}
    return {"hidden_size": 96, "intermediate_size": 160, "linear_value_head_dim": 16}


def make(
    folder: Path, family: str, name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Checkpoints:
    settings = sizes(name)
    if family != "qwen3_5":
        settings.pop("linear_value_head_dim", None)
    plain = make_checkpoint(folder / "plain", family, dtype=dtype, tokenizer=False, **settings)
    return quantise_checkpoint(plain, FORMATS[name], **options)


def run(folder: Path, chunks: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Streams of all layers, and the logits."""
    request = SingleRequest(make_config(folder, max_model_len=NUM_TOKENS), NUM_TOKENS)
    layers = range(request.num_layers + 1)
    sink = ListSink(frozenset(layers))
    logits = request.run_chunks(prompt(), chunks, sink)
    return [sink.rows(layer) for layer in layers], logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_streams_are_those_of_the_dequantised_weights(
    name: str, family: str, tmp_path: Path
) -> None:
    stored, dequantised = make(tmp_path, family, name)
    expected = reference_run(dequantised, prompt())
    streams, logits = run(stored, [])
    errors = [relative_error(s, e) for s, e in zip(streams, expected.streams, strict=True)]
    assert max(errors) <= 1e-4, errors
    assert relative_error(logits, expected.logits) <= 1e-4


EXPERTS = ["fp8-block", "gptq-order", "awq", "nvfp4-modelopt", "mxfp4", "int4-asymmetric"]
EXPERTS += ["bnb-fp4", "bnb-int8"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_stay_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """One by one in the file, each with scales of its own."""
    settings: dict[str, Any] = {}
    if name in MULTIPLES:
        settings = {"hidden_size": 96, "moe_intermediate_size": 32, "intermediate_size": 160}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", tokenizer=False, **settings)
    stored, dequantised = quantise_checkpoint(plain, FORMATS[name])
    expected = reference_run(dequantised, prompt()).streams
    whole = run(stored, [])[0]
    assert max(map(relative_error, whole, expected)) <= 1e-4
    assert all(map(torch.equal, whole, run(stored, [1, 37, 16, 2])[0]))
    experts = get_model(vllm_config=make_config(stored)).model.layers[0].mlp.experts
    if unpacks_weights(torch.device("cpu")):
        assert experts.gate_up_proj.numel() == experts.down_proj.numel() == 0


def join_experts(weights: dict[str, torch.Tensor]) -> None:
    """Join the experts that have their own tensors."""
    for first in [name for name in weights if name.endswith("experts.0.gate_proj.weight")]:
        experts = first.removesuffix(".0.gate_proj.weight")
        joined: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
        while f"{experts}.{len(joined['down_proj'])}.gate_proj.weight" in weights:
            expert = f"{experts}.{len(joined['down_proj'])}"
            gate, up, down = (
                weights.pop(f"{expert}.{name}_proj.weight") for name in ("gate", "up", "down")
            )
            joined["gate_up_proj"].append(torch.cat([gate, up]))
            joined["down_proj"].append(down)
        weights |= {f"{experts}.{name}": torch.stack(parts) for name, parts in joined.items()}


def is_of_experts(name: str) -> bool:
    """Tell whether ``name`` is the tensor of all experts."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def pack_experts(weights: dict[str, torch.Tensor]) -> None:
    """In blocks of FP8."""
    for name in list(filter(is_of_experts, weights)):
        packed = [fp8_block(expert)[0] for expert in weights[name]]
        weights[name] = torch.stack([tensors["weight"] for tensors in packed])
        scales = torch.stack([tensors["weight_scale_inv"] for tensors in packed])
        weights[f"{name}_scale_inv"] = scales
        weights[f"{name}_activation_scale"] = torch.ones(len(packed))  # not used


@pytest.mark.parametrize("family", ["qwen3_5_moe", "llama4"])
def test_experts_of_fp8_may_lie_in_one_tensor(family: str, tmp_path: Path) -> None:
    """As transformers writes them; of Llama 4, whose tensors lie the other way, dequantised."""
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False)
    edit_weights(plain, join_experts)
    stored, dequantised = quantise_checkpoint(plain, FORMATS["fp8-block"])

    def round_values(weights: dict[str, torch.Tensor]) -> None:
        for name in filter(is_of_experts, weights):
            weights[name] = torch.stack([fp8_block(e)[1].float() for e in weights[name]])

    edit_weights(stored, pack_experts)
    edit_weights(dequantised, round_values)
    expected = reference_run(dequantised, prompt()).streams
    whole = run(stored, [])[0]
    assert max(map(relative_error, whole, expected)) <= 1e-4
    assert all(map(torch.equal, whole, run(stored, [1, 37, 16, 2])[0]))
    model = get_model(vllm_config=make_config(stored))
    (experts, *_) = [module for module in model.modules() if isinstance(module, Experts)]
    is_packed = unpacks_weights(torch.device("cpu")) and family != "llama4"
    assert (experts.down_proj.numel() == 0) is is_packed
    (name, *_) = filter(is_of_experts, load_file(stored / "model.safetensors"))
    edit_weights(stored, lambda w: w.update({f"{name}_scale_inv": w[f"{name}_scale_inv"][1:]}))
    with pytest.raises(ValueError, match=f"'{name}_scale_inv' has shape"):
        get_model(vllm_config=make_config(stored))


def test_an_expert_may_be_stored_in_another_way(tmp_path: Path) -> None:
    others = {"experts.2.": as_it_is, "experts.3.up_proj": int8_channel}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", tokenizer=False)
    stored, dequantised = quantise_checkpoint(plain, MIXED, others)
    config = json.loads(json.dumps(MIXED.config))
    config["config_groups"]["some"]["targets"] = ["re:.*experts.3.up_proj$"]
    del config["config_groups"]["up"]
    config["ignore"] += [r"re:.*experts\.2\..*"]
    set_config(stored, config)
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored, [])[0], expected)) <= 1e-4


def test_gpt_oss_keeps_its_experts_in_mxfp4(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 64}
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", tokenizer=False, **sizes)
    stored = shutil.copytree(plain, tmp_path / "stored")
    dequantised = shutil.copytree(plain, tmp_path / "dequantised")

    experts = ("experts.gate_up_proj", "experts.down_proj")

    def pack(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith(experts)]:
            packed = [mxfp4(expert.t())[0] for expert in weights.pop(name)]
            blocks = torch.stack([tensors["weight_packed"] for tensors in packed])
            weights[f"{name}_blocks"] = blocks.unflatten(2, (-1, 16))
            weights[f"{name}_scales"] = torch.stack([t["weight_scale"] for t in packed])

    def round_values(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith(experts):
                weights[name] = torch.stack([mxfp4(e.t())[1].t().float() for e in weight])

    edit_weights(stored, pack)
    edit_weights(dequantised, round_values)
    set_config(stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    expected = reference_run(dequantised, prompt()).streams
    whole = run(stored, [])[0]
    assert max(map(relative_error, whole, expected)) <= 1e-4
    assert all(map(torch.equal, whole, run(stored, [1, 37, 16, 2])[0]))
    experts = get_model(vllm_config=make_config(stored)).model.layers[1].mlp.experts
    assert (experts.down_proj.numel() == 0) is unpacks_weights(torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_fused_layer_may_differ(family: str, tmp_path: Path) -> None:
    """Keys in another format than queries and values, gates as they are."""
    others = {"k_proj": int8_channel, "up_proj": fp8_tensor, "in_proj_z": int8_channel}
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False)
    stored, dequantised = quantise_checkpoint(plain, MIXED, others)
    expected = reference_run(dequantised, prompt())
    streams, _ = run(stored, [5, 64])
    assert max(map(relative_error, streams, expected.streams)) <= 1e-4


def _group(targets: list[str], name: str, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "format": name, "weights": weights}


MIXED = FORMATS["int4-groups"]._replace(
    config={
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "config_groups": {
            "some": _group(["re:.*(k_proj|in_proj_z)$"], "int-quantized", num_bits=8, type="int"),
            "up": _group(["re:.*up_proj$"], "float-quantized", num_bits=8, type="float"),
            "rest": _group(["Linear"], "pack-quantized", num_bits=4, type="int", group_size=8),
        },
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["fp8-block", "int8-asymmetric", "gptq-order", "nvfp4-modelopt", *map(at_night, FORMATS)],
)
def test_chunks_change_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = make(tmp_path, "qwen3_5" if name == "fp8-block" else "llama", name, dtype).stored
    whole = run(stored, [])
    for chunks in ([64], [1, 37, 16, 2], [33] + [1] * 20):
        other = run(stored, chunks)
        assert all(map(torch.equal, whole[0], other[0]))
        assert torch.equal(whole[1], other[1])


Change = Callable[[dict[str, torch.Tensor]], None]
GATE = "model.layers.2.mlp.gate_proj"


def edit_weights(folder: Path, change: Change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def _without(leaf: str) -> Change:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[f"{GATE}.{leaf}"]

    return change


def _with(leaf: str, make_other: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{GATE}.{leaf}"] = make_other(weights[f"{GATE}.{leaf}"])

    return change


def _spoilt(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def make_other(scales: torch.Tensor) -> torch.Tensor:
        flat = scales.float().flatten()
        flat[-1] = value
        return flat.view(scales.shape).to(scales.dtype)

    return make_other


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"

BAD: list[tuple[str, Change, tuple[str, ...]]] = [
    ("fp8-block", _without("weight_scale_inv"), (f"{GATE}.weight'", "weight_scale_inv")),
    ("fp8-channel", _with("weight_scale", lambda s: s[:7]), ("(7, 1)", "(136, 1)")),
    ("fp8-channel", _with("weight_scale", lambda s: s[:1]), ("(1, 1)", "expected (136, 1)")),
    ("fp8-fbgemm", _with("weight_scale", lambda s: s[0, 0]), ("shape ()", "expected (136, 1)")),
    ("int8-channel", _with("weight_scale", lambda s: s[0]), ("(1,)", "expected (136, 1)")),
    ("int4-groups", _with("weight_scale", lambda s: s[0, 0]), ("shape ()", "expected (136, 9)")),
    (
        "fp8-block",
        _with("weight_scale_inv", lambda s: s[:1].repeat(1, 3)),
        ("one scale", "128 x 128"),
    ),
    ("fp8-block", _with("weight_scale_inv", lambda s: s[:1]), ("(1, 1)", "(2, 1)")),
    ("fp8-block", _with("weight_scale_inv", _spoilt(float("nan"))), ("holds nan in 1 place",)),
    ("fp8-tensor", _with("weight", _spoilt(float("nan"))), ("holds NaN in 1 place",)),
    ("fp8-tensor", _with("weight", lambda w: w.view(torch.int8)), ("int8", "float8_e4m3fn")),
    ("int8-channel", _with("weight_scale", _spoilt(float("inf"))), ("holds inf in 1 place",)),
    ("int4-groups", _without("weight_scale"), (f"{GATE}.weight_scale' is missing",)),
    ("int4-groups", _with("weight_scale", lambda s: s[:, :3]), ("(136, 3)", "(136, 9)")),
    ("int4-groups", _with("weight_packed", lambda w: w[:, :-1]), ("(136, 8)", "(136, 9)")),
    ("int4-order", _with("weight_g_idx", lambda g: g * 0), ("each of the groups",)),
    ("int4-order", _without("weight_g_idx"), (f"{GATE}.weight_g_idx' is missing",)),
    ("int4-asymmetric", _without("weight_zero_point"), ("weight_zero_point' is missing",)),
    (
        "int4-asymmetric",
        _with("weight_zero_point", lambda z: torch.full((136, 9), 8, dtype=torch.int8)),
        ("is 8 to 8, expected -8 to 7",),
    ),
    ("gptq-order", _without("g_idx"), (f"{GATE}.g_idx' is missing", "scales, g_idx")),
    ("gptq", _without("qzeros"), (f"{GATE}.qzeros' is missing", "qweight, qzeros, scales")),
    ("gptq", _with("scales", _spoilt(float("nan"))), ("holds nan in 1 place",)),
    ("awq", _with("qzeros", lambda z: z[1:]), ("(8, 17)", "(9, 17)")),
    ("mxfp4", _with("weight_scale", lambda s: s | 255), ("255, which is NaN",)),
    ("nvfp4-packed", _with("weight_global_scale", lambda s: s * 0), ("is 0,",)),
    ("nvfp4-packed", _with("weight_global_scale", lambda s: s * 0 + 1e-40), ("divided",)),
    ("nvfp4-modelopt", _with("weight_scale_2", _spoilt(float("nan"))), ("weight_scale_2", "nan")),
    ("nvfp4-modelopt", _with("weight_scale", lambda s: s[:, 1:]), ("(160, 5)", "(160, 6)")),
    ("bnb-nf4", _without("weight.absmax"), (f"{GATE}.weight.absmax' is missing",)),
    ("bnb-nf4", _without(NF4_STATE), (f"{GATE}.{NF4_STATE}' is missing",)),
    ("bnb-nf4", _with(NF4_STATE, lambda s: s[1:]), (NF4_STATE, "as JSON")),
    ("bnb-nf4", _with("weight", lambda w: w[1:]), ("has 4895 bytes for 136 x 72 codes",)),
    ("bnb-nf4", _with("weight.absmax", _spoilt(float("nan"))), ("holds nan in 1 place",)),
    ("bnb-nf4", _with("weight.quant_map", lambda t: t[:8]), ("(8,)", "(16)")),
    ("bnb-nf4-nested", _without("weight.nested_quant_map"), ("nested_quant_map' is missing",)),
    ("bnb-nf4-nested", _with("weight.nested_absmax", lambda s: s[1:]), ("(152,)", "(153)")),
    ("bnb-int8", _with("SCB", lambda s: s[1:]), ("(135,)", "(136, 1)")),
    ("bnb-int8", _with("weight_format", lambda f: f + 1), ("weight_format' is not 0",)),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]}: {case[2][-1]}")
def test_a_damaged_module_is_named(
    case: tuple[str, Change, tuple[str, ...]], tmp_path: Path
) -> None:
    name, change, parts = case
    stored = make(tmp_path, "llama", name).stored
    edit_weights(stored, change)
    with pytest.raises(ValueError) as error:
        get_model(vllm_config=make_config(stored))
    for part in (GATE, *parts):
        assert part in str(error.value)


LISTS: list[tuple[str, dict[str, Any]]] = [
    ("fp8-block", {"modules_to_not_convert": ["model.layers.2.mlp"]}),
    ("fp8-fbgemm", {"modules_to_not_convert": [GATE]}),
    ("awq", {"modules_to_not_convert": ["gate_proj"]}),
    ("fp8-modelopt", {"exclude_modules": ["model.layers.*.mlp*"]}),
    ("nvfp4-modelopt", {"ignore": ["model.layers.2.mlp*"]}),
    ("int4-groups", {"ignore": [r"re:.*\.2\.mlp\..*"]}),
    ("gptq", {"dynamic": {r"-:.*\.2\.mlp\..*": {}}}),
]


@pytest.mark.parametrize(("name", "listed"), LISTS, ids=lambda value: str(value)[:20])
def test_a_listed_module_is_no_quantised_one(
    name: str, listed: dict[str, Any], tmp_path: Path
) -> None:
    others = {f"layers.{layer}.mlp": as_it_is for layer in range(8)}
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False, **sizes_of_llama(name))
    stored, dequantised = quantise_checkpoint(plain, FORMATS[name], others)
    set_config(stored, {**FORMATS[name].config, **listed})
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored, [])[0], expected)) <= 1e-4
    shutil.rmtree(stored)
    shutil.rmtree(dequantised)
    stored, _ = quantise_checkpoint(plain, FORMATS[name])
    set_config(stored, {**FORMATS[name].config, **listed})
    with pytest.raises(ValueError, match=r"is not quantised") as error:
        get_model(vllm_config=make_config(stored))
    entry = next(iter(next(iter(listed.values()))))
    assert ".mlp." in str(error.value) and repr(entry) in str(error.value)


def as_it_is(weight: torch.Tensor) -> Packed:
    return {"weight": weight}, weight.double()


def sizes_of_llama(name: str) -> dict[str, Any]:
    return {k: v for k, v in sizes(name).items() if k != "linear_value_head_dim"}


def test_dynamic_gives_modules_other_settings(tmp_path: Path) -> None:
    """GPTQModel: 8 bits and rows for keys, 4 bits in groups for the others, gates as they are."""
    others = {"k_proj": gptq(8, -1, True, True, 1), "gate_proj": as_it_is}
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    stored, dequantised = quantise_checkpoint(plain, FORMATS["gptq"], others)
    settings = {"bits": 8, "group_size": -1, "desc_act": True}
    dynamic = {r"+:.*\.k_proj": settings, r"-:.*gate_proj": {}}
    set_config(stored, {**FORMATS["gptq"].config, "dynamic": dynamic})
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored, [5])[0], expected)) <= 1e-4


@pytest.mark.skipif(not unpacks_weights(torch.device("cpu")), reason="weights are dequantised")
def test_a_cut_group_is_named_with_its_tensor() -> None:
    layer = torch.nn.Module()
    layer.down_proj = RowParallelLinear(64, 4, bias=False, prefix="down_proj")
    layer.down_proj.tp_rank, layer.down_proj.input_size_per_partition = 1, 12
    weight = PackedWeight(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), 64, 32)
    with pytest.raises(ValueError, match=r"'down_proj\.weight' cannot be cut: .*12 to 24.*of 32"):
        AutoWeightsLoader(layer).load_weights([("down_proj.weight", weight)])


ROTATED = {
    **compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8),
    "transform_config": {
        "config_groups": {
            "R1": {"apply": [{"targets": ["Linear"], "location": "weight_output"}]},
            "R3": {"apply": [{"targets": ["Linear"], "location": "input"}]},
        }
    },
}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quant_method": "gptqq"}, ("'gptqq'", "'gptq'?", "compressed-tensors")),
        ({"quant_method": "hqq", "nbits": 4}, ("'hqq'", "dequantize()")),
        ({"quant_method": "gptq", "bits": 5, "group_size": 8}, ("bits=5", "2, 3, 4, 8")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ("group_size=0",)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 7}, ("scales' has shape", "expected")),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, ("'gemv_fast'", "'gemm'")),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size=[128]",)),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, ("quant_algo='INT4_AWQ'",)),
        ({**FORMATS["fp8-block"].config, "scale_fmt": "e5m3"}, ("scale_fmt='e5m3'", "'ue8m0'")),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:x"]}, ("dynamic=['-:x']", "to map")),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x(": {}}}, ("'x('", "dynamic")),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, ("ignored_layers='lm_head'",)),
        ({**compressed("pack-quantized"), "ignore": ["re:("]}, ("'('", "not a regular expression")),
        ({**compressed("pack-quantized"), "config_groups": [1]}, ("config_groups=[1]",)),
        ({**compressed("x"), "config_groups": {"a": "Linear"}}, ("a='Linear'", "to map")),
        (compressed("pack-quantized", num_bits=4, type="float"), ("type='float'", "'int'")),
        (compressed("marlin-24", num_bits=4), ("format='marlin-24'", "'pack-quantized'")),
        (compressed("pack-quantized", num_bits=3), ("num_bits=3",)),
        (ROTATED, ("'R3'", "location='input'", "'weight_output'")),
        (
            {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
            ("data_type='mx_fp'", "'int'"),
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            ("dtype='int4'", "'fp8_e4m3'", "'int8'"),
        ),
        (
            {"quant_method": "quark", "algo_config": [{"name": "rotation", "r3": True}]},
            ("algo_config: r3=True",),
        ),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_says_what_is(
    config: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    stored = make(tmp_path, "llama", "gptq").stored
    set_config(stored, config)
    with pytest.raises(ValueError) as error:
        get_model(vllm_config=make_config(stored))
    for part in parts:
        assert part in str(error.value)


def test_a_module_that_no_group_targets_is_named(tmp_path: Path) -> None:
    stored = make(tmp_path, "llama", "int4-groups").stored
    config = json.loads(json.dumps(FORMATS["int4-groups"].config))
    config["config_groups"]["group_0"]["targets"] = ["re:.*(attn|up_proj|down_proj)"]
    set_config(stored, config)
    with pytest.raises(
        ValueError, match=r"gate_proj\.weight_scale' is in .*'re:\.\*\(attn"
    ) as error:
        get_model(vllm_config=make_config(stored))
    assert "supported: 'Linear'" in str(error.value)


def test_experts_of_mxfp4_become_what_the_bfloat16_checkpoint_holds() -> None:
    weight = torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(1))
    packed = [mxfp4(expert) for expert in weight]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": torch.stack([p[0]["weight_packed"].view(10, 2, 16) for p in packed]),
        f"{name}_scales": torch.stack([p[0]["weight_scale"] for p in packed]),
        f"{name}_bias": torch.ones(3, 10),
    }
    format_of = read_quantization({"quant_method": "mxfp4"})
    joined = dict(join_stored_weights(tensors.items(), tensors.keys(), format_of))
    assert joined.keys() == {name, f"{name}_bias"}
    experts = joined[name]
    assert isinstance(experts, PackedExperts) and experts.shape == (3, 10, 64)
    found = experts.dequantise(torch.bfloat16)
    assert torch.equal(found.double(), torch.stack([p[1].t() for p in packed]))


@pytest.mark.parametrize("place", ["hf_quant_config.json", "config.json"])
def test_modelopt_may_keep_its_config_as_it_writes_it(place: str, tmp_path: Path) -> None:
    """In a file of its own, or with all that this has in it in the model's."""
    stored, dequantised = make(tmp_path, "llama", "nvfp4-modelopt")
    path = stored / "config.json"
    config = json.loads(path.read_text())
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    del config["quantization_config"]
    if place == path.name:
        config["quantization_config"] = content
    path.write_text(json.dumps(config))
    if place != path.name:
        (stored / place).write_text(json.dumps(content))
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored, [])[0], expected)) <= 1e-4


@pytest.mark.parametrize("content", [{}, {"quantization": None}, {"quantization": "FP8"}])
def test_a_config_of_modelopt_without_settings_is_refused(content: Any, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    (plain / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"hf_quant_config.json: quantization=.*to settings"):
        get_model(vllm_config=make_config(plain))


def test_a_cache_alone_may_be_quantised(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (plain / "hf_quant_config.json").write_text(json.dumps(content))
    expected = reference_run(plain, prompt()).streams
    assert max(map(relative_error, run(plain, [])[0], expected)) <= 1e-4


def test_weights_stay_packed_where_products_unpack_them(tmp_path: Path) -> None:
    stored = make(tmp_path, "llama", "int4-groups").stored
    model = get_model(vllm_config=make_config(stored))
    num_values = 2 * 136 * 72
    held = num_weight_bytes(model.model.layers[0].mlp.gate_up_proj)
    if unpacks_weights(torch.device("cpu")):
        # Half a byte a value, a scale in 16 bits for 8 of them, rounded up to 64 rows; a table.
        assert held <= 320 / 272 * num_values * (0.5 + 2 / 8) + 16 * 4
    else:
        assert held == 4 * num_values


def rounded(weight: torch.Tensor, method: str) -> torch.Tensor:
    """The weight as ``method`` rounds it, block by block, in float64."""
    found = torch.empty(weight.shape, dtype=torch.float64)
    rows = 128 if method == "fp8" else 1
    for i in range(0, weight.shape[0], rows):
        for j in range(0, weight.shape[1], 128):
            block = weight[i : i + rows, j : j + 128]
            if method == "fp8":
                scale = block.abs().max() / 448
                found[i : i + rows, j : j + 128] = (block / scale).to(
                    torch.float8_e4m3fn
                ).double() * scale.double()
            else:
                scale = block.abs().max() / (7 if method == "int4" else 127)
                found[i : i + rows, j : j + 128] = (block / scale).round().double() * scale.double()
    return found


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_float_checkpoints_are_quantised_at_load(method: str, family: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False)
    meant = shutil.copytree(plain, tmp_path / "meant")

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if weight.dim() == 2 and ("proj" in name or name.endswith("mlp.gate.weight")):
                weights[name] = rounded(weight, method).float()

    edit_weights(meant, change)
    expected = reference_run(meant, prompt()).streams
    request = SingleRequest(
        make_config(plain, max_model_len=NUM_TOKENS, quantization=method), NUM_TOKENS
    )
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    request.run_chunks(prompt(), [64], sink)
    errors = [relative_error(sink.rows(i), stream) for i, stream in enumerate(expected)]
    assert max(errors) <= 1e-4, errors
    exact = reference_run(plain, prompt()).streams[-1]
    assert relative_error(sink.rows(request.num_layers), exact) > 1e-3


def test_a_quantization_that_cannot_be_is_refused(tmp_path: Path) -> None:
    stored = make(tmp_path, "llama", "gptq").stored
    assert make_config(stored, quantization="gptq").model_config.quantise_at_load is None
    with pytest.raises(ValueError, match=r"quantization='fp8'.*stored as 'gptq'.*use 'gptq'"):
        make_config(stored, quantization="fp8")
    with pytest.raises(ValueError, match=r"quantization='nf4'.*'fp8', 'int8', 'int4'"):
        make_config(tmp_path / "plain", quantization="nf4")
    modules = make_config(tmp_path / "plain", quantization="int8", model_impl="transformers")
    for refuses in (lambda config: get_model(vllm_config=config), outline_model):
        with pytest.raises(ValueError, match=r"quantization='int8'.*'LlamaForCausalLM' as transf"):
            refuses(modules)


def test_dummy_weights_are_not_quantised(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    with pytest.raises(ValueError, match=r"quantization='int8' with load_format='dummy'"):
        LLM(str(folder), load_format="dummy", quantization="int8")

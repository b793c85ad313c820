"""Activations in 8 bits as served: against a reference that rounds element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import (
    FORMATS,
    Checkpoints,
    fp8_block,
    quantise_checkpoint,
    set_config,
)
from tests.models.test_models import NUM_TOKENS, prompt
from tests.models.test_quantization import edit_weights, join_experts, pack_experts
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.weight import weight_of
from vllm.model_executor.model_loader import get_model
from vllm.ops.packed_linear import unpacks_weights
from vllm.ops.served_activations import ServedActivations

pytestmark = pytest.mark.skipif(
    not unpacks_weights(torch.device("cpu")), reason="weights are dequantised without kernels"
)

AS_SERVED: dict[str, Any] = {"activation_quantization": "as_served"}
BOUND = 1.5


def inputs(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """``input_activations`` of compressed-tensors."""
    return {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": True, **more}


def with_inputs(name: str, stored: dict[str, Any]) -> dict[str, Any]:
    config = FORMATS[name].config
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "input_activations": stored}}}


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
DYNAMIC = {**FORMATS["fp8-tensor"].config, "activation_scheme": "dynamic"}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("fp8-tensor", FORMATS["fp8-tensor"].config, "static"),
    ("fp8-tensor", DYNAMIC, "token"),
    ("fp8-block", FORMATS["fp8-block"].config, "block"),
    ("fp8-block", {**FORMATS["fp8-block"].config, "scale_fmt": "ue8m0"}, "powers"),
    ("fp8-fbgemm", {"quant_method": "fbgemm_fp8", "activation_scale_ub": BOUND}, "bound"),
    ("fp8-modelopt", FORMATS["fp8-modelopt"].config, "static"),
    ("fp8-channel", with_inputs("fp8-channel", inputs("float", "token")), "token"),
    ("fp8-groups", with_inputs("fp8-groups", inputs("float", "group", group_size=8)), "eights"),
    ("int8-channel", with_inputs("int8-channel", inputs("int", "token")), "int8"),
    ("int4-groups", with_inputs("int4-groups", inputs("int", "token")), "int8"),
]
SIZES = {"hidden_size": 144, "intermediate_size": 272}


def make(folder: Path, name: str, config: dict[str, Any], dtype: torch.dtype) -> Checkpoints:
    plain = make_checkpoint(folder / "plain", "llama", dtype=dtype, tokenizer=False, **SIZES)
    made = quantise_checkpoint(plain, FORMATS[name])
    set_config(made.stored, config)
    return made


def rounded(x: torch.Tensor, rule: str) -> torch.Tensor:
    """In float64, scale by scale."""
    size = {"block": 128, "powers": 128, "eights": 8}.get(rule, x.shape[-1])
    largest = 127 if rule == "int8" else 448
    parts = []
    for part in x.double().split(size, dim=-1):
        scale = part.abs().amax(-1, keepdim=True)
        scale = (scale.clamp(max=BOUND) if rule == "bound" else scale) / largest
        scale = (torch.full_like(scale, 0.5) if rule == "static" else scale).float()
        if rule == "powers":
            scale = 2 ** scale.double().clamp(min=2**-40).log2().ceil().float()
        code = (part.float() / scale).clamp(-largest, largest)
        code = code.round() if rule == "int8" else code.to(torch.float8_e4m3fn)
        parts.append(code.double() * scale.double())
    return torch.cat(parts, -1)


def run(folder: Path, chunks: list[int], **options: Any) -> list[torch.Tensor]:
    request = SingleRequest(make_config(folder, max_model_len=NUM_TOKENS, **options), NUM_TOKENS)
    layers = range(request.num_layers + 1)
    sink = ListSink(frozenset(layers))
    request.run_chunks(prompt(), chunks, sink)
    return [sink.rows(layer) for layer in layers]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_a_layer_multiplies_rounded_inputs(
    case: tuple[str, dict[str, Any], str], tmp_path: Path
) -> None:
    name, config, rule = case
    stored, dequantised = make(tmp_path, name, config, torch.float32)
    model = get_model(vllm_config=make_config(stored, **AS_SERVED))
    weight = load_file(dequantised / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    layer = model.model.layers[2].mlp.down_proj
    for rows in (1, 19):
        x = torch.randn(rows, SIZES["intermediate_size"])
        x[0, 5:9] = 0
        x[-1, 130] = 7.0  # the largest of its block, whose scale is a power of two
        expected = rounded(x, rule) @ weight.double().t()
        found = layer(x)[0] if isinstance(layer(x), tuple) else layer(x)
        assert relative_error(found, expected) <= 2e-6
        assert relative_error(found, x.double() @ weight.double().t()) > 1e-3


@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=lambda case: case[0])
def test_streams_are_nearer_to_the_served_than_to_the_exact_model(
    case: tuple[str, dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value between two codes may go either way, so no closer than that."""
    name, config, rule = case
    stored, dequantised = make(tmp_path, name, config, torch.float32)
    streams = run(stored, [5, 64], **AS_SERVED)
    exact = reference_run(dequantised, prompt()).streams
    plain_forward = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        is_head = self.out_features > max(SIZES.values())  # the vocabulary
        return plain_forward(self, x if is_head else rounded(x, rule).to(x.dtype))

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    served = reference_run(dequantised, prompt()).streams
    for layer in range(1, len(streams)):
        to_served = relative_error(streams[layer], served[layer])
        assert to_served < relative_error(streams[layer], exact[layer]) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_chunks_change_no_bit(case: tuple[str, dict[str, Any], str], tmp_path: Path) -> None:
    name, config, _ = case
    stored = make(tmp_path, name, config, torch.bfloat16).stored
    whole = run(stored, [], **AS_SERVED)
    assert all(map(torch.equal, whole, run(stored, [1, 37, 16, 2], **AS_SERVED)))


@pytest.mark.parametrize("name", ["awq", "gptq", "int4-groups", "int8-packed", "fp8-channel"])
def test_what_is_served_with_exact_activations_is_refused(name: str, tmp_path: Path) -> None:
    stored = make(tmp_path, name, FORMATS[name].config, torch.float32).stored
    with pytest.raises(ValueError, match=r"'as_served': module 'model\.layers\.\d.*leave the opt"):
        get_model(vllm_config=make_config(stored, **AS_SERVED))


def test_other_bad_input_is_named(tmp_path: Path) -> None:
    name, config, _ = CASES[0]
    stored, dequantised = make(tmp_path, name, config, torch.float32)
    with pytest.raises(ValueError, match=r"activation_quantization='as_served'.*no quantization_c"):
        make_config(dequantised, **AS_SERVED)
    with pytest.raises(ValueError, match=r"activation_quantization"):
        make_config(stored, activation_quantization="fp8")
    path = stored / "model.safetensors"
    weights = load_file(path)
    for value, problem in (
        (float("nan"), "holds nan"),
        (0.0, "is 0.0, expected one above 0"),
        (None, "is missing"),
    ):
        leaf = "model.layers.1.mlp.up_proj.input_scale"
        weights.pop(leaf, None)
        if value is not None:
            weights[leaf] = torch.tensor(value)
        save_file(weights, path)
        with pytest.raises(ValueError, match=rf"'{leaf}' {problem}"):
            get_model(vllm_config=make_config(stored, **AS_SERVED))


def test_experts_in_one_tensor_multiply_rounded_inputs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 144, "moe_intermediate_size": 160}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_5_moe", tokenizer=False, **sizes)
    edit_weights(plain, join_experts)
    stored, _ = quantise_checkpoint(plain, FORMATS["fp8-block"])
    edit_weights(stored, pack_experts)
    model = get_model(vllm_config=make_config(stored, **AS_SERVED))
    weights = load_file(plain / "model.safetensors")
    (name, *_) = [name for name in weights if name.endswith("layers.1.mlp.experts.down_proj")]
    expected_weight = fp8_block(weights[name][2])[1]
    (experts, *_) = [
        module
        for name, module in model.named_modules()
        if isinstance(module, Experts) and "layers.1." in name
    ]
    x, found = torch.randn(7, 160), torch.empty(7, 144)
    weight_of(experts.down_proj).multiply_into(x, None, found, 2)
    assert relative_error(found, rounded(x, "block") @ expected_weight.t()) <= 2e-6


def test_scales_of_inputs_go_by_two_names(tmp_path: Path) -> None:
    name, config, _ = CASES[0]
    stored, _ = make(tmp_path, name, config, torch.float32)
    expected = run(stored, [], **AS_SERVED)
    path = stored / "model.safetensors"
    weights = load_file(path)
    renamed = {name.replace(".input_scale", ".activation_scale"): weights[name] for name in weights}
    assert renamed.keys() != weights.keys()
    save_file(renamed, path)
    assert all(map(torch.equal, run(stored, [], **AS_SERVED), expected))


def test_zeros_and_rows_of_nothing() -> None:
    for rule in (ServedActivations(torch.int8), ServedActivations(torch.float8_e4m3fn, 4)):
        codes, scales = rule.quantise(torch.zeros(2, 6, dtype=torch.bfloat16))
        assert not codes.any() and scales.isfinite().all() and (scales > 0).all()
        codes, scales = rule.quantise(torch.zeros(0, 6))
        assert codes.shape == (0, 6) and len(scales) == 0

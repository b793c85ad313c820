"""Names that writers of quantised checkpoints give the same thing, and extras beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import (
    FORMATS,
    Format,
    Packed,
    Packer,
    awq,
    awq_by_row,
    compressed,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8_channel,
    mxfp4,
    mxfp8,
    pack_quantized,
    quantise_checkpoint,
    set_config,
)
from tests.models.test_models import prompt
from tests.models.test_quantization import as_it_is, run
from tests.models.zoo import make_checkpoint as make_zoo_checkpoint
from vllm.model_executor.model_loader import get_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "data_type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
SYMMETRIC = gptq(4, 8, True, False, 1)


def also(
    pack: Packer, change: Callable[[dict[str, torch.Tensor], torch.Tensor], dict[str, Any]]
) -> Packer:
    """With other tensors too: ``change`` of those there are, and of the weight."""

    def packed(weight: torch.Tensor) -> Packed:
        tensors, exact = pack(weight)
        return {**tensors, **change(tensors, weight)}, exact

    return packed


def renamed(pack: Packer, **names: str) -> Packer:
    def packed(weight: torch.Tensor) -> Packed:
        tensors, exact = pack(weight)
        return {names.get(leaf, leaf): tensor for leaf, tensor in tensors.items()}, exact

    return packed


def int4_in_int8(weight: torch.Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 7).float()
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def int4_tensor(weight: torch.Tensor) -> Packed:
    """One scale for all; zeros in an int8, as old writers have them."""
    scale = (weight.abs().max() / 6).reshape(1)
    codes = (weight / scale).round().add(1).to(torch.int8)
    shifts = 4 * torch.arange(8)
    words = (codes.long().add(8).view(len(codes), -1, 8) << shifts).sum(2)
    tensors = {
        "weight_packed": torch.where(words < 2**31, words, words - 2**32).int(),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": torch.ones(1, dtype=torch.int8),
    }
    return tensors, (codes.double() - 1) * scale.double()


def unpacked_zeros(tensors: dict[str, torch.Tensor], weight: torch.Tensor) -> dict[str, Any]:
    packed = tensors["weight_zero_point"]
    codes = (packed[:, None] >> 4 * torch.arange(8, dtype=torch.int32)[None, :, None]) & 15
    return {"weight_zero_point": (codes.flatten(0, 1)[: len(weight)] - 8).to(torch.int8)}


def quark(weight: dict[str, Any], **entries: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
        "exclude": ["lm_head", "re:.*gate$", "*router*"],
        "layer_quant_config": {},
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "algo_config": None,
        **entries,
    }


QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None}
QUARK_INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}
MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
quark_fp4 = renamed(mxfp4, weight_packed="weight")

STORED: dict[str, tuple[dict[str, Any], Packer]] = {
    "fp8, zeros of it": (
        compressed("float-quantized", **FP8),
        also(fp8_channel, lambda t, w: {"weight_zero_point": torch.zeros(len(w), 1).byte()}),
    ),
    "mxfp8": (compressed("mxfp8-quantized", **MXFP8), mxfp8),
    "mxfp8 of modelopt": ({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}, mxfp8),
    "fp4, no format": (
        compressed("mixed-precision", num_bits=4, type="float", group_size=32),
        mxfp4,
    ),
    "int4 in int8": (compressed("naive-quantized", num_bits=4, type="int"), int4_in_int8),
    "int4, a tensor": (compressed("pack-quantized", num_bits=4, type="int"), int4_tensor),
    "int4, zeros as they are": (
        {
            **compressed("pack-quantized", **INT4, symmetric=False),
            "quant_method": "compressed_tensors",
        },
        also(pack_quantized(4, 8, False, False), unpacked_zeros),
    ),
    "gptq, biases of 0": (
        {**GPTQ, "quant_method": "GPTQ", "checkpoint_format": None, "bits": 4.0},
        also(SYMMETRIC, lambda t, w: {"bias": torch.zeros(len(w)).half()}),
    ),
    "awq of exllama": ({**GPTQ, "quant_method": "awq", "version": "exllama"}, awq(8)),
    "scales of caches": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        also(fp8_tensor, lambda t, w: {"kv_scale": w[0] + 1, "output_zero_point": w[1].int()}),
    ),
    "auto-round": ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, SYMMETRIC),
    "auto-round, old": (
        {**AUTO_ROUND, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
        SYMMETRIC,
    ),
    "auto-round, its own": (
        {**AUTO_ROUND, "sym": False, "packing_format": "auto_round"},
        gptq(4, 8, False, False, 2),
    ),
    "auto-round, awq": ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq(8)),
    "quark, fp4": (quark(QUARK_FP4), quark_fp4),
    "quark, fp8": (quark(QUARK_FP8), fp8_tensor),
    "quark, int8": (
        quark(QUARK_INT8),
        also(int8_channel, lambda t, w: {"weight_scale": t["weight_scale"].flatten()}),
    ),
}


def compare(folder: Path, config: dict[str, Any], pack: Packer, **others: Packer) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160}
    plain = make_checkpoint(folder / "plain", "llama", tokenizer=False, **sizes)
    stored, dequantised = quantise_checkpoint(plain, Format(config, pack), others)
    expected = reference_run(dequantised, prompt()).streams
    whole, _ = run(stored, [])
    assert max(map(relative_error, whole, expected)) <= 1e-4
    assert all(map(torch.equal, whole, run(stored, [5, 64])[0]))


@pytest.mark.parametrize("name", STORED)
def test_every_spelling_is_read(name: str, tmp_path: Path) -> None:
    compare(tmp_path, *STORED[name])


INT4_OF_64 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
INT8_OF_64 = {**INT4_OF_64, "num_bits": 8}
TAILS: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": ({**GPTQ, "group_size": 64, "sym": True}, gptq(4, 64, True, False, 1)),
    "gptq of 3 bits": ({**GPTQ, "bits": 3, "group_size": 64}, gptq(3, 64, False, False, 1)),
    "gptq in order of activations": (
        {**GPTQ, "bits": 8, "group_size": 64, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(8, 64, False, True, 2),
    ),
    "auto-round": ({**AUTO_ROUND, "group_size": 64, "sym": True}, gptq(4, 64, True, False, 1)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq(64)),
    "awq by row": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
        awq_by_row(64),
    ),
    "pack-quantized": (
        compressed("pack-quantized", **INT4_OF_64, symmetric=False),
        pack_quantized(4, 64, False, False),
    ),
    "pack-quantized of 8 bits": (
        compressed("pack-quantized", **INT8_OF_64),
        pack_quantized(8, 64, True, False),
    ),
    "small groups": ({**GPTQ, "group_size": 24}, gptq(4, 24, False, False, 1)),
}


@pytest.mark.parametrize("name", TAILS)
def test_the_last_group_may_be_smaller(name: str, tmp_path: Path) -> None:
    """Weights with 96 and 160 columns, in groups of 64: the last group has 32."""
    compare(tmp_path, *TAILS[name])


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_zeros_that_contradict_sym_are_an_error(method: str, stored: int, tmp_path: Path) -> None:
    """Zeros of one version of GPTQ, read as those of the other, are one off."""
    right, wrong = ("gptq", "gptq_v2") if stored == 1 else ("gptq_v2", "gptq")
    names = {"gptq": "auto_round:auto_gptq", "gptq_v2": "auto_round:gptqmodel"}

    def config(version: str, **entries: Any) -> dict[str, Any]:
        if method == "gptq":
            return {**GPTQ, "checkpoint_format": version, **entries}
        return {**AUTO_ROUND, "packing_format": names[version], **entries}

    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    pack = gptq(4, 8, True, False, stored)
    folder, _ = quantise_checkpoint(plain, Format(config(right, sym=True), pack))
    run(folder, [])
    set_config(folder, config(wrong, sym=False))
    run(folder, [])
    set_config(folder, config(wrong, sym=True))
    with pytest.raises(ValueError, match=r"qzeros' means zeros of [79], and sym=true zeros of 8"):
        run(folder, [])


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("pack", [fp8_block, fp8_tensor], ids=["block", "tensor"])
def test_fp8_beside_int4_is_refused_by_its_name(
    pack: Packer, model_impl: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    folder, _ = quantise_checkpoint(plain, Format(GPTQ, SYMMETRIC), {"q_proj": pack})
    reason = (
        r"q_proj\.weight' is torch\.float8_e4m3fn with weight_scale(_inv)? in the checkpoint, of "
        r"which quant_method='gptq' in its quantization_config says nothing"
    )
    with pytest.raises(ValueError, match=reason):
        get_model(vllm_config=make_config(folder, model_impl=model_impl))


def test_the_first_entry_of_dynamic_that_matches_decides(tmp_path: Path) -> None:
    dynamic = {"+:.*up_proj": {"bits": 8}, "-:.*(gate|up)_proj": {}}
    eight = gptq(8, 8, True, False, 1)
    compare(tmp_path, {**GPTQ, "dynamic": dynamic}, SYMMETRIC, gate_proj=as_it_is, up_proj=eight)


def test_modules_of_auto_round_may_have_other_settings(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.mlp.gate_proj": {"bits": 16, "data_type": "fp"} for i in range(8)}
    config = {**AUTO_ROUND, "extra_config": {**extra, ".*k_proj.*": {"bits": 8}}}
    eight = gptq(8, 8, True, False, 1)
    compare(tmp_path, config, SYMMETRIC, gate_proj=as_it_is, k_proj=eight)


def test_modules_of_quark_may_have_other_settings(tmp_path: Path) -> None:
    layers = {"*k_proj": {"weight": QUARK_FP8}}
    compare(tmp_path, quark(QUARK_FP4, layer_quant_config=layers), quark_fp4, k_proj=fp8_tensor)


def test_a_module_of_transformers_has_the_dequantised_weights(tmp_path: Path) -> None:
    """GPT-J, which has no class of ours; beside them biases of 0 that it has no place for."""
    make_zoo_checkpoint(tmp_path / "plain", "gptj")
    modules = ("q_proj", "k_proj", "v_proj")
    stored, dequantised = quantise_checkpoint(
        tmp_path / "plain", Format(*STORED["gptq, biases of 0"]), modules=modules
    )
    expected = reference_run(dequantised, prompt()).streams
    assert max(map(relative_error, run(stored, [])[0], expected)) <= 1e-4


@pytest.mark.parametrize("name", ["gptq-order", "awq", "fp8-block"])
def test_gptq_and_awq_have_outputs_first_where_floats_do_not(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt2", tokenizer=False)
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for name_in_file, weight in load_file(plain / "model.safetensors").items():
        module = name_in_file.removesuffix(".weight")
        if module.endswith(("c_attn", "c_proj", "c_fc")):
            turned = weight if name == "fp8-block" else weight.t().contiguous()
            packed, exact = FORMATS[name].pack(turned)
            tensors[0].update({f"{module}.{leaf}": t.contiguous() for leaf, t in packed.items()})
            meant = exact if name == "fp8-block" else exact.t()
            tensors[1][name_in_file] = meant.float().contiguous()
        else:
            tensors[0][name_in_file] = tensors[1][name_in_file] = weight
    folders = [shutil.copytree(plain, tmp_path / each) for each in ("stored", "dequantised")]
    for folder, each in zip(folders, tensors, strict=True):
        save_file(each, folder / "model.safetensors")
    set_config(folders[0], FORMATS[name].config)
    expected = reference_run(folders[1], prompt()).streams
    assert max(map(relative_error, run(folders[0], [])[0], expected)) <= 1e-4

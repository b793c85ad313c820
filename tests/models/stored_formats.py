"""Quantised checkpoints, written by packers of their own: slow, plain, after the formats' texts.

A packer takes a weight [m, n] and returns the tensors of its module in the checkpoint, and the
weight that these mean, in float64. Imports nothing of vllm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-value for value in FP4]

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor], Packed]


class Format(NamedTuple):
    """A way to store linear layers: the entry of config.json, and who packs."""

    config: dict[str, Any]
    pack: Packer


def _amax(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Largest magnitudes, one value per block."""
    m, n = weight.shape
    blocks = [
        [weight[i : i + rows, j : j + columns].abs().max() for j in range(0, n, columns)]
        for i in range(0, m, rows)
    ]
    return torch.tensor(blocks)


def _spread(by_block: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The values of blocks at every element, in float64."""
    whole = by_block.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: weight.shape[0], : weight.shape[1]]


def _fp8(weight: torch.Tensor, rows: int, columns: int, leaf: str, dtype: torch.dtype) -> Packed:
    scale = (_amax(weight, rows, columns) / 448).to(dtype)
    spread = _spread(scale, weight, rows, columns)
    codes = (weight.double() / spread).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return {"weight": codes, leaf: scale}, codes.double() * spread


def fp8_tensor(weight: torch.Tensor) -> Packed:
    tensors, exact = _fp8(weight, *weight.shape, "weight_scale", torch.float32)
    tensors["weight_scale"] = tensors["weight_scale"].reshape(())
    return {**tensors, "input_scale": torch.tensor(0.5)}, exact


def fp8_block(weight: torch.Tensor) -> Packed:
    return _fp8(weight, 128, 128, "weight_scale_inv", torch.float32)


def fp8_channel(weight: torch.Tensor) -> Packed:
    return _fp8(weight, 1, weight.shape[1], "weight_scale", torch.bfloat16)


def fp8_groups(weight: torch.Tensor) -> Packed:
    return _fp8(weight, 1, 8, "weight_scale", torch.float32)


def fp8_rows(weight: torch.Tensor) -> Packed:
    """fbgemm's: a scale a row, and a bound for those of activations."""
    tensors, exact = _fp8(weight, 1, weight.shape[1], "weight_scale", torch.float32)
    return {**tensors, "input_scale_ub": torch.tensor(1200.0)}, exact


def _codes(
    weight: torch.Tensor, group: int, bits: int, dtype: torch.dtype, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on, zeros and scales [m, groups], and what they mean."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    m, n = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -n % group))  # the last group may be smaller
    grouped = padded.reshape(m, -1, group)
    if symmetric:
        scale = (grouped.abs().amax(2) / (middle - 1)).to(dtype)
        zero = torch.full(scale.shape, middle)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top).int()
    scales, zeros = (_spread(t, weight, 1, group) for t in (scale, zero))
    codes = (weight.double() / scales).round().add(zeros).clamp(0, top)
    return codes.int(), zero.int(), scale, (codes - zeros) * scales


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[k, n] -> int32 [k, n * bits / 32, rounded up]: one stream of bits."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << (bits * i) for i, code in enumerate(row))
        words = [(stream >> at) % 2**32 for at in range(0, bits * len(row), 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def int8_channel(weight: torch.Tensor) -> Packed:
    codes, _, scale, exact = _codes(weight, weight.shape[1], 8, torch.bfloat16, True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}, exact


def int8_asymmetric(weight: torch.Tensor) -> Packed:
    codes, zero, scale, exact = _codes(weight, weight.shape[1], 8, torch.float32, False)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    return {**tensors, "weight_zero_point": (zero - 128).to(torch.int8)}, exact


def pack_quantized(bits: int, group: int, symmetric: bool, activation_order: bool) -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        size = weight.shape[1] if group == -1 else group
        order = torch.arange(weight.shape[1])
        if activation_order:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(3))
        codes, zero, scale, exact = _codes(weight[:, order], size, bits, torch.bfloat16, symmetric)
        back = order.argsort()
        tensors = {
            "weight_packed": _pack(codes[:, back], bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _pack(zero.t(), bits).t().contiguous()
        if activation_order:
            tensors["weight_g_idx"] = (back // size).int()
        return tensors, exact[:, back]

    return pack


def gptq(bits: int, group: int, symmetric: bool, activation_order: bool, version: int) -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        size = weight.shape[1] if group == -1 else group
        order = torch.arange(weight.shape[1])
        if activation_order:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(5))
        codes, zero, scale, exact = _codes(weight[:, order], size, bits, torch.float16, symmetric)
        back = order.argsort()
        stored_zero = (zero - int(version == 1)) % 2**bits
        tensors = {
            "qweight": _pack(codes[:, back], bits).t().contiguous(),
            "qzeros": _pack(stored_zero.t(), bits),
            "scales": scale.t().contiguous(),
            "g_idx": (back // size).int(),
        }
        return tensors, exact[:, back]

    return pack


def awq(group: int) -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        codes, zero, scale, exact = _codes(weight, group, 4, torch.float16, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleave(values: torch.Tensor) -> torch.Tensor:
            return _pack(values.view(len(values), -1, 8)[:, :, order].flatten(1), 4)

        tensors = {"qweight": interleave(codes.t()), "qzeros": interleave(zero.t())}
        return {**tensors, "scales": scale.t().contiguous()}, exact

    return pack


def awq_by_row(group: int) -> Packer:
    """AWQ for the "gemv" kernels; zeros are padded to as many integers as those read at once."""

    def pack(weight: torch.Tensor) -> Packed:
        codes, zero, scale, exact = _codes(weight, group, 4, torch.float16, False)
        multiple = {64: 16, 32: 32}.get(group, 8)
        behind = (0, -zero.shape[1] % multiple)
        zero, held = (torch.nn.functional.pad(values, behind) for values in (zero, scale))
        return {"qweight": _pack(codes, 4), "qzeros": _pack(zero, 4), "scales": held}, exact

    return pack


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest code of every value, two a byte, the first one low."""
    codes = (values.double()[..., None] - torch.tensor(FP4).double()).abs().argmin(-1)
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed.int() % 16, packed.int() // 16], -1).flatten(-2)
    return torch.tensor(FP4).double()[codes]


def mxfp4(weight: torch.Tensor) -> Packed:
    exponents = (_amax(weight, 1, 32) / 6).log2().ceil()
    spread = _spread(2.0 ** exponents.double(), weight, 1, 32)
    packed = fp4_codes(weight.double() / spread)
    tensors = {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, fp4_values(packed) * spread


def mxfp8(weight: torch.Tensor) -> Packed:
    exponents = (_amax(weight, 1, 32) / 448).log2().ceil()
    spread = _spread(2.0 ** exponents.double(), weight, 1, 32)
    codes = (weight.double() / spread).float().to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, codes.double() * spread


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    factor = (weight.abs().max() / (6 * 448)).float()
    scale = (_amax(weight, 1, 16) / 6 / factor).to(torch.float8_e4m3fn)
    spread = _spread(scale.float(), weight, 1, 16) * factor.double()
    packed = fp4_codes(weight.double() / spread)
    return packed, scale, factor, fp4_values(packed) * spread


def nvfp4_modelopt(weight: torch.Tensor) -> Packed:
    packed, scale, factor, exact = _nvfp4(weight)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}
    return {**tensors, "input_scale": torch.tensor(0.1)}, exact


def nvfp4_packed(weight: torch.Tensor) -> Packed:
    packed, scale, factor, exact = _nvfp4(weight)
    tensors = {"weight_packed": packed, "weight_scale": scale}
    return {**tensors, "weight_global_scale": (1 / factor).reshape(1)}, exact


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
NF4 += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
NF4 += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
BNB_FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
BNB_FP4 += [-value for value in BNB_FP4]


def bitsandbytes_4bit(kind: str, block: int, nested: bool) -> Packer:
    """Blocks of the weight as one line; the last one may be shorter."""

    def pack(weight: torch.Tensor) -> Packed:
        table = torch.tensor(NF4 if kind == "nf4" else BNB_FP4)
        line = weight.double().flatten()
        absmax = torch.stack([part.abs().max() for part in line.split(block)]).float()
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        tensors = {"weight.quant_map": table, "weight.absmax": absmax}
        if nested:
            offset, size = float(absmax.mean()), 4
            levels = torch.linspace(-1, 1, 256)
            parts = (absmax - offset).split(size)
            outer = torch.stack([part.abs().max() for part in parts])
            codes = [(part[:, None] / m - levels).abs().argmin(1) for part, m in zip(parts, outer)]
            tensors["weight.absmax"] = torch.cat(codes).to(torch.uint8)
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": levels}
            state |= {"nested_blocksize": size, "nested_offset": offset}
            values = [levels[code].double() * m for code, m in zip(codes, outer.double())]
            absmax = torch.cat(values) + offset
        spread = absmax.double().repeat_interleave(block)[: len(line)]
        codes_of_line = ((line / spread)[:, None] - table.double()).abs().argmin(1)
        exact = (table.double()[codes_of_line] * spread).view_as(weight)
        padded = torch.nn.functional.pad(codes_of_line, (0, len(line) % 2)).view(-1, 2)
        tensors["weight"] = (16 * padded[:, :1] + padded[:, 1:]).to(torch.uint8)
        text = json.dumps({**state, "shape": list(weight.shape)}).encode()
        name = f"weight.quant_state.bitsandbytes__{kind}"
        return {**tensors, name: torch.tensor(list(text), dtype=torch.uint8)}, exact

    return pack


def bitsandbytes_8bit(weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(1).float()
    codes = (weight.double() * 127 / largest.double()[:, None]).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": largest}
    kind = torch.tensor(0, dtype=torch.uint8)
    return {**tensors, "weight_format": kind}, codes * largest.double()[:, None] / 127


def compressed(name: str, **weights: Any) -> dict[str, Any]:
    """An entry of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", r"re:.*in_proj_[ab]$"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
_BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 8}

FORMATS: Mapping[str, Format] = {
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8-block": Format(
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        fp8_block,
    ),
    "fp8-channel": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channel
    ),
    "fp8-groups": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="group", group_size=8),
        fp8_groups,
    ),
    "fp8-fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "fp8-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8_tensor,
    ),
    "int8-channel": Format(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channel
    ),
    "int8-asymmetric": Format(
        compressed("int-quantized", num_bits=8, type="int", symmetric=False), int8_asymmetric
    ),
    "int4-groups": Format(
        compressed("pack-quantized", **_INT4, group_size=8), pack_quantized(4, 8, True, False)
    ),
    "int4-asymmetric": Format(
        compressed("pack-quantized", **_INT4, group_size=8, symmetric=False),
        pack_quantized(4, 8, False, False),
    ),
    "int4-order": Format(
        compressed("pack-quantized", **_INT4, group_size=8, actorder="group"),
        pack_quantized(4, 8, False, True),
    ),
    "int8-packed": Format(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        pack_quantized(8, -1, True, False),
    ),
    "gptq": Format(_GPTQ, gptq(4, 8, False, False, 1)),
    "gptq-symmetric": Format({**_GPTQ, "group_size": -1}, gptq(4, -1, True, False, 1)),
    "gptq-order": Format(
        {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(4, 8, False, True, 2)
    ),
    "gptq-8": Format({**_GPTQ, "bits": 8}, gptq(8, 8, False, False, 1)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}, awq(8)),
    "gptq-2": Format({**_GPTQ, "bits": 2}, gptq(2, 8, True, False, 1)),
    "gptq-3": Format({**_GPTQ, "bits": 3, "desc_act": True}, gptq(3, 8, False, True, 1)),
    "awq-gemv": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, awq_by_row(32)
    ),
    "bnb-nf4": Format(_BNB, bitsandbytes_4bit("nf4", 64, False)),
    "bnb-nf4-nested": Format(_BNB, bitsandbytes_4bit("nf4", 16, True)),
    "bnb-fp4": Format(_BNB, bitsandbytes_4bit("fp4", 32, True)),
    "bnb-int8": Format({**_BNB, "load_in_8bit": True}, bitsandbytes_8bit),
    "mxfp4": Format(compressed("mxfp4-pack-quantized", num_bits=4, type="float"), mxfp4),
    "nvfp4-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4_modelopt
    ),
    "nvfp4-packed": Format(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float"), nvfp4_packed
    ),
}

MULTIPLES = {
    "awq-gemv": 32,
    "gptq-2": 16,
    "gptq-3": 32,
    "mxfp4": 32,
    "nvfp4-modelopt": 16,
    "nvfp4-packed": 16,
}
"""The number of columns is a multiple of this, where a format fixes it."""

KEPT = ("in_proj_b", "in_proj_a")
"""Modules that stay as they are."""


class Checkpoints(NamedTuple):
    stored: Path
    dequantised: Path


def is_linear(name: str, tensor: torch.Tensor, modules: Sequence[str] = ("proj",)) -> bool:
    module = name.removesuffix(".weight")
    is_named = any(part in module for part in modules)
    return tensor.dim() == 2 and is_named and not module.endswith(KEPT)


def quantise_checkpoint(
    folder: Path,
    stored: Format,
    others: Mapping[str, Packer] | None = None,
    *,
    modules: Sequence[str] = ("proj",),
) -> Checkpoints:
    """The float checkpoint in ``folder`` in that format, and what it means, beside it.

    others: part of a name -> another packer for such modules; modules: parts of the names of those
    that are quantised.
    """
    weights = load_file(folder / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not is_linear(name, weight, modules):
            packed[name] = meant[name] = weight
            continue
        module = name.removesuffix(".weight")
        pack = next((p for part, p in (others or {}).items() if part in name), stored.pack)
        tensors, exact = pack(weight.float())
        packed |= {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
        meant[name] = exact.to(weight.dtype)
    made = Checkpoints(folder.with_name("stored"), folder.with_name("dequantised"))
    for target, tensors in zip(made, (packed, meant), strict=True):
        shutil.copytree(folder, target)
        save_file({k: t.contiguous() for k, t in tensors.items()}, target / "model.safetensors")
    set_config(made.stored, stored.config)
    return made


def set_config(folder: Path, quantization_config: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization_config}))

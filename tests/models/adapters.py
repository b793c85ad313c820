"""Adapters as PEFT writes them, and checkpoints into which they were merged by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import save_tokenizer
from tests.models.oracle import load_reference
from vllm.lora.request import LoRARequest


def write_adapter(
    folder: Path,
    checkpoint: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    alpha: int = 8,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, int] | None = None,
    strength: float = 0.5,
    with_experts: bool = False,
    with_ends: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[str]:
    """Write an adapter of all linear modules of a checkpoint's layers; returns their names.

    ranks, alphas: PEFT's patterns. with_experts: also of single experts. with_ends: also of the
    embeddings and of the LM head. options: more entries of the config.
    """
    generator, tensors, names = torch.Generator().manual_seed(seed), {}, []
    model = load_reference(checkpoint)
    weights = linear_weights(model) | (expert_weights(model) if with_experts else {})
    weights |= end_weights(model) if with_ends else {}
    paths = {module: path for path, module in model.named_modules()}
    table = paths[model.get_input_embeddings()]
    for name, weight in weights.items():
        outputs, inputs = weight.shape
        own = _value(name, rank, ranks)
        scale = _scale(own, _value(name, alpha, alphas), bool(options.get("use_rslora")))
        down = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
        up = torch.randn(outputs, own, generator=generator) * weight.std() * strength
        up *= math.sqrt(inputs / own) / scale
        if name == table:
            down, up = up.t().contiguous(), down.t().contiguous()
            tensors[f"base_model.model.{name}.lora_embedding_A"] = down.to(dtype)
            tensors[f"base_model.model.{name}.lora_embedding_B"] = up.to(dtype)
            tensors[f"base_model.model.{name}.base_layer.weight"] = weight.clone()  # as PEFT does
        else:
            tensors[f"base_model.model.{name}.lora_A.weight"] = down.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = up.to(dtype)
        names.append(name)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "bias": "none",
        "modules_to_save": None,
        **options,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return names


def linear_weights(model: Any) -> dict[str, torch.Tensor]:
    """[outputs, inputs] of each linear module that PEFT's ``all-linear`` takes, by its path."""
    from transformers.pytorch_utils import Conv1D

    found = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head or re.search("visual|vision|multi_modal", name):
            continue
        if isinstance(module, Conv1D):
            found[name] = module.weight.data.t()
        elif isinstance(module, torch.nn.Linear):
            found[name] = module.weight.data
    return found


def end_weights(model: Any) -> dict[str, torch.Tensor]:
    """The tables of the embeddings and of the LM head, by their paths."""
    return {
        name: module.weight.data
        for name, module in model.named_modules()
        if module in (model.get_input_embeddings(), model.get_output_embeddings())
    }


def write_table_adapter(
    folder: Path, checkpoint: Path, seed: int, *, rank: int, is_old: bool, strength: float = 0.5
) -> None:
    """Write an adapter of the experts' parameters and of routers (``target_parameters``), as PEFT
    does: lora_A is for the inputs, and before 0.19 for the second axis of experts' parameters,
    whatever it is."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    model = load_reference(checkpoint)
    tables, routers = expert_tables(model), router_weights(model)
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in tables))
    for name, table in (tables | routers).items():
        experts = len(table) if name in tables else 1
        first, second = _axes(model, name, is_old) if name in tables else (1, 0)
        down = torch.randn(experts * rank, table.shape[first], generator=generator)
        up = torch.randn(table.shape[second], rank * experts, generator=generator)
        up *= table.std() * strength / 2 / math.sqrt(rank)
        path = _wrapped_path(name, leaves)
        tensors[f"base_model.model.{path}.lora_A.weight"] = down
        tensors[f"base_model.model.{path}.lora_B.weight"] = up
    targets = [".".join(name.split(".")[-2:]) for name in (*tables, *routers)]
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": [],
        "target_parameters": list(dict.fromkeys(targets)),
        "peft_version": "0.18.1" if is_old else "0.21.2",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def write_merged_tables(folder: Path, checkpoint: Path, adapter: Path, *, is_old: bool) -> Path:
    """Write the checkpoint with PEFT's change of each parameter added to it."""
    model = load_reference(checkpoint)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    targets = [one.split(".") for one in config["target_parameters"]]
    leaves = [leaf for module, leaf in targets if module == "experts"]
    for name, table in (expert_tables(model) | router_weights(model)).items():
        path = _wrapped_path(name, leaves)
        down = tensors.pop(f"base_model.model.{path}.lora_A.weight")
        up = tensors.pop(f"base_model.model.{path}.lora_B.weight")
        if table.dim() == 2:
            table += 2 * up @ down
            continue
        first, _ = _axes(model, name, is_old)
        down, up = down.view(len(table), -1, down.shape[1]), up.view(len(up), -1, len(table))
        table += 2 * torch.einsum("ore,eri->eoi" if first == 2 else "ore,eri->eio", up, down)
    assert not tensors
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def expert_tables(model: Any) -> dict[str, torch.Tensor]:
    """The parameters with a table for each expert, by their paths."""
    return {
        name: parameter.data
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name
    }


def router_weights(model: Any) -> dict[str, torch.Tensor]:
    """[experts, hidden] of routers that are not linear modules in transformers, by their paths."""
    return {
        f"{name}.weight": module.weight.data
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router"))
        and not isinstance(module, torch.nn.Linear)
        and "weight" in dict(module.named_parameters(recurse=False))
    }


def _wrapped_path(name: str, leaves: list[str]) -> str:
    """The path at which PEFT stores a parameter's adapter: that of its module, whose first
    parameter becomes the base of the second."""
    module, _, leaf = name.rpartition(".")
    is_base = len(leaves) > 1 and leaf == leaves[0]
    return f"{module}.base_layer" if is_base else module


def _axes(model: Any, name: str, is_old: bool) -> tuple[int, int]:
    """The axes of a parameter [experts, ., .] of which lora_A and lora_B are."""
    module = model.get_submodule(name.rpartition(".")[0])
    return (1, 2) if is_old or getattr(module, "is_transposed", False) else (2, 1)


def expert_weights(model: Any) -> dict[str, torch.Tensor]:
    """[outputs, inputs] of single experts, named as in checkpoints with a tensor for each."""
    found = {}
    for name, module in model.named_modules():
        tables = dict(module.named_parameters(recurse=False))
        for leaf, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("up_proj", ("up_proj",)),
            ("down_proj", ("down_proj",)),
        ):
            if leaf not in tables or tables[leaf].dim() != 3:
                continue
            for expert, table in enumerate(tables[leaf].data):
                inputs_first = model.config.model_type.startswith("llama4")
                rows = table.t() if inputs_first else table
                for part, weight in zip(parts, rows.chunk(len(parts)), strict=True):
                    found[f"{name}.{expert}.{part}"] = weight
    return found


def write_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with ``weight + scale * lora_B @ lora_A`` instead of each weight."""
    model = load_reference(checkpoint)
    if model.config.model_type.startswith("zamba"):
        _untie(model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    ends = end_weights(model)
    for name, weight in (linear_weights(model) | expert_weights(model) | ends).items():
        if (table := tensors.pop(f"base_model.model.{name}.lora_embedding_A", None)) is not None:
            del tensors[f"base_model.model.{name}.base_layer.weight"]
            tensors[f"base_model.model.{name}.lora_B.weight"] = table.t()
            up = tensors.pop(f"base_model.model.{name}.lora_embedding_B")
            tensors[f"base_model.model.{name}.lora_A.weight"] = up.t()
        down = tensors.pop(f"base_model.model.{name}.lora_A.weight", None)
        if down is None:
            continue
        up = tensors.pop(f"base_model.model.{name}.lora_B.weight").float()
        alpha = _value(name, config["lora_alpha"], config["alpha_pattern"])
        weight += _scale(len(down), alpha, config.get("use_rslora", False)) * (up @ down.float())
    assert not tensors
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _untie(model: Any) -> None:
    """Give each use of a block its own weights, as transformers has it without tied embeddings."""
    seen = set()
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                setattr(module, leaf, torch.nn.Parameter(parameter.detach().clone()))
            seen.add(parameter)
    model.config.tie_word_embeddings = False


def _scale(rank: int, alpha: int, is_stable: bool) -> float:
    return alpha / (math.sqrt(rank) if is_stable else rank)


def _value(name: str, value: int, patterns: dict[str, int] | None) -> int:
    for pattern, own in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return own
    return value


def request(folder: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(folder.name, number, str(folder))

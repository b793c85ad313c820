"""Adapters (LoRA) on several ranks, against one process with the same adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.engine.test_lora import MIXTURES
from tests.grids import at_night
from tests.models.adapters import request, write_adapter, write_table_adapter
from tests.models.checkpoints import make_checkpoint
from tests.models.families import FAMILIES
from tests.models.oracle import relative_error
from tests.models.ranks_of_families import is_refusal, overrides
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM
from vllm.hidden_states import ExtractRequest
from vllm.lora.request import LoRARequest

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(81, [37, 5, 18])
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "kv_cache_memory_bytes": 2**24,
    "enable_lora": True,
}
TENSOR: Mapping[str, Any] = {"tensor_parallel_size": 2}
STAGES: Mapping[str, Any] = {"pipeline_parallel_size": 2}
EXPERTS: Mapping[str, Any] = {**TENSOR, "enable_expert_parallel": True}
SHARED: Mapping[str, Any] = {**TENSOR, "enable_sequence_parallel": True}
PREFILL: Mapping[str, Any] = {"prefill_context_parallel_size": 2}
WAYS = {
    "tensor": TENSOR,
    "stages": STAGES,
    "experts": EXPERTS,
    "both": {**TENSOR, **STAGES},
    "shared": SHARED,
    "prefill": PREFILL,
}
MOST_ERROR = 1e-4
SINGLE_EXPERTS = ("qwen3_moe", "llama4", "nemotron_h", "deepseek_v32")


def write_adapters(folder: Path, checkpoint: Path, family: str) -> list[LoRARequest]:
    """Two adapters of everything that the family's checkpoints let PEFT name, and one of tables."""
    folders = [folder / "first", folder / "second"]
    for seed, path in enumerate(folders):
        with_experts = family in SINGLE_EXPERTS and seed == 0
        options: dict[str, Any] = {"with_experts": with_experts, "with_ends": seed == 1}
        write_adapter(path, checkpoint, seed, rank=3 + seed, **options)
    if family in MIXTURES:
        write_table_adapter(folder / "tables", checkpoint, 3, rank=2, is_old=False)
        folders.append(folder / "tables")
    return [request(path, number) for number, path in enumerate(folders, start=1)]


def asked(adapters: list[LoRARequest]) -> list[ExtractRequest]:
    chosen = [None, *adapters]
    return [ExtractRequest(prompt, lora_request=one) for prompt in PROMPTS for one in chosen]


def rows(llm: LLM, requests: list[ExtractRequest]) -> list[torch.Tensor]:
    layers = list(range(llm.llm_engine.model_config.get_total_num_hidden_layers() + 1))
    return [one.hidden_states for one in llm.extract(requests, layers=layers)]


def tokens(llm: LLM, adapters: list[LoRARequest]) -> list[Any]:
    chosen = [None, *adapters]
    outputs = llm.generate(PROMPTS[:1] * len(chosen), greedy(5), lora_request=chosen)
    return [one.outputs[0].token_ids for one in outputs]


def compare(checkpoint: Path, adapters: list[LoRARequest], way: str) -> None:
    requests = asked(adapters)
    with engine(checkpoint, **OPTIONS) as llm:
        expected, has_head = rows(llm, requests), core_of(llm).executor.no_head_reason() is None
        expected_tokens = tokens(llm, adapters) if has_head else []
    with engine(checkpoint, **OPTIONS, **WAYS[way]) as llm:
        llm.collective_rpc(rank_functions.poison)
        found = rows(llm, requests)
        assert all(map(torch.equal, rows(llm, requests[::-1])[::-1], found)), "prefix hits"
        for ours, whole in zip(found, expected, strict=True):
            if way == "stages":
                assert torch.equal(ours, whole)
            for layer in range(whole.shape[1]):
                assert relative_error(ours[:, layer], whole[:, layer]) <= MOST_ERROR, layer
        if has_head:
            assert tokens(llm, adapters) == expected_tokens
    with engine(checkpoint, **OPTIONS, **WAYS[way], max_num_batched_tokens=16) as llm:
        assert all(map(torch.equal, rows(llm, requests), found)), "chunks"


BY_NIGHT = [
    ("llama", "tensor"),
    ("llama", "both"),
    ("llama", "shared"),
    ("llama", "prefill"),
    ("qwen3_5", "tensor"),
    ("qwen3_5", "stages"),
]
BY_NIGHT += [(name, way) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss") for way in WAYS]
SWEPT = [(name, "both") for name in FAMILIES if (name, "both") not in BY_NIGHT]


@pytest.mark.parametrize(("family", "way"), [at_night(*one) for one in BY_NIGHT + SWEPT])
def test_rows_are_those_of_one_process(
    family: str, way: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Two adapters or three, and none, in one batch: also in chunks and with prefix hits."""
    folder = checkpoint(family, **overrides(family, way))
    adapters = write_adapters(tmp_path, folder, family)
    try:
        compare(folder, adapters, way)
    except ValueError as error:
        if (family, way) in BY_NIGHT or not is_refusal(error, WAYS[way]):
            raise


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "way"), [("gptq-order", "stages"), ("fp8-block", "stages"), ("fp8-block", "tensor")]
)
def test_quantised_checkpoints(name: str, way: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes["num_attention_heads"] = 4
    plain = make_checkpoint(tmp_path / "plain", "llama", **sizes)
    stored = quantise_checkpoint(plain, FORMATS[name]).stored
    compare(stored, write_adapters(tmp_path, plain, "llama")[:1], way)


def test_adapters_on_all_ranks_or_on_none(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two ranks of a mixture: values, what each rank holds, and a rank that cannot read a file."""
    folder = checkpoint("qwen3_moe", num_experts=7, intermediate_size=256)
    adapters = write_adapters(tmp_path, folder, "qwen3_moe")
    requests = asked(adapters)
    with engine(folder, **OPTIONS) as llm:
        expected = rows(llm, requests)
        (whole,) = llm.collective_rpc(rank_functions.adapter_elements)
    with engine(folder, **OPTIONS, **EXPERTS, max_loras=3) as llm:
        llm.collective_rpc(rank_functions.poison)
        found = rows(llm, requests)
        for ours, one in zip(found, expected, strict=True):
            assert relative_error(ours, one) <= MOST_ERROR
        for elements in llm.collective_rpc(rank_functions.adapter_elements):
            assert elements < 0.75 * whole
        names = ["first", "second", "tables"]
        assert llm.collective_rpc(rank_functions.adapter_names) == [names] * 2
        other = LoRARequest("other", 9, adapters[0].lora_path)
        refused = ExtractRequest(PROMPTS[0], lora_request=other)
        for failing_rank in (0, 1):
            llm.collective_rpc(rank_functions.fail_to_read_adapter, args=(failing_rank,))
            with pytest.raises(ValueError, match=r"adapter 'other' \(lora_path=.*planted"):
                list(llm.extract([refused], layers=[1]))
            assert llm.collective_rpc(rank_functions.adapter_names) == [names] * 2
        llm.collective_rpc(rank_functions.fail_to_read_adapter, args=(1,))
        with pytest.raises(ValueError, match=r"adapter 'other' .*planted"):
            llm.collective_rpc("add_lora", args=(other,))
        assert all(map(torch.equal, rows(llm, requests), found))
        assert llm.collective_rpc("add_lora", args=(other,)) == [True] * 2
        names = [*names[1:], "other"]
        assert llm.collective_rpc(rank_functions.adapter_names) == [names] * 2
        assert llm.collective_rpc("remove_lora", args=(9,)) == [True] * 2
        assert llm.collective_rpc(rank_functions.adapter_names) == [names[:-1]] * 2
        assert all(map(torch.equal, rows(llm, requests[:1]), found[:1]))
        outputs = llm.generate(PROMPTS[:1] * 4, greedy(2), lora_request=[None, *adapters])
        assert len({tuple(one.outputs[0].token_ids) for one in outputs}) > 1
        assert llm.collective_rpc(rank_functions.waiting_adapters) == [0, 0]

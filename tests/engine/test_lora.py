"""Adapters (LoRA), against transformers with checkpoints into which they were merged by hand."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.grids import at_night
from tests.models.adapters import (
    request,
    write_adapter,
    write_merged,
    write_merged_tables,
    write_table_adapter,
)
from tests.models.checkpoints import make_checkpoint
from tests.models.families import FAMILIES
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.hidden_states import ExtractRequest, FailedSample, HiddenStatesSample
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.adapter_files import read_adapter

Checkpoint = Callable[..., Path]
Change = Callable[[Path], Any]
PROMPTS = random_prompts(81, [5, 33, 17])
BY_DAY = ("llama", "qwen3_5", "qwen3_5_vl", "phi3", "gpt2", "gpt_neox", "qwen3_moe", "nemotron_h")
BY_DAY += ("zamba", "zamba2", "mixtral")
MIXTURES = [name for name, family in FAMILIES.items() if "expert" in str(family.config)]
MIXTURES_BY_DAY = ("qwen3_moe", "gpt_oss", "llama4", "nemotron_h", "mixtral", "granite_moe_shared")
MIXTURES_BY_DAY += ("longcat_flash", "kimi_linear", "minimax_m2")


def layers_of(llm: LLM) -> list[int]:
    return list(range(llm.llm_engine.model_config.get_total_num_hidden_layers() + 1))


@pytest.mark.parametrize(
    "family", [name if name in BY_DAY else at_night(name) for name in FAMILIES]
)
def test_rows_are_those_of_the_merged_checkpoint(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Two adapters and none in one batch, in chunks; then what is generated with one."""
    folder = checkpoint(family)
    with engine(folder, enable_lora=True, max_num_batched_tokens=16) as llm:
        check_rows(llm, folder, tmp_path)


def check_rows(
    llm: LLM, dense: Path, tmp_path: Path, limit: float = 1e-4, *, with_experts: bool = False
) -> None:
    """``dense``: the checkpoint that transformers can read."""
    adapters = [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(adapters):
        assert write_adapter(path, dense, seed, rank=1 + 3 * seed, with_experts=with_experts)
    chosen = [request(path, number) for number, path in enumerate(adapters, start=1)]
    layers = layers_of(llm)
    plain = list(llm.extract(PROMPTS, layers=layers))
    requests = [ExtractRequest(one, lora_request=a) for one in PROMPTS for a in (None, *chosen)]
    samples = list(llm.extract(requests, layers=layers))
    for beside, alone in zip(samples[::3], plain, strict=True):
        assert torch.equal(beside.hidden_states, alone.hidden_states)
    for number, path in enumerate(adapters):
        merged = write_merged(tmp_path / f"merged-{number}", dense, path)
        for sample, other in zip(samples[number + 1 :: 3], plain, strict=True):
            reference = reference_run(merged, sample.token_ids.tolist())
            for layer in layers:
                rows = sample.hidden_states[:, layer]
                assert relative_error(rows, reference.streams[layer]) <= limit, layer
            assert relative_error(rows, other.hidden_states[:, layer]) > 1e-2
    prompt, length = PROMPTS[2], len(PROMPTS[2]["prompt_token_ids"])
    outputs = llm.generate([prompt] * 2, greedy(6), lora_request=[chosen[1], None])
    text = [*prompt["prompt_token_ids"], *outputs[0].outputs[0].token_ids]
    best = reference_run(merged, text).logits[length - 1 : -1].argmax(-1).tolist()
    assert best == text[length:]
    (without,) = llm.generate(prompt, greedy(6))
    assert outputs[1].outputs[0].token_ids == without.outputs[0].token_ids
    assert [one.lora_request for one in (*outputs, without)] == [chosen[1], None, None]


@pytest.mark.parametrize("name", ["gptq-order", "fp8-block", "awq"])
def test_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160}
    folder = make_checkpoint(tmp_path / "plain", "llama", **sizes)
    checkpoints = quantise_checkpoint(folder, FORMATS[name])
    with engine(checkpoints.stored, enable_lora=True, max_num_batched_tokens=16) as llm:
        check_rows(llm, checkpoints.dequantised, tmp_path, limit=5e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4", "nemotron_h", "deepseek_v32"])
def test_single_experts(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Adapters of the experts' own projections, in checkpoints with a tensor for each of them."""
    folder = checkpoint(family)
    with engine(folder, enable_lora=True, max_num_batched_tokens=16) as llm:
        check_rows(llm, folder, tmp_path, with_experts=True)


@pytest.mark.parametrize(
    ("family", "is_old"),
    [
        *((name, False) if name in MIXTURES_BY_DAY else at_night(name, False) for name in MIXTURES),
        *(at_night("qwen3_moe", True), at_night("llama4", True)),
    ],
)
def test_parameters_with_a_table_for_each_expert(
    family: str, is_old: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Both of a layer's parameters, which PEFT names by their order, and its router; also where
    prefixes are cached."""
    folder = checkpoint(family)
    write_table_adapter(tmp_path / "tables", folder, 3, rank=2, is_old=is_old)
    merged = write_merged_tables(tmp_path / "merged", folder, tmp_path / "tables", is_old=is_old)
    with engine(folder, enable_lora=True, max_num_batched_tokens=16) as llm:
        layers = layers_of(llm)
        plain = list(llm.extract(PROMPTS, layers=layers))
        tables = request(tmp_path / "tables")
        requests = [ExtractRequest(one, lora_request=a) for one in PROMPTS for a in (None, tables)]
        samples = list(llm.extract(requests, layers=layers))
        again = list(llm.extract(requests, layers=layers))
    for sample, other in zip(samples, again, strict=True):
        assert torch.equal(sample.hidden_states, other.hidden_states)
    for alone, beside, sample in zip(plain, samples[::2], samples[1::2], strict=True):
        assert torch.equal(beside.hidden_states, alone.hidden_states)
        reference = reference_run(merged, sample.token_ids.tolist())
        for layer in layers:
            assert relative_error(sample.hidden_states[:, layer], reference.streams[layer]) <= 1e-4
        assert relative_error(sample.hidden_states, alone.hidden_states) > 1e-2


def rows_with(llm: LLM, folders: list[Path]) -> list[torch.Tensor]:
    """The streams of a prompt with each adapter."""
    chosen = [request(folder, number) for number, folder in enumerate(folders, start=1)]
    requests = [ExtractRequest(PROMPTS[1], lora_request=one) for one in chosen]
    return [one.hidden_states for one in llm.extract(requests, layers=layers_of(llm))]


def test_tables_named_as_in_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers before 5 has Granite's tables in two modules, and a linear module as router.
    Patterns name a parameter by its module and itself."""
    folder = checkpoint("granite_moe")
    new = tmp_path / "new"
    write_table_adapter(new, folder, 3, rank=2, is_old=False)
    edit_config(alpha_pattern={"router.weight": 3, "experts.down_proj": 9, "router": 1})(new)
    old = shutil.copytree(new, tmp_path / "old")
    tensors = load_file(new / "adapter_model.safetensors")
    for own, written in (
        ("experts.base_layer.", "input_linear."),
        ("experts.", "output_linear."),
        ("router.", "router.layer."),
    ):
        tensors = {name.replace(f"moe.{own}", f"moe.{written}"): t for name, t in tensors.items()}
    save_file(tensors, old / "adapter_model.safetensors")
    edit_config(
        alpha_pattern={"router.layer": 3, "output_linear.weight": 9},
        target_parameters=["input_linear.weight", "output_linear.weight"],
    )(old)
    plain = shutil.copytree(old, tmp_path / "plain")
    edit_config(alpha_pattern={})(plain)
    with engine(folder, enable_lora=True) as llm:
        rows, others, without = rows_with(llm, [new, old, plain])
    assert torch.equal(rows, others) and not torch.equal(rows, without)


@pytest.mark.parametrize("leaf", ["up_proj", "down_proj"])
def test_one_table_of_a_layer(leaf: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Names of whole paths tell which parameter it is if both have the same sizes."""
    folder, both = checkpoint("nemotron_h"), tmp_path / "both"
    write_table_adapter(both, folder, 3, rank=2, is_old=False)
    tensors = load_file(both / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    is_first, kept = leaf == "up_proj", {}
    for name, tensor in tensors.items():
        if (".base_layer." in name) == is_first:
            kept[name.replace(".base_layer", "")] = tensor.clone()
        else:
            tensor.zero_()
    one = shutil.copytree(both, tmp_path / "one")
    save_file(tensors, both / "adapter_model.safetensors")
    save_file(kept, one / "adapter_model.safetensors")
    (layer,) = {name.partition(".experts.")[0] for name in kept}
    layer = layer.removeprefix("base_model.model.")
    elsewhere = f"layers.1.experts.{'down_proj' if is_first else 'up_proj'}"
    edit_config(target_parameters=[f"{layer}.experts.{leaf}", elsewhere])(one)
    with engine(folder, enable_lora=True) as llm:
        rows, others = rows_with(llm, [both, one])
        (plain,) = llm.extract([PROMPTS[1]], layers=layers_of(llm))
    assert relative_error(others, plain.hidden_states) > 1e-2
    assert relative_error(others, rows) < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen3_5", at_night("gemma3"), at_night("gpt2")])
@pytest.mark.parametrize("ties", [False, True], ids=["two tables", "tied"])
def test_embeddings_and_heads(
    family: str, ties: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """In one batch with requests without; logits, also of prompts."""
    folder = checkpoint(family, tie_word_embeddings=ties)
    adapter, source = tmp_path / "ends", folder
    if ties:  # PEFT changes each use of the table by itself
        source = shutil.copytree(folder, tmp_path / "source")
        tensors = load_file(source / "model.safetensors")
        names = ("embed_tokens.weight", "wte.weight")
        (name,) = (one for one in tensors if one.endswith(names))
        tensors["lm_head.weight"] = tensors[name].clone()
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    write_adapter(adapter, source, with_ends=True)
    merged = write_merged(tmp_path / "merged", source, adapter)
    with engine(folder, enable_lora=True, max_num_batched_tokens=16) as llm:
        layers, ends = layers_of(llm), request(adapter)
        requests = [ExtractRequest(one, lora_request=a) for one in PROMPTS for a in (None, ends)]
        plain = list(llm.extract(PROMPTS, layers=layers, top_logprobs=3))
        samples = list(llm.extract(requests, layers=layers, top_logprobs=3))
        for alone, beside, sample in zip(plain, samples[::2], samples[1::2], strict=True):
            assert torch.equal(beside.hidden_states, alone.hidden_states)
            assert torch.equal(beside.tensors["top_logprobs"], alone.tensors["top_logprobs"])
            reference = reference_run(merged, sample.token_ids.tolist())
            for layer in layers:
                rows = sample.hidden_states[:, layer]
                assert relative_error(rows, reference.streams[layer]) <= 1e-4, layer
            right = reference.logits.float().log_softmax(-1).topk(3)
            assert torch.equal(sample.tensors["top_token_ids"].long(), right.indices)
            assert (sample.tensors["top_logprobs"] - right.values).abs().max() < 1e-3
        prompt, length = PROMPTS[2], len(PROMPTS[2]["prompt_token_ids"])
        outputs = llm.generate([prompt] * 2, greedy(6), lora_request=[ends, None])
        text = [*prompt["prompt_token_ids"], *outputs[0].outputs[0].token_ids]
        best = reference_run(merged, text).logits[length - 1 : -1].argmax(-1).tolist()
        assert best == text[length:]


def test_adapters_of_embeddings_beside_prompts_as_embeddings(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    write_adapter(tmp_path / "adapter", folder, with_ends=True)
    adapter = LoRARequest("one", 1, str(tmp_path / "adapter"))
    request = ExtractRequest(random_prompts(3, [30])[0], lora_request=adapter)
    embeds = ExtractRequest({"prompt_embeds": torch.ones(20, 72)}, lora_request=adapter)
    with engine(
        folder, enable_lora=True, enable_prompt_embeds=True, enable_prefix_caching=False
    ) as llm:
        (alone,) = llm.extract([request], layers=[0, 2])
        given, beside = llm.extract([embeds, request], layers=[0, 2])
    assert torch.equal(beside.hidden_states, alone.hidden_states)
    assert torch.equal(given.hidden_states[:, 0], torch.ones(20, 72))


def test_adapters_in_memory_when_an_update_unties_the_head(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, untied, adapter = tmp_path / "tied", tmp_path / "untied", tmp_path / "ends"
    shutil.copytree(checkpoint("llama", tie_word_embeddings=True), folder)
    shutil.copytree(folder, untied)
    weights = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"] * 0.5 + 0.1}
    save_file(weights | head, untied / "model.safetensors", {"format": "pt"})
    write_adapter(adapter, folder, with_ends=True)
    parts = load_file(adapter / "adapter_model.safetensors")
    without_tables = {name: one for name, one in parts.items() if "base_layer" not in name}
    save_file(without_tables, adapter / "adapter_model.safetensors")

    def probabilities(llm: LLM, number: int) -> list[torch.Tensor]:
        chosen = request(adapter, number)
        samples = llm.extract(PROMPTS, layers=[1], top_logprobs=3, lora_request=chosen)
        return [sample.tensors["top_logprobs"] for sample in samples]

    with engine(untied, enable_lora=True) as llm:
        right = probabilities(llm, 1)
    with engine(folder, enable_lora=True) as llm:
        tied = probabilities(llm, 1)
        for update, expected in ((head | weights, right), (weights, tied)):
            llm.update_weights(update)
            for number in (1, 2):  # one that was loaded before, and another
                found = probabilities(llm, number)
                assert all(map(torch.equal, found, expected))
    assert not torch.equal(tied[0], right[0])


def test_adapters_in_memory_with_tables_of_replaced_embeddings(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, other, adapter = checkpoint("llama"), checkpoint("llama", seed=77), tmp_path / "ends"
    write_adapter(adapter, folder, with_ends=True)
    with engine(folder, enable_lora=True) as llm:
        before = rows_with(llm, [adapter])
        llm.update_weights(other)
        with pytest.raises(ValueError, match="has other values in adapter_model than in the model"):
            rows_with(llm, [adapter])
        llm.update_weights(folder)
        assert all(map(torch.equal, rows_with(llm, [adapter]), before))


def test_adapters_of_requests_that_never_began_are_freed(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    chosen = [request(tmp_path / str(number), number) for number in (1, 2)]
    for one in chosen:
        write_adapter(Path(one.lora_path), folder, one.lora_int_id)
    with engine(folder, enable_lora=True, max_loras=1, max_num_seqs=1) as llm:
        adapters, loaded = core_of(llm).executor.worker.model_runner.adapters, []
        for number, one in enumerate((None, *chosen)):
            llm.llm_engine.add_request(f"{number}", PROMPTS[0], greedy(8), lora_request=one)
            loaded += [] if one is None else [weakref.ref(adapters._loaded[one])]
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["1", "2"])
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert [one() is None for one in loaded] == [True, False]  # max_loras keeps the last


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_moe", "zamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_what_runs_beside(
    family: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Chunks, prefix hits with the same adapter, a tiny pool, requests with other adapters."""
    folder = checkpoint(family, dtype=dtype)
    adapters = [request(tmp_path / str(number), number) for number in (1, 2)]
    with engine(folder, enable_lora=True, enable_prefix_caching=False) as llm:
        for one in adapters:
            write_adapter(Path(one.lora_path), folder, one.lora_int_id)
        alone = [
            next(iter(llm.extract([prompt], layers=[3], lora_request=one))).hidden_states
            for one in (*adapters, None)
            for prompt in PROMPTS
        ]
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 36}
    with engine(folder, enable_lora=True, **options) as llm:
        requests = [
            ExtractRequest(prompt, lora_request=one, positions=positions)
            for positions in ("all", "last")
            for one in (*adapters, None)
            for prompt in PROMPTS
        ]
        for _ in range(2):
            samples = list(llm.extract(requests, layers=[3]))
            for whole, every, last in zip(alone, samples[:9], samples[9:], strict=True):
                assert torch.equal(every.hidden_states, whole)
                assert torch.equal(last.hidden_states, whole[-1:])


def test_preempted_requests_keep_their_adapters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Also beyond the number of adapters that stay in memory."""
    folder = checkpoint("llama")
    adapters = [request(tmp_path / str(number), number) for number in range(1, 5)]
    for one in adapters:
        write_adapter(Path(one.lora_path), folder, one.lora_int_id)
    prompts = random_prompts(5, [30] * 4)
    with engine(folder, enable_lora=True) as llm:
        expected = [
            llm.generate(prompt, greedy(24), lora_request=one)[0].outputs[0].token_ids
            for prompt, one in zip(prompts, adapters, strict=True)
        ]
    options: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_loras": 1}
    with engine(folder, enable_lora=True, max_model_len=64, **options) as llm:
        outputs = llm.generate(prompts, greedy(24), lora_request=adapters)
        assert core_of(llm).stats().num_preemptions > 0
        assert [one.outputs[0].token_ids for one in outputs] == expected
        store = core_of(llm).executor.worker.model_runner.adapters
        assert list(store._loaded) == adapters[-1:] and not store._waiting


def test_files_that_change_after_they_were_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Requests of one name had the old adapter or the new one, by what had left the memory."""
    folder, (path, other) = checkpoint("llama"), (tmp_path / "one", tmp_path / "other")
    write_adapter(path, folder, 1)
    write_adapter(other, folder, 2)
    with engine(folder, enable_lora=True, max_loras=1) as llm:

        def rows(adapter: LoRARequest) -> torch.Tensor:
            (sample,) = llm.extract(PROMPTS[:1], layers=[4], lora_request=adapter)
            return sample.hidden_states

        one = request(path, 1)
        first, of_other = rows(one), rows(request(other, 2))
        assert torch.equal(rows(one), first)  # it had left, and is read again
        write_adapter(path, folder, 2)
        assert torch.equal(rows(one), first)
        rows(request(other, 2))
        with pytest.raises(ValueError, match=r"adapter 'one' .* have changed since they were read"):
            rows(one)
        assert torch.equal(rows(request(path, 3)), of_other)
        llm.collective_rpc("retire_lora", args=(1,))
        with pytest.raises(ValueError, match=r"adapter 'one' .* have changed since they were read"):
            rows(one)
        llm.collective_rpc("remove_lora", args=(1,))
        assert torch.equal(rows(one), of_other)
        rows(request(other, 2))
        write_adapter(path, folder, 1)
        llm.collective_rpc("add_lora", args=(one,))
        assert torch.equal(rows(one), first)


def test_prefixes_are_kept_apart(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """By what the files hold, not by names; the same content is shared."""
    folder, prompt = checkpoint("llama"), random_prompts(9, [64])[0]
    for number, seed in (("a", 1), ("b", 2), ("c", 1)):
        write_adapter(tmp_path / number, folder, seed)
    with engine(folder, enable_lora=True) as llm:

        def cached(name: str, number: int) -> int | None:
            one = request(tmp_path / name, number)
            return llm.generate(prompt, greedy(1), lora_request=one)[0].num_cached_tokens

        assert not llm.generate(prompt, greedy(1))[0].num_cached_tokens
        assert not cached("a", 1) and cached("a", 1)
        assert not cached("b", 2)
        assert cached("c", 3)
        assert llm.generate(prompt, greedy(1))[0].num_cached_tokens


@pytest.mark.parametrize("family", ["jamba", "qwen3_5", "deepseek_v3"])
def test_a_rank_above_the_inputs_of_modules(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Modules have 7 inputs or more; families move the rows of some weights when they load."""
    folder, adapter = checkpoint(family), tmp_path / "adapter"
    write_adapter(adapter, folder, rank=150)
    merged = write_merged(tmp_path / "merged", folder, adapter)
    with engine(folder, enable_lora=True, max_lora_rank=150) as llm:
        layers = layers_of(llm)
        (sample,) = llm.extract([PROMPTS[1]], layers=layers, lora_request=request(adapter))
    reference = reference_run(merged, PROMPTS[1]["prompt_token_ids"])
    for layer in layers:
        rows = sample.hidden_states[:, layer]
        assert relative_error(rows, reference.streams[layer]) <= 1e-4, layer


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "rank": 9},
        {"ranks": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alphas": {"o_proj": 3}},
        {"ranks": {r".*\.[02]\.self_attn\..*": 2}},
        {"dtype": torch.bfloat16, "rank": 1},
    ],
    ids=["stable", "by name", "by expression", "bfloat16"],
)
@pytest.mark.parametrize("is_archive", [False, True], ids=["safetensors", "bin"])
def test_forms_of_adapters(
    options: dict[str, Any], is_archive: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, adapter = checkpoint("llama"), tmp_path / "adapter"
    write_adapter(adapter, folder, **options)
    merged = write_merged(tmp_path / "merged", folder, adapter)
    if is_archive:
        file = adapter / "adapter_model.safetensors"
        torch.save(load_file(file), adapter / "adapter_model.bin")
        file.unlink()
    with engine(folder, enable_lora=True) as llm:
        (sample,) = llm.extract([PROMPTS[1]], layers=[4], lora_request=request(adapter))
    streams = reference_run(merged, PROMPTS[1]["prompt_token_ids"]).streams
    assert relative_error(sample.hidden_states[:, 0], streams[4]) <= 1e-4


def test_vectors_chats_and_settings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """An adapter for each prompt, in chats, in extract() with generation, and in AsyncLLM."""
    folder, adapter = checkpoint("llama"), tmp_path / "adapter"
    write_adapter(adapter, folder)
    one, prompt = request(adapter), PROMPTS[1]
    with engine(folder, enable_lora=True) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        expected = llm.generate(prompt, params, lora_request=one)[0].outputs[0].token_ids
        (sample,) = llm.extract([prompt], layers=[4], sampling_params=params, lora_request=one)
        assert sample.token_ids[-5:].tolist() == list(expected)
        (whole,) = llm.extract(
            [{"prompt_token_ids": sample.token_ids.tolist()}], layers=[4], lora_request=one
        )
        assert torch.equal(whole.hidden_states, sample.hidden_states)
        own, plain = (llm.embed([ExtractRequest(prompt, lora_request=a)]) for a in (one, None))
        of_call = llm.embed([prompt], lora_request=one)
        assert of_call[0].outputs == own[0].outputs != plain[0].outputs
        messages = [{"role": "user", "content": "A question?"}]
        template = "{{ messages[0].content }}"
        texts = [
            llm.chat(messages, params, lora_request=a, chat_template=template)[0].outputs[0]
            for a in (one, None)
        ]
        (direct,) = llm.generate("A question?", params, lora_request=one)
        assert texts[0].token_ids == direct.outputs[0].token_ids != texts[1].token_ids
        with pytest.raises(ValueError, match="lora_request has 1 entries for 2 prompts"):
            llm.generate([prompt] * 2, params, lora_request=[one])

    async def run() -> list[Any]:
        arguments: Any = {"max_model_len": 64, "kv_cache_memory_bytes": 2**24}
        args = AsyncEngineArgs(str(folder), enable_lora=True, **arguments)
        llm = AsyncLLM.from_engine_args(args)
        try:
            assert await llm.add_lora(one)
            outputs = [o async for o in llm.generate(prompt, params, "one", lora_request=one)]
            samples = [s async for s in llm.extract([prompt], layers=[4], lora_request=one)]
            assert await llm.remove_lora(1) and not await llm.remove_lora(1)
            with pytest.raises(ValueError, match="is not a folder"):
                await llm.add_lora(LoRARequest("x", 7, "/nowhere"))
            (one_sample,) = samples
            assert isinstance(one_sample, HiddenStatesSample)
            return [outputs[-1].outputs[0].token_ids, one_sample.hidden_states]
        finally:
            await llm.shutdown()

    token_ids, rows = asyncio.run(run())
    assert token_ids == expected and torch.equal(rows, sample.hidden_states[: len(rows)])


def edit_config(**entries: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return change


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
HEAD = "base_model.model.lm_head.lora_"
TABLE = "base_model.model.model.embed_tokens.lora_embedding_"
UNKNOWN = "base_model.model.model.layers.0.self_attn.z_proj.lora_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(),
         r"has no adapter_model\.safetensors or adapter_model\.bin"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is not an object"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 50),
         "adapter_model is damaged"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"PK" * 50),
         "adapter_model is damaged"),
        (edit_config(r=3), r"' has lora_A \(4, \d+\) and lora_B .*config.json is 3"),
        (edit_config(r="x"), r"the rank of .* is 'x'"),
        (edit_config(lora_alpha=None), r"lora_alpha of .* is None"),
        (edit_config(rank_pattern={"(": 3}), r"rank_pattern: '\('"),
        (edit_config(rank_pattern=3), r"rank_pattern=3 is not an object"),
        (edit_config(peft_type="IA3"), r"peft_type='IA3' is not supported; supported: 'LORA'"),
        (edit_config(bias="all"), r"bias='all' is not supported; supported: 'none'"),
        (edit_config(use_dora=True), r"use_dora=True is not supported"),
        (edit_config(modules_to_save=["lm_head"]), r"modules_to_save=.*lm_head.* is not supported"),
        (edit_config(init_lora_weights="pissa"), r"init_lora_weights='pissa' is not supported"),
        (edit_tensors(lambda t: t.pop(Q_PROJ + "B.weight")), r"q_proj' has lora_A alone"),
        (edit_tensors(lambda t: t.update({Q_PROJ + "magnitude": torch.ones(3)})),
         r"magnitude' is not a lora_A or lora_B of a linear module"),
        (edit_tensors(lambda t: t[Q_PROJ + "B.weight"].fill_(torch.inf)),
         r"q_proj.lora_B.weight' is not a matrix of finite floats"),
        (edit_tensors(lambda t: t.update({Q_PROJ + "A.weight": torch.ones(4, 71)})),
         r"q_proj' has lora_A \(4, 71\) and lora_B \(96, 4\); .* \[96, 72\] needs \[4, 72\]"),
        (edit_tensors(lambda t: t.update({Q_PROJ + "B.weight": torch.ones(95, 4)})),
         r"needs \[4, 72\] and \[96, 4\]"),
        (edit_tensors(lambda t: t.update(
            {UNKNOWN + "A.weight": torch.ones(4, 72), UNKNOWN + "B.weight": torch.ones(96, 4)})),
         r"'model.layers.0.self_attn.z_proj' is not a linear layer of LlamaForCausalLM"),
        (edit_tensors(lambda t: t.update(
            {HEAD + "A.weight": torch.ones(4, 72), HEAD + "B.weight": torch.ones(306, 4)})),
         r"'lm_head' has lora_A .*\[307, 72\] needs"),
        (edit_tensors(lambda t: t.update(
            {TABLE + "A": torch.ones(4, 306), TABLE + "B": torch.ones(72, 4)})),
         r"embed_tokens' has lora_embedding_A \(4, 306\) .*\[307, 72\] needs \[4, 307\]"),
        (edit_tensors(lambda t: t.update(
            {HEAD.replace("lora_", "base_layer.weight"): torch.ones(307, 72)})),
         r"'lm_head' has other values in adapter_model"),
        (edit_tensors(lambda t: t.update({Q_PROJ.replace("lora_", "weight"): torch.ones(96, 72)})),
         r"q_proj' has a weight in adapter_model"),
        (edit_tensors(lambda t: t.update({Q_PROJ + "embedding_A": torch.ones(4, 72)})),
         r"q_proj' has two tensors lora_A"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_used_fail_alone(
    lora_engine: tuple[LLM, Path], change: Change, message: str, tmp_path: Path
) -> None:
    llm, checkpoint_folder = lora_engine
    adapter = tmp_path / "bad"
    write_adapter(adapter, checkpoint_folder)
    change(adapter)
    requests = [ExtractRequest(PROMPTS[0], lora_request=request(adapter)), PROMPTS[0]]
    failed, sample = llm.extract(requests, layers=[4], on_error="yield")
    assert isinstance(failed, FailedSample)
    assert f"adapter 'bad' (lora_path={str(adapter)!r})" in failed.reason
    assert re.search(message, failed.reason)
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[0], greedy(1), lora_request=request(adapter))
    assert not isinstance(sample, FailedSample)


@pytest.fixture(scope="module")
def lora_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    with engine(folder, enable_lora=True) as llm:
        yield llm, folder


def test_options(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, adapter = checkpoint("llama"), tmp_path / "adapter"
    write_adapter(adapter, folder, rank=5)
    with engine(folder) as llm:
        with pytest.raises(ValueError, match=r"'adapter': .* without enable_lora=True"):
            llm.generate(PROMPTS[0], greedy(1), lora_request=request(adapter))
        llm.generate(PROMPTS[0], greedy(1))
    with engine(folder, enable_lora=True, max_lora_rank=4) as llm:
        with pytest.raises(ValueError, match="has rank 5, but max_lora_rank=4"):
            llm.generate(PROMPTS[0], greedy(1), lora_request=request(adapter))
        with pytest.raises(ValueError, match=r"lora_request='x': has to be a vllm\.lora\.request"):
            llm.generate(PROMPTS[0], greedy(1), lora_request=["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"enable_lora=True: .* takes no adapters"):
        LLM(str(folder), enable_lora=True, model_impl="transformers", max_model_len=64)
    for values, message in (
        (("", 1, "x"), "lora_name=''"),
        (("x", 0, "x"), "lora_int_id=0"),
        (("x", 1, None), "lora_path=None"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(*values)


def test_a_folder_in_place_of_the_weights(tmp_path: Path) -> None:
    """It does not count as absent: the weights of another file would be read."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").mkdir()
    (tmp_path / "adapter_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not a file"):
        read_adapter(tmp_path, 8)

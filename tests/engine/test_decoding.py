"""Decoding: between prompts and preemptions, with modules that somebody changes or looks into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
)
from tests.worker.test_recorded_steps import Recorder
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.model_executor.model_loader import loader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.ops.activations import silu_and_mul
from vllm.ops.operation import source_of
from vllm.v1.attention.backend import AttentionMetadata

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 16, 17]


def record(llm: LLM) -> Recorder:
    """From now on decode steps are played from recordings, by hand."""
    recorder = Recorder()
    core_of(llm).executor.worker.model_runner.record_decode_steps(recorder)
    recorder.batch_sizes.clear()
    return recorder


@pytest.mark.skipif(source_of("cpu").name == "plain", reason="plain torch reads no panels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_embeddings_in_panels_change_no_bit(
    tied: bool, dtype: torch.dtype, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_5", dtype=dtype, tie_word_embeddings=tied)
    params = greedy(9, logprobs=3, prompt_logprobs=2)
    found = []
    for in_panels in (True, False):
        with monkeypatch.context() as patch:
            if not in_panels:
                patch.setattr(loader, "prepare_heads", lambda *_: None)
            with engine(folder) as llm:
                model = core_of(llm).executor.worker.model_runner.model
                assert (model.lm_head.weight.dim() == 4) == in_panels
                assert (model.model.embed_tokens.weight.dim() == 4) == (in_panels and tied)
                outputs = llm.generate(random_prompts(7, LENGTHS), params, use_tqdm=False)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs)
                      for o in outputs])  # fmt: skip
    assert found[0] == found[1]


def test_preemption_between_steps(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    prompts = random_prompts(3, [60, 61, 62, 63])
    tokens = []
    small = 500_000 if source_of("cpu").keeps_pending else 300_000
    for options in ({}, {"kv_cache_memory_bytes": small}):
        with engine(folder, max_model_len=256, **options) as llm:
            outputs = llm.generate(prompts, greedy(80), use_tqdm=False)
            preempted = core_of(llm).stats().num_preemptions
            assert (preempted > 0) == ("kv_cache_memory_bytes" in options)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[1:] == tokens[:-1]


@pytest.mark.parametrize("layers", [[1], [0, 2, 4]])
def test_rows_of_single_tokens_are_handed_out(layers: list[int], checkpoint: Checkpoint) -> None:
    """A step of one token a request, which looks like decoding and is not."""
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(4, [1, 1, 1])]
    rows = []
    for records in (False, True):
        with engine(folder) as llm:
            recorder = record(llm) if records else None
            llm.generate(random_prompts(5, [1, 1, 1]), greedy(4), use_tqdm=False)
            rows.append([sample.hidden_states for sample in llm.extract(prompts, layers=layers)])
            assert recorder is None or recorder.batch_sizes == [4] * 4
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def test_states_that_are_kept_in_a_step_of_one_token(checkpoint: Checkpoint) -> None:
    """Chunks of every length around the grain at which states are kept, with decoding beside."""
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    (prompt,) = random_prompts(6, [150])
    tokens = []
    for records in (False, True):
        for budget in (9, 21, 63):
            with engine(folder, max_num_batched_tokens=budget, max_num_seqs=4) as llm:
                if records:
                    record(llm)
                llm.generate(random_prompts(7, [3]), greedy(5), use_tqdm=False)
                for _ in range(2):
                    (output,) = llm.generate([prompt], greedy(5), use_tqdm=False)
                    tokens.append(list(output.outputs[0].token_ids))
                assert output.num_cached_tokens == 144
    assert all(found == tokens[0] for found in tokens)


def test_hooks_and_changed_modules_are_called(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(5, [9])
    with engine(checkpoint("qwen3_5", dtype=torch.bfloat16)) as llm:
        recorder = record(llm)

        def tokens() -> list[int]:
            return list(llm.generate(prompts, greedy(6), use_tqdm=False)[0].outputs[0].token_ids)

        expected = tokens()
        assert recorder.batch_sizes == [1] * 5
        model = core_of(llm).executor.worker.model_runner.model
        layer = model.model.layers[1]
        seen: list[int] = []
        for register in (layer.register_forward_hook, layer.mlp.register_forward_pre_hook):
            handle = register(lambda *_: seen.append(1))
            assert tokens() == expected
            assert len(seen) == 6
            handle.remove()
            seen.clear()
        forward = layer.forward
        layer.forward = lambda *args: (seen.append(1), forward(*args))[1]
        assert tokens() == expected
        assert len(seen) == 6
        del layer.forward
        assert tokens() == expected
        assert len(seen) == 6
        assert recorder.batch_sizes == [1] * 10, "recorded steps again"


class Doubled(torch.nn.Module):
    """A module that somebody puts in another's place."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.module(x)


def exchange_module(model: Any) -> None:
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)


def exchange_parameter(model: Any) -> None:
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.flip(0).clone(), requires_grad=False)


def exchange_data(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight.data = norm.weight.data.flip(0).clone()


def exchange_buffer(model: Any) -> Callable[[], None]:
    rotary = next(m for m in model.modules() if hasattr(m, "cos_sin_cache"))
    before = rotary.cos_sin_cache
    rotary.cos_sin_cache = before.flip(0).clone()
    return lambda: setattr(rotary, "cos_sin_cache", before)  # other engines have it too


def change_in_place(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight.neg_()


def change_class(model: Any) -> Callable[[], None]:
    mlp = type(model.model.layers[0].mlp)
    forward = mlp.forward
    mlp.forward = lambda self, x: 2.0 * forward(self, x)
    return lambda: setattr(mlp, "forward", forward)


@pytest.mark.parametrize(
    "change",
    [exchange_module, exchange_parameter, exchange_data, exchange_buffer, change_class,
     change_in_place],
)  # fmt: skip
def test_a_changed_model_is_the_one_that_runs(
    change: Callable[[Any], Callable[[], None] | None], checkpoint: Checkpoint
) -> None:
    """Changed after the first steps or before them."""
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    prompts = random_prompts(9, [9, 30])
    tokens = []
    for runs_before in (True, False):
        with engine(folder, enable_prefix_caching=False) as llm:
            if runs_before:
                outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
                tokens.append([output.outputs[0].token_ids for output in outputs])
            with torch.inference_mode():
                undo = change(core_of(llm).executor.worker.model_runner.model)
            try:
                outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
            finally:
                if undo is not None:
                    undo()
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] != tokens[1] == tokens[2]


def test_contracts_are_checked_once_for_each_number_of_decoding_requests(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a request's first step they are, and in all steps into which others look."""
    checked: list[int] = []
    check = silu_and_mul._check
    monkeypatch.setattr(
        silu_and_mul, "_check", lambda given: (checked.append(len(given[0])), check(given))
    )
    with engine(checkpoint("llama", dtype=torch.bfloat16)) as llm:
        layers = core_of(llm).executor.worker.model_runner.model.model.layers

        def sizes(prompts: list[Any]) -> list[int]:
            checked.clear()
            llm.generate(prompts, greedy(4), use_tqdm=False)
            assert all(checked.count(size) % len(layers) == 0 for size in checked)
            return checked[:: len(layers)]

        assert sizes(random_prompts(5, [9])) == [9, 1]
        assert sizes(random_prompts(6, [1])) == [1]
        assert sizes(random_prompts(7, [9, 2])) == [11, 2]
        assert sizes(random_prompts(8, [9, 2])) == [11]
        handle = layers[1].register_forward_hook(lambda *_: None)
        assert sizes(random_prompts(9, [9])) == [9, 1, 1, 1]
        handle.remove()
        assert sizes(random_prompts(10, [9])) == [9]


def test_a_hook_that_changes_a_dtype_while_decoding_is_an_error(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama", dtype=torch.bfloat16)) as llm:
        llm.generate(random_prompts(5, [9]), greedy(6), use_tqdm=False)
        layer = core_of(llm).executor.worker.model_runner.model.model.layers[1]

        def widen(module: Any, args: Any, output: Any) -> Any:
            hidden, residual = output
            return (hidden.float(), residual) if len(hidden) == 1 else output

        layer.register_forward_hook(widen)
        (output,) = llm.generate(random_prompts(6, [9]), greedy(6), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert len(output.outputs[0].token_ids) == 1


def test_global_hooks_are_called(checkpoint: Checkpoint) -> None:
    seen: list[int] = []
    with engine(checkpoint("qwen3_5", dtype=torch.bfloat16)) as llm:
        record(llm)
        llm.generate(random_prompts(5, [9]), greedy(6), use_tqdm=False)
        register = torch.nn.modules.module.register_module_forward_hook
        handle = register(lambda module, *_: seen.append(type(module).__name__ == "GatedMLP"))
        llm.generate(random_prompts(5, [9]), greedy(6), use_tqdm=False)
        handle.remove()
        num_layers = llm.llm_engine.vllm_config.model_config.get_total_num_hidden_layers()
    assert sum(seen) == 6 * num_layers


class LooksAtValues(LlamaForCausalLM):
    """A model with code that an author may write, and that a recording would not see."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(*args, **kwargs)


def test_models_of_others_run_eagerly(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("AuthorsForCausalLM", LooksAtValues)
    overrides = {"architectures": ["AuthorsForCausalLM"]}
    with engine(checkpoint("llama", dtype=torch.bfloat16), hf_overrides=overrides) as llm:
        runner = core_of(llm).executor.worker.model_runner
        monkeypatch.setattr(runner, "device", torch.device("cuda"))
        assert not runner.records_cuda_graphs
        monkeypatch.undo()
        llm.generate(random_prompts(6, [5]), greedy(7), use_tqdm=False)
    assert LooksAtValues.calls == 7


class KeepsMetadata(ExampleHiddenStatesConnector):
    """Looks at what it was given when the run is over."""

    kept: ClassVar[list[tuple[str, Any]]] = []

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self.kept.append((layer_name, attn_metadata))


def test_connectors_see_what_they_see_of_eager_steps(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_5", dtype=torch.bfloat16)
    found = []
    for records in (False, True):
        config = extraction_config([0, 2], tmp_path / str(records))
        config["kv_transfer_config"] |= {
            "kv_connector": "KeepsMetadata",
            "kv_connector_module_path": __name__,
        }
        KeepsMetadata.kept.clear()
        with engine(folder, **config) as llm:
            recorder = record(llm) if records else None
            llm.generate(random_prompts(3, [20, 14]), greedy(6), use_tqdm=False)
            assert recorder is None or recorder.batch_sizes == [2] * 5
        found.append([(name, numbers_of(metadata)) for name, metadata in KeepsMetadata.kept])
    names = [name for name, _ in found[0]]
    assert [name.split(".")[2] for name in names[:5]] == ["0", "1", "2", "3", "4"]
    assert names == names[:6] * 6  # the layers, then the rows
    assert found[0] == found[1]


def numbers_of(metadata: Any) -> list[list[int]]:
    numbers = [metadata.layout.seq_lens.tolist(), metadata.layout.query_start.tolist()]
    if isinstance(metadata, AttentionMetadata):
        return [*numbers, metadata.slot_mapping.tolist(), *metadata.block_table[:, :1].tolist()]
    states = metadata.states
    return [*numbers, states.block_ids.tolist(), states.has_state.tolist()]

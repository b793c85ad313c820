"""``expert_trace``: which experts tokens were routed to, as transformers' routers choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from tests.models.checkpoints import make_checkpoint
from vllm import LLM
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states import HiddenStatesError, HiddenStatesSample
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.hidden_states.verify import verify_dataset
from vllm.model_executor.layers.fused_moe import FusedMoE, RoutedLayer
from vllm.v1.engine.core_messages import CoreReport, EngineStats, ReportDecoder, ReportEncoder
from vllm.v1.rows.capture import RowCapture

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 70, 1, 130, 17]
NATIVE = {
    "qwen3_moe": [0, 2, 3],
    "qwen2_moe": None,
    "mixtral": [0, 1, 2, 3],
    "olmoe": [0, 1, 2, 3],
    "qwen3_next": None,
    "qwen3_5_moe": [0, 1, 2, 3, 4],
    "glm4_moe": None,
    "gpt_oss": [0, 1, 2, 3],
    "hunyuan_moe": None,
}


def traces(llm: LLM, prompts: list[Any], **options: Any) -> list[HiddenStatesSample]:
    found = list(llm.extract(prompts, options.pop("layers", [2]), **options))
    assert all(sample.expert_ids is not None for sample in found)
    return found


def same(a: HiddenStatesSample, b: HiddenStatesSample) -> bool:
    assert a.expert_ids is not None and b.expert_ids is not None
    assert a.expert_weights is not None and b.expert_weights is not None
    return torch.equal(a.expert_ids, b.expert_ids) and torch.equal(
        a.expert_weights, b.expert_weights
    )


@torch.no_grad()
def routed(folder: Path, token_ids: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> ids and weights that transformers' own routers give its experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "_is_expert_parallel"):
            layer = next(int(part) for part in name.split(".") if part.isdigit())

            def hook(_: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                given = [*args, *kwargs.values()]
                found[layer] = given[1], given[2]

            module.register_forward_pre_hook(hook, with_kwargs=True)
    model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return found


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
@pytest.mark.parametrize("family", NATIVE)
def test_choices_are_those_of_transformers(
    family: str, model_impl: str, checkpoint: Checkpoint
) -> None:
    if model_impl == "transformers" and family not in ("mixtral", "qwen3_moe", "qwen3_5_moe"):
        pytest.skip("the modules are alike")
    folder = checkpoint(family)
    prompts = random_prompts(1, LENGTHS[:3])
    with engine(folder, expert_trace=True, model_impl=model_impl) as llm:
        samples = traces(llm, prompts)
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = routed(folder, prompt["prompt_token_ids"])
        assert (
            list(sample.expert_layers) == sorted(expected) == (NATIVE[family] or sorted(expected))
        )
        assert sample.expert_ids is not None and sample.expert_weights is not None
        assert sample.expert_ids.dtype is torch.int16
        for column, layer in enumerate(sample.expert_layers):
            ids, weights = expected[layer]
            mine, order = sample.expert_ids[:, column].long().sort(dim=1)
            theirs, their_order = ids.sort(dim=1)
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(
                sample.expert_weights[:, column].gather(1, order),
                weights.float().gather(1, their_order),
                atol=1e-4,
                rtol=1e-4,
            )


def test_steps_of_one_row(checkpoint: Checkpoint) -> None:
    """An odd number of experts in one layer: their weights lie between two words of a row."""
    (prompt,) = random_prompts(5, [9])
    with engine(checkpoint("nemotron_h"), expert_trace=True) as llm:
        (whole,) = traces(llm, [prompt])
        (last,) = traces(llm, [prompt], positions="last")
        (generated,) = traces(llm, [prompt], sampling_params=greedy(3))
    assert whole.expert_ids is not None and whole.expert_ids.shape[1:] == (1, 3)
    assert same(last, whole.take_rows(slice(-1, None)))
    assert same(generated.take_rows(slice(0, 9)), whole)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_the_same_bits_in_any_company(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(2, LENGTHS * 2)
    with engine(folder, expert_trace=True) as llm:
        alone = [traces(llm, [prompt])[0] for prompt in prompts]
        together = traces(llm, prompts)
        again = traces(llm, prompts)  # whose first tokens are in the cache
        last = traces(llm, prompts, positions="last")
        llm.generate(prompts, greedy(3), use_tqdm=False)
    with engine(folder, expert_trace=True, max_num_batched_tokens=19) as llm:
        in_chunks = traces(llm, prompts)
    with engine(folder, expert_trace=True) as llm:
        for module in core_of(llm).executor.worker.model_runner.model.modules():
            if isinstance(module, FusedMoE):
                module.tokens_at_once = 7
        in_pieces = traces(llm, prompts)
    few = {"num_gpu_blocks_override": 16, "max_model_len": 160, "long_prefill_token_threshold": 16}
    with engine(folder, expert_trace=True, **few) as llm:
        preempted = traces(llm, prompts)
        if family == "qwen3_moe":
            assert core_of(llm).stats().num_preemptions > 0
    for others in (together, again, in_chunks, in_pieces, preempted):
        assert all(map(same, alone, others))
    for whole, one in zip(alone, last, strict=True):
        assert whole.expert_ids is not None and one.expert_ids is not None
        assert torch.equal(whole.expert_ids[-1:], one.expert_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_files_have_what_extract_gives(
    model_impl: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe", dtype=dtype)
    prompts = random_prompts(3, LENGTHS)
    options = {"expert_trace": True, "model_impl": model_impl, "max_num_batched_tokens": 37}
    with engine(folder, **options) as llm:
        samples = traces(llm, prompts, layers=[4, 1, 4])
    with engine(folder, **options, **extraction_config([4, 1, 4], tmp_path)) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts, greedy(2), use_tqdm=False)
            for sample, output in zip(samples, outputs, strict=True):
                assert output.kv_transfer_params is not None
                tensors = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
                assert torch.equal(tensors["hidden_states"], sample.hidden_states)
                assert torch.equal(tensors["expert_ids"], sample.expert_ids)
                assert torch.equal(tensors["expert_weights"], sample.expert_weights)
        assert any(output.num_cached_tokens for output in outputs)
        (from_folder, *_) = HiddenStatesDataset(tmp_path)
        assert from_folder.expert_layers == samples[0].expert_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_files_of_preempted_requests(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows that left before the preemption and those after it, prefix hits among them."""
    folder, prompts = checkpoint(family), random_prompts(3, [90, 64, 129, 90, 17, 33] * 2)
    layers: list[int | str] = [4, "norm", 0, "norm"]
    with engine(folder, expert_trace=True) as llm:
        alone = [traces(llm, [prompt], layers=layers)[0] for prompt in prompts]
    few = {"num_gpu_blocks_override": 26, "max_model_len": 160, "long_prefill_token_threshold": 16}
    config = extraction_config(layers, tmp_path)
    with engine(folder, expert_trace=True, **few, **config) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
            for sample, output in zip(alone, outputs, strict=True):
                assert output.kv_transfer_params is not None
                tensors = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
                for name, tensor in sample.tensors.items():
                    assert torch.equal(tensors[name], tensor), name
        assert core_of(llm).stats().num_preemptions > 0


def test_datasets_keep_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "Text {"ab" * n}."}}\n' for n in range(1, 12)))

    def make(output: Path, **options: Any) -> HiddenStatesDataset:
        settings = {"layers": "0,last", "shard_size_gib": 2e-5, **options}
        args = EngineArgs(str(folder), max_model_len=128, expert_trace=True)
        run = ExtractOptions(input=[str(data)], output=str(output), **settings)
        assert run_job(run, args) == 0
        assert list(verify_dataset(str(output))) == []
        return HiddenStatesDataset(output, verify="first_read")

    shards = make(tmp_path / "shards")
    assert len(shards.file_paths) > 1
    prompts = [{"prompt_token_ids": sample.token_ids.tolist()} for sample in shards]
    with engine(folder, expert_trace=True) as llm:
        expected = traces(llm, prompts)
    half = make(tmp_path / "fp8", storage_dtype="fp8", positions="every:2")
    for sample, other, few in zip(expected, shards, half, strict=True):
        assert same(sample, other) and other.expert_layers == sample.expert_layers == (0, 2, 3)
        assert few.expert_ids is not None and sample.expert_ids is not None
        assert torch.equal(few.expert_ids, sample.expert_ids[few.positions])
    convert_dataset(str(tmp_path / "shards"), str(tmp_path / "files"), "files", "bfloat16")
    assert all(map(same, expected, HiddenStatesDataset(tmp_path / "files")))
    refused = EngineArgs(str(folder), max_model_len=64)
    again = ExtractOptions(
        input=[str(data)], output=str(tmp_path / "shards"), layers="0,last", shard_size_gib=2e-5
    )
    with pytest.raises(ValueError, match="other settings"):
        run_job(again, refused)


def test_they_cross_processes(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen3_moe"), expert_trace=True) as llm:
        core = core_of(llm)
        kept: list[Any] = []
        step = core.step

        def keeping() -> Any:
            news = step()
            kept.extend(output for output in news.outputs if output.extracted is not None)
            return news

        core.step = keeping
        (sample,) = traces(llm, random_prompts(4, [20]))
    report = CoreReport(outputs=kept, stats=EngineStats())
    frames = [bytes(frame) for frame in ReportEncoder().encode(report)]
    (output,) = ReportDecoder().decode(frames).outputs
    assert output.extracted is not None
    assert torch.equal(output.extracted.tensors["expert_ids"], sample.expert_ids)
    assert torch.equal(output.extracted.tensors["expert_weights"], sample.expert_weights)
    assert output.extracted.constants["expert_layers"] == list(sample.expert_layers)


def test_a_choice_that_was_not_told_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_moe")
    with engine(folder, expert_trace=True) as llm:
        monkeypatch.setattr(RoutedLayer, "tell_choice", lambda *arguments: None)
        with pytest.raises(HiddenStatesError, match="reported their choices for"):
            traces(llm, random_prompts(5, [9]))
        monkeypatch.undo()
        assert traces(llm, random_prompts(5, [9]))
    for arguments in ({}, extraction_config([1], tmp_path)):
        with engine(folder, expert_trace=True, **arguments) as llm:
            put = RowCapture.put

            def forgetting(self: RowCapture, source: str, *values: Any, put: Any = put) -> None:
                put(self, source, *values)
                for taker in self._takers["experts"]:
                    taker.cells.zero_()  # as memory that was never written

            monkeypatch.setattr(RowCapture, "put", forgetting)
            if arguments:
                (output,) = llm.generate(random_prompts(5, [9]), greedy(), use_tqdm=False)
                assert "experts of token 0 in layer 0 are not known" in str(
                    output.outputs[0].stop_reason
                )
            else:
                with pytest.raises(HiddenStatesError, match="experts of token 0 in layer 0"):
                    traces(llm, random_prompts(5, [9]))
            monkeypatch.undo()


def test_what_cannot_be_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expert_trace=True, but LlamaForCausalLM has no layers"):
        LLM(str(checkpoint("llama")), expert_trace=True)
    with pytest.raises(ValueError, match="expert_trace=True, but TransformersForCausalLM has no"):
        LLM(str(checkpoint("llama")), expert_trace=True, model_impl="transformers")
    folder = checkpoint("mixtral")
    config = extraction_config([1], tmp_path)
    config["kv_transfer_config"] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="expert_trace=True, but the KV connector 'OffloadingConn"):
        LLM(str(folder), expert_trace=True, **config)
    with (
        engine(folder, expert_trace=True) as llm,
        pytest.raises(ValueError, match="pooling='mean' with expert_trace=True"),
    ):
        llm.extract(random_prompts(1, [5]), [1], pooling="mean")

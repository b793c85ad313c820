"""Prompts given as embeddings: the same bits as their ids give, and what cannot be one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
)
from tests.models.oracle import load_reference, relative_error
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.hidden_states import ExtractRequest, HiddenStatesSample
from vllm.model_executor.models.llama import LlamaForCausalLM

Checkpoint = Callable[..., Path]
LENGTHS = [5, 40, 1, 77, 33]
ON = {"enable_prompt_embeds": True}


def embeds_of(llm: LLM, prompts: list[Any]) -> list[dict[str, Any]]:
    """The same prompts as what the model looks up for their ids."""
    model = core_of(llm).executor.worker.model_runner.model
    with torch.inference_mode():
        return [
            {"prompt_embeds": model.embed_input_ids(torch.tensor(p["prompt_token_ids"])).clone()}
            for p in prompts
        ]


def rows(samples: Any) -> list[torch.Tensor]:
    found = list(samples)
    assert all(isinstance(sample, HiddenStatesSample) for sample in found)
    return [sample.hidden_states for sample in found]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3_5", {}),
        ("gpt2", {}),
        ("gemma3", {}),
        ("qwen3", {"model_impl": "transformers"}),
        ("falcon", {"model_impl": "transformers"}),
    ],
)
def test_embeddings_of_ids_give_their_bits(
    family: str, options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family)
    prompts = random_prompts(1, LENGTHS)
    with engine(folder, **ON, **options) as llm:
        expected = rows(llm.extract(prompts, ":"))
        tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(6), use_tqdm=False)]
        embeds = embeds_of(llm, prompts)
        samples: list[Any] = list(llm.extract(embeds, ":"))
        mixed = [embeds[0], prompts[1], embeds[2], prompts[3], embeds[4]]
        assert equal(rows(samples), expected) and equal(rows(llm.extract(mixed, ":")), expected)
        assert samples[1].token_ids.tolist() == [-1] * LENGTHS[1]
        for given in (embeds, mixed):
            outputs = llm.generate(given, greedy(6), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == tokens
        assert outputs[0].prompt_token_ids == [-1] * LENGTHS[0]
        last = rows(llm.extract(ExtractRequest(embeds[1], positions=[3, 20]), [2]))
        assert torch.equal(last[0], expected[1][[3, 20]][:, 2:3])
    chunks = {"max_num_batched_tokens": 19}
    with engine(folder, **ON, **options, **chunks) as llm:
        embeds = embeds_of(llm, prompts)
        in_chunks = rows(llm.extract(prompts, ":"))
        assert equal(rows(llm.extract(embeds, ":")), in_chunks)
        if options.get("model_impl") is None:
            assert equal(in_chunks, expected)


@pytest.mark.parametrize("family", ["granite", "recurrent_gemma", "falcon_h1", "gemma"])
def test_scaled_where_transformers_scales_them(family: str, checkpoint: Checkpoint) -> None:
    """Mixed with ids in one step; embeddings as the module looks them up, changed a little."""
    folder = checkpoint(family)
    model, prompts = load_reference(folder), random_prompts(4, [19, 7])
    ids = [torch.tensor([prompt["prompt_token_ids"]]) for prompt in prompts]
    with torch.inference_mode():
        given = 0.9 * model.get_input_embeddings()(ids[0])
        runs = ({"inputs_embeds": given}, {"input_ids": ids[1]})
        expected = [model(**run, output_hidden_states=True).hidden_states for run in runs]
    with engine(folder, **ON) as llm:
        found = rows(llm.extract([{"prompt_embeds": given[0].clone()}, prompts[1]], [0, 2]))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, torch.stack([theirs[0][0], theirs[2][0]], 1)) <= 1e-4


def test_rows_of_layer_0_are_the_embeddings_and_prefixes_go_by_content(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with engine(checkpoint("llama"), **ON, **extraction_config([0, 3], tmp_path)) as llm:
        given = [torch.randn(length, 72) for length in (50, 50, 31)]
        prompts = [{"prompt_embeds": one} for one in given]
        first = llm.generate(prompts, greedy(), use_tqdm=False)
        again = llm.generate(prompts, greedy(), use_tqdm=False)
        for one, output, repeated in zip(given, first, again, strict=True):
            assert torch.equal(rows_of(output)[:, 0], one)
            assert torch.equal(rows_of(repeated), rows_of(output))
            assert repeated.num_cached_tokens and not output.num_cached_tokens
        assert not torch.equal(rows_of(first[0])[:, 1], rows_of(first[1])[:, 1])
        path = first[2].kv_transfer_params["hidden_states_path"]  # type: ignore[index]
        assert load_hidden_states(path)["token_ids"].tolist() == [-1] * 31
        # What their ids would be is another prompt.
        zeros = llm.generate({"prompt_token_ids": [0] * 50}, greedy(), use_tqdm=False)
        assert not zeros[0].num_cached_tokens


def test_they_come_through_preemption(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    prompts = random_prompts(2, [60, 55, 70, 64])
    few = {"num_gpu_blocks_override": 14, "max_model_len": 160, "enable_prefix_caching": False}
    with engine(folder, **ON) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(40))]
    with engine(folder, **ON, **few) as llm:
        outputs = llm.generate(embeds_of(llm, prompts), greedy(40), use_tqdm=False)
        assert core_of(llm).stats().num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_penalties_know_output_tokens_only(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(3, [20])
    with engine(checkpoint("llama"), **ON) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=1.5)
        (by_ids,) = llm.generate(prompts, params, use_tqdm=False)
        (by_embeds,) = llm.generate(embeds_of(llm, prompts), params, use_tqdm=False)
        assert by_ids.outputs[0].token_ids == by_embeds.outputs[0].token_ids
        params = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=5.0)
        (output,) = llm.generate(embeds_of(llm, prompts), params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12


def test_a_negated_view_is_its_values(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), max_model_len=64, **ON) as llm:
        values = -torch.randn(4, 72)
        views = [values, torch._neg_view(-values), torch.cat([values] * 2, 1)[:, :72]]
        prompts: list[Any] = [{"prompt_embeds": view} for view in views]
        first, *others = rows(llm.extract(prompts, [0, -1]))
        assert all(torch.equal(first, other) for other in others)


def test_what_is_no_prompt_is_refused(checkpoint: Checkpoint) -> None:
    good = torch.ones(4, 72)
    with engine(checkpoint("llama"), max_model_len=64, **ON) as llm:
        nan, wide = good.clone(), torch.full((2, 72), 1e38)
        nan[2, 5] = float("nan")
        shrunk = good.clone()
        shrunk.untyped_storage().resize_(16)
        for value, problem in {
            "of type list": [[1.0] * 72],
            r"shape \(4, 71\)": good[:, :71],
            r"shape \(4,\)": good[:, 0],
            "of 0 tokens": good[:0],
            "of 65 tokens": torch.ones(65, 72),
            "torch.int64": good.long(),
            "torch.float64": good.double(),
            "row of token 2 is not finite": nan,
            "sparse": good.to_sparse(),
            "on meta": good.to("meta"),
            "complex64": good.to(torch.complex64),
            "strided, on cpu: has to be a dense tensor": torch.nested.nested_tensor([good]),
            "on cpu: has to be a dense tensor with all its values": shrunk,
        }.items():
            with pytest.raises(ValueError, match=value):
                llm.generate({"prompt_embeds": problem}, greedy(), use_tqdm=False)
        assert wide.isfinite().all()
        with pytest.raises(ValueError, match="not both"):
            llm.generate({"prompt_embeds": good, "prompt_token_ids": [1]}, greedy())
        for name, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 2)):
            params = SamplingParams(max_tokens=1, **{name: value})
            with pytest.raises(ValueError, match=f"{name}={value} with prompt_embeds"):
                llm.generate({"prompt_embeds": good}, params, use_tqdm=False)
        full = SamplingParams(max_tokens=1)
        with pytest.raises(ValueError, match="fills the context"):
            llm.generate({"prompt_embeds": torch.ones(64, 72)}, full, use_tqdm=False)
    with (
        engine(checkpoint("llama"), dtype="float16", **ON) as llm,
        pytest.raises(ValueError, match="not finite in float16"),
    ):
        llm.generate({"prompt_embeds": wide}, greedy(), use_tqdm=False)
    with (
        engine(checkpoint("llama")) as llm,
        pytest.raises(ValueError, match="start it with enable_prompt_embeds=True"),
    ):
        llm.generate({"prompt_embeds": good}, greedy(), use_tqdm=False)


def test_models_that_need_ids_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_impl in ("vllm", "transformers"):
        with pytest.raises(ValueError, match="its layers need token ids besides embeddings"):
            LLM(str(checkpoint("gemma4")), model_impl=model_impl, **ON)
    monkeypatch.setattr(LlamaForCausalLM, "supports_prompt_embeds", False)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True, but LlamaForCausalLM"):
        LLM(str(checkpoint("llama")), **ON)
    from transformers import Qwen3Model

    forward = Qwen3Model.forward

    @functools.wraps(forward)
    def by_ids_only(
        self: Any, input_ids: Any = None, inputs_embeds: Any = None, **more: Any
    ) -> Any:
        assert input_ids is not None, "hash layers need ids"
        return forward(self, input_ids=input_ids, **more)

    monkeypatch.setattr(Qwen3Model, "forward", by_ids_only)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True, but TransformersForCausalLM"):
        LLM(str(checkpoint("qwen3")), model_impl="transformers", **ON)

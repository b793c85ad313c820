"""Hook points: values inside decoder layers, against hooks on transformers' modules."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, greedy, random_prompts
from tests.models import zoo
from tests.models.families import SLICE
from tests.models.oracle import ModuleOracle, place_of, relative_error
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.entrypoints.cli.main import main
from vllm.hidden_states import ExtractRequest, FailedSample, HiddenStatesSample

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(92, [5, 33, 17])
MIXED = [
    "blocks.1.hook_attn_out",
    "model.layers.2.mlp",
    "blocks.0.hook_resid_mid",
    "blocks.1.attn.hook_z",
    "blocks.2.hook_resid_post",
]
PARALLEL = {"cohere", "falcon"}
NOT_PLAIN_SUMS = {"minimax", "openai_gpt", "gemma4", "gemma4_moe", "gemma4_vl"}
"""Families whose blocks do more than add branches to the stream."""


def points_of(llm: Any) -> list[Any]:
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    points: list[Any] = runner.hook_points.points
    return points


def compare(
    samples: Sequence[HiddenStatesSample], oracle: ModuleOracle, names: Iterable[str]
) -> None:
    """Activations by the path of a module are what the module returns in transformers."""
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        places = {name: place_of(name) for name in names}
        seen = oracle.run(prompt["prompt_token_ids"], {p for p in places.values() if p})
        for name, place in places.items():
            assert place is not None
            assert relative_error(sample.activations[name], seen[place][1]) <= 1e-4, name


@pytest.mark.parametrize("family", SLICE)
def test_values_are_those_of_transformers_modules(family: str, checkpoint: Checkpoint) -> None:
    """All points with a path, several prompts at once, in chunks; the others by what they mean."""
    folder = checkpoint(family)
    oracle = ModuleOracle(folder)
    with engine(folder, max_num_batched_tokens=32) as llm:
        points = points_of(llm)
        firsts = [point.names[0] for point in points]
        paths = {p: point for point in points for p in point.names if place_of(p) in oracle.modules}
        assert len({id(point) for point in paths.values()}) >= 4
        asked = [*firsts, *paths]
        samples = list(llm.extract(PROMPTS, layers=list(range(3)), hooks=asked))
        plain = list(llm.extract(PROMPTS, layers=list(range(3))))
    compare(samples, oracle, paths)
    for sample, other in zip(samples, plain, strict=True):
        assert torch.equal(sample.hidden_states, other.hidden_states)
        assert list(sample.activations) == asked
        check_meanings(family, sample.activations)
        for point in points:
            width, dtype = point.form
            activation = sample.activations[point.names[0]]
            assert activation.shape == (len(sample.token_ids), width)
            assert activation.dtype is dtype
        for layer in (0, 1):
            stream = sample.hidden_states[:, layer]
            assert torch.equal(sample.activations[f"blocks.{layer}.hook_resid_pre"], stream)
    check_heads(samples, oracle, [name for name in firsts if name.endswith("attn.hook_z")])


def check_meanings(family: str, values: Mapping[str, torch.Tensor]) -> None:
    """The stream in the middle of a block lies between its branches."""
    middles = [name for name in values if name.endswith("hook_resid_mid")]
    assert family not in PARALLEL or not middles
    for middle in middles if family not in NOT_PLAIN_SUMS else ():
        block = middle.rpartition(".")[0]
        after = values[f"{block}.hook_resid_post"]
        added = values.get(f"{block}.hook_mlp_out")
        if added is not None and family != "rwkv":
            assert relative_error(values[middle] + added, after) <= 1e-4, middle


def check_heads(samples: list[HiddenStatesSample], oracle: ModuleOracle, names: list[str]) -> None:
    """``hook_z`` is what the output projection reads: a module whose input is as wide."""
    for name in names:
        layer = int(name.split(".")[1])
        projections = [
            place
            for place in oracle.modules
            if place[0] == layer and re.search(r"(o_proj|out_proj|dense|c_proj)$", place[1])
        ]
        prompt, sample = PROMPTS[1], samples[1]
        seen = oracle.run(prompt["prompt_token_ids"], projections)
        read = [x for x, _ in seen.values() if x is not None]
        same = [x for x in read if x.shape == sample.activations[name].shape]
        assert any(relative_error(sample.activations[name], x) <= 1e-4 for x in same), name


@pytest.mark.parametrize(
    "family", ["qwen3_5", "mixtral", "gpt2", "mamba2", "rwkv", "longcat_flash"]
)
def test_of_modules_of_transformers(family: str, checkpoint: Checkpoint) -> None:
    """One request after another, all as one sequence, and with nothing cached."""
    folder = checkpoint(family)
    oracle = ModuleOracle(folder)
    with engine(folder, model_impl="transformers", max_num_batched_tokens=32) as llm:
        paths = [p for point in points_of(llm) for p in point.names if p[:7] != "blocks."]
        assert len(paths) > 8 and not any(".experts." in path for path in paths)
        compare(list(llm.extract(PROMPTS, hooks=paths)), oracle, paths)
        values = [s.activations for s in llm.extract(PROMPTS, hooks=["blocks.1.hook_resid_post"])]
        rows = [s.hidden_states[:, 0] for s in llm.extract(PROMPTS, layers=[2])]
    for value, row in zip(values, rows, strict=True):
        assert relative_error(value["blocks.1.hook_resid_post"], row) <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "added"),
    [
        *(("bloom", ""), ("mpt", "attn"), ("olmo2", ""), ("gptj", "attn mlp")),
        *(("gpt_neo", "attn mlp"), ("gpt_neox_japanese", "mlp")),
    ],
)
def test_what_modules_add_to_the_stream(model_type: str, added: str, tmp_path: Path) -> None:
    """The names say so only where it is so: some modules return the stream, or a norm follows.

    The last attention of GPT-NeoX-Japanese returns the bias of its projection beside the product.
    """
    model = zoo.make_checkpoint(tmp_path, model_type)
    last = model.config.num_hidden_layers - 1
    options = {"skip_tokenizer_init": True, "max_model_len": 64}
    with engine(tmp_path, model_impl="transformers", **options) as llm:
        kinds = ("attn", "mlp")
        named = {name for point in points_of(llm) for name in point.names}
        assert {f"blocks.{last}.{kind}.hook_out" for kind in kinds} <= named
        found = [kind for kind in kinds if f"blocks.{last}.hook_{kind}_out" in named]
        assert found == added.split()
        if len(found) < 2:
            return
        hooks = [f"blocks.{last}.hook_{name}" for name in ("attn_out", "mlp_out")]
        for sample in llm.extract(PROMPTS[:2], layers=[last, last + 1], hooks=hooks):
            change = sample.hidden_states[:, 1] - sample.hidden_states[:, 0]
            assert relative_error(sum(map(sample.activations.get, hooks)), change) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_bits_do_not_depend_on_what_runs_beside(family: str, checkpoint: Checkpoint) -> None:
    """Chunks, prefixes, preemptions, other requests' hooks and depths, positions."""
    folder = checkpoint(family)
    attention = "blocks.0.linear_attn.hook_out" if family == "qwen3_5" else MIXED[0]
    hooks = [attention, *MIXED[1:3], MIXED[4]]
    with engine(folder, enable_prefix_caching=False) as llm:
        alone = [next(iter(llm.extract([prompt], layers=[1], hooks=hooks))) for prompt in PROMPTS]
    requests = [
        ExtractRequest(prompt, layers=layers, hooks=names, positions=positions)
        for prompt in PROMPTS
        for layers, names, positions in (
            ([1], hooks, "all"),
            ([2, 0], None, "all"),
            (None, hooks[:1], "last"),
            ([1], hooks[::-1], [3, 1, 3]),
        )
    ]
    with engine(folder, max_num_batched_tokens=16, num_gpu_blocks_override=34) as llm:
        for _ in range(2):
            samples = list(llm.extract(requests))
            _ = llm.generate(PROMPTS, greedy(3))
            for index, whole in enumerate(alone):
                every, none, last, some = samples[4 * index : 4 * index + 4]
                assert none.activations == {} and none.layer_ids == (2, 0)
                assert last.hidden_states.shape[:2] == (1, 0)
                for name in hooks:
                    expected = whole.activations[name]
                    assert torch.equal(every.activations[name], expected), name
                    assert torch.equal(some.activations[name], expected[[3, 1, 3]]), name
                assert torch.equal(last.activations[hooks[0]], whole.activations[hooks[0]][-1:])
                assert torch.equal(every.hidden_states, whole.hidden_states)


def test_layers_above_do_not_run(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    with engine(folder) as llm:
        runner = llm.llm_engine.engine_core.executor.worker.model_runner
        runner.model.model.layers[3].mlp.down_proj.weight.data.fill_(float("nan"))
        (sample,) = llm.extract(PROMPTS[0], hooks="blocks.2.hook_mlp_out")
        assert sample.activations["blocks.2.hook_mlp_out"].isfinite().all()
        with pytest.raises(RuntimeError, match=r"blocks.3.hook_mlp_out of token 0 is not finite"):
            list(llm.extract(PROMPTS[0], hooks="blocks.3.hook_mlp_out"))
        assert len(list(llm.extract(PROMPTS, hooks="blocks.2.hook_mlp_out"))) == 3


def test_dtypes_and_pooling(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("mixtral")) as llm:
        hooks = [MIXED[0], "blocks.1.mlp.hook_router_logits"]
        (whole,) = llm.extract(PROMPTS[1], hooks=hooks)
        for dtype in (torch.bfloat16, torch.float16):
            (sample,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, dtype=dtype)
            for name in hooks:
                assert torch.equal(sample.activations[name], whole.activations[name].to(dtype))
        (sample,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, dtype="fp8")
        assert sample.scales is not None
        for name in hooks:
            assert torch.equal(sample.activations[name], whole.activations[name])
        (mean,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, pooling="mean")
        (last,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, pooling="last")
        (alone,) = llm.extract(PROMPTS[1], hooks=hooks, pooling="mean")
        (small,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, pooling="mean", dtype="fp8")
        for name in hooks:
            assert torch.equal(alone.activations[name], mean.activations[name])
            assert torch.equal(small.activations[name], mean.activations[name])
            rows = whole.activations[name]
            assert torch.allclose(mean.activations[name][0], rows.mean(0), atol=1e-5)
            assert torch.equal(last.activations[name], rows[-1:])
        (none,) = llm.extract(PROMPTS[1], layers=[1], hooks=hooks, positions=[])
        assert none.activations[hooks[1]].shape == (0, whole.activations[hooks[1]].shape[1])


def test_with_log_probabilities_and_the_norm(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen3_5")) as llm:
        hooks = ["blocks.1.mlp.hook_out"]
        (both,) = llm.extract(PROMPTS[1], layers=["norm"], hooks=hooks, top_logprobs=3)
        (one,) = llm.extract(PROMPTS[1], hooks=hooks)
        assert torch.equal(both.activations[hooks[0]], one.activations[hooks[0]])
        assert both.top_token_ids is not None and both.top_token_ids.shape == (33, 3)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ("blocks.1.hook_atn_out", r"no hook point 'blocks.1.hook_atn_out'; the nearest are .*"
         r"blocks.1.hook_attn_out"),
        (["blocks.9.hook_mlp_out"], r"no hook point 'blocks.9.hook_mlp_out'"),
        (["model.embed_tokens"], r"no hook point 'model.embed_tokens'"),
        (["nonsense"], r"hooks=\['nonsense'\]: 'nonsense' is not the name of a hook point"),
        ([3], r"hooks=\[3\]: 3 is not the name of a hook point"),
        ({"a.b": 1}, r"hooks=.*: has to be a list of names"),
    ],
)  # fmt: skip
def test_a_wrong_name_fails_alone(hooks: Any, message: str, checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama")) as llm:
        with pytest.raises(ValueError, match=message):
            list(llm.extract([ExtractRequest(PROMPTS[0], layers=[1], hooks=hooks)]))
        requests = [
            ExtractRequest(PROMPTS[0], layers=[1], hooks=hooks),
            ExtractRequest(PROMPTS[1], layers=[1], hooks=MIXED),
        ]
        bad, good = llm.extract(requests, on_error="yield")
        assert isinstance(bad, FailedSample) and re.search(message, bad.reason)
        assert isinstance(good, HiddenStatesSample) and list(good.activations) == MIXED


def test_parallel_blocks_have_no_middle(checkpoint: Checkpoint) -> None:
    message = r"no hook point 'blocks.0.hook_resid_mid'"
    with engine(checkpoint("cohere")) as llm, pytest.raises(ValueError, match=message):
        list(llm.extract(PROMPTS[0], hooks="blocks.0.hook_resid_mid"))


def test_rows_larger_than_a_step_are_refused(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("qwen3_5"), max_num_batched_tokens=1, max_num_seqs=1) as llm:
        hooks = [f"blocks.{layer}.{name}" for layer in range(4)
                 for name in ("mlp.hook_out", "hook_resid_mid", "hook_resid_post")]  # fmt: skip
        with pytest.raises(ValueError, match=r"and hooks 12, as large as 13 layers"):
            list(llm.extract(PROMPTS[0], layers=[1], hooks=hooks))


def test_the_server_engine(checkpoint: Checkpoint) -> None:
    """Through the messages between processes."""
    folder = checkpoint("llama")
    with engine(folder) as llm:
        expected = list(llm.extract(PROMPTS, layers=[1], hooks=MIXED))

    async def run() -> list[Any]:
        async_llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_model_len=256))
        try:
            return [s async for s in async_llm.extract(PROMPTS, layers=[1], hooks=MIXED)]
        finally:
            await async_llm.shutdown()

    for sample, other in zip(asyncio.run(run()), expected, strict=True):
        for name in MIXED:
            assert torch.equal(sample.activations[name], other.activations[name])


def test_the_list_of_points(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """``vllm models --hooks``: what an engine has, without its weights."""
    for impl in ("auto", "transformers"):
        folder = checkpoint("mixtral")
        with engine(folder, model_impl=impl) as llm:
            points = points_of(llm)
        capsys.readouterr()
        assert main(["models", str(folder), "--hooks", "--json", "--model-impl", impl]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [one["names"] for one in listed] == [list(point.names) for point in points]
        assert [one["width"] for one in listed] == [point.form.width for point in points]
        assert main(["models", str(folder), "--hooks", "--model-impl", impl]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(points)
        form = r"blocks.1.attn.hook_out +\[rows, 72\] float32 +.*model.layers.1.self_attn"
        assert any(re.match(form, line) for line in lines)
    with pytest.raises(SystemExit):
        main(["models", "--hooks"])
    assert "--hooks lists the hook points of a checkpoint" in capsys.readouterr().err

"""LLM.embed, LLM.encode and AsyncLLM.embed: pooled states after the final norm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from tests.engine.harness import check_nothing_is_left, engine, random_prompts
from tests.grids import grid
from tests.models.families import FAMILIES
from tests.models.oracle import reference_run, relative_error
from vllm import AsyncEngineArgs, AsyncLLM, EmbeddingRequestOutput, PoolingRequestOutput
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states import ExtractRequest
from vllm.v1.engine.pooling import Pooler, PoolingOptions

Checkpoint = Callable[..., Path]
NEWER = "sentence_transformers.sentence_transformer.modules.normalize.Normalize"
PROMPTS = random_prompts(58, [1, 17, 40, 97, 33])
IDS = [prompt["prompt_token_ids"] for prompt in PROMPTS]
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
}
BY_DAY = [("llama", "last"), ("qwen3_5", "mean"), ("qwen3_5", "last"), ("minicpm3", "mean")]
BY_DAY += [("deepseek_v3", "last"), ("mamba2", "last")]
WITH_NORM = [family for family in FAMILIES if family != "openai_gpt"]


def expected(folder: Path, pooling: str) -> torch.Tensor:
    return torch.stack([POOLED[pooling](reference_run(folder, ids).head_input) for ids in IDS])


def state(folder: Path, **files: Any) -> None:
    """Write the files in which sentence-transformers says how it pools."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content))


def module(index: int, kind: str) -> dict[str, Any]:
    name, path = f"sentence_transformers.models.{kind}", f"{index}_{kind}" if index else ""
    return {"idx": index, "name": str(index), "path": path, "type": name}


@pytest.mark.parametrize(("family", "pooling"), grid(WITH_NORM, ["last", "mean"], by_day=BY_DAY))
def test_values_in_batches_chunks_and_after_prefix_hits(
    family: str, pooling: Any, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family)
    vectors = expected(folder, pooling)
    with engine(folder, enable_prefix_caching=False) as llm:
        alone = [llm.embed(one, pooling, False, as_tensor=True) for one in PROMPTS]
    assert relative_error(torch.cat(alone), vectors) <= 1e-4
    with engine(folder, max_num_batched_tokens=32, num_gpu_blocks_override=40) as llm:
        for _ in range(2):  # the second time the prefixes are there
            assert torch.equal(llm.embed(PROMPTS, pooling, False, as_tensor=True), torch.cat(alone))
        outputs = llm.embed(IDS, pooling)
    for output, ids, vector in zip(outputs, IDS, vectors, strict=True):
        assert isinstance(output, EmbeddingRequestOutput) and output.finished
        assert isinstance(output, PoolingRequestOutput) and output.prompt_token_ids == ids
        assert output.outputs.hidden_size == len(vector)
        made = torch.tensor(output.outputs.embedding)
        assert relative_error(made, normalize(vector, dim=0)) <= 1e-4


def test_bfloat16_and_modules_of_transformers(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    vectors = normalize(expected(folder, "mean"), dim=-1)
    for options, limit in (({"model_impl": "transformers"}, 1e-4), ({"dtype": "bfloat16"}, 0.05)):
        with engine(folder, **options) as llm:
            made = llm.embed(PROMPTS, "mean", as_tensor=True)
        assert made.dtype == torch.float32 and relative_error(made, vectors) <= limit
        assert (made.norm(dim=-1) - 1).abs().max() <= 1e-6


def test_kinds_of_prompts(checkpoint: Checkpoint) -> None:
    chat = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    with engine(checkpoint("llama"), enable_prompt_embeds=True) as llm:
        by_text = llm.embed(text, add_special_tokens=False)[0]
        by_chat, by_record = llm.embed([chat, {"messages": chat}])
        assert by_text.outputs == by_chat.outputs == by_record.outputs
        (rows,) = llm.extract(IDS[1], layers=0)
        embeds = {"prompt_embeds": rows.hidden_states[:, 0]}
        both = llm.embed([embeds, IDS[1]], as_tensor=True)
        assert torch.equal(both[0], both[1])
        assert llm.embed([]) == [] and llm.embed([], as_tensor=True).shape == (0, 72)
        (each,) = llm.encode(IDS[2], "token_embed", normalize=False)
        (whole,) = llm.extract(IDS[2], layers="norm")
        assert torch.equal(each.outputs.data, whole.hidden_states[:, 0])


def test_truncation(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), max_model_len=64) as llm:
        ids = IDS[3]
        for given, options, kept in (
            (ids, {"truncate_prompt_tokens": 7}, ids[:7]),
            (ids, {"truncate_prompt_tokens": 7, "truncation_side": "left"}, ids[-7:]),
            (ids, {"truncate_prompt_tokens": -1}, ids[:64]),
            (ids[:5], {"truncate_prompt_tokens": 7}, ids[:5]),
        ):
            (cut,), (short,) = llm.embed([given], **options), llm.embed([kept])  # type: ignore[arg-type]
            assert cut.prompt_token_ids == kept and cut.outputs == short.outputs
        with pytest.raises(ValueError, match="prompt 1: This model's maximum context length is 64"):
            llm.embed([ids[:3], ids])
        for keep in (0, -2, 65, 1.5, "7"):
            with pytest.raises(ValueError, match=f"truncate_prompt_tokens='?{keep}'?"):
                llm.embed([ids], truncate_prompt_tokens=keep)  # type: ignore[call-overload]
        check_nothing_is_left(llm)


def test_truncated_texts_keep_their_special_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As the truncation of the tokenizer itself, which models that read an EOS depend on."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint("llama"))
    begin, end = "<|im_start|>", "<|im_end|>"
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (begin, end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end} {end}", special_tokens=pairs
    )
    tokenizer.save_pretrained(tmp_path)
    with engine(checkpoint("llama"), tokenizer=str(tmp_path)) as llm:
        for side in ("right", "left"):
            tokenizer.truncation_side = side
            for keep in (4, 5, 9, 13, 14, 40):
                expected_ids = tokenizer.encode("hello world", truncation=True, max_length=keep)
                options: Any = {"truncate_prompt_tokens": keep, "truncation_side": side}
                (cut,) = llm.embed("hello world", **options)
                assert cut.prompt_token_ids == expected_ids
        (cut,) = llm.embed("hello world", truncate_prompt_tokens=2)  # no room for all of them
        assert len(cut.prompt_token_ids) == 2


@pytest.mark.parametrize("name", ["old", "new"])
def test_pooling_as_the_checkpoint_says(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    pooling: Any = modes if name == "old" else {"pooling_mode": "mean"}
    state(folder, modules=[module(0, "Transformer"), module(1, "Pooling")])
    state(folder, **{"1_Pooling__config": {"word_embedding_dimension": 72, **pooling}})
    vectors = expected(folder, "mean")
    with engine(folder) as llm:
        assert relative_error(llm.embed(PROMPTS, as_tensor=True), vectors) <= 1e-4
        last = llm.embed(PROMPTS, "last", True, as_tensor=True)
        assert relative_error(last, normalize(expected(folder, "last"), dim=-1)) <= 1e-4
    modules = [module(index, kind) for index, kind in enumerate(("Transformer", "Pooling"))]
    state(folder, modules=[*modules, {**module(2, "Normalize"), "type": NEWER}])
    with engine(folder) as llm:
        made = llm.embed(PROMPTS, as_tensor=True)
        assert relative_error(made, normalize(vectors, dim=-1)) <= 1e-4


@pytest.mark.parametrize(
    ("pooling", "kinds", "problem"),
    [
        ({"pooling_mode_cls_token": True}, ["Pooling"], "1_Pooling/config.json says cls_token"),
        ({"pooling_mode": "weightedmean"}, ["Pooling"], "config.json says weightedmean"),
        ({"pooling_mode": ["mean", "lasttoken"]}, ["Pooling"], "says mean_tokens and lasttoken"),
        ({}, ["Pooling"], "says no pooling_mode"),
        ({"pooling_mode": "mean"}, ["Pooling", "Dense"], r"module 'sentence_.*\.Dense'"),
        ({"pooling_mode": "mean"}, [], "has no module Pooling"),
        ({"pooling_mode": "mean"}, ["Normalize", "Pooling"], "Normalize, Pooling in this order"),
        ({"pooling_mode": "mean"}, ["Pooling", "Pooling"], "Pooling, Pooling in this order"),
    ],
)
def test_pooling_that_cannot_be_done(
    pooling: Any, kinds: list[str], problem: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    modules = [module(index, kind) for index, kind in enumerate(["Transformer", *kinds])]
    state(folder, modules=modules, **{"1_Pooling__config": pooling})
    with engine(folder) as llm:
        with pytest.raises(ValueError, match=f"{problem}; supported: .*pooling='last' or 'mean'"):
            llm.embed(PROMPTS)
        assert len(llm.embed(PROMPTS, "last")) == len(PROMPTS)
        assert len(llm.encode(PROMPTS, "token_embed")) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["pylate.models.Dense.Dense", "sentence_transformers.x.Dense"])
def test_vectors_of_tokens_that_a_module_projects(
    kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Models of many vectors for a text, such as those of PyLate."""
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    state(folder, modules=[module(0, "Transformer"), {**module(1, "Dense"), "type": kind}])
    with engine(folder) as llm:
        for task in ("embed", "token_embed"):
            with pytest.raises(ValueError, match=f"cannot be made: .* the module '{kind}'"):
                llm.encode(PROMPTS, task)
        assert len(list(llm.extract(PROMPTS, layers=["norm"]))) == len(PROMPTS)


def test_what_sentence_transformers_does_to_texts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Lower case, truncation, a model elsewhere and code of others are followed or refused."""
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    kinds = [module(0, "Transformer"), module(1, "Pooling")]
    state(folder, modules=kinds, **{"1_Pooling__config": {"pooling_mode": "mean"}})
    state(folder, sentence_bert_config={"max_seq_length": 32, "do_lower_case": False})
    with engine(folder) as llm:
        short = [ids[:32] for ids in IDS]
        cut = llm.embed(IDS, truncate_prompt_tokens=-1, as_tensor=True)
        assert torch.equal(cut, llm.embed(short, as_tensor=True))
        assert torch.equal(cut, llm.embed(short, "mean", False, as_tensor=True))
        whole = llm.embed(IDS, "mean", False, as_tensor=True)
        assert relative_error(whole, expected(folder, "mean")) <= 1e-4
        for options in ({}, {"truncate_prompt_tokens": 40}):
            with pytest.raises(
                ValueError, match=r"prompt 2: .* 40 tokens; this call takes 32, the max_seq"
            ):
                llm.embed(IDS, **options)  # type: ignore[call-overload]
        assert len(llm.encode(IDS, "token_embed")) == len(IDS)
        plain = llm.embed(["A text"], as_tensor=True)
        check_nothing_is_left(llm)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    elsewhere = [{**kinds[0], "path": "0_Transformer"}, kinds[1]]
    of_others = [kinds[0], {**kinds[1], "type": "custom.Pooling"}]
    for files, problem in (
        ({"sentence_bert_config": {"do_lower_case": True}}, "says do_lower_case"),
        ({"sentence_bert_config": {"max_seq_length": "9"}}, "max_seq_length='9' has to be a"),
        ({"sentence_bert_config": {}, "sentence_roberta_config": {"max_seq_length": 5}}, "takes 5"),
        ({"sentence_roberta_config": {}}, None),
        ({"config_sentence_transformers": {"truncate_dim": 8}}, "says truncate_dim=8"),
        ({"config_sentence_transformers": {"prompts": {"query": "Q: "}}}, None),
        ({"tokenizer_config": {**tokenizer, "model_max_length": 3}}, "takes 3, the model_max_"),
        ({"tokenizer_config": {**tokenizer, "model_max_length": 1e30}}, None),
        ({"modules": elsewhere}, "model in '0_Transformer'"),
        ({"modules": of_others}, "module 'custom.Pooling'"),
    ):
        state(folder, **files)
        with engine(folder) as llm:
            if problem is None:
                assert torch.equal(llm.embed(["A text"], as_tensor=True), plain)
            else:
                with pytest.raises(ValueError, match=problem):
                    llm.embed(["A text"])


LEFT = {"truncation_side": "left"}
LAST_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}


def test_every_entry_about_texts_counts(
    checkpoint: Checkpoint, tmp_path: Path, caplog: Any
) -> None:
    """Lengths from each file that sentence-transformers reads; other entries are refused by name.

    The expected values are those that sentence-transformers 6.2 has for these files.
    """
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    state(folder, modules=[module(0, "Transformer"), module(1, "Pooling")])
    state(folder, **{"1_Pooling__config": {"pooling_mode": "mean"}})
    newer = {"modality_config": {"text": LAST_STATE}, "module_output_name": "token_embeddings"}
    cases: list[tuple[dict[str, Any], dict[str, Any], int | None, str]] = [
        ({}, {}, None, "right"),
        ({}, {"model_max_length": 16}, 16, "right"),
        ({}, {"model_max_length": 16, **LEFT}, 16, "left"),
        ({}, {"model_max_length": 10**30}, None, "right"),
        ({"max_seq_length": 40, "unpad_inputs": True}, {"model_max_length": 16}, 40, "right"),
        ({"tokenizer_args": {"model_max_length": 8, **LEFT}, "max_seq_length": 40}, {}, 8, "left"),
        ({"processor_kwargs": {"model_max_length": 8}}, LEFT, 8, "left"),
        ({"model_args": {"torch_dtype": "float16"}, "config_args": {}, **newer}, {}, None, "right"),
        ({"transformer_task": "feature-extraction", "query_length": None}, {}, None, "right"),
    ]
    refused: dict[str, dict[str, Any]] = {
        "model_args.gguf_file='a'": {"model_args": {"gguf_file": "a"}},
        "config_args.num_hidden_layers=1": {"config_args": {"num_hidden_layers": 1}},
        "config_kwargs.is_causal=False": {"config_kwargs": {"is_causal": False}},
        "processor_kwargs.add_bos_token=True": {"processor_kwargs": {"add_bos_token": True}},
        "processing_kwargs.text=": {"processing_kwargs": {"text": {"max_length": 4}}},
        "transformer_task='text-generation'": {"transformer_task": "text-generation"},
        "modality_config.message: .* chat template": {"modality_config": {"message": LAST_STATE}},
        "modality_config=": {"modality_config": {"text": {"method": "encode"}}},
        "module_output_name='x'": {"module_output_name": "x"},
        "query_length=8": {"query_length": 8},
        "frobnicate=": {"frobnicate": [1]},
        "do_lower_case": {"do_lower_case": True},
    }
    with engine(folder) as llm:
        config = llm.llm_engine.vllm_config
        for of_texts, more, most_tokens, side in cases:
            for name in ("sentence_bert_config", "sentence_xlm-roberta_config"):
                state(folder, tokenizer_config={**of_tokenizer, **more}, **{name: of_texts})
                settings = Pooler(config).call(PoolingOptions(truncate_prompt_tokens=-1)).settings
                assert (settings.most_tokens, settings.truncation_side) == (most_tokens, side)
                assert settings.truncate_prompt_tokens == (most_tokens or -1)
                right = PoolingOptions(truncation_side="right")
                assert Pooler(config).call(right).settings.truncation_side == "right"
                (folder / f"{name}.json").unlink()
        for problem, of_texts in refused.items():
            state(folder, sentence_bert_config=of_texts)
            with pytest.raises(ValueError, match=f"sentence_bert_config.json says {problem}"):
                Pooler(config).call(PoolingOptions())
            assert Pooler(config).call(PoolingOptions(pooling="mean")).settings.most_tokens is None
        state(folder, sentence_bert_config={})
        prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
        state(folder, config_sentence_transformers=prompts)
        Pooler(config).call(PoolingOptions())
        assert "default_prompt_name='query'" in caplog.text and "'Q: '" in caplog.text
        state(folder, tokenizer_config={**of_tokenizer, "model_max_length": 9})
        llm.embed([[5] * 9])
        for of_tokens in ({"model_max_length": "9"}, {"truncation_side": "top"}):
            state(folder, tokenizer_config={**of_tokenizer, **of_tokens})
            with pytest.raises(ValueError, match=f"{next(iter(of_tokens))}='.*' .*has to be"):
                Pooler(config).call(PoolingOptions())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": 1}, "modules.json is not a list of modules"),
        ([{"type": 5}], "modules.json is not a list of modules"),
        (
            [module(0, "Transformer"), module(1, "Pooling") | {"path": "../.."}],
            r"path '\.\./\.\.' leaves the checkpoint",
        ),
    ],
)
def test_damaged_files(content: Any, problem: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    state(folder, modules=content)
    with engine(folder) as llm, pytest.raises(ValueError, match=problem):
        llm.embed(PROMPTS)


def test_dimensions(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    vectors = expected(folder, "last")
    with engine(folder, hf_overrides={"is_matryoshka": True}) as llm:
        made = llm.embed(PROMPTS, dimensions=24, as_tensor=True)
        assert relative_error(made, normalize(vectors[:, :24], dim=-1)) <= 1e-4
        raw = llm.embed(PROMPTS, normalize=False, dimensions=1)
        assert [len(one.outputs.embedding) for one in raw] == [1] * len(PROMPTS)
        for wrong in (0, -1, 73):
            with pytest.raises(VLLMValidationError, match=f"dimensions={wrong}: has to be from 1"):
                llm.embed(PROMPTS, dimensions=wrong)
    with engine(folder, hf_overrides={"matryoshka_dimensions": [8, 32]}) as llm:
        assert llm.embed(PROMPTS, dimensions=32, as_tensor=True).shape == (len(PROMPTS), 32)
        with pytest.raises(VLLMValidationError, match="dimensions=24: use one of 8, 32"):
            llm.embed(PROMPTS, dimensions=24)
    with engine(folder) as llm, pytest.raises(ValueError, match="not trained for shorter vectors"):
        llm.embed(PROMPTS, dimensions=24)


def test_wrong_options(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama")) as llm:
        for options, problem in (
            ({"pooling": "cls"}, "pooling='cls': use 'last', 'mean', None"),
            ({"normalize": "yes"}, "normalize='yes': has to be true or false"),
            ({"dimensions": 2.5}, "dimensions=2.5: has to be a whole number"),
            ({"truncation_side": "top"}, "truncation_side='top': use 'left', 'right'"),
        ):
            with pytest.raises(ValueError, match=problem):
                llm.embed(PROMPTS, **options)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="pooling_task='score': use 'embed', 'classify'"):
            llm.encode(PROMPTS, "score")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pooling='mean' with pooling_task='token_embed'"):
            llm.encode(PROMPTS, "token_embed", pooling="mean")
        with pytest.raises(ValueError, match="prompt 1: Token id 999 is out of vocabulary"):
            llm.embed([[5], [999]])
        check_nothing_is_left(llm)


def test_requests_with_options_of_their_own(checkpoint: Checkpoint) -> None:
    """Positions choose the rows of a mean; what would change the rows is refused."""
    mask = [index % 3 == 1 for index in range(len(IDS[2]))]
    with engine(checkpoint("llama")) as llm:
        requests = [ExtractRequest(IDS[2], positions="mask", mask=mask), ExtractRequest(IDS[2])]
        some, whole = llm.embed(requests, "mean", False, as_tensor=True)
        (rows,) = llm.encode(IDS[2], "token_embed", normalize=False)
        assert relative_error(some, rows.outputs.data[torch.tensor(mask)].mean(0)) <= 1e-5
        assert relative_error(whole, rows.outputs.data.mean(0)) <= 1e-5
        for name, value in (("layers", 2), ("dtype", "fp8"), ("hooks", "x"), ("top_logprobs", 1)):
            options: Any = {name: value}
            with pytest.raises(ValueError, match=f"prompt 0: ExtractRequest: {name}= has no place"):
                llm.embed([ExtractRequest(IDS[2], **options)])
        for empty in ([], "mask"):
            nothing = ExtractRequest(IDS[1], positions=empty, mask=[0] * len(IDS[1]))
            with pytest.raises(ValueError, match="prompt 1: positions names none of its tokens"):
                llm.embed([IDS[0], nothing])
        check_nothing_is_left(llm)


def test_a_model_without_a_final_norm_is_named(checkpoint: Checkpoint) -> None:
    problem = r"OpenAIGPT.* has no state after a final norm: .*embed, classify and reward read it"
    with engine(checkpoint("openai_gpt")) as llm, pytest.raises(ValueError, match=problem):
        llm.embed(PROMPTS)


def test_in_another_process(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_5")
    with engine(folder) as llm:
        vectors = [one.outputs for one in llm.embed(PROMPTS, "mean")]
        (each,) = llm.encode(IDS[2], "token_embed")

    async def run() -> None:
        other = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_model_len=512))
        try:
            made = await asyncio.gather(*(other.embed(PROMPTS, "mean") for _ in range(3)))
            assert [[one.outputs for one in outputs] for outputs in made] == [vectors] * 3
            (again,) = await other.encode(IDS[2], "token_embed")
            assert torch.equal(again.outputs.data, each.outputs.data)
            with pytest.raises(ValueError, match="prompt 0: the prompt is empty"):
                await other.embed([[]])
            with pytest.raises(ValueError, match="the checkpoint has no v_head"):
                await other.classify(PROMPTS)
        finally:
            await other.shutdown()

    asyncio.run(run())

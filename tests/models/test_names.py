"""Names of tensors that differ between checkpoints of one model, and checkpoints without heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.harness import engine, greedy
from tests.grids import at_night
from tests.models import every_family, zoo
from tests.models.checkpoints import FAMILIES, make_checkpoint, make_transformers_model
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from vllm.model_executor.model_loader import get_model

PROMPT = list(range(3, 40))
MOST_ERROR = 1e-4
BY_DAY = {"qwen3", "gpt2", "gemma3_vl", "qwen3_vl", "deepseek_v3", "rwkv", "olmo_hybrid"}
EACH_FAMILY = [name if name in BY_DAY else at_night(name) for name in FAMILIES]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 2**24,
}


def streams_of(folder: Path) -> list[torch.Tensor]:
    """Return the stream at each boundary."""
    request = SingleRequest(make_config(folder, model_impl="vllm"), len(PROMPT))
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    request.run(PROMPT, sink)
    return [sink.rows(index) for index in range(request.num_layers + 1)]


def rename(folder: Path, *changes: tuple[str, str]) -> None:
    """Replace beginnings of names, each name by the first change that fits."""
    path = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        fits = [(old, new) for old, new in changes if name.startswith(old)]
        old, new = fits[0] if fits else ("", "")
        renamed[new + name.removeprefix(old)] = tensor
    save_file(renamed, path, metadata={"format": "pt"})


def check_streams(folder: Path, expected: list[torch.Tensor]) -> None:
    for rows, stream in zip(streams_of(folder), expected, strict=True):
        assert relative_error(rows, stream) <= MOST_ERROR


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_base_of_names_may_be_missing_or_there_twice(family: str, tmp_path: Path) -> None:
    """transformers reads such names, too."""
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    expected = streams_of(folder)
    names = load_file(folder / "model.safetensors").keys()
    base = next(name for name in names if ".0." in name).partition(".")[0] + "."
    rename(folder, (base, ""))
    for rows, stream in zip(streams_of(folder), expected, strict=True):
        assert torch.equal(rows, stream)
    make_checkpoint(tmp_path, family, tokenizer=False)
    rename(folder, (base, base + base))
    for rows, stream in zip(streams_of(folder), expected, strict=True):
        assert torch.equal(rows, stream)


def test_an_encoder_and_layers_under_repeated_prefixes(tmp_path: Path) -> None:
    """As some releases of transformers saved Qwen3.5, and as derived checkpoints have it."""
    folder = make_checkpoint(tmp_path, "qwen3_5_vl", tokenizer=False)
    expected = streams_of(folder)
    rename(folder, ("model.visual.", "model.language_model.visual."))
    for _ in range(2):
        for rows, stream in zip(streams_of(folder), expected, strict=True):
            assert torch.equal(rows, stream)
        rename(folder, ("model.language_model.", "model.language_model.language_model."))


def test_names_of_the_text_model_alone_under_the_config_of_the_whole(tmp_path: Path) -> None:
    """Gemma 4, whose norms have other names here, one of which is that of another norm there."""
    folder = make_checkpoint(tmp_path, "gemma4_vl", tokenizer=False)
    expected = streams_of(folder)
    rename(folder, ("model.language_model.", "model."))
    for rows, stream in zip(streams_of(folder), expected, strict=True):
        assert torch.equal(rows, stream)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_that_was_cut_out_of_the_whole(family: str, tmp_path: Path) -> None:
    """Its names are those inside the whole model, which transformers reads for these configs."""
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    expected = streams_of(folder)
    rename(folder, ("model.", "model.language_model."))
    path = folder / "model.safetensors"
    beside = {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    beside["model.language_model.visual.blocks.0.norm1.weight"] = torch.ones(5)
    save_file(load_file(path) | beside, path, metadata={"format": "pt"})
    for rows, stream in zip(streams_of(folder), expected, strict=True):
        assert torch.equal(rows, stream)
    check_streams(folder, reference_run(folder, PROMPT).streams)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_bare_model_has_the_same_streams(family: str, tmp_path: Path) -> None:
    expected = streams_of(make_checkpoint(tmp_path / "whole", family, tokenizer=False))
    model = make_transformers_model(family)
    model.base_model.save_pretrained(tmp_path / "bare")
    (name,) = json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"]
    assert name == type(model.base_model).__name__
    for rows, stream in zip(streams_of(tmp_path / "bare"), expected, strict=True):
        assert torch.equal(rows, stream)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Model"),
        ("qwen3", "ForSequenceClassification"),
        ("gpt2", "ForTokenClassification"),
        ("gemma3_vl", "ForSequenceClassification"),
    ],
)
def test_rows_without_an_lm_head(family: str, kind: str, model_impl: str, tmp_path: Path) -> None:
    """Extraction works. Generation works where the head is tied to the embeddings, else it says
    what is missing."""
    whole = make_transformers_model(family, tie_word_embeddings=False)
    prefix = FAMILIES[family].model_class.split("For")[0].removesuffix("LMHeadModel")
    other = getattr(transformers, prefix + kind)(whole.config)
    base = other if kind == "Model" else other.base_model
    base.load_state_dict(whole.base_model.state_dict())
    other.save_pretrained(tmp_path / "other")
    whole.save_pretrained(tmp_path / "whole")
    streams = reference_run(tmp_path / "whole", PROMPT).streams
    with engine(tmp_path / "other", **OPTIONS, model_impl=model_impl) as llm:
        prompts: Any = [{"prompt_token_ids": PROMPT}]
        (sample,) = llm.extract(prompts, layers=list(range(len(streams))))
        for rows, stream in zip(sample.hidden_states.unbind(1), streams, strict=True):
            assert relative_error(rows, stream) <= MOST_ERROR
        problem = rf"{prefix}{kind} generates nothing.* no .*head"
        with pytest.raises(ValueError, match=problem):
            llm.generate(prompts, greedy(2), use_tqdm=False)
        for count in (2, -1):  # the head's values would be made up
            with pytest.raises(ValueError, match=problem):
                list(llm.extract(prompts, layers=1, top_logprobs=count))


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_rows_without_a_head_of_several_layers(kind: str, tmp_path: Path) -> None:
    """ModernBERT's decoder: layers stand before its LM head, and before its classifier."""
    whole = zoo.make_checkpoint(tmp_path / "whole", "modernbert-decoder")
    other = getattr(transformers, f"ModernBertDecoder{kind}")(whole.config)
    base = other if kind == "Model" else other.base_model
    base.load_state_dict(whole.base_model.state_dict())
    other.save_pretrained(tmp_path / "other")
    streams = every_family.streams_of(whole, PROMPT)
    with torch.no_grad():
        last = whole.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    with engine(tmp_path / "other", max_model_len=128) as llm:
        prompts: Any = [{"prompt_token_ids": PROMPT}]
        (sample,) = llm.extract(prompts, layers=list(range(len(streams))))
        for rows, stream in zip(sample.hidden_states.unbind(1), streams, strict=True):
            assert relative_error(rows, stream) <= MOST_ERROR
        (vector,) = llm.embed(prompts, normalize=False)
        assert relative_error(torch.tensor(vector.outputs.embedding), last) <= MOST_ERROR
        with pytest.raises(ValueError, match=r"no decoder\.bias, .*lm_head\.dense\.weight"):
            llm.generate(prompts, greedy(2), use_tqdm=False)
        with pytest.raises(ValueError, match=r"no v_head|head\.dense\.weight, .*which is no head"):
            llm.classify(prompts)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_causal_model_that_was_saved_without_its_head(model_impl: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B: the class is causal, names lack the base, and there is no head."""
    folder = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=False)
    expected = reference_run(folder, PROMPT).streams
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    prompts: Any = [{"prompt_token_ids": PROMPT}]
    with engine(folder, **OPTIONS, model_impl=model_impl) as llm:
        (sample,) = llm.extract(prompts, layers=[1])
        assert relative_error(sample.hidden_states[:, 0], expected[1]) <= MOST_ERROR
        with pytest.raises(ValueError, match=r"no .*lm_head"):
            llm.generate(prompts, greedy(2), use_tqdm=False)
    for name, tensor in (("model.norm.weight", bare["norm.weight"]), ("lm_head.weight", head)):
        wrong = {**weights, "lm_head.weight": head}
        del wrong[name]
        save_file(wrong, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"missing 1 weight\(s\): {name}"):
            get_model(vllm_config=make_config(folder, model_impl=model_impl))
        assert tensor.numel()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["mistral3", "gemma3_vl", "qwen2_vl", "qwen3_vl"])
def test_a_head_beside_the_language_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Names as transformers has them in memory: ``model.language_model.*``, ``lm_head.weight``."""
    folder = make_checkpoint(tmp_path, family, tokenizer=False, tie_word_embeddings=tied)
    expected = reference_run(folder, PROMPT)
    rename(
        folder,
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
    )
    again = reference_run(folder, PROMPT)
    assert torch.equal(again.logits, expected.logits), "transformers reads these names"
    request = SingleRequest(make_config(folder, model_impl="vllm"), len(PROMPT))
    logits = request.run_chunks(PROMPT, [], ListSink(frozenset()))
    if family != "gemma3_vl":  # transformers does not cap these
        assert relative_error(logits, expected.logits) <= MOST_ERROR
    assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))


ADAPTER = {"base_model_name_or_path": "some/model", "peft_type": "LORA"}


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_no_model(file: str, has_config: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    (folder / "model.safetensors").rename(folder / file)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    if not has_config:
        (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"only an adapter .* of 'some/model'; merge it, or"):
        get_model(vllm_config=make_config(folder))


def test_an_adapter_beside_its_model_is_left_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    expected = streams_of(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"base_model.model.x.lora_A": torch.ones(3)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    check_streams(folder, expected)

"""Classes and values: LLM.classify, LLM.reward and LLM.encode against the heads of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.harness import check_nothing_is_left, engine, random_prompts
from tests.grids import at_night
from tests.models.checkpoints import FAMILIES, make_transformers_model, save_tokenizer
from tests.models.oracle import reference_run, relative_error
from vllm import LLM, ClassificationRequestOutput

PROMPTS = random_prompts(58, [1, 17, 40, 97, 33])
IDS = [prompt["prompt_token_ids"] for prompt in PROMPTS]
PAD = 11
SIGMOID = torch.sigmoid
NN = "torch.nn.modules"
AUTO = {
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
}
_BY_DAY = {"llama", "qwen3_5", "gemma3_vl", "minicpm3", "gpt2", "jamba", "qwen3_moe"}


def with_heads() -> Iterator[Any]:
    """Yield families and kinds of head that transformers has, and that have a final norm."""
    for family, names in FAMILIES.items():
        for kind, auto in AUTO.items():
            is_there = getattr(transformers, names.config_class) in auto._model_mapping
            if is_there and family != "openai_gpt":
                yield (family, kind) if family in _BY_DAY else at_night(family, kind)


def make_head(folder: Path, family: str, kind: str, num_labels: int = 3, **entries: Any) -> Any:
    """Write a checkpoint of a family with a classifier; returns the model."""
    whole = make_transformers_model(family)
    config = whole.config
    config.num_labels = num_labels
    for name, value in entries.items():
        setattr(config.get_text_config() if name == "pad_token_id" else config, name, value)
    model = AUTO[kind].from_config(config).float().eval()
    model.base_model.load_state_dict(whole.base_model.state_dict())
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.startswith(("score", "classifier")):
            weight.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def classify(llm: LLM, prompts: Any = IDS) -> list[torch.Tensor]:
    outputs = llm.encode(prompts, "classify", use_activation=False)
    return [output.outputs.data for output in outputs]


@pytest.mark.parametrize(("family", "kind"), list(with_heads()))
def test_scores_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    model = make_head(tmp_path, family, kind)
    task: Any = "classify" if kind == "sequence" else "token_classify"
    for options in ({}, {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 40}):
        with engine(tmp_path, **options) as llm:
            for _ in range(2):
                outputs = llm.encode(IDS, task, use_activation=False)
                for ids, output in zip(IDS, outputs, strict=True):
                    assert output.prompt_token_ids == ids
                    error = relative_error(output.outputs.data, logits_of(model, ids))
                    assert error <= 1e-4


def test_as_a_module_of_transformers(tmp_path: Path) -> None:
    model = make_head(tmp_path, "qwen3", "sequence")
    with engine(tmp_path, model_impl="transformers") as llm:
        for ids, scores in zip(IDS, classify(llm), strict=True):
            assert relative_error(scores, logits_of(model, ids)) <= 1e-4


@pytest.mark.parametrize("pad_token_id", [None, PAD, -1])
def test_padding_at_the_end_is_not_read(pad_token_id: int | None, tmp_path: Path) -> None:
    """transformers reads the last token that is not padding, also in a text that ends with it."""
    model = make_head(tmp_path, "llama", "sequence", pad_token_id=pad_token_id)
    prompts = [[5, 6, 7, PAD], [PAD, 5, PAD, PAD, PAD], [PAD, PAD], [5, PAD, 6], *IDS]
    with engine(tmp_path) as llm:
        for ids, scores in zip(prompts, classify(llm, prompts), strict=True):
            assert relative_error(scores, logits_of(model, ids)) <= 1e-4
        data = llm.encode([5, PAD, 6], "token_classify", use_activation=False)[0].outputs.data
        assert data.shape == (3, 3)


@pytest.mark.parametrize(
    ("num_labels", "entries", "activation"),
    [
        (
            1,
            {"sentence_transformers": {"activation_fn": f"{NN}.activation.Sigmoid"}},
            torch.sigmoid,
        ),
        (3, {"sentence_transformers": {"activation_fn": f"{NN}.linear.Identity"}}, lambda x: x),
        (3, {"sbert_ce_default_activation_function": f"{NN}.activation.Sigmoid"}, SIGMOID),
        (3, {"sentence_transformers": {"version": "5.0.0"}}, lambda x: x.softmax(-1)),
        (1, {"sentence_transformers": {"activation_fn": f"{NN}.activation.Tanh"}}, "Tanh'?: known"),
        (3, {"problem_type": "multilabel"}, "problem_type='multilabel': known"),
    ],
)
def test_what_cross_encoders_store(
    num_labels: int, entries: dict[str, Any], activation: Any, tmp_path: Path
) -> None:
    model = make_head(tmp_path, "llama", "sequence", num_labels)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    with engine(tmp_path) as llm:
        if isinstance(activation, str):
            with pytest.raises(ValueError, match=activation):
                llm.classify(PROMPTS)
        else:
            for ids, output in zip(IDS, llm.classify(PROMPTS), strict=True):
                probs = torch.tensor(output.outputs.probs)
                assert (probs - activation(logits_of(model, ids))).abs().max() <= 1e-4
        for ids, output in zip(IDS, llm.reward(PROMPTS), strict=True):
            assert (output.outputs.data - logits_of(model, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("num_labels", "problem", "activation"),
    [
        (3, None, lambda scores: scores.softmax(-1)),
        (3, "single_label_classification", lambda scores: scores.softmax(-1)),
        (3, "multi_label_classification", torch.sigmoid),
        (3, "regression", lambda scores: scores),
        (1, None, lambda scores: scores),
    ],
)
def test_classes(
    num_labels: int,
    problem: str | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
) -> None:
    labels = {index: f"kind {index}" for index in range(num_labels)}
    model = make_head(
        tmp_path, "llama", "sequence", num_labels, problem_type=problem, id2label=labels
    )
    with engine(tmp_path) as llm:
        outputs = llm.classify(PROMPTS)
        raw = llm.classify(PROMPTS, use_activation=False)
        rewards = llm.reward(PROMPTS)
        for ids, output, scores, reward in zip(IDS, outputs, raw, rewards, strict=True):
            expected = logits_of(model, ids)
            assert isinstance(output, ClassificationRequestOutput)
            probs = torch.tensor(output.outputs.probs)
            assert (probs - activation(expected)).abs().max() <= 1e-4
            assert output.outputs.num_classes == num_labels
            assert output.outputs.label == labels[int(expected.argmax())]
            assert (torch.tensor(scores.outputs.probs) - expected).abs().max() <= 1e-4
            assert reward.outputs.data.tolist() == scores.outputs.probs


def value_head(folder: Path, family: str, *, with_bias: bool = True) -> dict[str, torch.Tensor]:
    """Write a causal checkpoint as TRL saves one with a value head; returns the head."""
    make_transformers_model(family).save_pretrained(folder)
    save_tokenizer(folder)
    generator = torch.Generator().manual_seed(2)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    head = {"v_head.summary.weight": torch.randn(1, width, generator=generator)}
    if with_bias:
        head["v_head.summary.bias"] = torch.randn(1, generator=generator)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_value_head_of_trl(family: str, model_impl: str, tmp_path: Path) -> None:
    head = value_head(tmp_path, family, with_bias=family == "llama")
    weight, bias = head["v_head.summary.weight"], head.get("v_head.summary.bias")
    with engine(tmp_path, model_impl=model_impl) as llm:
        each = llm.encode(PROMPTS, "token_classify")
        for ids, output, reward in zip(IDS, each, llm.reward(PROMPTS), strict=True):
            state = reference_run(tmp_path, ids).head_input
            values = torch.nn.functional.linear(state, weight, bias)
            assert relative_error(output.outputs.data, values) <= 1e-4
            last = output.outputs.data[-1]
            assert relative_error(reward.outputs.data, last) <= (model_impl != "auto") * 1e-4
        assert llm.classify([5])[0].outputs.label is None
        assert llm.generate(PROMPTS, use_tqdm=False)[0].outputs[0].token_ids


def test_a_classifier_of_tokens_is_not_asked_about_prompts(tmp_path: Path) -> None:
    model = make_head(tmp_path, "llama", "token")
    with engine(tmp_path) as llm:
        for call in (llm.classify, llm.reward):
            with pytest.raises(ValueError, match=r"classifies tokens.*'token_classify'"):
                call(PROMPTS)
        (probabilities,) = llm.encode(IDS[1], "token_classify")
        expected = logits_of(model, IDS[1]).softmax(-1)
        assert (probabilities.outputs.data - expected).abs().max() <= 1e-4


def test_unknown_heads_are_named(tmp_path: Path) -> None:
    make_head(tmp_path / "model", "llama", "sequence")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    score = weights.pop("score.weight")
    for head, problem in (
        (
            {},
            r"LlamaForSequenceClassification'\]: the checkpoint has no score\.\* or classifier\.\*",
        ),
        ({"score.0.weight": score}, r"has score\.0\.weight, score\.2\.weight"),
        ({"score.dense.weight": score}, r"has score\.dense\.weight, which is no head"),
        ({"score.weight": score / 0}, r"the head score\.weight has values that are not finite"),
        ({"score.weight": score[:2]}, r"does not fit config.json: num_labels=3, hidden_size=72"),
        ({"score.weight": score.to(torch.int8)}, r"weight 'score.weight' is torch.int8"),
    ):
        more = {"score.2.weight": score[:, :3]} if "score.0.weight" in head else {}
        tensors = {name: tensor.contiguous() for name, tensor in {**head, **more}.items()}
        save_file({**weights, **tensors}, path, metadata={"format": "pt"})
        with engine(tmp_path / "model") as llm:
            for call in (llm.classify, llm.reward):
                with pytest.raises(ValueError, match=problem):
                    call(PROMPTS)
            assert len(llm.embed(PROMPTS)) == len(PROMPTS)
            check_nothing_is_left(llm)


def test_options_of_vectors_are_refused(tmp_path: Path) -> None:
    make_head(tmp_path, "llama", "sequence")
    with engine(tmp_path) as llm:
        for name, value in (("pooling", "last"), ("normalize", True), ("dimensions", 4)):
            options: Any = {name: value}
            with pytest.raises(ValueError, match=f"{name}=.* with pooling_task='classify'"):
                llm.encode(PROMPTS, "classify", **options)
    problem = "load_format='dummy' gives no head"
    with engine(tmp_path, load_format="dummy") as llm, pytest.raises(ValueError, match=problem):
        llm.classify(PROMPTS)


@pytest.mark.parametrize("kind", ["sequence", at_night("token"), "value"])
def test_new_weights_do_not_leave_an_old_head_behind(kind: str, tmp_path: Path) -> None:
    """A head with other values is refused: the front end has read the first one."""
    first, second = tmp_path / "first", tmp_path / "second"
    if kind == "value":
        make_transformers_model("llama").save_pretrained(first)
        save_tokenizer(first)
    else:
        make_head(first, "llama", kind)
    weights = load_file(first / "model.safetensors")
    if kind == "value":
        weights["v_head.summary.weight"] = torch.randn(1, 72)
        save_file(weights, first / "model.safetensors", {"format": "pt"})
    heads = {name for name in weights if name.startswith(("score.", "v_head."))}
    trunk = {name: one if name in heads else one * 1.1 for name, one in weights.items()}
    shutil.copytree(first, second)
    task: Any = "classify" if kind == "sequence" else "token_classify"

    def scores(llm: LLM) -> list[torch.Tensor]:
        return [one.outputs.data for one in llm.encode(IDS, task, use_activation=False)]

    save_file(trunk, second / "model.safetensors", {"format": "pt"})
    with engine(second) as llm:
        fresh = scores(llm)
    with engine(first) as llm:
        before = scores(llm)
        for name in heads:
            other = trunk | {name: trunk[name] + 0.5}
            save_file(other, second / "model.safetensors", {"format": "pt"})
            for update in (other, second):
                with pytest.raises(ValueError, match=f"'{name}' has other values and cannot be"):
                    llm.update_weights(update)
            shape = {name: tuple(other[name].shape)}
            with pytest.raises(ValueError, match=f"'{name}' cannot be replaced: .* leave it out"):
                llm.collective_rpc(lambda worker, forms=shape: worker._weights.check_forms(forms))
        assert all(map(torch.equal, scores(llm), before))
        llm.update_weights({name: one for name, one in trunk.items() if name not in heads})
        assert all(map(torch.equal, scores(llm), fresh))
        llm.update_weights(weights)
        assert all(map(torch.equal, scores(llm), before))


@pytest.mark.parametrize("is_used_before", [True, False])
def test_a_head_that_was_overwritten_is_refused(is_used_before: bool, tmp_path: Path) -> None:
    """A trainer writes each checkpoint into the folder with which the engine started."""
    model = make_head(tmp_path, "llama", "sequence")
    expected = [logits_of(model, ids) for ids in IDS]
    with engine(tmp_path) as llm:
        if is_used_before:
            classify(llm)
        weights = load_file(tmp_path / "model.safetensors")
        changed = {name: one * 0.9 + 0.05 for name, one in weights.items()}
        save_file(changed, tmp_path / "new", {"format": "pt"})
        (tmp_path / "new").rename(tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"'score\.weight' has other values and cannot be"):
            llm.collective_rpc("reload_weights")
        for scores, right in zip(classify(llm), expected, strict=True):
            assert relative_error(scores, right) <= 1e-4

"""A model class of another package, registered, through LLM: values, errors, its capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.models import test_out_of_tree
from tests.models.oracle import reference_run, relative_error
from vllm import ModelRegistry
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.sequence import IntermediateTensors

Checkpoint = Callable[..., Path]
AuthorsModel = test_out_of_tree.AuthorsModel
ARCHITECTURE = {"architectures": ["AuthorsForCausalLM"]}


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})


@pytest.mark.parametrize("form", ["class", "name"])
@pytest.mark.parametrize("budget", [16, 512])
def test_a_registered_class_gives_transformers_values(
    form: str, budget: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It collects the streams itself (``SupportsEagle3``); ids in any order, duplicates too."""
    name = f"{AuthorsModel.__module__}:AuthorsModel"
    ModelRegistry.register_model("AuthorsForCausalLM", AuthorsModel if form == "class" else name)
    folder = checkpoint("llama")
    layers = [3, 0, 1, 3]
    arguments = {"hf_overrides": ARCHITECTURE, "max_num_batched_tokens": budget}
    prompts = random_prompts(1, [33, 5, 70])
    with engine(folder, **arguments, **extraction_config(layers, tmp_path)) as llm:
        outputs = llm.generate(prompts, with_output_tokens(6), use_tqdm=False)
        cut_short = llm.generate(prompts, greedy(0), use_tqdm=False)
    for prompt, output, short in zip(prompts, outputs, cut_short, strict=True):
        generated = list(output.outputs[0].token_ids)
        tokens = prompt["prompt_token_ids"] + generated[:-1]
        reference = reference_run(folder, tokens)
        start = len(prompt["prompt_token_ids"])
        assert reference.logits[start - 1 :].argmax(-1).tolist() == generated
        rows = rows_of(output)
        for column, layer in enumerate(layers):
            assert relative_error(rows[:, column], reference.streams[layer]) <= 1e-4
        assert torch.equal(rows_of(short), rows[:start])


def test_streams_that_the_model_does_not_hand_out_are_an_error(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """This author forgot the stream after the last layer: no file holds anything else for it."""
    ModelRegistry.register_model("AuthorsForCausalLM", AuthorsModel)
    arguments = {"hf_overrides": ARCHITECTURE, **extraction_config([4, 1], tmp_path)}
    with engine(checkpoint("llama"), **arguments) as llm:
        (output,) = llm.generate([[1, 2, 3]], greedy(), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    assert "1 auxiliary hidden states for the layer ids [1, 4]" in str(completion.stop_reason)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_hand_out_streams_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AuthorsModel, "supports_eagle3", False)
    ModelRegistry.register_model("AuthorsForCausalLM", AuthorsModel)
    arguments: dict[str, Any] = {"hf_overrides": ARCHITECTURE}
    with (
        pytest.raises(ValueError, match=r"AuthorsModel cannot hand out .*SupportsEagle3"),
        engine(checkpoint("llama"), **arguments, **extraction_config([1], tmp_path)),
    ):
        pass
    with engine(checkpoint("llama"), **arguments) as llm:
        assert llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)[0].finished


def test_a_class_that_cannot_be_imported_says_how_to_register(checkpoint: Checkpoint) -> None:
    ModelRegistry.register_model("AuthorsForCausalLM", "no_such_package.models:AuthorsModel")
    with (
        pytest.raises(ValueError, match=r"no_such_package.*cannot be imported.*general_plugins"),
        engine(checkpoint("llama"), hf_overrides=ARCHITECTURE),
    ):
        pass


class ConstantModel(nn.Module, EagleModelMixin):
    """Layer i gives rows of i, as in upstream's own test; no attention at all."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], self.config.hidden_size
        )
        self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> Any:
        shape = (len(input_ids), self.config.hidden_size)
        # Whatever the engine's dtype is.
        aux = [torch.full(shape, layer).bfloat16() for layer in self.aux_hidden_state_layers]
        hidden = torch.full(shape, self.config.num_hidden_layers).bfloat16()
        return (hidden, aux) if aux else hidden


class ConstantLlama(LlamaForCausalLM):
    """Puts another module where Llama has its layers."""

    def _init_model(self, vllm_config: Any, prefix: str = "", layer_type: Any = None) -> nn.Module:
        return ConstantModel(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Any) -> set[str]:
        return set()


class MarkingLlama(LlamaForCausalLM):
    """Marks layers, but nothing in it hands them out."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.marked = layers


class OtherLayers(LlamaForCausalLM):
    def _init_model(self, vllm_config: Any, prefix: str = "", layer_type: Any = None) -> nn.Module:
        return super()._init_model(vllm_config, prefix, layer_type=nn.Linear)


def test_a_module_of_its_own_inside_a_class_of_ours(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ModelRegistry.register_model("AuthorsForCausalLM", ConstantLlama)
    folder = checkpoint("llama", num_hidden_layers=12)
    arguments = {"hf_overrides": ARCHITECTURE, "load_format": "dummy"}
    layers = [5, 2, 10]
    with engine(folder, **arguments, **extraction_config(layers, tmp_path)) as llm:
        outputs = llm.generate(random_prompts(1, [33, 5]), greedy(1), use_tqdm=False)
    for output in outputs:
        rows = rows_of(output)
        expected = torch.tensor(layers, dtype=rows.dtype)[None, :, None]
        assert torch.equal(rows, expected.expand_as(rows))


def test_a_class_that_an_option_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In the place of the architecture's own, in this engine alone."""
    arguments: dict[str, Any] = {
        "model_class_overrides": {"LlamaForCausalLM": f"{__name__}:ConstantLlama"},
        "load_format": "dummy",
    }
    folder = checkpoint("llama")
    with engine(folder, **arguments, **extraction_config([3, 1], tmp_path)) as llm:
        (output,) = llm.generate([[1, 2]], greedy(), use_tqdm=False)
    assert rows_of(output)[0, :, 0].tolist() == [3.0, 1.0]
    with engine(folder) as llm:
        assert type(core_of(llm).executor.worker.model_runner.model) is LlamaForCausalLM


@pytest.mark.parametrize("target", ["", "no_such_module:A", "vllm:NoClass", "LlamaForCausalLM"])
def test_a_class_that_an_option_names_and_is_not_there(target: str, checkpoint: Checkpoint) -> None:
    with (
        pytest.raises(ValueError, match="LlamaForCausalLM"),
        engine(checkpoint("llama"), model_class_overrides={"LlamaForCausalLM": target}),
    ):
        pass


def test_a_class_that_marks_layers_and_hands_out_none(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ModelRegistry.register_model("AuthorsForCausalLM", MarkingLlama)
    arguments: dict[str, Any] = {"hf_overrides": ARCHITECTURE}
    with engine(checkpoint("llama"), **arguments, **extraction_config([1, 2], tmp_path)) as llm:
        (output,) = llm.generate([[1, 2]], greedy(), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert "MarkingLlama returned no auxiliary hidden states" in str(output.outputs[0].stop_reason)


def test_layers_of_somebody_else_are_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ModelRegistry.register_model("AuthorsForCausalLM", OtherLayers)
    with (
        pytest.raises(ValueError, match=r"OtherLayers.*layer_type=Linear.*make_layer"),
        engine(checkpoint("llama"), hf_overrides=ARCHITECTURE),
    ):
        pass


def test_streams_that_the_mixin_collects() -> None:
    mixin = EagleModelMixin()
    mixin._set_aux_hidden_state_layers((0, 2))
    hidden, residual = torch.ones(3, 4), torch.full((3, 4), 2.0)
    aux: list[torch.Tensor] = []
    for layer_id, rest in ((0, None), (1, residual), (2, residual)):
        aux = mixin._maybe_add_hidden_state(aux, layer_id, hidden, rest)
    hidden.zero_()
    assert [stream.unique().tolist() for stream in aux] == [[1.0], [3.0]]
    empty = make_empty_intermediate_tensors_factory(["a", "b"], 5)(2, torch.float16, hidden.device)
    assert isinstance(empty, IntermediateTensors)
    assert empty["b"].shape == (2, 5)
    assert empty["b"].dtype is torch.float16

"""Weights from a checkpoint to their replacement under a running engine, through the engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.models import test_out_of_tree
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import FORMATS, Format, Packed, quantise_checkpoint
from tests.models.test_quantization import edit_weights
from vllm import LLM, ModelRegistry
from vllm.model_executor.layers.quantization import quantization
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    Reader,
    StorageFormat,
    join_halves,
)
from vllm.model_executor.layers.weight import weights_of
from vllm.model_executor.model_loader.checkpoint import iterate_weights
from vllm.model_executor.model_loader.loader import load_checkpoint
from vllm.model_executor.model_loader.stored_weights import stored_weights
from vllm.model_executor.utils import WeightFormatError, WeightShapeError
from vllm.ops.linear import prefers_panels
from vllm.ops.packed_linear import PackedExperts, PackedWeight, unpacks_weights

CPU = torch.device("cpu")
PROMPTS = random_prompts(5, [70, 3, 41])

Stored = torch.Tensor | PackedWeight | PackedExperts


class Answer(NamedTuple):
    rows: list[torch.Tensor]
    logprobs: list[Any]


def model_of(llm: LLM) -> Any:
    return core_of(llm).executor.worker.model_runner.model


def answer(llm: LLM) -> Answer:
    """Rows of all layers, and what is generated after the prompts."""
    num_layers = core_of(llm).vllm_config.model_config.get_total_num_hidden_layers()
    ids = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    rows = [sample.hidden_states for sample in llm.extract(ids, list(range(num_layers + 1)))]
    params = greedy(5, logprobs=3)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return Answer(rows, [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])


@pytest.mark.skipif(not prefers_panels(CPU), reason="plain torch reads no panels")
@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_lies_in_rows_first(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that became panels after it was loaded would take its memory twice."""
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=tied)
    monkeypatch.setattr("vllm.model_executor.layers.weight.make_panels", None)
    with engine(folder) as llm:
        assert model_of(llm).lm_head.weight.dim() == 4


def is_same(one: Answer, other: Answer) -> bool:
    pairs = zip(one.rows, other.rows, strict=True)
    return one.logprobs == other.logprobs and all(torch.equal(*pair) for pair in pairs)


def answer_of(folder: Path, **options: Any) -> Answer:
    with engine(folder, **options) as llm:
        return answer(llm)


# ---- one more storage format


def ternary(weight: torch.Tensor) -> Packed:
    """Codes 0, 1 and 2 for minus one, nothing and one, four in a byte, times the row's scale."""
    scale = weight.abs().mean(1, keepdim=True)
    codes = (weight / scale).round().clamp(-1, 1).add(1).to(torch.uint8)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(len(codes), -1, 4)
    bits = sum(padded[..., i] << 2 * i for i in range(4))
    assert isinstance(bits, torch.Tensor)
    size = torch.tensor(codes.shape[1])
    return {"trits": bits, "step": scale, "size": size}, (codes.double() - 1) * scale.double()


class TernaryFormat(StorageFormat):
    """As :func:`ternary` writes it."""

    name = "ternary"
    required: ClassVar[tuple[str, ...]] = ("trits", "step", "size")

    def unpack(self, stored: Reader) -> PackedWeight:
        bits = stored.get("trits", (torch.uint8,), (None, None))
        columns = int(stored.get("size", (torch.int64,), ()))
        codes = torch.stack([bits >> 2 * i & 3 for i in range(4)], 2).flatten(1)[:, :columns]
        scales = stored.by_group("step", (len(bits), 1), (torch.float32,))
        table = (-1.0, 0.0, 1.0, *[0.0] * 13)
        return PackedWeight(join_halves(codes), scales, columns, columns, table)


def read_ternary(config: Mapping[str, Any]) -> FormatOf:
    return lambda module, names: TernaryFormat()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_one_more_storage_format_is_a_class_and_its_reader(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = {**quantization.READERS, "ternary": read_ternary}
    monkeypatch.setattr(quantization, "READERS", readers)
    plain = make_checkpoint(tmp_path / "plain", family, tokenizer=False)
    form = Format({"quant_method": "ternary"}, ternary)
    stored, dequantised = quantise_checkpoint(plain, form)
    with engine(stored) as llm:
        codes = [weight for weight in weights_of(model_of(llm)) if weight.has_codes]
        assert bool(codes) is unpacks_weights(CPU)
        found = answer(llm)
    for prompt, rows in zip(PROMPTS, found.rows, strict=True):
        streams = reference_run(dequantised, prompt["prompt_token_ids"]).streams
        for layer, stream in enumerate(streams):
            assert relative_error(rows[:, layer], stream) <= 1e-4


# ---- other values under a running engine


class Case(NamedTuple):
    """Two checkpoints that differ in their values, and the options of an engine."""

    family: str
    stored_as: str = ""
    options: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    dtype: torch.dtype = torch.bfloat16

    def checkpoints(self, folder: Path) -> tuple[Path, Path]:
        first, second = (self._one(folder / str(seed), seed) for seed in range(2))
        return first, second

    def _one(self, folder: Path, seed: int) -> Path:
        settings: dict[str, Any] = {"dtype": self.dtype, "tokenizer": False, **self.config}
        plain = make_checkpoint(folder / "plain", self.family, seed=seed, **settings)
        if not self.stored_as:
            return plain
        return quantise_checkpoint(plain, FORMATS[self.stored_as]).stored


TIED = {"tie_word_embeddings": True}
CASES = {
    "panels": Case("llama"),
    "float32": Case("llama", dtype=torch.float32),
    "tied": Case("llama", config=TIED),
    "tied and quantised": Case("llama", options={"head_quantization": "int8"}, config=TIED),
    "head quantised": Case("llama", "gptq", {"head_quantization": "int4"}),
    "quantised at load": Case("llama", options={"quantization": "int4"}),
    "gptq": Case("llama", "gptq"),
    "fp8": Case("llama", "fp8-block"),
    "fp8 as served": Case("llama", "fp8-block", {"activation_quantization": "as_served"}),
    "experts": Case("qwen3_moe"),
    "experts in fp8": Case("qwen3_moe", "fp8-block"),
    "experts in one tensor": Case("qwen3_5_moe"),
    "latent": Case("deepseek_v3"),
    "recurrent": Case("qwen3_5", "int4-groups"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_replaced_gives_the_rows_of_a_fresh_engine(name: str, tmp_path: Path) -> None:
    """Bit for bit, in the memory that the weights had."""
    case = CASES[name]
    if "activation_quantization" in case.options and not unpacks_weights(CPU):
        pytest.skip("activations are rounded for codes alone")
    first, second = case.checkpoints(tmp_path)
    with engine(first, **case.options) as llm:
        before = answer(llm)
        model, config = model_of(llm), core_of(llm).vllm_config
        weights = set(weights_of(model))
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        load_checkpoint(model, config, [second / "model.safetensors"])
        assert set(weights_of(model)) == weights
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
        llm.reset_prefix_cache()
        after = answer(llm)
    assert is_same(after, answer_of(second, **case.options))
    assert not is_same(after, before)


def stored_by_name(llm: LLM, folder: Path) -> dict[str, Stored]:
    """Weights of a checkpoint as the engine's loader sees them."""
    files = [folder / "model.safetensors"]
    return dict(
        stored_weights(core_of(llm).vllm_config.model_config, files, iterate_weights(files))
    )


ATTENTION = "model.layers.1.self_attn"
MLP = "model.layers.1.mlp"
EXPERT = "model.layers.0.mlp.experts.2"
Replace = Callable[[Any, Mapping[str, Stored]], None]


def replace_down(model: Any, stored: Mapping[str, Stored]) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.weight_loader(layer.weight, stored[f"{MLP}.down_proj.weight"])


def replace_values(model: Any, stored: Mapping[str, Stored]) -> None:
    layer = model.model.layers[1].self_attn.qkv_proj
    layer.weight_loader(layer.weight, stored[f"{ATTENTION}.v_proj.weight"], "v")


def replace_expert(model: Any, stored: Mapping[str, Stored]) -> None:
    experts = model.model.layers[0].mlp.experts
    for part, name in enumerate(("gate_proj", "up_proj")):
        tensor = stored[f"{EXPERT}.{name}.weight"]
        experts.load_gate_up(experts.gate_up_proj, tensor, (2, part))
    down = stored[f"{EXPERT}.down_proj.weight"]
    experts.load_down(experts.down_proj, down, (2, 0))


def replace_embedding(model: Any, stored: Mapping[str, Stored]) -> None:
    layer = model.model.embed_tokens
    layer.weight_loader(layer.weight, stored["model.embed_tokens.weight"])


ONE_WEIGHT: dict[str, tuple[Replace, tuple[str, ...]]] = {
    "linear": (replace_down, (f"{MLP}.down_proj.",)),
    "part of a merged one": (replace_values, (f"{ATTENTION}.v_proj.",)),
    "expert": (replace_expert, (f"{EXPERT}.",)),
    "tied embedding": (replace_embedding, ("model.embed_tokens.",)),
}


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *[("linear", name) for name in ("panels", "float32", "gptq", "fp8", "quantised at load")],
        *[("part of a merged one", name) for name in ("panels", "gptq", "fp8")],
        *[("expert", name) for name in ("experts", "experts in fp8")],
        *[("tied embedding", name) for name in ("tied", "tied and quantised")],
    ],
)
def test_one_weight_replaced_gives_the_rows_of_a_fresh_engine(
    which: str, name: str, tmp_path: Path
) -> None:
    case, (replace, prefixes) = CASES[name], ONE_WEIGHT[which]
    first, second = case.checkpoints(tmp_path)
    meant = shutil.copytree(first, tmp_path / "meant")
    others = load_file(second / "model.safetensors")
    changed = {n: tensor for n, tensor in others.items() if n.startswith(prefixes)}
    edit_weights(meant, lambda weights: weights.update(changed))
    with engine(first, **case.options) as llm:
        before = answer(llm)
        replace(model_of(llm), stored_by_name(llm, second))
        stale = answer(llm)
        llm.reset_prefix_cache()
        after = answer(llm)
    fresh = answer_of(meant, **case.options)
    assert is_same(after, fresh)
    assert not is_same(after, before)
    assert not is_same(stale, fresh)  # prefixes were computed by the weight that was there before


@pytest.mark.parametrize("name", ["panels", "gptq", "fp8", "quantised at load", "experts in fp8"])
def test_a_refused_replacement_changes_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    first, second = case.checkpoints(tmp_path)
    with engine(first, **case.options) as llm:
        before = answer(llm)
        model, stored = model_of(llm), stored_by_name(llm, second)
        layer = model.model.layers[1].self_attn.qkv_proj
        good = stored[f"{ATTENTION}.v_proj.weight"]
        assert not isinstance(good, PackedExperts)
        with pytest.raises(WeightShapeError, match="expected"):
            layer.weight_loader(layer.weight, good.narrow(0, 0, good.shape[0] - 1), "v")
        rows, columns = good.shape
        codes = torch.ones(rows, columns, dtype=torch.int8)
        other = PackedWeight(codes, torch.ones(rows, 1), columns, columns)
        if unpacks_weights(CPU):
            with pytest.raises(WeightFormatError, match=r"cannot be replaced:.*a new engine"):
                layer.weight_loader(layer.weight, other, "v")
            if isinstance(good, PackedWeight):
                with pytest.raises(WeightFormatError, match=r"float32"):
                    layer.weight_loader(layer.weight, good.dequantise(torch.float32), "v")
        llm.reset_prefix_cache()
        assert is_same(answer(llm), before)


@pytest.mark.parametrize("is_inside", [False, True])
def test_weights_that_other_engines_rely_on_are_fixed(is_inside: bool, tmp_path: Path) -> None:
    """Else they would load prefixes that other weights computed."""
    first, second = CASES["panels"].checkpoints(tmp_path)
    storing = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "blocks")},
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [storing]},
    }
    transfer = {"kv_role": "kv_both", **(multi if is_inside else storing)}
    with engine(first, kv_transfer_config=transfer) as llm:
        before = answer(llm)
        with pytest.raises(ValueError, match=r"Connector shares what they compute.*a new engine"):
            replace_down(model_of(llm), stored_by_name(llm, second))
        llm.reset_prefix_cache()
        assert is_same(answer(llm), before)


# ---- models that load themselves


class SelfLoading(test_out_of_tree.AuthorsModel):
    """Reads its file alone, past all loaders, and notes what its weights are in a step."""

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for own, part, shard in test_out_of_tree.STACKED:
                if part in name:
                    parameter: Any = parameters[name.replace(part, own)]
                    layer = self.get_submodule(name.replace(part, own).removesuffix(".weight"))
                    sizes = [0, *layer.output_sizes]  # type: ignore[misc]
                    index = "qkv".index(shard) if isinstance(shard, str) else shard
                    start = sum(sizes[: index + 1])
                    parameter.data[start : start + len(tensor)] = tensor
                    break
            else:
                parameters[name].data.copy_(tensor)
        return set(parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.finished = [weight.is_finished for weight in weights_of(self)]
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_loads_itself_is_finished_before_the_first_step(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    ModelRegistry.register_model("LlamaForCausalLM", SelfLoading)
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    with engine(folder, load_format=load_format) as llm:
        (output,) = llm.generate(PROMPTS[:1], greedy(4), use_tqdm=False)
        model = model_of(llm)
    assert model.finished and all(model.finished)
    products = [model.model.layers[i].self_attn.qkv_proj.weight for i in range(2)]
    assert all((weight.dim() == 4) is prefers_panels(CPU) for weight in products)
    if load_format == "auto":
        ids = PROMPTS[0]["prompt_token_ids"] + list(output.outputs[0].token_ids)
        logits = reference_run(folder, ids[:-1]).logits
        assert logits[-4:].argmax(-1).tolist() == ids[-4:]

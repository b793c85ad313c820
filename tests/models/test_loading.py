"""Forms that a checkpoint may have, and the errors that name what is wrong with it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, floats_of, make_config
from tests.models.oracle import reference_run
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.checkpoint import iterate_shapes, iterate_weights
from vllm.model_executor.model_loader.loader import find_weights

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
PROMPT = list(range(3, 40))


def load(folder: Path, **options: Any) -> Any:
    return get_model(vllm_config=make_config(folder, **options))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights of a one-file checkpoint."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, path)


def remove(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", "llama", tokenizer=False)


def last_stream(folder: Path, **options: Any) -> torch.Tensor:
    request = SingleRequest(make_config(folder, **options), len(PROMPT))
    sink = ListSink(frozenset({request.num_layers}))
    request.run(PROMPT, sink)
    return sink.rows(request.num_layers)


def test_shards_give_the_same_values_as_one_file(folder: Path, tmp_path: Path) -> None:
    shards = make_checkpoint(tmp_path / "shards", "llama", tokenizer=False, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(last_stream(shards), last_stream(folder))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_to_the_model_dtype(
    stored: torch.dtype, wanted: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype=stored, tokenizer=False)
    file = load_file(folder / "model.safetensors")
    model = load(folder, dtype=wanted)
    dtype = getattr(torch, wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    mixer = model.model.layers[0].linear_attn
    names = "model.layers.0.linear_attn."
    rows = [file[f"{names}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
    assert torch.equal(floats_of(mixer.in_proj_qkvzba.weight), torch.cat(rows).to(dtype))
    assert torch.equal(mixer.A_log, file[f"{names}A_log"].to(dtype))
    assert torch.equal(mixer.conv1d.weight, file[f"{names}conv1d.weight"][:, 0].to(dtype))


def test_a_missing_weight_is_named_as_in_the_file(folder: Path) -> None:
    edit(folder, remove(K_PROJ))
    with pytest.raises(ValueError, match=r"missing 1 weight\(s\): " + K_PROJ):
        load(folder)


def test_a_missing_weight_of_the_multimodal_layout_has_its_full_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_vl", tokenizer=False)
    name = "model.language_model.layers.0.linear_attn.in_proj_z.weight"
    edit(folder, remove(name))
    with pytest.raises(ValueError, match=name):
        load(folder)


def test_left_over_weights_are_named(folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.9.mlp.gate.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.9\.mlp\.gate\.weight"):
        load(folder)


def in_two_files(folder: Path, ending: str) -> None:
    """Write one weight with other values into a second file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(weights, folder / f"weights-1.{ending}")
    write({K_PROJ: -weights[K_PROJ]}, folder / f"weights-2.{ending}")


def write(weights: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".bin":
        torch.save(weights, path)
    else:
        save_file(weights, path)


def write_index(folder: Path, ending: str, file_of_k_proj: int) -> None:
    first, stem = folder / f"weights-1.{ending}", "pytorch_model" if ending == "bin" else "model"
    names = torch.load(first, weights_only=True) if ending == "bin" else load_file(first)
    places = dict.fromkeys(names, first.name) | {K_PROJ: f"weights-{file_of_k_proj}.{ending}"}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_name_in_two_files_is_read_from_the_one_of_the_index(
    model_impl: str, ending: str, folder: Path
) -> None:
    expected = {1: last_stream(folder)}
    in_two_files(folder, ending)
    with pytest.raises(ValueError, match=rf"{K_PROJ}' .* twice, in .*-1\..* and in .*-2\."):
        load(folder, model_impl=model_impl)
    other = make_checkpoint(folder.parent / "other", "llama", tokenizer=False)
    edit(other, lambda weights: weights.update({K_PROJ: -weights[K_PROJ]}))
    expected[2] = last_stream(other)
    assert not torch.allclose(expected[1], expected[2])
    for file, stream in expected.items():
        write_index(folder, ending, file)
        vllm_config = make_config(folder, model_impl=model_impl)
        files = find_weights(vllm_config)
        assert files is not None
        read = dict(iterate_weights(files))
        assert read.keys() == dict(iterate_shapes(files)).keys()
        save_file(read, other / "model.safetensors")
        assert torch.equal(last_stream(other), stream)
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_weight_that_is_not_in_its_shard_is_named_with_it(
    model_impl: str, ending: str, folder: Path
) -> None:
    """Not read from another shard, which the index does not name for it."""
    in_two_files(folder, ending)
    write_index(folder, ending, 2)
    second = next(folder.glob(f"*-2.{ending}"))
    write({"model.layers.1.unused": torch.ones(3)}, second)
    where = rf"'{K_PROJ}' is missing from {second.name}, where .*index\.json places it"
    with pytest.raises(ValueError, match=where):
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_two_spellings_of_a_name_are_an_error(model_impl: str, folder: Path) -> None:
    short = K_PROJ.removeprefix("model.")
    edit(folder, lambda weights: weights.update({short: -weights[K_PROJ]}))
    with pytest.raises(ValueError, match=rf"is in the checkpoint twice|no place for: {short}"):
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
@pytest.mark.parametrize("name", [K_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_name_with_the_base_once_more_is_an_error(
    model_impl: str, name: str, folder: Path
) -> None:
    edit(folder, lambda weights: weights.update({f"model.{name}": -weights[name]}))
    with pytest.raises(ValueError, match=rf"'{name}' \(as .* is in the checkpoint twice"):
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_experts_in_one_tensor_and_by_themselves_are_an_error(
    model_impl: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "olmoe", tokenizer=False)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    edit(tmp_path, lambda weights: weights.update({name: torch.ones(6, 2 * 136, 96)}))
    with pytest.raises(ValueError, match=rf"'{name}' \(as .* twice|no place for: .*gate_proj"):
        load(tmp_path, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_float_copy_beside_a_quantised_weight_is_an_error(model_impl: str, folder: Path) -> None:
    """Nobody can tell which of them is out of date."""
    quantised, _ = quantise_checkpoint(folder, FORMATS["gptq"])
    load(quantised, model_impl=model_impl)
    edit(quantised, lambda weights: weights.update({K_PROJ: torch.ones(32, 72)}))
    with pytest.raises(ValueError, match=f"weight '{K_PROJ}' is in the checkpoint twice"):
        load(quantised, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_a_file_may_have_any_name(model_impl: str, folder: Path) -> None:
    expected = last_stream(folder, model_impl=model_impl)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(last_stream(folder, model_impl=model_impl), expected)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda weights: weights.update({K_PROJ: torch.ones(31, 72)}))
    with pytest.raises(ValueError) as error:
        load(folder)
    for part in (K_PROJ, "(31, 72)", "(32, 72)"):
        assert part in str(error.value)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_quantised_weights_are_refused(model_impl: str, folder: Path) -> None:
    edit(folder, lambda weights: weights.update({K_PROJ: weights[K_PROJ].to(torch.int8)}))
    with pytest.raises(ValueError, match=rf"{K_PROJ}.*int8"):
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("keep", [0, 5, 200, 20_000])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder, dtype="float32")


def test_a_file_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and fetching it again would not help."""
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: Permission denied"):
        load(folder, dtype="float32")


def test_a_corrupt_header_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"x" * 32
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder, dtype="float32")


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False, max_shard_size="100KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        load(folder)


@pytest.mark.parametrize(
    "content", [{"metadata": {}}, {"weight_map": {"lm_head.weight": 5}}, {"weight_map": {}}]
)
def test_a_broken_index_is_named(content: dict[str, Any], folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index\.json is not an index of weights"):
        load(folder)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model-Q4_K_M.gguf"])
def test_a_folder_without_safetensors_says_what_it_has(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=rf"no \.safetensors or \.bin files.*{name}"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma3_vl", "gpt2"])
@pytest.mark.parametrize("differs", [False, True], ids=["equal", "other"])
def test_a_tied_head_in_the_file_is_used_where_it_differs(
    family: str, differs: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False, tie_word_embeddings=True)

    def add_head(weights: dict[str, torch.Tensor]) -> None:
        embeddings = next(n for n in weights if n.endswith(("embed_tokens.weight", "wte.weight")))
        head = "lm_head.weight"
        if embeddings.startswith("language_model."):
            head = f"language_model.{head}"
        weights[head] = weights[embeddings] + 0.25 * differs

    edit(folder, add_head)
    model = load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differs
    hidden = torch.rand(3, model.config.hidden_size)
    expected = reference_logits(folder, hidden)
    torch.testing.assert_close(model.compute_logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_the_config_of_llama_4s_text_model_ties_its_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama4_vl", tokenizer=False, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def reference_logits(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' head."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model.get_output_embeddings()(hidden)
    return logits


def test_skipped_parts_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5_vl", tokenizer=False)
    extra = {f"mtp.layers.{i}.weight": torch.ones(2) for i in range(3)}
    edit(folder, lambda weights: weights.update(extra))
    with caplog.at_level(logging.INFO, logger="vllm"):
        load(folder)
    assert "Skipped 3 weights named mtp.*" in caplog.text
    assert "Skipped 21 weights named model.visual.*" in caplog.text


SKIPPED: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_5_vl", "mtp.layers.0.mlp.up_proj", {}),
    ("qwen3_5_vl", "model.visual.blocks.0.mlp.up_proj", {}),
    ("gemma3_vl", "vision_tower.encoder.layers.0.mlp.up_proj", {}),
    ("gemma3_vl", "model.vision_tower.encoder.layers.0.mlp.up_proj", {}),
    ("deepseek_v3", "model.layers.4.mlp.up_proj", {"num_nextn_predict_layers": 1}),
    ("glm4_moe", "layers.4.mlp.up_proj", {"num_nextn_predict_layers": 1}),
]


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
@pytest.mark.parametrize(("family", "module", "options"), SKIPPED)
def test_what_is_skipped_is_not_looked_at(
    family: str, module: str, options: dict[str, Any], model_impl: str, tmp_path: Path
) -> None:
    """Tensors of a tower may be damaged, be there twice, or mean nothing by the config."""
    folder = make_checkpoint(tmp_path, family, tokenizer=False, **options)
    tensors = {
        f"{module}.qweight": torch.zeros(3, 5, dtype=torch.int32),
        f"{module}.weight": torch.ones(3, 5).to(torch.float8_e4m3fn),
        f"{module}.bias": torch.zeros(3, dtype=torch.complex64),
    }
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    for file in ("b", "c"):
        save_file(tensors, folder / f"{file}.safetensors")
    content = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    content["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(content))
    load(folder, model_impl=model_impl)
    save_file({"model.layers.1.x": torch.ones(2, dtype=torch.complex64)}, folder / "b.safetensors")
    with pytest.raises(ValueError, match=r"weight 'model.layers.1.x' is C64 in the checkpoint"):
        load(folder, model_impl=model_impl)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_dummy_weights_are_reproducible_and_of_sensible_scale(
    family: str, folder: Path, tmp_path: Path
) -> None:
    config = make_checkpoint(tmp_path / "config", family, tokenizer=False)
    (config / "model.safetensors").unlink()
    options = {"load_format": "dummy", "dtype": "float32"}
    first = last_stream(config, seed=1, **options)
    assert torch.equal(first, last_stream(config, seed=1, **options))
    assert not torch.allclose(first, last_stream(config, seed=2, **options))
    assert first.isfinite().all()
    assert 0.1 < first.square().mean().sqrt() < 30.0


def test_loading_leaves_the_default_dtype_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, tokenizer=False)
    load(folder)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("family", "entry", "error"),
    [
        ("llama", {"hidden_act": "tanhexp"}, r"hidden_act='tanhexp'.*supported: 'silu'"),
        (
            "gpt2",
            {"activation_function": "silu"},
            r"^activation_function='silu'.*'gelu_new'.*'relu'",
        ),
        ("llama", {"rope_parameters": {"rope_type": "wavy"}}, r"rope_type='wavy'.*longrope"),
        ("falcon", {"alibi": True}, "alibi=True is not supported; supported: False"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method=.noaux_tc.*limited_greedy",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True.*supported: False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; supported: 1"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type='copy'.*'identity'"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        (
            "gemma4",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention='all' is not supported",
        ),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types.0.='sliding_attent"),
    ],
)
def test_what_a_class_does_not_do_is_named(
    family: str, entry: dict[str, Any], error: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    with pytest.raises(ValueError, match=error):
        load(folder, model_impl="vllm")


def without_prefix(weights: dict[str, torch.Tensor]) -> None:
    """As the first GPT-2 checkpoints have it, causal masks among the weights."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)
    weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)


def test_names_without_the_base_and_masks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", tokenizer=False)
    expected = last_stream(folder)
    edit(folder, without_prefix)
    assert torch.equal(last_stream(folder), expected)


def as_published(weights: dict[str, torch.Tensor]) -> None:
    """Experts as [experts, inputs, outputs]."""
    for name in list(weights):
        if ".experts." in name:
            weights[name] = weights[name].transpose(1, 2).contiguous()


def test_experts_lie_as_published_or_as_transformers_saves_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_vl_moe", tokenizer=False)
    expected = last_stream(folder)
    edit(folder, as_published)
    assert torch.equal(last_stream(folder), expected)


def test_keys_of_layers_that_share_those_of_others_are_skipped(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma4_vl", tokenizer=False)
    expected = last_stream(folder)
    shared = "model.language_model.layers.3.self_attn"
    unused = {f"{shared}.k_proj.weight": torch.ones(2), f"{shared}.k_norm.weight": torch.ones(2)}
    edit(folder, lambda weights: weights.update(unused))
    assert torch.equal(last_stream(folder), expected)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight"),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
        ("falcon", "transformer.h.1.self_attention.query_key_value.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("llama4", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ("stablelm", "model.layers.1.self_attn.q_layernorm.norms.3.weight"),
        ("qwen3_vl_moe", "model.language_model.layers.2.mlp.experts.down_proj"),
    ],
)
def test_converted_weights_are_named_as_in_the_file(family: str, name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    edit(folder, lambda weights: weights.update({name: weights[name][1:]}))
    with pytest.raises(ValueError, match=rf"'{name}' has shape .* in the file, expected"):
        load(folder)
    edit(folder, remove(name))
    with pytest.raises(ValueError, match=rf"missing 1 weight\(s\): {name}"):
        load(folder)


def test_a_checkpoint_in_another_dtype_than_the_model(tmp_path: Path) -> None:
    """Nemotron's norms are stored minus one. The sum is the model's: bfloat16 has fewer digits."""
    folder = make_checkpoint(tmp_path, "nemotron", tokenizer=False)
    edit(folder, lambda weights: weights.update((k, v.bfloat16()) for k, v in weights.items()))
    expected = reference_run(folder, PROMPT).streams[-1]
    torch.testing.assert_close(last_stream(folder, dtype="float32"), expected, rtol=1e-4, atol=1e-3)

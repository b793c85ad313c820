"""LM heads in fewer bits, as a checkpoint has them or as ``head_quantization`` asks for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint, set_config
from tests.models.test_models import NUM_TOKENS, prompt
from tests.models.test_quantization import edit_weights, rounded
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    prepare_heads,
)
from vllm.model_executor.layers.weight import num_weight_bytes, weight_of
from vllm.ops.packed_linear import unpacks_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("int4-order", {"ignore": []}),
        ("gptq", {"lm_head": True}),
        ("fp8-block", {"modules_to_not_convert": []}),
    ],
)
def test_a_head_stays_as_it_is_stored(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    stored, dequantised = quantise_checkpoint(plain, FORMATS[name], modules=("proj", "lm_head"))
    set_config(stored, {**FORMATS[name].config, **settings})
    expected = reference_run(dequantised, prompt()).logits
    request = SingleRequest(make_config(stored, max_model_len=NUM_TOKENS), NUM_TOKENS)
    head: ParallelLMHead = request.model.lm_head
    float_bytes = 4 * head.num_embeddings * head.embedding_dim
    assert (num_weight_bytes(head) < float_bytes / 2) == unpacks_weights(CPU)
    logits = request.run_chunks(prompt(), [], ListSink(frozenset()))
    assert relative_error(logits, expected) <= 1e-4


def test_a_head_of_the_file_is_no_tied_one(tmp_path: Path) -> None:
    """Quantised, beside embeddings that the config ties it to: as with one in floating point."""
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False, tie_word_embeddings=True)
    stored, dequantised = quantise_checkpoint(plain, FORMATS["gptq"])
    table = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    tensors, exact = FORMATS["gptq"].pack(table.flip(0).contiguous())
    packed = {f"lm_head.{leaf}": tensor for leaf, tensor in tensors.items()}
    edit_weights(stored, lambda weights: weights.update(packed))
    edit_weights(dequantised, lambda weights: weights.update({"lm_head.weight": exact.float()}))
    request = SingleRequest(make_config(stored, max_model_len=NUM_TOKENS), NUM_TOKENS)
    assert weight_of(request.model.lm_head.weight).has_codes == unpacks_weights(CPU)
    logits = request.run_chunks(prompt(), [], ListSink(frozenset()))
    assert relative_error(logits, reference_run(dequantised, prompt()).logits) <= 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_head_quantization_rounds_the_head_and_what_is_tied_to_it(
    method: str, tied: bool, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False, tie_word_embeddings=tied)
    meant = shutil.copytree(plain, tmp_path / "meant")
    table = "model.embed_tokens.weight" if tied else "lm_head.weight"
    edit_weights(
        meant, lambda weights: weights.update({table: rounded(weights[table], method).float()})
    )
    expected = reference_run(meant, prompt())
    options = {"head_quantization": method, "max_model_len": NUM_TOKENS}
    request = SingleRequest(make_config(plain, **options), NUM_TOKENS)
    head: ParallelLMHead = request.model.lm_head
    float_bytes = 4 * head.num_embeddings * head.embedding_dim
    assert (num_weight_bytes(head) < 0.6 * float_bytes) == unpacks_weights(CPU)
    sink = ListSink(frozenset([0]))
    logits = request.run_chunks(prompt(), [], sink)
    torch.testing.assert_close(sink.rows(0), expected.streams[0], rtol=1e-6, atol=0)
    assert relative_error(logits, expected.logits) <= 1e-4
    assert relative_error(logits, reference_run(plain, prompt()).logits) > 1e-4


def test_head_quantization_is_an_option_of_every_engine(tmp_path: Path) -> None:
    """It applies to quantised checkpoints too; one table embeds prompts and gives the logits."""
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False, tie_word_embeddings=True)
    stored, _ = quantise_checkpoint(plain, FORMATS["int4-groups"])
    tokens = []
    for options in ({"head_quantization": "int8"}, {}):
        with engine(stored, **options) as llm:
            model = core_of(llm).executor.worker.model_runner.model
            has_codes = weight_of(model.lm_head.weight).has_codes
            assert has_codes == bool(options and unpacks_weights(CPU))
            assert model.lm_head.weight is model.model.embed_tokens.weight
            (output,) = llm.generate(random_prompts(1, [7]), greedy(5, logprobs=1), use_tqdm=False)
        tokens.append([next(iter(each.values())).logprob for each in output.outputs[0].logprobs])
    assert tokens[0] != tokens[1]
    assert tokens[0] == pytest.approx(tokens[1], abs=0.3)


def test_a_head_that_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", tokenizer=False)
    stored, _ = quantise_checkpoint(plain, FORMATS["gptq"], modules=("proj", "lm_head"))
    with pytest.raises(ValueError, match=r"head_quantization"):
        make_config(stored, head_quantization="nf4")
    if unpacks_weights(CPU):
        with pytest.raises(ValueError, match=r"head_quantization='int8'.*stored in floating point"):
            engine(stored, head_quantization="int8").__enter__()
    no_head = torch.nn.Sequential(VocabParallelEmbedding(8, 4))
    with pytest.raises(ValueError, match=r"head_quantization='int8': Sequential has no LM head"):
        prepare_heads(no_head, "int8")

"""Quantised checkpoints in an engine: the same bits, whatever happens around a prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
    with_output_tokens,
)
from tests.grids import at_night
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import reference_run, relative_error
from tests.models.stored_formats import (
    FORMATS,
    MULTIPLES,
    Checkpoints,
    Format,
    Packed,
    compressed,
    quantise_checkpoint,
)
from vllm.ops.packed_linear import unpacks_weights

LAYERS = [0, 2, 4]
PROMPT = random_prompts(11, [203])[0]
CASES = [
    ("llama", "int4-asymmetric", torch.float32),
    ("llama", "gptq-order", torch.bfloat16),
    ("qwen3_5", "fp8-block", torch.float32),
    ("qwen3_5", "awq", torch.bfloat16),
    *(at_night(("llama", name, torch.bfloat16)) for name in FORMATS),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    family, name, dtype = request.param
    sizes = {"hidden_size": 96, "intermediate_size": 160} if name in MULTIPLES else {}
    folder = tmp_path_factory.mktemp(name) / "plain"
    make_checkpoint(folder, family, dtype=dtype, **sizes)
    return quantise_checkpoint(folder, FORMATS[name])


def test_bits_over_batch_chunks_and_prefix(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.stored
    config = extraction_config(LAYERS, tmp_path)
    with engine(folder, enable_prefix_caching=False, **config) as llm:
        (alone,) = llm.generate([PROMPT], with_output_tokens(6), use_tqdm=False)
        expected = rows_of(alone)
    prompts = [*random_prompts(12, [1, 16, 50, 90] * 2), PROMPT]
    with engine(folder, max_num_batched_tokens=57, max_num_seqs=9, **config) as llm:
        *_, among = llm.generate(prompts, with_output_tokens(6), use_tqdm=False)
        assert torch.equal(rows_of(among), expected)
    first = PROMPT["prompt_token_ids"][:100] + [7] * 60
    with engine(folder, **config) as llm:
        llm.generate([{"prompt_token_ids": first}], greedy(2), use_tqdm=False)
        (hit,) = llm.generate([PROMPT], with_output_tokens(6), use_tqdm=False)
        assert hit.num_cached_tokens > 0
        assert torch.equal(rows_of(hit), expected)


def test_rows_are_those_of_the_dequantised_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompt = PROMPT["prompt_token_ids"]
    streams = reference_run(checkpoints.dequantised, prompt).streams
    config = extraction_config(LAYERS, tmp_path)
    with engine(checkpoints.stored, **config) as llm:
        (output,) = llm.generate([PROMPT], greedy(1), use_tqdm=False)
        rows = rows_of(output)
    theirs = reference_run(checkpoints.dequantised, prompt, rows.dtype).streams
    for column, layer in enumerate(LAYERS):
        if rows.dtype is torch.float32:
            assert relative_error(rows[:, column], streams[layer]) <= 1e-4
            continue
        our_error = (rows[:, column].float() - streams[layer]).norm(dim=-1)
        their_error = (theirs[layer].float() - streams[layer]).norm(dim=-1)
        assert our_error.median() <= 1.25 * their_error.median()
        assert our_error.quantile(0.9) <= 1.5 * their_error.quantile(0.9)


GROWN = """
import json, sys
from vllm import LLM

def resident_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

options = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 1}
options |= {"kv_cache_memory_bytes": 1 << 20}
sizes = []
for model in sys.argv[1:]:
    llm = LLM(model, **options)
    llm.generate([[5, 6, 7]], use_tqdm=False)
    sizes.append(resident_bytes())
print(sizes[1] - sizes[0])
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not unpacks_weights(torch.device("cpu")), reason="weights are dequantised")
def test_four_bits_take_the_memory_of_four_bits(tmp_path: Path) -> None:
    """Memory of the process, beyond what it takes with a tiny model."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    none = make_checkpoint(tmp_path / "none", "llama", dtype=torch.bfloat16)
    plain = make_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, **sizes)
    stored = Format(compressed("pack-quantized", **INT4, group_size=128), any_int4)
    grown = []
    for folder in (quantise_checkpoint(plain, stored).stored, plain):
        command = [sys.executable, "-c", GROWN, str(none), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        grown.append(int(done.stdout.splitlines()[-1]))
    assert grown[0] <= 0.36 * grown[1]


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}


def any_int4(weight: torch.Tensor) -> Packed:
    """Some weight of that shape: the packers are slow."""
    rows, columns = weight.shape
    tensors = {
        "weight_packed": torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32),
        "weight_scale": torch.full((rows, columns // 128), 0.01, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, weight

"""Every family with a class of its own on two ranks, against one.

    python -m tests.models.ranks_of_families [FAMILY ...]     # all without; prints a table
    python -m tests.models.ranks_of_families --way stages  # or experts, context, sequence, prefill
    python -m tests.models.ranks_of_families --model-impl transformers  # transformers' modules

Rows at all boundaries, log-probabilities and tokens of two ranks have to be those of one, within
1e-4 of a row's rms, and those of two pipeline stages the same bits; those of ranks that share
tokens, the bits of ranks that do not. In chunks, with prefix hits and alone they have to be the
same bits, unless a module of transformers runs one request after another. It ends with status 1
when a family differs, or is refused that is not listed here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import core_of, greedy
from tests.models.families import FAMILIES
from tests.models.kinds_of_run import Family
from tests.models.oracle import relative_error

WAYS: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "context": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "enable_sequence_parallel": True},
    "prefill": {"prefill_context_parallel_size": 2},
}
"""Options of the engine that is compared with one process."""
COMPARED_WITH = {"sequence": WAYS["tensor"]}
"""Options of the engine with which that of some ways is compared instead."""
SAME_BITS = ("stages", "sequence")
_READ_MORE = frozenset(("gemma4", "gemma4_moe", "gemma4_vl", "longcat_flash", "zamba", "zamba2"))
"""Families whose layers read more than the stream, or are no `DecoderBlock`."""
_RECURRENT = ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm")
_IN_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
_SELECTING = ("deepseek_v32", "glm_moe_dsa")
_OWN_HEADS = ("falcon_40b", "gpt2", "gpt_neox", "openai_gpt", "opt", "zamba2")
"""Families of which each rank has keys and values of its own heads."""
REFUSED: Mapping[str, Collection[str]] = {
    "stages": ("gemma4", "gemma4_vl"),  # layers that share caches would be in two stages
    "context": (*_RECURRENT, *_IN_WINDOWS, *_SELECTING, *_OWN_HEADS),
    "sequence": _READ_MORE,
    "prefill": _READ_MORE,
}
"""Families that the engine refuses for each way, for another reason than sizes."""
_WITHOUT_PLAN = (
    *("bamba", "falcon", "falcon_40b", "falcon_h1", "falcon_mamba", "gpt2", "gpt_oss", "hunyuan"),
    *("lfm2", "mamba", "mamba2", "openai_gpt", "opt", "qwen3_vl", "recurrent_gemma", "rwkv"),
    *("stablelm", "xlstm", "zamba", "zamba2"),
)
"""Families whose layers transformers has no tensor-parallel plan for."""
MODULES_REFUSED: Mapping[str, Collection[str]] = {
    "tensor": _WITHOUT_PLAN,
    "stages": REFUSED["stages"],
}
"""The same for modules of transformers."""
MOST_ERROR = 1e-4
TOP = 4
ONE_SEQUENCE = "all requests of a step as one sequence"
"""The way of transformers' modules in which rows are the same bits in any chunks."""


def results(family: Family, **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
    with family.engine(**options) as llm:
        has_head = core_has_head(llm)
        top = TOP if has_head else None
        samples = list(llm.extract(family.asked(), layers=family.layers, top_logprobs=top))
        rows = [sample.hidden_states for sample in samples]
        alone = next(iter(llm.extract(family.asked(1), layers=family.layers))).hidden_states
        check_same(llm, alone, rows[1], "alone and with a prefix hit")
        if not has_head:
            return rows, None, None
        outputs = llm.generate(family.asked(), greedy(max_tokens=6), use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        return rows, [sample.top_logprobs for sample in samples], tokens


def check_same(llm: Any, rows: torch.Tensor, others: torch.Tensor, what: str) -> None:
    """Rows have to be the same bits, or nearly the same where the engine says so."""
    way = getattr(core_of(llm).executor.worker.model_runner.model, "way", ONE_SEQUENCE)
    away = relative_error(rows, others)
    assert away <= (0.0 if way == ONE_SEQUENCE else MOST_ERROR), f"{what}: {away:.0e} away"


def core_has_head(llm: Any) -> bool:
    return core_of(llm).executor.no_head_reason() is None


def compare(family: Family, way: str) -> str:
    rows, logprobs, tokens = results(family, **COMPARED_WITH.get(way, {}))
    ranks = WAYS[way]
    other_rows, other_logprobs, other_tokens = results(family, **ranks)
    with family.engine(**ranks, max_num_batched_tokens=16) as llm:
        for chunked, whole in zip(family.extracted(llm, family.layers), other_rows, strict=True):
            check_same(llm, chunked, whole, "chunks")
    errors = [
        relative_error(o[:, i], r[:, i])
        for r, o in zip(rows, other_rows, strict=True)
        for i in range(r.shape[1])
    ]
    most = 0.0 if way in SAME_BITS else MOST_ERROR
    assert max(errors) <= most, f"rows are {max(errors):.0e} of the rms away"
    if logprobs is not None:
        away = max(
            float((a - b).abs().max()) for a, b in zip(logprobs, other_logprobs, strict=True)
        )
        assert away <= 1e-3, f"log-probabilities are {away:.0e} away"
        assert tokens == other_tokens, "other tokens"
    return f"rows {max(errors):.0e}"


def checked(name: str, folder: Path, way: str = "tensor", model_impl: str = "auto") -> str:
    """Compare a family in words. ValueError: it is refused."""
    with redirect_stdout(StringIO()):
        family = Family(name, folder, **overrides(name, way))
        family.model_impl = model_impl
        return compare(family, way)


EVEN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "gemma4_moe": {"num_global_key_value_heads": 2},
    "kimi_linear": {"linear_num_heads": 4},
    "nemotron_h": {"n_groups": 2},
    "xlstm": {"num_heads": 6},
    "zamba": {"n_mamba_heads": 4},
}
"""Entries of configs whose tiny checkpoints have sizes that two ranks do not divide."""


def overrides(name: str, way: str) -> dict[str, Any]:
    """Return entries of the config that the way needs: two ranks spread the tokens of one head."""
    entries = {} if way == "stages" else dict(EVEN_SIZES.get(name, {}))
    heads, config = "num_key_value_heads", FAMILIES[name].config
    cannot = "kv_lora_rank" in config or name == "zamba2"  # its heads have to be as many
    if way == "context" and heads in config and not cannot:
        entries |= {one: 1 for one in config if one in (heads, "num_global_key_value_heads")}
    return entries


def refused_families(way: str, model_impl: str) -> Collection[str]:
    return (REFUSED if model_impl == "auto" else MODULES_REFUSED).get(way, ())


def is_refusal(error: Exception, options: Mapping[str, Any]) -> bool:
    """Return whether an engine refused these options, by the name and value of one."""
    named = (f"{name}={value}" for name, value in options.items())
    return isinstance(error, ValueError) and any(one in str(error) for one in named)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--way", choices=list(WAYS), default="tensor")
    parser.add_argument("--model-impl", choices=["auto", "transformers"], default="auto")
    arguments, failed = parser.parse_args(), 0
    refused = refused_families(arguments.way, arguments.model_impl)
    for name in arguments.families:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = checked(name, Path(folder), arguments.way, arguments.model_impl)
            except Exception as error:
                is_known = name in refused and is_refusal(error, WAYS[arguments.way])
                failed += not is_known
                kind = "refused" if is_known else "WRONG"
                result = f"{kind}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(f"{name:24} {time.monotonic() - start:5.1f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

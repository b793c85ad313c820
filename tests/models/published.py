"""Tiny checkpoints as they are published: entries of ``config.json`` of real ones, sizes apart.

    python -m tests.models.published [--model-impl transformers] [NAME ...]   # all without

``published.json`` keeps their spelling, nesting and odd entries (old scalings, names of code in the
checkpoint, entries that nobody reads); layers, widths, heads, experts, windows and vocabularies
are small. Rows at all boundaries, behind a prefix hit and in chunks, and generated tokens are
compared with transformers. It ends with status 1 when one is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import engine, greedy, random_prompts
from tests.models.checkpoints import randomise
from tests.models.every_family import greedy_tokens, streams_between
from tests.models.oracle import relative_error
from vllm.config.model_facts import num_decoder_layers

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
LENGTHS = (61, 9, 34)
SHARED = 48
NEW_TOKENS = 8
MOST_ERROR = 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 2**25,
}


def make_published(folder: Path, name: str) -> Any:
    """Write the checkpoint into ``folder``, with the published config; returns its model."""
    import transformers

    content = json.dumps(CONFIGS[name])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model_class = getattr(transformers, config.architectures[0], None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some are drawn below around the mean of what they were
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = model_class(config)
    randomise(model.float().eval(), 0)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(content)
    return model


def streams_of(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Streams into each decoder layer of the language model, and out of the last, by hooks."""
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    num_layers = num_decoder_layers(model.config.get_text_config(decoder=True))
    lists = (m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList))
    layers = next(each for each in lists if len(each) == num_layers)
    return streams_between(layers, model, token_ids)


def check_rows(llm: Any, model: Any, prompts: list[list[int]], positions: Any = "all") -> None:
    """Rows of all boundaries are those of transformers."""
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [streams_of(model, prompt) for prompt in prompts]
    layers = list(range(len(expected[0])))
    samples = llm.extract(asked, layers=layers, positions=positions)
    for sample, streams in zip(samples, expected, strict=True):
        for rows, stream in zip(sample.hidden_states.unbind(1), streams, strict=True):
            error = relative_error(rows, stream if positions == "all" else stream[positions])
            assert error <= MOST_ERROR, f"rows are {error:.1e} of their rms away"


def check_published(folder: Path, model: Any, model_impl: str = "auto") -> None:
    """AssertionError: the engine's rows or tokens are not those of ``model``."""
    prompts = [prompt["prompt_token_ids"] for prompt in random_prompts(3, LENGTHS)]
    longer = prompts[0][:SHARED] + random_prompts(4, [15])[0]["prompt_token_ids"]
    options = {**OPTIONS, "model_impl": model_impl}
    with engine(folder, **options, max_num_batched_tokens=256) as llm:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        check_rows(llm, model, prompts)
        outputs = llm.generate(asked, greedy(NEW_TOKENS), use_tqdm=False)
        made = [list(output.outputs[0].token_ids) for output in outputs]
        assert made == [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
        check_rows(llm, model, [longer], positions=[SHARED + 2, len(longer) - 1])
    with engine(folder, **options, max_num_batched_tokens=13, max_num_seqs=3) as llm:
        check_rows(llm, model, prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of published.json; all without")
    parser.add_argument("--model-impl", default="auto", help="as the engine's option")
    arguments = parser.parse_args()
    wrong = 0
    for name in arguments.names or CONFIGS:
        outcome = "whole"
        with tempfile.TemporaryDirectory() as folder:
            try:
                model = make_published(Path(folder), name)
                check_published(Path(folder), model, arguments.model_impl)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        wrong += outcome != "whole"
        print(f"{name:24} {outcome}", flush=True)
    print(f"{wrong} with a fault")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Every entry of every family's config, changed one at a time: is it read as transformers reads it?

``python -m tests.models.config_fields [FAMILY ...]`` prints what differs, and what is refused. Each
case is a checkpoint of its own: one entry doubled, one more, halved, turned round, taken away or
set to another word. What transformers cannot build or run is no case. Right are rows of every layer
and logits as transformers has them, or a ValueError that says why not. It ends with status 1 when a
case differs, or when nothing was compared.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.models.checkpoints import make_checkpoint, make_transformers_model
from tests.models.families import FAMILIES, VOCAB_SIZE
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import Reference, reference_run, relative_error

NUM_TOKENS = 75
CHUNKS = [1, 37, 16, 2]
MOST_ERROR = 1e-3
"""Share of the rms; a layer that amplifies its input is not a difference in reading."""
_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_LENGTHS = ("max_position_embeddings", "n_positions")
_SAYS_WHAT_IT_IS = ("architectures", "model_type", "dtype", "transformers_version")
_UNREAD = ("output_hidden_states", "output_attentions", "return_dict", "use_cache")
_UNREAD += ("id2label", "label2id", "problem_type", "chunk_size_feed_forward")
_LEFT_ALONE = {*_TOKENS, *_LENGTHS, *_SAYS_WHAT_IT_IS, *_UNREAD}
_OTHER_LOGITS = {("gemma3_vl", "final_logit_softcapping")}
"""Family and entry: transformers caps the logits of Gemma 3's text checkpoints alone."""
_SEEDS = range(7, 10)
"""Seeds of prompts, tried until one is right: routers, and queries that read the best earlier
tokens, fall the other way where scores are equal up to rounding. A misread entry is never right."""
_OF_FIRST_WEIGHTS = ("rescale_prenorm_residual",)
"""Are to change no row; where they are true, transformers divides weights that it has loaded."""
_ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu")
_SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.3,
    },
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


class Case(NamedTuple):
    """``entry`` of a family's config is ``value``."""

    family: str
    entry: str
    value: Any


Outcome = Literal["right", "differs", "refused", "no case"]


class Finding(NamedTuple):
    """Outcome of a case, and the errors or the reason."""

    outcome: Outcome
    what: str


def changes(value: Any) -> Iterator[Any]:
    """Other values that an entry of the config may have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from sorted({2 * value, value + 1, value // 2} - {value})
    elif isinstance(value, float):
        yield 1.7 * value + 0.13
    elif value is None:
        yield from (True, 2, 0.5)
    elif isinstance(value, str):
        words = _ACTIVATIONS if value in _ACTIVATIONS else ("another",)
        yield from (word for word in words if word != value)
    elif isinstance(value, dict):
        yield from ({**value, key: new} for key, old in value.items() for new in changes(old))
        if "rope_type" in value:
            names = ("rope_theta", "partial_rotary_factor")
            kept = {name: value[name] for name in names if name in value}
            yield from ({**kept, **scaled} for scaled in _SCALED)
    elif isinstance(value, list | tuple) and len(value) > 1:
        yield from (list(value)[::-1], [*value[1:], value[0]], list(value[:-1]))


def cases(families: Sequence[str]) -> list[Case]:
    """All of these families, in an order that is drawn once."""
    found = []
    for family in families:
        config = make_transformers_model(family).config.get_text_config(decoder=True)
        for entry, value in config.to_dict().items():
            if entry not in _LEFT_ALONE and not entry.startswith("_"):
                found += [Case(family, entry, new) for new in changes(value)]
    # With fewer heads some scores are 0 in every prompt.
    found = [case for case in found if case[1:] != ("index_n_heads", 4)]
    random.Random(5).shuffle(found)
    return found


def examine(case: Case, folder: Path) -> Finding:
    """Make the case's checkpoint in ``folder``, and run it both ways."""
    found = Finding("no case", "")
    for seed in _SEEDS:
        found = _examine(case, folder, seed)
        if found.outcome != "differs":
            break
    return found


def _examine(case: Case, folder: Path, seed: int) -> Finding:
    generator = random.Random(seed)
    tokens = [generator.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)]
    try:
        make_checkpoint(folder, case.family, tokenizer=False, **{case.entry: case.value})
        expected = _reference_of(case, folder, tokens)
    except Exception as error:  # whatever transformers says to it
        return Finding("no case", f"{type(error).__name__}: {error}")
    if not expected.logits.isfinite().all():
        return Finding("no case", "transformers' logits are not finite")
    try:
        config = make_config(folder, model_impl="vllm", max_model_len=NUM_TOKENS)
        request = SingleRequest(config, NUM_TOKENS)
    except ValueError as refusal:
        return Finding("refused", str(refusal))
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    logits = request.run_chunks(tokens, CHUNKS, sink)
    assert len(expected.streams) == request.num_layers + 1
    errors = [relative_error(sink.rows(i), rows) for i, rows in enumerate(expected.streams)]
    if (case.family, case.entry) not in _OTHER_LOGITS:
        errors.append(relative_error(logits, expected.logits))
    outcome: Outcome = "right" if max(errors) <= MOST_ERROR else "differs"
    return Finding(outcome, " ".join(f"{error:.0e}" for error in errors))


def _reference_of(case: Case, folder: Path, tokens: list[int]) -> Reference:
    """Reference that transformers makes of the checkpoint, or should make."""
    path = folder / "config.json"
    text = path.read_text()
    if case.entry in _OF_FIRST_WEIGHTS:
        path.write_text(json.dumps({**json.loads(text), case.entry: False}))
    reference = reference_run(folder, tokens)
    path.write_text(text)
    return reference


def main() -> None:
    outcomes: Counter[Outcome] = Counter()
    for case in cases(sys.argv[1:] or sorted(FAMILIES)):
        with tempfile.TemporaryDirectory() as folder:
            finding = examine(case, Path(folder))
        outcomes[finding.outcome] += 1
        if finding.outcome in ("differs", "refused"):
            print(f"{finding.outcome:8} {case}: {finding.what}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    sys.exit(bool(outcomes["differs"]) or not outcomes["right"])


if __name__ == "__main__":
    main()

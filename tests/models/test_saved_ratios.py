"""Every family as transformers saves it when heads have the widths that published models have.

transformers joins and cuts tensors when it loads and saves. What it cuts in the wrong place shows
only if parts have other sizes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.grids import at_night
from tests.models.checkpoints import FAMILIES, make_checkpoint
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import load_reference, reference_run, relative_error

PROMPT = list(range(3, 70))
MOST_ERROR = 1e-3
BY_DAY = {"olmo_hybrid", "qwen3_next", "deepseek_v3", "gpt_neox"}
IN_PIECES = {"olmo_hybrid", "kimi_linear", "bailing_hybrid", "longcat_flash"}
"""Families whose published checkpoints have pieces of what is one tensor in transformers."""
TOGETHER = (
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("linear_key_head_dim", "linear_value_head_dim"),
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ("num_attention_heads", "num_key_value_heads"),
)
"""Entries whose ratio is that of the default config, which is a published one's."""
LEAST_WIDTH = 8
KEEP_HEADS = {"bamba", "gemma4_moe", "granite_moe_hybrid", "helium", "zamba"}
"""Families whose other sizes follow from the attention heads or the hidden size."""


def published_ratios(family: str) -> dict[str, Any]:
    """Return the entries of a small config with the ratios of the published one."""
    small = FAMILIES[family].config
    published = getattr(transformers, FAMILIES[family].config_class)()
    published = published.get_text_config(decoder=True)
    entries: dict[str, Any] = {}
    for names in TOGETHER:
        values = {name: getattr(published, name, None) for name in names if name in small}
        if names[0] == "num_attention_heads" and family in KEEP_HEADS:
            continue
        if len(values) < 2 or not all(isinstance(each, int) for each in values.values()):
            continue
        least = math.gcd(*values.values())
        factor = 1 if "heads" in names[0] else LEAST_WIDTH
        entries |= {name: value // least * factor for name, value in values.items()}
    if "qk_rope_head_dim" in entries and "head_dim" in small:  # the size that is rotated
        entries["head_dim"] = entries["qk_rope_head_dim"]
    heads = entries.get("num_attention_heads")
    if heads is not None and "head_dim" not in small:
        entries["hidden_size"] = heads * 2 * LEAST_WIDTH
    return entries


@pytest.mark.parametrize("family", [n if n in BY_DAY else at_night(n) for n in FAMILIES])
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    entries = published_ratios(family)
    check(make_checkpoint(tmp_path, family, tokenizer=False, **entries), entries)


@pytest.mark.parametrize("family", [n if n in IN_PIECES else at_night(n) for n in FAMILIES])
def test_its_own_format_is_read(family: str, tmp_path: Path) -> None:
    """``save_original_format=False`` writes tensors as its modules have them, and it reads them."""
    entries = published_ratios(family)
    folder = make_checkpoint(tmp_path, family, tokenizer=False, **entries)
    load_reference(folder).save_pretrained(folder, save_original_format=False)
    check(folder, entries)


def check(folder: Path, entries: dict[str, Any]) -> None:
    """Compare the streams with those of transformers."""
    expected = reference_run(folder, PROMPT)
    request = SingleRequest(make_config(folder, model_impl="vllm"), len(PROMPT))
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    request.run(PROMPT, sink)
    for index, stream in enumerate(expected.streams):
        assert relative_error(sink.rows(index), stream) <= MOST_ERROR, f"{index}, {entries}"


def test_convolutions_that_are_cut_right_are_read_too(tmp_path: Path) -> None:
    """As published: q, k and v have their own widths."""
    folder = make_checkpoint(tmp_path, "olmo_hybrid", tokenizer=False)
    path, prefix = folder / "model.safetensors", "model.layers.0.linear_attn."
    expected = reference_run(folder, PROMPT).streams
    weights = load_file(path)
    names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
    parts = [weights[name] for name in names]
    assert [len(part) for part in parts] == [48, 48, 48]
    cut = torch.cat(parts).split([24, 24, 96])
    save_file({**weights, **dict(zip(names, (p.clone() for p in cut), strict=True))}, path)
    request = SingleRequest(make_config(folder), len(PROMPT))
    sink = ListSink(frozenset({1}))
    request.run(PROMPT, sink)
    assert relative_error(sink.rows(1), expected[1]) <= MOST_ERROR
    save_file({**weights, names[1]: weights[names[1]][1:].clone()}, path)
    with pytest.raises(ValueError, match=r"conv1d\.weight' has shape"):
        SingleRequest(make_config(folder), len(PROMPT))

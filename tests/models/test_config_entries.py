"""Entries of config.json that no model can have: refused by the name that the file has for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config

ENTRIES: list[tuple[str, str, Any, str]] = [
    ("bamba", "mamba_n_heads", 0, "mamba_n_heads=0 has to be a whole number above 0"),
    ("bamba", "mamba_d_head", 25, r"\(read there: .*mamba_d_head=25"),
    ("zamba2", "mamba_expand", "nonsense", "mamba_expand='nonsense' has to be"),
    ("jamba", "attn_layer_offset", 7, r"\(read there: attn_layer_offset=7, attn_layer_period"),
    ("kimi_linear", "num_shared_experts", -3, "num_shared_experts=-3 has to be .* at least 0"),
    ("minicpm3", "qk_rope_head_dim", 13, "qk_rope_head_dim=13 has to be even"),
    ("longcat_flash", "num_layers", -1, "num_layers=-1 has to be a whole number above 0"),
    ("gemma3_vl", "intermediate_size", -3, "intermediate_size=-3 has to be"),
]


@pytest.mark.parametrize(("family", "name", "value", "message"), ENTRIES)
def test_the_name_in_the_file_is_told(
    family: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    content = json.loads((folder / "config.json").read_text())
    content.get("text_config", content)[name] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        make_config(folder)

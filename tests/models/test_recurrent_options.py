"""Configs of recurrent families that cannot be served: the error names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from vllm.model_executor.model_loader import get_model

CASES = [
    ("lfm2", {"conv_L_cache": 9}, "conv_L_cache=9 is not supported; supported: 2 to 8"),
    ("lfm2", {"layer_types": ["conv"] * 4 + ["hybrid"]}, r"layer_types\[4\]='hybrid' is not"),
    ("lfm2", {"layer_types": ["conv"] * 4}, r"number of `layer_types` \(4\)"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
    ("mamba", {"conv_kernel": 1}, "conv_kernel=1 is not supported"),
    ("jamba", {"mamba_d_conv": 16}, "mamba_d_conv=16 is not supported"),
    ("olmo_hybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide"),
    ("recurrent_gemma", {"conv1d_width": 9}, "conv1d_width=9 is not supported"),
    ("recurrent_gemma", {"hidden_activation": "tan"}, "hidden_act.*='tan' is not supported"),
    ("recurrent_gemma", {"lru_width": 71}, "num_attention_heads=6 does not divide lru_width=71"),
    ("jamba", {"hidden_act": "tan"}, "hidden_act='tan' is not supported"),
]


@pytest.mark.parametrize(("family", "overrides", "message"), CASES)
def test_the_field_is_named(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    with pytest.raises(ValueError, match=message):
        get_model(vllm_config=make_config(folder, load_format="dummy", hf_overrides=overrides))

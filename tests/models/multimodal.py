"""Models of transformers that read more than text: the text alone, on this engine, type by type.

    python -m tests.models.multimodal [MODEL_TYPE ...]     # all without; prints a table

A tiny checkpoint of every type that ``AutoModelForMultimodalLM`` knows, made by the names of sizes
as in zoo.py, encoders too; served with ``model_impl="auto"`` and held against a pass of the whole
model over text, as every_family.py does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.models import zoo
from tests.models.every_family import Report, check_family, table

MOST_WEIGHTS = 20_000_000
_ENCODER_SIZES: list[tuple[Any, str]] = [
    (32, "hidden_size embed_dim dim d_model width vision_hidden_size"),
    (96, "out_hidden_size"),
    (32, "projector_hidden_size qformer_hidden_size"),
    (48, "intermediate_size mlp_dim"),
    (1, "num_hidden_layers depth num_layers n_layers encoder_layers num_hidden_blocks"),
    (2, "num_attention_heads num_heads n_heads encoder_attention_heads num_key_value_heads"),
    (16, "head_dim num_mel_bins"),
    (28, "image_size"),
    (14, "patch_size"),
    (64, "num_embeddings codebook_size"),
]
_SIZES = {name: value for value, names in _ENCODER_SIZES for name in names.split()}
_SECTIONED = {
    **dict.fromkeys(("glm4v", "glm46v", "glmga", "glm4v_moe"), 0.5),
    **dict.fromkeys(("glm_ocr", "paddleocr_vl", "qwen2_5_omni_thinker"), 1.0),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), 1.0),
}
"""Types whose rotation has three sections of what they rotate of a head -> that part."""
_NO_CAUSAL_MODEL = frozenset({"shieldgemma2"})
"""Named under a class whose checkpoints are those of another type."""


def model_types() -> list[str]:
    """Every key of the mapping, in order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - _NO_CAUSAL_MODEL)


def tiny_config(model_type: str) -> Any:
    """A small config of that type, and of all parts of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    example = config_class()
    if not config_class.sub_configs:
        return config_class(**_text_sizes(model_type, example))
    text = example.get_text_config(decoder=True)
    parts = {}
    for name in config_class.sub_configs:
        part = getattr(example, name, None)
        if part is not None:
            sizes = _text_sizes(model_type, part) if part is text else _encoder_sizes(part)
            parts[name] = {**sizes, "model_type": part.model_type}
    return config_class(**parts)


def _text_sizes(model_type: str, part: Any) -> dict[str, Any]:
    known = zoo._settings_of(type(part))
    sizes = {name: value for name, value in zoo.SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "cross_attention_layers" in known:
        sizes["cross_attention_layers"] = [1]
    if (share := _SECTIONED.get(model_type)) is not None:
        angles = int(zoo.SIZES["head_dim"] * share) // 2
        third = angles // 3
        sizes["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": share,
            "mrope_section": [angles - 2 * third, third, third],
        }
    return {**sizes, **zoo.EXTRA.get(part.model_type, {})}


def _encoder_sizes(part: Any) -> dict[str, Any]:
    known = zoo._settings_of(type(part))
    return {name: value for name, value in _SIZES.items() if name in known}


def make_checkpoint(folder: Path, model_type: str, seed: int = 0) -> Any:
    """Write a float32 checkpoint whose every weight shows; returns its model."""
    from transformers import AutoModelForMultimodalLM

    config = tiny_config(model_type)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        meta = AutoModelForMultimodalLM.from_config(config)
    size = sum(parameter.numel() for parameter in meta.parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"no tiny config is known: it would have {size:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config).float().eval()
    zoo.randomise(model, seed)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return model


def check_type(model_type: str, folder: Path, model_impl: str = "auto") -> Report:
    """Build it, serve it, compare it with a pass of the whole model over text."""
    options: dict[str, Any] = {"bfloat16": False, "model_impl": model_impl}
    return check_family(model_type, folder, make=make_checkpoint, **options)


def main() -> None:
    reports = []
    for model_type in sys.argv[1:] or model_types():
        with tempfile.TemporaryDirectory() as folder:
            reports.append(check_type(model_type, Path(folder)))
        print(table(reports[-1:]).splitlines()[0], flush=True)
    print(table(reports))
    sys.exit(any(report.outcome == "wrong" for report in reports))


if __name__ == "__main__":
    main()

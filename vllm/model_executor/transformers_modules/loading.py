"""A module of transformers with its weights, by transformers' own loading, and strictly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.checkpoint import checkpoint_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MOST_NAMES_SHOWN = 8


def load_causal_lm(vllm_config: VllmConfig) -> Any:
    """transformers' causal model of the config, in its dtype; with ``load_format="dummy"`` the
    weights are what transformers initialises them to."""
    from transformers import AutoModelForCausalLM

    model_config = vllm_config.model_config
    options: dict[str, Any] = {
        "dtype": model_config.dtype,
        "attn_implementation": "eager",
        "trust_remote_code": model_config.trust_remote_code,
    }
    if vllm_config.load_config.load_format == "dummy":
        return AutoModelForCausalLM.from_config(model_config.hf_config, **options)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            _place(vllm_config),
            config=model_config.hf_config,
            output_loading_info=True,
            use_safetensors=True,
            **options,
        )
    except (RuntimeError, OSError, KeyError, AttributeError) as error:
        raise ValueError(
            f"model={model_config.model!r}: transformers cannot load its weights: {error}"
        ) from error
    _check_complete(report)
    return model


def _place(vllm_config: VllmConfig) -> str | Path:
    """Code of the checkpoint's own is fetched by its hub id; weights are in the folder."""
    model_config = vllm_config.model_config
    if model_config.trust_remote_code:
        return model_config.model
    return checkpoint_folder(model_config, vllm_config.load_config)


def _check_complete(report: dict[str, Any]) -> None:
    complaints = []
    for key, said in (
        ("missing_keys", "is missing {} weight(s): {}"),
        ("unexpected_keys", "has {} weight(s) that the model has no place for: {}"),
        ("mismatched_keys", "has {} weight(s) of another shape: {}"),
        ("error_msgs", "cannot be loaded ({} errors): {}"),
    ):
        found = sorted(map(str, report.get(key) or ()))
        if found:
            complaints.append(said.format(len(found), _listing(found)))
    if complaints:
        raise ValueError("the checkpoint " + "; and ".join(complaints))


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

"""LoadConfig: the source of the weights."""

from __future__ import annotations

from typing import Literal

from vllm.utils.checked import config


@config()
class LoadConfig:
    """Finding and reading the checkpoint."""

    load_format: Literal["auto", "safetensors", "pt", "dummy"] = "auto"
    """Files to read: "safetensors"; "pt" (pytorch_model.bin); "auto": safetensors if the checkpoint
    has any, else pt. "dummy": none, random weights are made."""
    download_dir: str | None = None
    """Folder for weights from the hub. Default: the hub's own cache, where a model's config and
    tokenizer always are."""
    ignore_patterns: list[str] | str | None = None
    """Files that are not downloaded, as shell patterns."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while loading."""

"""LoadConfig: where weights come from."""

from __future__ import annotations

from typing import Literal

from vllm.utils.checked import config


@config()
class LoadConfig:
    """How the checkpoint is found and read."""

    load_format: Literal["auto", "safetensors", "pt", "dummy"] = "auto"
    """"safetensors" and "pt" (pytorch_model.bin) read the checkpoint, "auto" its safetensors where
    it has any, "dummy" makes random weights."""
    download_dir: str | None = None
    """Folder for downloads from the hub. None: the hub's own cache."""
    ignore_patterns: list[str] | str | None = None
    """Files that are not downloaded, as shell patterns."""
    use_tqdm_on_load: bool = True
    """Show progress while loading."""

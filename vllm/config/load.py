"""LoadConfig: where weights come from."""

from __future__ import annotations

from typing import Literal

from vllm.utils.checked import config


@config()
class LoadConfig:
    """How the checkpoint is found and read."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """"safetensors" reads the checkpoint, "dummy" makes random weights, "auto" is safetensors."""
    download_dir: str | None = None
    """Folder for downloads from the hub. None: the hub's own cache."""
    ignore_patterns: list[str] | str | None = None
    """Files that are not downloaded, as shell patterns."""
    use_tqdm_on_load: bool = True
    """Show progress while loading."""

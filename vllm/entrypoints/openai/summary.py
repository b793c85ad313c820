"""What a person reads when a server is ready."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.hidden_states_store import storage_folder
from vllm.v1.engine.core_messages import CoreStarted
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.cli_args import ServerSettings


def startup_summary(
    config: VllmConfig,
    settings: ServerSettings,
    started: CoreStarted,
    served_model_names: list[str],
    url: str,
) -> str:
    """Model, dtype, device, pool, extraction and address, a line each."""
    model = config.model_config
    names = ", ".join(served_model_names)
    rows = [
        ("model", model.model if names == model.model else f"{model.model} (served as {names})"),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("device", config.device_config.device_type),
        ("context", f"{started.max_model_len:,} tokens a request"),
        *_pool_rows(started.pool_description),
        *_extraction_rows(config, settings),
        ("URL", f"{url} ({_where(settings)}; status at /, API at /docs)"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {value}" for name, value in rows]
    return "\n".join([f"vLLM {__version__} is ready", *lines])


def _pool_rows(description: list[str]) -> list[tuple[str, str]]:
    lines = [line.removeprefix("KV pool: ") for line in description]
    return [("pool" if index == 0 else "", line) for index, line in enumerate(lines)]


def _extraction_rows(config: VllmConfig, settings: ServerSettings) -> list[tuple[str, str]]:
    speculative = config.speculative_config
    if speculative is None:
        return [("extraction", "off")]
    layers = json.dumps(list(speculative.hidden_state_layer_ids))
    of_all = f"layers {layers} of 0 to {config.model_config.get_total_num_hidden_layers()}"
    rows = [("extraction", of_all)]
    folder = storage_folder(config)
    if folder is not None:
        rows.append(("files", f"{folder}{_downloads(settings)}"))
    elif config.kv_transfer_config is not None:
        rows.append(("connector", str(config.kv_transfer_config.kv_connector)))
    else:
        rows.append(("files", "none: kv_transfer_config names no connector"))
    return rows


def _downloads(settings: ServerSettings) -> str:
    parts = []
    if settings.enable_hidden_states_download:
        parts.append("also at /v1/hidden_states/{id}")
    if settings.hidden_states_ttl:
        parts.append(f"kept {settings.hidden_states_ttl:g} s")
    if settings.hidden_states_quota_gib is not None:
        parts.append(f"at most {settings.hidden_states_quota_gib:g} GiB")
    return f" ({', '.join(parts)})" if parts else ""


def _where(settings: ServerSettings) -> str:
    if settings.uds is not None:
        return "a Unix socket"
    return "all addresses" if settings.host in (None, "", "0.0.0.0", "::") else "this address only"


__all__ = ["startup_summary"]

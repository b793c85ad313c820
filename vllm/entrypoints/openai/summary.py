"""What a person reads when a server is ready."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.hidden_states_store import storage_folder
from vllm.v1.engine.core_messages import CoreStarted
from vllm.version import PRODUCT, __version__

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
    pool = [line.removeprefix("KV pool: ") for line in started.pool_description]
    where = "this address only"
    if settings.uds is not None or settings.host in (None, "", "0.0.0.0", "::"):
        where = "all addresses" if settings.uds is None else "a Unix socket"
    rows = [
        ("model", model.model if names == model.model else f"{model.model} (served as {names})"),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("device", config.device_config.device_type),
        ("context", f"{started.max_model_len:,} tokens a request"),
        *(("" if index else "pool", line) for index, line in enumerate(pool)),
        *_extraction_rows(config, settings),
        ("URL", f"{url} ({where}; status at /, API at /docs)"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {value}" for name, value in rows]
    return "\n".join([f"{PRODUCT} {__version__} is ready", *lines])


def _extraction_rows(config: VllmConfig, settings: ServerSettings) -> list[tuple[str, str]]:
    speculative = config.speculative_config
    if speculative is None:
        return [("extraction", "off")]
    layers = json.dumps(list(speculative.hidden_state_layer_ids))
    of_all = f"layers {layers} of 0 to {config.model_config.get_total_num_hidden_layers()}"
    row = ("files", "none: kv_transfer_config names no connector")
    folder = storage_folder(config)
    if folder is not None:
        row = ("files", f"{folder}{_downloads(settings)}")
    elif config.kv_transfer_config is not None:
        row = ("connector", str(config.kv_transfer_config.kv_connector))
    return [("extraction", of_all), row]


def _downloads(settings: ServerSettings) -> str:
    parts = []
    if settings.enable_hidden_states_download:
        parts.append("also at /v1/hidden_states/{id}")
    if settings.hidden_states_ttl:
        parts.append(f"kept {settings.hidden_states_ttl:g} s")
    if settings.hidden_states_quota_gib is not None:
        parts.append(f"at most {settings.hidden_states_quota_gib:g} GiB")
    return f" ({', '.join(parts)})" if parts else ""

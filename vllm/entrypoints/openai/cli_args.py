"""ServerSettings: the options of the HTTP server, for Python and for the command line."""

from __future__ import annotations

import re
import ssl
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, TypeAdapter, ValidationError, ValidationInfo

from vllm import envs
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.transformers_utils.chat_messages import ContentFormat
from vllm.utils.checked import (
    ABOVE_0,
    FINITE,
    FolderPath,
    SizeBytes,
    at_least,
    at_most,
    config,
    from_mapping,
    require,
)
from vllm.utils.options import Group, Option
from vllm.utils.regular_files import is_regular
from vllm.utils.text import check_text

_SERVER = Group("Server", "Address, threads, shutdown and logs of the server.")
_SECURITY = Group("Security", "Keys, certificates and CORS.")
_API = Group("API", "Options of the endpoints.")
_LIMITS = Group("Limits", "Limits on the number, size and time of requests.")
_DOWNLOADS = Group("Downloads", "Hidden states for clients that do not share the storage folder.")


def _names_or_json(values: Any, info: ValidationInfo) -> Any:
    """Return ``values``, or the list in it if its only value is JSON."""
    if not isinstance(values, list) or len(values) != 1 or not str(values[0]).startswith("["):
        return values
    try:
        return TypeAdapter(list[str]).validate_json(values[0], strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(
            f"{info.field_name}={values[0]!r} is not valid; give a list of strings ({message})"
        ) from None


Names = Annotated[list[str], BeforeValidator(_names_or_json)]
HeaderNames = Annotated[
    Names,
    require(
        lambda names: all(name.isascii() and name.isprintable() for name in names),
        "use ASCII, as HTTP headers do",
    ),
]
SteeringFiles = Annotated[
    Names,
    require(
        lambda items: all(re.fullmatch(r"[\w.-]+=.+", item) for item in items),
        "write each as NAME=PATH",
    ),
]
AdapterFolders = Annotated[
    Names,
    require(
        lambda items: all(re.fullmatch(r"[^={]+=.+|\{.*\}", item) for item in items),
        "write each as NAME=PATH",
    ),
]
ExistingFile = Annotated[str, require(is_regular, "there is no such file")]
PathPrefix = Annotated[
    str,
    require(
        lambda path: not path or (path.startswith("/") and not path.endswith("/")),
        "write it like /prefix",
    ),
]
Count = Annotated[int, at_least(1)]
Seconds = Annotated[float, ABOVE_0]


@config(frozen=True)
class ServerSettings:
    """Options of ``vllm serve`` except those of the engine. Times are in seconds.

    Raises ValueError that names the option, the value and what would work.
    """

    host: Annotated[str | None, Option(group=_SERVER)] = None
    """Address to listen on. Default: all addresses of this machine."""
    port: Annotated[int, at_least(0), at_most(65535)] = 8000
    """Port to listen on; 0: any free port, which the start-up summary names."""
    uds: Annotated[str, require(bool, "name a path")] | None = None
    """Unix domain socket to listen on, instead of host and port."""
    headless: bool = False
    """Serve nothing here, but run this machine's ranks for the engine of node 0 (--nnodes,
    --node-rank, --master-addr), or this machine's engines for the front end there
    (--data-parallel-size, --data-parallel-start-rank, --data-parallel-address)."""
    root_path: PathPrefix = ""
    """Path prefix under which a proxy serves this server; the proxy may keep or remove it in the
    requests that it passes on."""
    api_server_count: Count = 1
    """HTTP processes that share the address, the engines and all that requests read or change.
    Above 1 another process accepts connections and has the engines. It is for machines whose HTTP
    process takes a whole core."""
    renderer_num_workers: Count = 2
    """Threads of each HTTP process that tokenise and render templates, in addition to its event
    loop. Requests above 64 KiB never take all of them, unless there is only one."""
    shutdown_timeout: Annotated[float, at_least(0), FINITE] = 30.0
    """Time for running requests to finish after SIGTERM or SIGINT; a second signal ends the server
    at once."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Least severe level of the HTTP server's own log."""
    disable_uvicorn_access_log: bool = False
    """Do not log a line for each request."""
    api_key: Annotated[
        list[str] | None,
        require(lambda keys: keys is None or all(keys), "use no empty key"),
        require(
            lambda keys: keys is None or all(map(envs.is_header_value, keys)),
            "use keys that a header can carry, without white space at their ends",
        ),
        Option(group=_SECURITY),
    ] = None
    """Accepted keys; requests must carry one of them as "Authorization: Bearer KEY". Status pages
    (/, /health, /ping, /version, /load, /metrics, /docs) need none. Default: the key in the
    environment variable VLLM_API_KEY; if that is unset, no key is required."""
    ssl_keyfile: ExistingFile | None = None
    """Private key of the certificate."""
    ssl_certfile: ExistingFile | None = None
    """Certificate; with it the server speaks HTTPS."""
    ssl_ca_certs: ExistingFile | None = None
    """Authorities whose client certificates are trusted."""
    ssl_cert_reqs: Annotated[int, require((0, 1, 2).__contains__, "use 0, 1 or 2")] = 0
    """Client certificates: 0 none, 1 optional, 2 required."""
    allowed_origins: HeaderNames = field(default_factory=lambda: ["*"])
    """CORS: origins of web pages that may call the server; names, or one JSON list."""
    allowed_methods: HeaderNames = field(default_factory=lambda: ["*"])
    """CORS: methods that web pages may use; names, or one JSON list."""
    allowed_headers: HeaderNames = field(default_factory=lambda: ["*"])
    """CORS: headers that web pages may send; names, or one JSON list."""
    allow_credentials: bool = False
    """CORS: allow cookies and credentials."""
    chat_template: Annotated[str | None, Option(group=_API)] = None
    """Chat template: path of a file, or the template itself. Default: the tokenizer's template."""
    chat_template_content_format: ContentFormat = "auto"
    """Form of the messages' content for the template: one string, or a list of parts."""
    enable_auto_tool_choice: bool = False
    """Let the model call tools (tool_choice "auto"); needs tool_call_parser."""
    tool_call_parser: Literal["hermes"] | None = None
    """Format in which the model writes its tool calls."""
    strict_requests: bool = False
    """Refuse requests with fields that are not known, or with unknown keys of kv_transfer_params.
    Default: they have no effect, of which the log and the reply's warnings tell."""
    enable_prompt_tokens_details: bool = False
    """Tell in the usage of an answer how many tokens of its prompts were found in the prefix cache,
    or loaded (prompt_tokens_details.cached_tokens)."""
    enable_scale_out: bool = False
    """Accepted for existing launchers, without effect: the render endpoints are always on."""
    weight_transfer_config: Annotated[
        WeightTransferConfig | None, from_mapping(WeightTransferConfig)
    ] = None
    """Let trainers send weights to this server, as JSON: {"backend": "nccl" or "gloo", "timeout":
    seconds (300)}. Anyone who reaches the server can then replace its weights."""
    weight_folders: Names = field(default_factory=list)
    """Folders from which /update_weights may load checkpoints (VLLM_SERVER_DEV_MODE=1), also from
    folders inside them; or one JSON list."""
    max_queued_requests: Annotated[int, at_least(1), Option(group=_LIMITS)] = 4096
    """Most unfinished generation requests, including running ones; further requests get 429."""
    max_head_bytes: Annotated[SizeBytes, at_least(1024)] = 64 * 2**10
    """Longest request line with its headers, as a number or e.g. 64KiB; longer ones get 431, or
    414 if the address is too long."""
    max_body_bytes: Annotated[SizeBytes, at_least(1)] = 32 * 2**20
    """Longest request body, as a number or e.g. 64MiB; a longer one gets 413."""
    body_timeout: Seconds = 60.0
    """Time limit for a client to send a request body; after it the request gets 408."""
    max_inline_hidden_states_mib: Annotated[float, ABOVE_0, FINITE] = 16.0
    """Most MiB of hidden states in the JSON of one reply (the request's field hidden_states)."""
    max_hidden_states_mib: Annotated[float, ABOVE_0, FINITE] = 1024.0
    """Most MiB of hidden states and log-probabilities of one request, in a file or as the body of
    the reply; this server holds them in memory."""
    max_total_hidden_states_mib: Annotated[float, ABOVE_0, FINITE] = 4096.0
    """Most MiB of such rows that this server holds for all requests together. Further requests wait
    in turn, at most 60 s, and then get 503. A body that is sent as it is computed counts 16 MiB."""
    steering_vectors: SteeringFiles = field(default_factory=list)
    """Steering vectors that requests may name: NAME=PATH for each file (.safetensors, .pt or
    .gguf) that says the layers of its vectors; or one JSON list."""
    enable_steering_uploads: bool = False
    """Let clients keep steering vectors on this server (POST /v1/steering_vectors)."""
    max_steering_vectors: Count = 64
    """Most names of steering vectors, those of steering_vectors included, before uploads are
    refused."""
    max_steering_mib: Annotated[float, ABOVE_0, FINITE] = 256.0
    """Most MiB of these vectors."""
    lora_modules: AdapterFolders = field(default_factory=list)
    """Adapters (LoRA) that requests may name as their model: NAME=PATH for each folder, or
    {"name": ..., "path": ...}; or one JSON list. Needs enable_lora."""
    mooncake_store: dict[str, Any] | None = None
    """Store for the rows of SpecForge's requests (POST /generate with spec_capture): options of
    MooncakeDistributedStore.setup, such as master_server_addr; {} for Mooncake's usual ones."""
    spec_capture_aux_layer_ids: list[int] | None = None
    """Layers of the feature "aux" of these requests, counted from 0 as SpecForge does. Default:
    those of EAGLE-3."""
    request_timeout: Seconds | None = None
    """Time limit of a generation request; after it the request is aborted and gets 504. Default:
    no limit."""
    hidden_states_folder: Annotated[FolderPath | None, Option(group=_DOWNLOADS)] = None
    """Folder for the files of requests with the field hidden_states, if no connector is configured.
    It is made if it does not exist. Default: such requests get rows in their replies only."""
    extract_only_when_asked: bool = False
    """Write files of hidden states only for requests with kv_transfer_params, which may be empty.
    Default: the connector writes one for every request."""
    enable_hidden_states_download: bool = False
    """Serve the files that this server made at /v1/hidden_states/{id}, and add hidden_states_url
    to replies with a hidden_states_path."""
    hidden_states_ttl: Annotated[float, at_least(0)] = 0.0
    """Remove files of this server that were not fetched for this long. 0: keep them."""
    hidden_states_quota_gib: Annotated[float, ABOVE_0, FINITE] | None = None
    """Most GiB that files of this server may take. Above this, the oldest files that were not
    fetched for a minute are removed; if that is not enough, requests that would write a file get
    507. Default: no limit."""

    def __post_init__(self) -> None:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_certfile is missing; name the certificate of the private key")
        if self.ssl_cert_reqs != ssl.CERT_NONE and self.ssl_ca_certs is None:
            raise ValueError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, the authorities to trust"
            )
        count = self.api_server_count
        if count > 1 and self.headless:
            raise ValueError(f"api_server_count={count} with headless, which serves no HTTP; use 1")
        if count > 1 and self.mooncake_store is not None:
            raise ValueError(
                f"api_server_count={count} with mooncake_store: one process writes to the store; "
                "use api_server_count=1"
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser; use 'hermes'")
        variables = {name: getattr(envs, name) for name in envs.VARIABLES}  # before the model loads
        for name, value in {**vars(self), **variables}.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    check_text(name, text)

    @property
    def accepted_keys(self) -> list[str]:
        """Keys of which requests must carry one; empty if no key is required."""
        return self.api_key or list(filter(None, [envs.VLLM_API_KEY]))

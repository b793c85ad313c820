"""ServerSettings: every option of the HTTP server, once, for Python and the command line."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Self, get_type_hints

from pydantic import TypeAdapter, ValidationError

from vllm import envs
from vllm.entrypoints.chat_utils import ContentFormat
from vllm.utils.argparse_utils import add_field_flag, field_docs

_GROUPS = (
    ("Server", "Where it listens, and how it ends.", "host"),
    ("Security", "Who may ask.", "api_key"),
    ("API", "What the endpoints answer.", "chat_template"),
    ("Limits", "How much is taken on, and for how long.", "max_queued_requests"),
    (
        *("Downloads", "Hidden states for clients that do not share the storage folder."),
        "enable_hidden_states_download",
    ),
)
"""Groups of flags: title, one line about it, the first of its options."""
_CORS_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
_AT_LEAST_0 = ("port", "shutdown_timeout", "hidden_states_ttl")
_AT_LEAST_1 = (
    "api_server_count",
    "renderer_num_workers",
    "max_queued_requests",
    "max_body_bytes",
    "max_head_bytes",
)
_ABOVE_0 = ("body_timeout", "request_timeout", "hidden_states_quota_gib")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class ServerSettings:
    """Options of ``vllm serve`` beside those of the engine. Times are in seconds.

    Raises ValueError that names the option, the value and what would work.
    """

    host: str | None = None
    """Address to listen at. None: all of this machine's."""
    port: int = 8000
    """Port to listen at; 0: any free one, which the start-up summary names."""
    uds: str | None = None
    """Unix domain socket to listen at, instead of host and port."""
    root_path: str = ""
    """Path under which a proxy shows this server."""
    api_server_count: int = 1
    """Times renderer_num_workers threads tokenise. One process serves HTTP, whatever the number:
    what others start more processes for runs on threads here."""
    renderer_num_workers: int = 1
    """Threads that tokenise and render templates, beside the event loop."""
    shutdown_timeout: float = 30.0
    """How long requests may go on after SIGTERM or SIGINT; a second signal ends at once."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Least severe level of the HTTP server's own log."""
    disable_uvicorn_access_log: bool = False
    """Do not log a line for each request."""
    api_key: list[str] | None = None
    """Keys, one of which requests have to carry as "Authorization: Bearer KEY". Status pages
    (/, /health, /ping, /version, /load, /metrics, /docs) stay open. None: the one in the
    environment variable VLLM_API_KEY; where that is unset, no key is asked for."""
    ssl_keyfile: str | None = None
    """Private key of the certificate."""
    ssl_certfile: str | None = None
    """Certificate; with it the server speaks HTTPS."""
    ssl_ca_certs: str | None = None
    """Authorities whose client certificates are trusted."""
    ssl_cert_reqs: int = 0
    """Client certificates: 0 none, 1 optional, 2 required."""
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    """CORS: origins of web pages that may call; names, or one JSON list."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: methods they may use; names, or one JSON list."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: headers they may send; names, or one JSON list."""
    allow_credentials: bool = False
    """CORS: allow cookies and credentials."""
    chat_template: str | None = None
    """Chat template: the path of a file, or the template itself. None: the tokenizer's own."""
    chat_template_content_format: ContentFormat = "auto"
    """How the template gets the content of messages: one string, or a list of parts."""
    enable_auto_tool_choice: bool = False
    """Let the model call tools (tool_choice "auto"); needs tool_call_parser."""
    tool_call_parser: Literal["hermes"] | None = None
    """How the model writes its tool calls."""
    enable_scale_out: bool = False
    """Accepted for existing launchers: the render endpoints are always on here."""
    max_queued_requests: int = 4096
    """Generation requests that may be unfinished, running ones included; more get 429."""
    max_head_bytes: int = 64 * 2**10
    """Longest request line with its headers, as a number or e.g. 64KiB; longer ones get 431, or
    414 where it is the address that is long."""
    max_body_bytes: int = 32 * 2**20
    """Longest request body, as a number or e.g. 64MiB; a longer one gets 413."""
    body_timeout: float = 60.0
    """How long a client may take to send a request; then it gets 408."""
    request_timeout: float | None = None
    """How long a generation request may take; then it is aborted and gets 504. None: no limit."""
    enable_hidden_states_download: bool = False
    """Serve the files this server made at /v1/hidden_states/{id}, and put hidden_states_url
    beside hidden_states_path in replies."""
    hidden_states_ttl: float = 0.0
    """Remove files of this server that nobody fetched for so long. 0: keep them."""
    hidden_states_quota_gib: float | None = None
    """GiB that files of this server may take. Above it the oldest that nobody fetched for a
    minute are removed; while that is not enough, extraction requests get 507."""

    def __post_init__(self) -> None:
        for smallest, names in enumerate((_AT_LEAST_0, _AT_LEAST_1)):
            for name in names:
                self._require(name, getattr(self, name) >= smallest, f"use at least {smallest}")
        for name in _ABOVE_0:
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "use a number above 0")
        self._require("port", self.port <= _HIGHEST_PORT, f"use at most {_HIGHEST_PORT}")
        self._require("ssl_cert_reqs", self.ssl_cert_reqs in (0, 1, 2), "use 0, 1 or 2")
        self._require("api_key", self.api_key is None or all(self.api_key), "use no empty key")
        is_prefix = self.root_path.startswith("/") and not self.root_path.endswith("/")
        self._require("root_path", not self.root_path or is_prefix, "write it like /prefix")
        self._check_ssl()
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser; use 'hermes'")

    def _require(self, name: str, holds: bool, advice: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} is not valid; {advice}")

    def _check_ssl(self) -> None:
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            self._require(name, path is None or Path(path).is_file(), "there is no such file")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_certfile is missing; name the certificate of the private key")
        if self.ssl_cert_reqs != ssl.CERT_NONE and self.ssl_ca_certs is None:
            raise ValueError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, the authorities to trust"
            )

    @property
    def accepted_keys(self) -> list[str]:
        """Keys, of which requests have to carry one; empty: no key is asked for."""
        return self.api_key or list(filter(None, [envs.VLLM_API_KEY]))

    @property
    def num_renderer_threads(self) -> int:
        """Threads beside the event loop that tokenise and render."""
        return self.api_server_count * self.renderer_num_workers

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every option to ``parser``; returns it."""
        hints, docs = get_type_hints(cls), field_docs(cls)
        options = {option.name: option for option in fields(cls)}
        for title, (about, names) in GROUPS.items():
            group = parser.add_argument_group(title, about)
            for name in names:
                add_field_flag(group, options[name], hints[name], docs[name])
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among ``args``, which may hold others; missing ones keep their default."""
        given = vars(args)
        values = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        for name in _CORS_LISTS:
            if name in values:
                values[name] = _names_or_json(name, values[name])
        return cls(**values)


def _names_or_json(name: str, values: list[str]) -> list[str]:
    """``values``; or the list in the one value that is JSON."""
    if len(values) != 1 or not values[0].startswith("["):
        return values
    try:
        return TypeAdapter(list[str]).validate_json(values[0], strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(
            f"{name}={values[0]!r} is not valid; give a list of strings ({message})"
        ) from None


def _groups() -> dict[str, tuple[str, tuple[str, ...]]]:
    names = [option.name for option in fields(ServerSettings)]
    ends = [names.index(first) for _, _, first in _GROUPS[1:]] + [len(names)]
    return {
        title: (about, tuple(names[names.index(first) : end]))
        for (title, about, first), end in zip(_GROUPS, ends, strict=True)
    }


GROUPS = _groups()
"""Title -> (one line about it, its options)."""

"""The state that the endpoints of one server share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_tracker import TRANSFER_PARAMS
from vllm.distributed.kv_transfer.kv_connector.v1.storage_folder import storage_options
from vllm.entrypoints.openai.adapters import ServedAdapters
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.row_memory import RowMemory
from vllm.entrypoints.openai.served_weights import ServedWeights
from vllm.entrypoints.openai.server_load import ServerLoad
from vllm.entrypoints.openai.steering_store import SteeringStore
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.token_texts import TokenTexts
from vllm.transformers_utils.tokenizer import make_decoder
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore
    from vllm.entrypoints.openai.server_metrics import ServerMetrics

T = TypeVar("T")


async def nothing_to_share() -> None:
    """Do nothing: the server has one HTTP process."""


@dataclass
class ServerState:
    """One server: its engine, which has started, its settings and its metrics."""

    engine: AsyncLLM
    settings: ServerSettings
    served_model_names: list[str]
    metrics: ServerMetrics
    chat_template: str | None = None
    """Template text that replaces the tokenizer's template."""
    store: HiddenStatesStore | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Names and values that do not change, such as the dtype, for the status page."""
    storage_folder: str | None = None
    """Folder of the connector's files."""
    load: ServerLoad = field(default_factory=ServerLoad)
    is_draining: bool = False
    started_seconds: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start."""
    steering: SteeringStore = field(init=False)
    """Steering vectors by name."""
    adapters: ServedAdapters = field(init=False)
    weights: ServedWeights = field(init=False)

    share: Callable[[], Awaitable[None]] = nothing_to_share
    """Waits until all HTTP processes of the server have what :meth:`shared` returns."""
    count_all: Callable[[], Awaitable[None]] = nothing_to_share
    """Lets ``metrics`` take in the counts of all HTTP processes."""

    def __post_init__(self) -> None:
        self.steering = SteeringStore(self.settings, self.engine)
        self.adapters = ServedAdapters(self.engine, self.served_model_names)
        self.weights = ServedWeights(self.settings, self.engine)

    @property
    def server_load(self) -> int:
        """Number of generation requests in progress, including streams."""
        return self.load.total

    def shared(self) -> tuple[object, ...]:
        """Return what all HTTP processes have to know of changes since the start."""
        return self.is_draining, self.adapters.served, self.steering.stored

    def take_shared(self, shared: tuple[Any, ...]) -> None:
        """Take over what :meth:`shared` has returned in another process."""
        self.is_draining, self.adapters.served, self.steering.stored = shared

    async def beside_loop(
        self, request: Request, function: Callable[..., T], *arguments: object
    ) -> T:
        """Call ``function(*arguments)`` on a thread for tokenising and rendering."""
        num_bytes = len(await request.body())
        return await self.engine.renderer.run(num_bytes, function, *arguments)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if no such model is served. Requests may leave the name out."""
        if name and name not in self.served_model_names and self.adapters.find(name) is None:
            raise unknown_model(name)

    @cached_property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Token ids -> text, with special tokens; ids without a token give no text."""
        return make_decoder(self.engine.get_tokenizer())

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts and bytes of single tokens."""
        return TokenTexts(self.engine.get_tokenizer())

    @property
    def model_name(self) -> str:
        """The name in responses, which is always the first served name."""
        return self.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        return self.engine.model_config.max_model_len

    @cached_property
    def vocab_size(self) -> int:
        return self.engine.model_config.get_vocab_size()

    @cached_property
    def row_memory(self) -> RowMemory:
        """Memory for rows of all requests."""
        return RowMemory(int(self.settings.max_total_hidden_states_mib * 2**20))

    @cached_property
    def extracts(self) -> bool:
        """True if requests extract hidden states."""
        return self.engine.vllm_config.speculative_config is not None

    @cached_property
    def lets_clients_name_files(self) -> bool:
        """True if a request may name the path of its file."""
        options = storage_options(self.engine.vllm_config)
        return options is not None and options.allow_custom_save_path is not False

    def unknown_transfer_keys(self, params: Mapping[str, object]) -> list[str]:
        """Return the keys of ``kv_transfer_params`` without effect. Connectors other than the one
        that writes files may read any key."""
        config = self.engine.vllm_config.kv_transfer_config
        name = ExampleHiddenStatesConnector.__name__
        if config and (config.kv_connector != name or config.kv_connector_module_path):
            return []
        known = () if config is None else TRANSFER_PARAMS
        lets_name_files = self.lets_clients_name_files
        return [
            key
            for key in params
            if key not in known or (key == "hidden_states_path" and not lets_name_files)
        ]

    @cached_property
    def default_sampling(self) -> dict[str, Any]:
        """Settings of the checkpoint, for requests that leave them out."""
        stated = dict(self.engine.model_config.get_diff_sampling_param())
        stated.pop("max_tokens", None)
        return stated

    @cached_property
    def most_output_tokens(self) -> int | None:
        """Most tokens of an answer, which the checkpoint or the operator states; None: any number.

        ValueError: what is stated is no number of tokens.
        """
        stated = self.engine.model_config.get_diff_sampling_param().get("max_tokens")
        return SamplingParams.from_optional(max_tokens=stated).max_tokens

    @cached_property
    def system_fingerprint(self) -> str:
        """A text that differs between servers that may answer the same request differently."""
        config = self.engine.model_config
        facts = f"{config.model} {config.dtype} {config.max_model_len}"
        return f"vllm-{__version__}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def unknown_model(name: str) -> ApiError:
    """Return the error for a name under which no model is served."""
    return ApiError(404, f"The model `{name}` does not exist.", param="model")


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state_of)]
"""The parameter type with which an endpoint gets the state from FastAPI."""

"""Steering vectors that a server keeps by name, from files and from clients."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.errors import ApiError, bad_request
from vllm.entrypoints.openai.responses import SteeringVectorCard
from vllm.steering import SteeringVector, check_fit
from vllm.utils.text import brief, did_you_mean

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.v1.engine.async_llm import AsyncLLM

_MIB = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAMES_TOLD = 20


@dataclass(frozen=True)
class _Stored:
    vector: SteeringVector
    num_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self, name: str) -> SteeringVectorCard:
        layers = self.vector.layers
        return SteeringVectorCard(
            id=name,
            created=self.created,
            layers=[layers] if isinstance(layers, int) else list(layers),
            width=self.vector.vectors.shape[-1],
            bytes=self.num_bytes,
        )


class SteeringStore:
    """The vectors of a server by name. A request keeps the vectors that its name had at first.

    ValueError: a file of ``--steering-vectors`` cannot be used.
    """

    def __init__(self, settings: ServerSettings, engine: AsyncLLM) -> None:
        self._settings = settings
        self._engine = engine
        self.stored: dict[str, _Stored] = {}
        """By name."""
        for item in settings.steering_vectors:
            name, _, path = item.partition("=")
            if name in self.stored:
                raise ValueError(f"steering_vectors: the name {name!r} comes twice; leave one out")
            self.stored[_checked_name(name)] = self._checked(SteeringVector.from_file(path))

    def find(self, name: str) -> SteeringVector:
        """Return the vectors of a name. ApiError: there are none."""
        return self._find(name).vector

    def card(self, name: str) -> SteeringVectorCard:
        """Describe the vectors of a name. ApiError: there are none."""
        return self._find(name).card(name)

    def cards(self) -> list[SteeringVectorCard]:
        """Describe all vectors."""
        return [stored.card(name) for name, stored in self.stored.items()]

    def put(self, name: str, vector: SteeringVector) -> None:
        """Keep vectors from a client. ValueError or ApiError: they cannot be kept."""
        self._check_uploads()
        name = _checked_name(name)
        stored, settings = self._checked(vector), self._settings
        others = [one for other, one in self.stored.items() if other != name]
        if len(others) >= settings.max_steering_vectors:
            raise bad_request(
                f"{len(others)} steering vectors are kept, and --max-steering-vectors is "
                f"{settings.max_steering_vectors}: delete one, or use the name of one"
            )
        num_bytes = stored.num_bytes + sum(one.num_bytes for one in others)
        if num_bytes > settings.max_steering_mib * _MIB:
            raise bad_request(
                f"steering vectors would take {num_bytes:,} bytes, and --max-steering-mib is "
                f"{settings.max_steering_mib:g}: delete some, or give them inline in requests"
            )
        self.stored[name] = stored

    def remove(self, name: str) -> None:
        """Forget the vectors of a name. ApiError: there are none."""
        self._check_uploads()
        self._find(name)
        del self.stored[name]

    def _find(self, name: str) -> _Stored:
        stored = self.stored.get(name)
        if stored is None:
            names = sorted(self.stored)
            known = f"there are {', '.join(names[:_NAMES_TOLD])}" if names else "there are none"
            known += f" and {len(names) - _NAMES_TOLD} others" if len(names) > _NAMES_TOLD else ""
            near = did_you_mean(name, names)
            raise ApiError(404, f"steering vectors of the name {brief(name)}{near}: {known}")
        return stored

    def _checked(self, vector: SteeringVector) -> _Stored:
        model = self._engine.model_config
        specs = vector.specs()
        check_fit(specs, model.get_total_num_hidden_layers(), model.get_row_size())
        return _Stored(vector, sum(len(spec.vector) for spec in specs))

    def _check_uploads(self) -> None:
        if not self._settings.enable_steering_uploads:
            raise ApiError(
                403,
                "this server keeps no vectors from clients: start it with "
                "--enable-steering-uploads, or give them inline in requests",
            )


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"steering vectors name={brief(name)}: has to be at most 128 letters, digits, '.', '_' "
            "and '-', and begin with a letter or digit"
        )
    return name

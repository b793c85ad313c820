"""Bodies of SpecForge's requests; see :mod:`vllm.entrypoints.openai.spec_capture`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, Strict

from vllm.entrypoints.openai.errors import bad_request
from vllm.entrypoints.openai.protocol import Body, Int64, TokenIds
from vllm.entrypoints.openai.responses import Described

_MOST_SAMPLES = 16384
_MOST_TENSORS = 256
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]


class Features(Described):
    """Names under which rows are stored; null: not stored."""

    model_config = ConfigDict(extra="forbid")

    aux: _Name | None = None
    """[1, tokens, layers * hidden]: the layers of the server, side by side."""
    last_hidden: _Name | None = None
    """[1, tokens, hidden]: the state after the final norm."""


class Passthrough(Described):
    """A tensor that is stored as the client gives it."""

    model_config = ConfigDict(extra="forbid")

    name: _Name
    data: Annotated[
        list[Annotated[bool, Strict()] | Annotated[int, Strict()] | float], Field(fail_fast=True)
    ]
    shape: Annotated[list[Annotated[Int64, Strict(), Field(ge=0)]], Field(max_length=8)]
    dtype: _Dtype = "int64"

    def tensor(self, place: str) -> torch.Tensor:
        """Return the tensor. ApiError: the data has no such form; ``place`` is its path."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point and any(isinstance(one, float) for one in self.data):
            raise bad_request(f"{place}.data: has fractions, and dtype is {self.dtype}")
        try:
            return torch.tensor(self.data, dtype=dtype).reshape(self.shape)
        except (RuntimeError, OverflowError, ValueError) as error:
            raise bad_request(f"{place}.data: {error}") from None


class Capture(Described):
    """The objects of one sample, with the keys ``{store_id}/{sample_id}/g{gen}/{name}``.

    Of these parts only sample_id may have slashes, so each key belongs to one sample.
    """

    model_config = ConfigDict(extra="forbid")

    store_id: _Name
    sample_id: _Name
    gen: Annotated[Int64, Strict(), Field(ge=0)] = 1
    replace: bool = False
    """Replace objects that exist."""
    features: Features
    passthrough: Annotated[list[Passthrough], Field(max_length=_MOST_TENSORS, default_factory=list)]

    @property
    def prefix(self) -> str:
        """The keys of the objects without their names."""
        return f"{self.store_id}/{self.sample_id}/g{self.gen}"

    def given_tensors(self, place: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the client. ApiError: names or data cannot be used."""
        rows = filter(None, (self.features.aux, self.features.last_hidden))
        names = [*rows, *(one.name for one in self.passthrough)]
        for what, text in (("store_id", self.store_id), *(("the name", name) for name in names)):
            if "/" in text:
                raise bad_request(
                    f"{place}: {what} {text!r} has a slash, so its keys may be those of another "
                    "sample; only sample_id may have one"
                )
        if not names:
            raise bad_request(f"{place}.features: names nothing to store")
        if twice := next((one for one in names if names.count(one) > 1), None):
            raise bad_request(f"{place}: the name {twice!r} comes twice")
        given = enumerate(self.passthrough)
        return {one.name: one.tensor(f"{place}.passthrough.{index}") for index, one in given}

    def row_tensors(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors made of rows [tokens, layers, hidden], with the norm's last."""
        aux, last_hidden = rows[:, :-1].flatten(1), rows[:, -1]
        named = ((self.features.aux, aux), (self.features.last_hidden, last_hidden))
        return {name: tensor.unsqueeze(0) for name, tensor in named if name is not None}


class CaptureRequest(Body):
    """Body of /generate. Other fields could change the rows, so they are refused."""

    model_config = ConfigDict(extra="forbid")

    input_ids: Annotated[list[TokenIds], Field(max_length=_MOST_SAMPLES, fail_fast=True)]
    spec_capture: Annotated[list[Capture], Field(max_length=_MOST_SAMPLES, fail_fast=True)]
    """One object for each prompt."""
    sampling_params: dict[str, Any] | None = None
    """Without effect, because nothing is generated."""
    extra_key: Any = None
    """Without effect: rows of all tokens are computed, whatever is cached."""

    def given_tensors(self) -> list[dict[str, torch.Tensor]]:
        """Return each sample's tensors of the client. ApiError: values that cannot be served."""
        captures = self.spec_capture
        if len(captures) != len(self.input_ids):
            raise bad_request(
                f"spec_capture: has {len(captures)} objects for {len(self.input_ids)} lists in "
                "input_ids"
            )
        if (count := (self.sampling_params or {}).get("max_new_tokens")) not in (None, 0, 1):
            raise bad_request(
                f"sampling_params.max_new_tokens={count!r:.100}: has to be 0 or 1, because this "
                "endpoint generates nothing"
            )
        places: dict[str, int] = {}
        for index, one in enumerate(captures):
            if (first := places.setdefault(one.prefix, index)) != index:
                raise bad_request(
                    f"spec_capture.{index}.sample_id={one.sample_id!r}: is also that of "
                    f"spec_capture.{first}"
                )
        return [one.given_tensors(f"spec_capture.{i}") for i, one in enumerate(captures)]

"""Calls whose parameters are in the address, such as ``/sleep?level=2``: they have no body."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi import Depends, Request

from vllm.entrypoints.openai.errors import bad_form
from vllm.entrypoints.openai.protocol import told_of_unknown
from vllm.utils.text import parse_json


async def _check_address(request: Request) -> None:
    """Raise ApiError if a body has a parameter of the address, where it would have no effect;
    tell of parameters that are not known."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    given: Any = None
    with suppress(ValueError):  # whatever else it is, nobody reads it
        given = parse_json(await request.body())
    fields = [name for name in given if given[name] is not None] if isinstance(given, dict) else []
    for name in known.intersection(fields):
        raise bad_form((f"body.{name}", f"has to be in the address: ?{name}=..."))
    names = [*fields, *(name for name in request.query_params if name not in known)]
    told_of_unknown(names, request.app.state.server.settings.strict_requests)


IN_ADDRESS = [Depends(_check_address)]
"""Dependencies of calls that have their parameters in the address, and no body."""

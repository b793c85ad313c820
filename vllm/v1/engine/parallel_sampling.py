"""``n`` continuations of one prompt: one request for the user, n for the engine core."""

from __future__ import annotations

import msgspec

from vllm.v1.engine import EngineCoreRequest


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The requests for the core: the request itself, or ``<k>_<id>`` for each of its n.

    Child k of a seeded request has the seed plus k, so that each is reproducible and
    no two are equal.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    children = []
    for index in range(params.n):
        child_params = params.copy()
        child_params.n = 1
        if params.seed is not None:
            child_params.seed = (params.seed + index) % 2**64
        children.append(
            msgspec.structs.replace(
                request,
                request_id=f"{index}_{request.request_id}",
                sampling_params=child_params,
            )
        )
    return children

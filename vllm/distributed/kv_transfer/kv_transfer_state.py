"""Access to the worker side of the KV connector, for code that does not get it as an argument.

The names are upstream's. Several engines of a process do not interfere: a forward pass gets the
connector of its own engine, and outside of a pass the process must have exactly one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_pass_connector: ContextVar[KVConnectorBase_V1 | None] = ContextVar(
    "connector of the pass", default=None
)
_known: WeakSet[KVConnectorBase_V1] = WeakSet()
_owned: list[KVConnectorBase_V1] = []


def announce(connector: KVConnectorBase_V1) -> None:
    """Note that a worker of this process has ``connector``, until :func:`retract`."""
    _known.add(connector)


def retract(connector: KVConnectorBase_V1) -> None:
    """Note that the worker of ``connector`` ends."""
    _known.discard(connector)


@contextmanager
def in_pass(connector: KVConnectorBase_V1) -> Iterator[None]:
    """A context in which a forward pass of the connector's worker runs on this thread."""
    token = _pass_connector.set(connector)
    try:
        yield
    finally:
        _pass_connector.reset(token)


def has_kv_transfer_group() -> bool:
    """Return whether a worker of this process has a connector."""
    return _pass_connector.get() is not None or bool(_known)


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """Return the connector of the pass on this thread; outside of a pass, the process's only one.

    RuntimeError: the process has no connector, or several.
    """
    if (connector := _pass_connector.get()) is not None:
        return connector
    known = list(_known)
    if len(known) == 1:
        return known[0]
    names = ", ".join(sorted(type(connector).__name__ for connector in known)) or "none"
    raise RuntimeError(
        "get_kv_transfer_group: outside of a forward pass the process must have exactly one KV "
        f"connector; there are {len(known)}: {names}"
    )


def is_v1_kv_transfer_group(connector: object | None = None) -> bool:
    """Return whether ``connector`` is one of this interface; None: the process's connector."""
    if connector is None:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return isinstance(connector, KVConnectorBase_V1)


def ensure_kv_transfer_initialized(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Make the worker side that the config names, unless the process has a connector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance or has_kv_transfer_group():
        return
    connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config
    )
    _owned.append(connector)
    announce(connector)


def ensure_kv_transfer_shutdown() -> None:
    """Shut down what :func:`ensure_kv_transfer_initialized` made; engines shut down their own."""
    while _owned:
        connector = _owned.pop()
        retract(connector)
        connector.shutdown()

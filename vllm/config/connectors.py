"""KV connectors by name; their classes are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config.kv_transfer import KVTransferConfig
from vllm.utils.mem_utils import GIB_BYTES
from vllm.utils.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class Location(NamedTuple):
    """The module and the name of a class."""

    module_path: str
    class_name: str


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = Location(f"{_V1}.base", "KVConnectorBase_V1")
REGISTERED = {
    "ExampleHiddenStatesConnector": Location(
        f"{_V1}.example_hidden_states_connector", "ExampleHiddenStatesConnector"
    ),
    "MultiConnector": Location(f"{_V1}.multi_connector", "MultiConnector"),
    "OffloadingConnector": Location(f"{_V1}.offloading_connector", "OffloadingConnector"),
    "SharedStorageConnector": Location(f"{_V1}.shared_storage_connector", "SharedStorageConnector"),
    "ExampleConnector": Location(f"{_V1}.shared_storage_connector", "SharedStorageConnector"),
}
"""The connectors that this process knows by name."""


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Make ``class_name`` of ``module_path`` available as ``kv_connector=name``.

    Raises ValueError if the name already stands for another class.
    """
    location = Location(module_path, class_name)
    known = REGISTERED.setdefault(name, location)
    if known != location:
        raise ValueError(
            f"a connector {name!r} is registered already ({known.module_path}."
            f"{known.class_name}); choose another name"
        )


def find_connector_class(kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
    """The class that ``kv_connector`` (and ``kv_connector_module_path``) names.

    Raises ValueError if there is none.
    """
    name = kv_transfer_config.kv_connector
    if not name:
        raise ValueError(
            "kv_transfer_config has no kv_connector; available: " + _listed(REGISTERED)
        )
    module_path = kv_transfer_config.kv_connector_module_path
    location = Location(module_path, name) if module_path else REGISTERED.get(name)
    if location is None:
        raise ValueError(
            f"kv_connector={name!r} is not known{did_you_mean(name, REGISTERED)}; "
            f"available: {_listed(REGISTERED)}; for your own connector, set "
            "kv_connector_module_path to the module that defines it"
        )
    return _import_connector(location)


def offloading_connector(cache_config: CacheConfig) -> KVTransferConfig | None:
    """The connector that ``kv_offloading_size`` asks for; None if nothing is offloaded."""
    size_gib, backend = cache_config.kv_offloading_size, cache_config.kv_offloading_backend
    if size_gib is None:
        return None
    size_bytes = int(size_gib * GIB_BYTES)
    known: dict[str | None, tuple[str, dict[str, Any]]] = {
        "native": ("OffloadingConnector", {"cpu_bytes_to_use": size_bytes}),
        "lmcache": (
            "LMCacheConnectorV1",
            {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": size_gib},
        ),
    }
    name, options = known.get(backend or "native", (str(backend), {"cpu_bytes_to_use": size_bytes}))
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=options)


def _import_connector(location: Location) -> type[KVConnectorBase_V1]:
    module_path, class_name = location
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"connector {class_name!r}: module {module_path!r} cannot be imported ({error}); "
            "is it installed, and on PYTHONPATH?"
        ) from error
    base = vars(importlib.import_module(_BASE.module_path))[_BASE.class_name]
    connectors = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base)
    }
    if class_name not in connectors:
        own = [name for name, found in connectors.items() if found.__module__ == module_path]
        raise ValueError(
            f"module {module_path!r} has no connector class {class_name!r}"
            f"{did_you_mean(class_name, own)}; it defines: {_listed(own)}"
        )
    return connectors[class_name]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"

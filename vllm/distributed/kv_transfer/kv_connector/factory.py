"""Connectors by name, and what can be known of them before one is made."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    sub_connector_configs,
)
from vllm.utils.text import did_you_mean

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _Location(NamedTuple):
    module_path: str
    class_name: str


class KVConnectorFactory:
    """The registry of connectors. A class is imported when it is first asked for."""

    _registry: dict[str, _Location] = {}  # noqa: RUF012 - the one registry of the process

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make ``class_name`` of ``module_path`` available as ``kv_connector=name``.

        Raises ValueError when the name stands for another class already.
        """
        location = _Location(module_path, class_name)
        known = cls._registry.setdefault(name, location)
        if known != location:
            raise ValueError(
                f"a connector {name!r} is registered already ({known.module_path}."
                f"{known.class_name}); choose another name"
            )

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """The class that ``kv_connector`` (and ``kv_connector_module_path``) names.

        Raises ValueError when there is none.
        """
        name = kv_transfer_config.kv_connector
        if not name:
            raise ValueError(
                "kv_transfer_config has no kv_connector; available: " + _listed(cls._registry)
            )
        module_path = kv_transfer_config.kv_connector_module_path
        location = _Location(module_path, name) if module_path else cls._registry.get(name)
        if location is None:
            raise ValueError(
                f"kv_connector={name!r} is not known{did_you_mean(name, cls._registry)}; "
                f"available: {_listed(cls._registry)}; for a connector of your own set "
                "kv_connector_module_path to the module that defines it"
            )
        return _import_connector(location)

    @classmethod
    def create_connector(
        cls,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """One half of the configured connector."""
        if vllm_config.kv_transfer_config is None:
            raise ValueError("no connector can be made: kv_transfer_config is not set")
        connector_class = cls.get_connector_class(vllm_config.kv_transfer_config)
        return connector_class(vllm_config, role, kv_cache_config)

    @classmethod
    def leaf_classes(cls, kv_transfer_config: KVTransferConfig) -> list[type[KVConnectorBase_V1]]:
        """The configured class, or those inside a MultiConnector, however deep."""
        connector_class = cls.get_connector_class(kv_transfer_config)
        if not issubclass(connector_class, MultiConnector):
            return [connector_class]
        return [
            leaf
            for config in sub_connector_configs(kv_transfer_config)
            for leaf in cls.leaf_classes(config)
        ]

    @classmethod
    def supports_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the connector, or each one inside a MultiConnector, is ``SupportsHMA``."""
        return all(supports_hma(leaf) for leaf in cls.leaf_classes(kv_transfer_config))

    @classmethod
    def rows_leave_each_step(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether hidden-state blocks may be freed after each step."""
        return all(leaf.rows_leave_each_step for leaf in cls.leaf_classes(kv_transfer_config))


def _import_connector(location: _Location) -> type[KVConnectorBase_V1]:
    module_path, class_name = location
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"connector {class_name!r}: module {module_path!r} cannot be imported ({error}); "
            "is it installed, and on PYTHONPATH?"
        ) from error
    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        connectors = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, KVConnectorBase_V1)
            and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"module {module_path!r} has no connector class {class_name!r}"
            f"{did_you_mean(class_name, connectors)}; it defines: {_listed(connectors)}"
        )
    return found


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
KVConnectorFactory.register_connector(
    "ExampleHiddenStatesConnector",
    f"{_V1}.example_hidden_states_connector",
    "ExampleHiddenStatesConnector",
)
KVConnectorFactory.register_connector("MultiConnector", f"{_V1}.multi_connector", "MultiConnector")

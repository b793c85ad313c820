"""From a name to the spec that keeps offloaded blocks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.utils.text import did_you_mean
from vllm.v1.kv_offload.base import OffloadingSpec


class OffloadingSpecFactory:
    """Specs by ``spec_name``."""

    _registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Make a class known to this process. ValueError: the name stands for another."""
        location = (module_path, class_name)
        if cls._registered.setdefault(name, location) != location:
            raise ValueError(f"a spec {name!r} is registered already; choose another name")

    @classmethod
    def find_spec(cls, extra_config: Mapping[str, Any]) -> type[OffloadingSpec]:
        """The class that ``spec_name`` and ``spec_module_path`` mean; ValueError: there is none."""
        name, path = extra_config.get("spec_name"), extra_config.get("spec_module_path")
        location = cls._registered.get(str(name))
        if isinstance(name, str) and isinstance(path, str):
            location = location or (path, name)
        if location is None:
            raise ValueError(
                f"spec_name={name!r} is not known{did_you_mean(str(name), cls._registered)}; for a "
                "spec of your own set spec_module_path to the module that defines it"
            )
        module_path, class_name = location
        try:
            module = importlib.import_module(module_path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"spec_module_path={module_path!r} cannot be imported ({error}); is it installed, "
                "and on PYTHONPATH?"
            ) from error
        found = vars(module).get(class_name)
        own = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module_path
        ]
        if not isinstance(found, type):
            raise ValueError(
                f"spec_name={class_name!r}: module {module_path!r} has no such class"
                f"{did_you_mean(class_name, own)}"
            )
        if not issubclass(found, OffloadingSpec):
            raise ValueError(f"spec_name={class_name!r} is no OffloadingSpec (vllm.v1.kv_offload)")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            defined = {name for one in found.__mro__ for name in vars(one)}
            hint = "; get_worker of later releases is not called" * ("get_worker" in defined)
            raise ValueError(f"spec_name={class_name!r} lacks {missing}{hint}")
        return found

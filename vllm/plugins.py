"""Out-of-tree extensions: entry points of the group ``vllm.general_plugins``.

A plugin is a function without arguments, for instance one that registers a model
class. It runs once in every process of the engine.
"""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint, entry_points

from vllm import envs
from vllm.logger import init_logger

GENERAL_PLUGINS_GROUP = "vllm.general_plugins"

logger = init_logger(__name__)
_lock = threading.Lock()
_loaded = False
loaded_plugins: list[EntryPoint] = []
"""The plugins that have run in this process."""


def load_general_plugins() -> None:
    """Run every installed plugin that ``VLLM_PLUGINS`` allows, once in this process.

    A plugin that fails is logged by name; the engine continues without it.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        _loaded = True
    allowed = envs.VLLM_PLUGINS
    installed = list(entry_points(group=GENERAL_PLUGINS_GROUP))
    names = {plugin.name for plugin in installed}
    if missing := sorted(set(allowed or ()) - names):
        logger.warning("VLLM_PLUGINS: %s: not installed; there are %s", missing, sorted(names))
    for plugin in installed:
        if allowed is not None and plugin.name not in allowed:
            logger.debug("plugin %s is not in VLLM_PLUGINS: not loaded", plugin.name)
            continue
        try:
            plugin.load()()
        except Exception:
            logger.exception("plugin %s (%s) failed", plugin.name, plugin.value)
        else:
            loaded_plugins.append(plugin)
            logger.info("plugin %s loaded", plugin.name)

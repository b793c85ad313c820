"""The few calls of Ray that this package makes, without Ray: actors are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

HERE = "node-0"


class RayError(Exception):
    pass


class Group:
    """A placement group: bundle I is on ``places[I]``; "" for a group that has no room."""

    def __init__(self, bundles: Sequence[dict[str, float]], places: Sequence[str]) -> None:
        self.bundle_specs, self.places = list(bundles), places

    @property
    def bundle_count(self) -> int:
        return len(self.bundle_specs)

    def wait(self, timeout_seconds: float) -> bool:
        return "" not in self.places


class Actor:
    def __init__(self, target: Any, bundle: int, num_cpus: int) -> None:
        self.target, self.bundle, self.num_cpus = target, bundle, num_cpus
        self.is_killed = False
        self._threads = ThreadPoolExecutor(4)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *args: self._threads.submit(call, *args))


class RayDouble:
    """A cluster with these CPUs on its nodes, the first of which is this one."""

    __file__ = "/no/ray/__init__.py"
    WORKER_MODE = 1

    def __init__(self, cpus: Sequence[int], group: Group | None = None) -> None:
        self._nodes = {f"node-{number}": count for number, count in enumerate(cpus)}
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.groups: list[Group] = []
        self.actors: list[Actor] = []
        self.addresses: list[str | None] = []
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)),
            get_current_placement_group=lambda: group,
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self._placement_group,
            placement_group_table=lambda one: {"bundles_to_node_id": dict(enumerate(one.places))},
            remove_placement_group=self.groups.remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=dict),
        )

    def is_initialized(self) -> bool:
        return bool(self.addresses)

    def init(self, address: str | None, *, log_to_driver: bool) -> None:
        self.addresses.append(address)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: HERE, worker=SimpleNamespace(mode=0), gcs_address="127.0.0.1:1"
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": True, "NodeManagerAddress": node, "Resources": {"CPU": count}}
            for node, count in self._nodes.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(self._nodes.values())}

    def _placement_group(
        self,
        bundles: list[dict[str, int]],
        strategy: str,
        bundle_label_selector: list[dict[str, str]],
    ) -> Group:
        free, places = dict(self._nodes), []
        for bundle, labels in zip(bundles, bundle_label_selector, strict=True):
            fitting = [node for node, count in free.items() if count >= bundle["CPU"]]
            node = next((one for one in fitting if labels in ({}, {"ray.io/node-id": one})), "")
            places.append(node)
            if node:
                free[node] -= bundle["CPU"]
        self.groups.append(Group(bundles, places))
        return self.groups[-1]

    def remote(self, actor_class: Callable[..., Any]) -> Any:
        def options(num_cpus: int, max_concurrency: int, scheduling_strategy: Any) -> Any:
            def make(*args: Any) -> Actor:
                bundle = scheduling_strategy["placement_group_bundle_index"]
                self.actors.append(Actor(actor_class(*args), bundle, num_cpus))
                return self.actors[-1]

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def wait(self, references: list[Future[Any]], timeout: float | None) -> Any:
        return list(wait(references, timeout).done), []

    def get(self, reference: Future[Any]) -> Any:
        return reference.result()

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True
        threading.Thread(target=actor.target.end).start()

"""Ray clusters on this machine, small and gone at the end of a test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80 * 2**20
FREE_SECONDS = 20.0


@contextmanager
def ray_cluster(cpus: Sequence[int]) -> Iterator[Any]:
    """Run a cluster of nodes with these CPUs, and be connected to the first of them."""
    import ray
    from ray.cluster_utils import Cluster

    head, *others = cpus
    options = {"object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, **options})
    try:
        cluster.extra_nodes = [cluster.add_node(num_cpus=count, **options) for count in others]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def check_nothing_is_left() -> None:
    """All CPUs become free, and no placement group is there."""
    import ray

    deadline = time.monotonic() + FREE_SECONDS
    while (free := ray.available_resources().get("CPU")) != ray.cluster_resources().get("CPU"):
        assert time.monotonic() < deadline, f"{free} CPUs are free"
        time.sleep(0.1)
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}

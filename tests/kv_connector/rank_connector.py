"""A connector of another package, on every rank: it notes what each rank sees and hears, and
reports the end of a request later on some ranks than on others."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kv_connector.counting_connector import Counts
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.kv_events import BlockStored, KVConnectorKVEvents, KVEventAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.shared_storage_connector import (
    SharedStorageConnector,
)


def place(config: Any) -> tuple[int, ...]:
    """Return what a rank is told: its number, that in its stage, their number, its stage."""
    tensor = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return config.parallel_config.rank, *tensor, get_pp_group().rank_in_group


@dataclass
class StepMetadata(KVConnectorMetadata):
    ended: list[str] = field(default_factory=list)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    of: tuple[int, ...]


@dataclass
class Told(KVConnectorWorkerMetadata):
    """Rank -> the requests that it reports as sent in this step."""

    sent: dict[int, list[str]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Told:
        assert isinstance(other, Told) and not self.sent.keys() & other.sent.keys()
        return Told(self.sent | other.sent)


class Events(KVConnectorKVEvents):
    def __init__(self, *hashes: bytes) -> None:
        self.counts = KVEventAggregator(1)
        self.add_events([_stored(one) for one in hashes])

    def add_events(self, events: Any) -> None:
        self.counts.add_events(events)

    def aggregate(self) -> Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.counts.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self.counts.get_all_events()

    def get_number_of_workers(self) -> int:
        return self.counts.get_number_of_workers()

    def clear_events(self) -> None:
        self.counts.clear_events()


def _stored(block_hash: bytes) -> BlockStored:
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        lora_id=None,
        medium=None,
        lora_name=None,
    )


class RankConnector(KVConnectorBase_V1, SupportsHMA):
    reads_all_layers = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.places = {place(vllm_config)}
        self.planned = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self.registered: list[str] = []
        self.hooks: dict[str, list[str]] = defaultdict(list)
        self.waits: dict[str, int] = {}
        self.sent: list[str] = []
        # Scheduler side.
        self.ended: list[str] = []
        self.addresses: dict[Any, Any] = {}
        self.outputs: list[Any] = []

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.registered = list(kv_caches)

    def get_handshake_metadata(self) -> Address:
        return Address(place(self._vllm_config))

    def _note(self, hook: str, layer: str = "") -> None:
        self.places.add(place(self._vllm_config))
        if not self._vllm_config.parallel_config.is_driver:
            with ThreadPoolExecutor(1) as threads:
                self.places.add(threads.submit(place, self._vllm_config).result())
        self.hooks[hook].append(layer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load_kv")
        rank = self._vllm_config.parallel_config.rank
        metadata: Any = self._get_connector_metadata()
        self.waits |= dict.fromkeys(metadata.ended, 2 * rank)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load", layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._note("save_kv_layer", layer_name)

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._note("get_finished")
        self.sent = [name for name, steps in self.waits.items() if not steps]
        self.waits = {name: steps - 1 for name, steps in self.waits.items() if steps}
        return set(self.sent), None

    def get_kv_connector_stats(self) -> Counts | None:
        if self.role is KVConnectorRole.SCHEDULER:
            return None
        return Counts({f"rank {self._vllm_config.parallel_config.rank}": [len(self.sent)]})

    def get_kv_connector_kv_cache_events(self) -> Events | None:
        rank = self._vllm_config.parallel_config.rank
        return Events(b"all", b"%d" % rank) if self.sent else None

    def build_connector_worker_meta(self) -> Told:
        return Told({self._vllm_config.parallel_config.rank: self.sent})

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.addresses = metadata

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ended, self.ended = self.ended, []
        return StepMetadata(ended)

    def update_connector_output(self, connector_output: Any) -> None:
        self.outputs.append(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.ended.append(request.request_id)
        return True, None

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))


class FirstRankConnector(RankConnector):
    """Only one rank reports."""

    def get_finished_count(self) -> int:
        return 1


class RowsElsewhereConnector(RankConnector):
    """Reads rows on every rank, as if each had them."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _ = kv_caches[next(name for name in self.planned[-1] if "cache_only" in name)]


class FaultyConnector(SharedStorageConnector):
    """A store whose loads fail on the last rank of the first stage while there is the file
    ``fault``: it raises, or it says that blocks did not come only when the step has been saved."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        fault = self._blocks.folder.parent.parent / "fault"
        parallel = self._vllm_config.parallel_config
        self._asked, self._hidden = 0, set[int]()
        is_faulty = fault.exists() and parallel.rank == parallel.tensor_parallel_size - 1
        if is_faulty and self._step().loads:
            if fault.read_text() == "raise":
                raise RuntimeError("planted")
            self._hidden = {block for one in self._step().loads for block in one.blocks}
            return
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._asked += 1
        failed = super().get_block_ids_with_load_errors()
        return failed | (self._hidden if self._asked == 2 else set())


def connector(name: str, folder: Path | None = None) -> dict[str, Any]:
    """One connector's config."""
    options = {} if folder is None else {"shared_storage_path": str(folder / "blocks")}
    return {
        "kv_connector": name,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": options,
    }


# ---- functions that tests call with the workers of all ranks


def part_of(worker: Any, index: int) -> Any:
    """The worker side of one of several connectors."""
    return worker.model_runner.connector.connector._connectors[index]


def seen(worker: Any, index: int) -> dict[str, Any]:
    part = part_of(worker, index)
    names = ("places", "planned", "registered", "hooks")
    return {name: getattr(part, name) for name in names} | {"kind": type(part).__name__}

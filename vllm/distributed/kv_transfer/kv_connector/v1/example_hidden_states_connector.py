"""The connector that writes the hidden states of each request to its own file.

``<shared_storage_path>/<request id>.safetensors`` holds ``hidden_states``
[tokens, layers, hidden], ``token_ids`` [tokens], and the tensors of other fields [tokens, ...].
The reply's ``kv_transfer_params["hidden_states_path"]`` is its path; the reply goes out when the
file is complete.
Rows leave the pool in the step that computes them (docs/design.md, "Hidden states").

A subclass may override ``_write_tensors`` to store the tensors in another form.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_saver import (
    MAX_PIECE_BYTES,
    OpenDestination,
    RowSaver,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_tracker import (
    HiddenStatesMetadata,
    RowTracker,
)
from vllm.hidden_states.layer_ids import convention_of
from vllm.utils.boundaries import LayerId
from vllm.v1.rows.fields import StoredNames
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import ALL_FIELDS, TensorForm
from vllm.v1.rows.file import HiddenStatesFile, read_hidden_states, write_hidden_states
from vllm.v1.rows.leaving import RowMemory
from vllm.v1.rows.lock import lock_path_of, wait_until_unlocked
from vllm.v1.rows.writer import CollectedRows, HostEvent

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.exceptions import Failure
    from vllm.forward_context import ForwardContext
    from vllm.v1.cache_kinds.rows import HiddenStateCacheSpec
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, SaveStats
    from vllm.v1.request import Request
    from vllm.v1.rows.destinations import RowDestination


def extract_from_kv_cache(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return the rows of the first ``num_tokens`` slots, [num_tokens, layers, hidden], dense.

    kv_cache: [blocks, layers, block_size, hidden], may be strided; slot_mapping:
    [>= num_tokens], ``block * block_size + row``.
    """
    slots = slot_mapping[:num_tokens].to(device=kv_cache.device, dtype=torch.int64)
    block_size = kv_cache.shape[2]
    return kv_cache[slots // block_size, :, slots % block_size]


def load_hidden_states(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Wait until a file of :class:`ExampleHiddenStatesConnector` is written, and read it.

    Raises ValueError when a tensor differs from its checksum, FileNotFoundError when there
    is no file.
    """
    name = os.fspath(path)
    wait_until_unlocked(name)
    return read_hidden_states(name)


def cleanup_hidden_states(path: str | os.PathLike[str], keep_hidden_states: bool = False) -> None:
    """Remove a file and its lock, or only the lock; missing ones are ignored."""
    name = os.fspath(path)
    for target in [lock_path_of(name)] if keep_hidden_states else [name, lock_path_of(name)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)


class ExampleHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams the rows of every request from the pool into safetensors files."""

    reply_when_saved = True
    rows_leave_each_step = True
    keeps = ALL_FIELDS
    takes_rows_only = True
    reads_all_layers = False
    keeps_prefixes = False
    reads_metadata_later = False
    loads_rows = True  # it loads nothing, so no loaded token lacks its rows
    sends_rows_on = True
    keeps_rows_back = True

    _ROW_PATH = (
        "build_connector_meta",
        "bind_connector_metadata",
        "wait_for_save",
        "get_finished",
        "request_finished",
        "request_finished_all_groups",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the blocks of rows for a subclass that moves rows itself: it may read them late."""
        super().__init_subclass__(**kwargs)
        cls.reads_metadata_later = vars(cls).get("reads_metadata_later", True)
        if "rows_leave_each_step" not in vars(cls) and vars(cls).keys() & set(cls._ROW_PATH):
            cls.rows_leave_each_step = False
            cls.keeps_rows_back = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layer_ids = _extracted_layer_ids(vllm_config)
        group_id, rows_per_block, self._layer_name, spec = _row_layer(kv_cache_config)
        self._row_layout = spec.row_layout
        self._options = self._read_options(self._kv_transfer_config)
        self._tracker = RowTracker(self._options, group_id, rows_per_block)
        self._saver: RowSaver | None = None
        self._dropped: set[str] = set()
        self._writes = self._kv_transfer_config.is_kv_producer  # a consumer would only load

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        _extracted_layer_ids(vllm_config)
        assert vllm_config.kv_transfer_config is not None
        cls._read_options(vllm_config.kv_transfer_config).warn_of_any_path()

    @classmethod
    def _read_options(cls, config: KVTransferConfig) -> HiddenStatesOptions:
        """Return the checked options; their folder exists and can be written."""
        extra_config = config.kv_connector_extra_config
        if cls is ExampleHiddenStatesConnector:
            options = HiddenStatesOptions(**extra_config)
        else:  # a subclass may have more options
            options = HiddenStatesOptions.among(extra_config)
        options.prepare_storage()
        return options

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return None: the rows of a token are contiguous in either layout of keys and values."""
        return None

    def shutdown(self) -> None:
        """Complete the files of requests that ended, and remove those of the others."""
        if self._saver is not None:
            self._saver.shutdown()

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor],
        event: HostEvent,
        filename: str,
        lock_fd: int | None,
    ) -> None:
        """Write complete tensors to ``filename``; for subclasses to override.

        An override is called on a writer thread with ``hidden_states``, ``token_ids`` and the
        tensors of other fields on the host, readable after ``event.synchronize()``. It has to close
        ``lock_fd`` (None: no lock) and to write the file to ``filename``, a temporary name.
        """
        try:
            event.synchronize()
            write_hidden_states(filename, tensors, {})
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.ops.row_transport import make_row_transport

        # [blocks, layers, rows, hidden] -> [blocks, rows, layers, hidden]
        row_cache = kv_caches[self._layer_name].permute(0, 2, 1, 3)
        hidden_size, dtype = row_cache.shape[3], row_cache.dtype
        hidden = HiddenStates(tuple(self._layer_ids), hidden_size, dtype, dtype)
        self._saver = RowSaver(
            RowMemory(row_cache, hidden, self._row_layout),
            make_row_transport(row_cache.device),
            self._saver_options(row_cache),
            self.make_destinations(row_cache),
        )

    def _saver_options(self, row_cache: torch.Tensor) -> HiddenStatesOptions:
        """Return the options, by default with room for the rows of two steps on a device, each
        rounded up to whole pieces: with less, a step would wait for the rows of the step before
        it, and the device for the step after it."""
        options = self._options
        is_set = "max_bytes_in_flight" in self._kv_transfer_config.kv_connector_extra_config
        if is_set or row_cache.device.type == "cpu":
            return options
        step_rows = self._vllm_config.scheduler_config.max_num_batched_tokens
        two_steps = 2 * (step_rows * row_cache[0, 0].nbytes + MAX_PIECE_BYTES)
        room = max(options.max_bytes_in_flight, two_steps)
        return replace(options, max_bytes_in_flight=room)

    def make_destinations(self, row_cache: torch.Tensor) -> OpenDestination:
        """Return the function that begins the output of a request: a growing file, or rows that
        are collected for ``_write_tensors``.

        A subclass may send rows elsewhere: it returns a function that makes a
        :class:`vllm.v1.rows.destinations.RowDestination` for each request.
        """
        if type(self)._write_tensors is not ExampleHiddenStatesConnector._write_tensors:
            write_tensors = self._write_tensors
            return lambda path, lock, num_rows: CollectedRows(path, write_tensors, lock, num_rows)

        metadata = {
            "model": str(self._vllm_config.model_config.model),
            "layer_ids": json.dumps(self._layer_ids),
            "layer_convention": convention_of(self._layer_ids),
        }
        layout, form = self._row_layout, TensorForm(row_cache.dtype, tuple(row_cache.shape[2:]))
        metadata |= {name: json.dumps(value) for name, value in layout.constants.items()}
        names = StoredNames.of(layout.others)
        metadata |= names.metadata

        def open_file(path: str, lock: int | None, num_rows: int) -> RowDestination:
            return HiddenStatesFile(path, form, metadata, names.tensors)

        return open_file

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._dropped = set()
        # Before the forward pass, so that files are completed while it runs.
        if self._saver is not None:
            self._saver.end_requests(self._step())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: this connector does not load."""

    def drop_computed(self, request_ids: set[str]) -> None:
        self._dropped = request_ids

    def wait_for_save(self) -> None:
        """Send this step's rows to the host; their blocks may be reused on return."""
        if self._saver is not None:
            rows = self._step().rows
            self._saver.save([one for one in rows if one.request_id not in self._dropped])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose file is complete, or has failed (:meth:`take_failures`)."""
        if self._saver is None:
            return None, None
        idle = self.has_connector_metadata() and self._step().nothing_scheduled
        return self._saver.take_finished(nothing_else_to_do=idle) or None, None

    def take_failures(self) -> dict[str, Failure]:
        return self._saver.take_failures() if self._saver is not None else {}

    def save_stats(self) -> SaveStats | None:
        return self._saver.stats() if self._saver is not None else None

    def _step(self) -> HiddenStatesMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HiddenStatesMetadata)
        return metadata

    # Scheduler side

    def check_request(self, request: Request) -> None:
        if self._writes:
            self._tracker.check(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "nothing can be loaded"

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if not self._writes:
            return HiddenStatesMetadata()
        return self._tracker.plan_step(scheduler_output)

    def take_rows_back(self, request_id: str) -> None:
        self._tracker.take_rows_back(request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._tracker.take_report(connector_output.finished_sending)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._tracker.finish(request) if self._writes else (False, None)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._tracker.finish(request) if self._writes else (False, None)


def _extracted_layer_ids(vllm_config: VllmConfig) -> list[LayerId]:
    speculative = vllm_config.speculative_config
    method = None if speculative is None else speculative.method
    if speculative is None or method != "extract_hidden_states":
        raise ValueError(
            "ExampleHiddenStatesConnector needs speculative_config with method "
            f"'extract_hidden_states', found {method!r}; set it, or leave kv_transfer_config out"
        )
    return list(speculative.hidden_state_layer_ids)


def _row_layer(config: KVCacheConfig | None) -> tuple[int, int, str, HiddenStateCacheSpec]:
    """Return the id and the rows per block of the group that keeps rows, and the name and the spec
    of its layer that does; the group may have attention layers before that layer."""
    group_id = None if config is None else config.hidden_state_group_id()
    if config is None or group_id is None:
        raise ValueError(
            "ExampleHiddenStatesConnector found no hidden-state group in the KV cache config: the "
            "model has no layer that captures rows"
        )
    group = config.kv_cache_groups[group_id]
    name = next(name for name in group.layer_names if config.spec_of(name).holds_rows)
    spec = cast("HiddenStateCacheSpec", config.spec_of(name))
    return group_id, group.kv_cache_spec.block_size, name, spec

"""Samples as objects of a Mooncake store, from which trainers on other machines fetch them.

Each tensor is an object of raw bytes with the key ``{prefix}/{name}``; its form travels beside it.
The objects are pinned: they stay until they are removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from vllm.exceptions import Failure, FailureError, FailureKind, kind_of
from vllm.hidden_states.sample import FailedSample, HiddenStatesSample
from vllm.logger import init_logger
from vllm.utils.boundaries import LayerId
from vllm.v1.rows.fields.layout import TensorForm

logger = init_logger(__name__)

_SETUP = {
    "local_hostname": "localhost",
    "metadata_server": "http://localhost:8080/metadata",
    "global_segment_size": 1 << 30,
    "local_buffer_size": 1 << 30,
    "protocol": "tcp",
    "rdma_devices": "",
    "master_server_addr": "localhost:50051",
}
_NO_ROOM = -200
"""Mooncake's status if no segment has room for an object."""
_NOT_THERE = -704
"""Its status if there is no such object."""


class StoreClient(Protocol):
    """The part of ``mooncake.store.MooncakeDistributedStore`` that is used here.

    Methods return a negative status if they fail; a pointer is an address in host memory.
    """

    def register_buffer(self, pointer: int, size: int, /) -> int: ...
    def unregister_buffer(self, pointer: int, /) -> int: ...
    def batch_put_from(
        self, keys: list[str], pointers: list[int], sizes: list[int], config: Any, /
    ) -> list[int]: ...
    def get_into(self, key: str, pointer: int, size: int, /) -> int: ...
    def is_exist(self, key: str, /) -> int: ...
    def remove(self, key: str, /) -> int: ...


class StoredSample(NamedTuple):
    """A sample in a store, without its tensors."""

    prefix: str
    sample_index: int
    layer_ids: tuple[LayerId, ...]
    tensors: dict[str, TensorForm]
    """Their forms, with ``token_ids`` and ``positions``."""
    request_id: str
    record: int | None
    constants: dict[str, list[int]]
    columns: dict[str, Any]
    num_generated_tokens: int


class MooncakeStore:
    """Puts tensors into a store, all of a sample or none, and fetches them."""

    def __init__(self, client: StoreClient, put_config: Any = None) -> None:
        """client: connected. put_config: the ReplicateConfig of new objects."""
        self._client = client
        self._put_config = put_config

    @classmethod
    def connect(cls, **setup: Any) -> MooncakeStore:
        """Connect with the options of ``MooncakeDistributedStore.setup``.

        ImportError: the client is not installed. FailureError: it could not connect.
        """
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ImportError(
                f"a Mooncake store needs its client ({error}): pip install '.[mooncake]' in the "
                "source tree, or mooncake-transfer-engine-cuda13 for CUDA 13"
            ) from error
        if unknown := setup.keys() - _SETUP.keys():
            raise ValueError(f"{sorted(unknown)}: options are {', '.join(_SETUP)}")
        client, options = MooncakeDistributedStore(), {**_SETUP, **setup}
        if status := client.setup(**options):
            message = f"the Mooncake store could not be set up (status {status}) with {options}"
            raise FailureError(Failure(FailureKind.CONNECTOR_FAILED, message))
        config = ReplicateConfig()
        config.replica_num, config.with_hard_pin = 1, True
        return cls(client, config)

    def put(
        self, prefix: str, tensors: Mapping[str, torch.Tensor], *, replace: bool = False
    ) -> dict[str, TensorForm]:
        """Store tensors under ``{prefix}/{name}``; returns their forms.

        FailureError: one of them could not be stored, or exists and ``replace`` is false. Then
        none of them is there, except those that were there before.
        """
        dense = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        keys = [f"{prefix}/{name}" for name in dense]
        for key in keys:
            if replace:
                self._remove(key)
            elif self._ask(key, self._client.is_exist, key) == 1:
                raise _failure(FailureKind.WRITE_FAILED, f"{key}: exists in the store already")
        try:
            self._put(keys, list(dense.values()))
        except FailureError:
            self.remove(keys)
            raise
        return {name: TensorForm(one.dtype, tuple(one.shape)) for name, one in dense.items()}

    def _put(self, keys: list[str], tensors: Sequence[torch.Tensor]) -> None:
        pointers, sizes = [one.data_ptr() for one in tensors], [one.nbytes for one in tensors]
        with contextlib.ExitStack() as stack:
            for pointer, size in zip(pointers, sizes, strict=True):
                if size:
                    self._client.register_buffer(pointer, size)
                    stack.callback(self._client.unregister_buffer, pointer)
            put = self._client.batch_put_from
            statuses = self._ask(keys[0], put, keys, pointers, sizes, self._put_config)
        for key, status in zip(keys, statuses, strict=True):
            if status < 0:
                kind = FailureKind.DISK_FULL if status == _NO_ROOM else FailureKind.WRITE_FAILED
                raise _failure(kind, f"{key}: could not be stored (status {status})")

    def get(self, prefix: str, forms: Mapping[str, TensorForm]) -> dict[str, torch.Tensor]:
        """Fetch tensors. FailureError: one is not there, or has another size."""
        tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
        for name, tensor in tensors.items():
            key, pointer, size = f"{prefix}/{name}", tensor.data_ptr(), tensor.nbytes
            with contextlib.ExitStack() as stack:
                if size:
                    self._client.register_buffer(pointer, size)
                    stack.callback(self._client.unregister_buffer, pointer)
                status = self._ask(key, self._client.get_into, key, pointer, size)
            if status < 0:
                raise _failure(FailureKind.FILE_GONE, f"{key}: is not there (status {status})")
            if status != size:
                message = f"{key}: has {status} bytes, but {size} are expected"
                raise _failure(FailureKind.FILE_DAMAGED, message)
        return tensors

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there, or stay for now, are no error."""
        for key in keys:
            try:
                self._remove(key)
            except FailureError as error:
                logger.warning("%s", error)

    def _remove(self, key: str) -> None:
        # To ask whether an object exists keeps it from being removed for a while.
        status = self._ask(key, self._client.remove, key)
        if status not in (0, _NOT_THERE):
            message = f"{key}: could not be removed (status {status})"
            raise _failure(FailureKind.WRITE_FAILED, message)

    def _ask(self, key: str, method: Any, *arguments: Any) -> Any:
        """Call the client. FailureError: it raised an exception."""
        try:
            return method(*arguments)
        except Exception as error:
            kind = kind_of(error, FailureKind.CONNECTOR_FAILED)
            raise _failure(kind, f"{key}: {type(error).__name__}: {error}") from error

    def publish(
        self, items: Iterable[HiddenStatesSample | FailedSample], prefix: str
    ) -> Iterator[StoredSample | FailedSample]:
        """Store each sample under ``{prefix}/{index}``, and yield what a trainer needs to fetch it.

        A sample that could not be stored becomes a FailedSample with the reason.
        """
        for item in items:
            if isinstance(item, FailedSample):
                yield item
                continue
            place = f"{prefix}/{item.index}"
            tensors = {**item.tensors, "token_ids": item.token_ids, "positions": item.positions}
            try:
                forms = self.put(place, tensors)
            except FailureError as error:
                yield FailedSample(item.index, item.request_id, error.failure)
            else:
                yield StoredSample(
                    *(place, item.index, item.layer_ids, forms, item.request_id, item.record),
                    constants={name: list(values) for name, values in item.constants.items()},
                    columns=dict(item.columns),
                    num_generated_tokens=item.num_generated_tokens,
                )

    def fetch(self, stored: StoredSample) -> HiddenStatesSample:
        """Fetch a sample that was published. FailureError: it is not there as it was."""
        tensors = self.get(stored.prefix, stored.tensors)
        return HiddenStatesSample(
            index=stored.sample_index,
            request_id=stored.request_id,
            token_ids=tensors.pop("token_ids"),
            positions=tensors.pop("positions"),
            tensors=tensors,
            layer_ids=stored.layer_ids,
            record=stored.record,
            constants=stored.constants,
            columns=stored.columns,
            num_generated_tokens=stored.num_generated_tokens,
        )


def _failure(kind: FailureKind, message: str) -> FailureError:
    return FailureError(Failure(kind, message))

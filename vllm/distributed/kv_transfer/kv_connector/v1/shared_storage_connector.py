"""Keeps blocks in a folder that outlives the process and that several engines may share.

Every block that a step fills becomes a file named by the hash of its prefix, with the states that
are kept of recurrent layers and the rows of hidden states; any engine of the same model finds it.
Options (``kv_connector_extra_config``):

    shared_storage_path   the folder; made when it is missing
    max_bytes             quota of what one model has there; None: no limit

    <folder>/<what the blocks fit>/<group>-<hash of the prefix>-<index>.block

A file is made under a temporary name and renamed when its step has ended, so one that can be seen
is whole, whoever was killed meanwhile; writers of the same block write the same bytes. Further
names of a block (it also holds shorter prefixes) are hard links. When the quota is reached, those
go first that nobody read for the longest time.

A file that is gone or damaged when it is to be loaded counts as a failed load
(``kv_load_failure_policy``). What cannot be written is not stored, and the engine goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.distributed.kv_transfer.kv_connector.utils import check_options
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import EndedStep, PrefixConnector
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    NumberedIndex,
    PrefixTracker,
    SavedContent,
)
from vllm.logger import init_logger
from vllm.utils.torch_files import torch_files
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.block_pool import BlockKey
from vllm.v1.kv_offload.state_layout import StateLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.request import Request

logger = init_logger(__name__)

OPTIONS = ("shared_storage_path", "max_bytes")
SUFFIX = ".block"
_TEMPORARY = ".tmp-"
_DIGEST_BYTES = 16
_ABANDONED_SECONDS = 3600.0
"""Temporary files of that age belong to nobody any more."""


class DamagedBlockError(Exception):
    """A file that does not hold what was written."""


class StoredBlocks:
    """One folder of blocks."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        _make(folder)
        self._room = 0
        """Bytes to write before a look at the folder, where others write too."""
        self._remove_abandoned()

    def path(self, key: BlockKey) -> Path:
        """Where a block is, if it is there."""
        group_id, digest, index = key
        return self.folder / f"{group_id}-{digest.hex()}-{index}{SUFFIX}"

    def has(self, key: BlockKey) -> bool:
        """Whether it is there."""
        return self.path(key).exists()

    def stage(self, data: bytes) -> Path:
        """A block in a temporary file, to be published or unlinked. OSError: there is none."""
        staged = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        try:
            with open(staged, "wb") as file:
                file.write(digest)
                file.write(data)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def publish(self, keys: Sequence[BlockKey], staged: Path) -> None:
        """Give a block all of its names. OSError: it is not stored."""
        try:
            num_bytes = staged.stat().st_size
            for key in keys[:-1]:
                with suppress(OSError):  # there already, or no links on this file system
                    os.link(staged, self.path(key))
            os.replace(staged, self.path(keys[-1]))
        finally:
            staged.unlink(missing_ok=True)
        self._room -= num_bytes
        if self.max_bytes is not None and self._room < 0:
            self._make_room(self.max_bytes)

    def read(self, key: BlockKey) -> bytes:
        """A block. OSError, DamagedBlockError (then it is removed): there is none."""
        path = self.path(key)
        content = path.read_bytes()
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != digest:
            path.unlink(missing_ok=True)
            raise DamagedBlockError(f"{path.name} does not have its checksum")
        with suppress(OSError):
            os.utime(path)
        return data

    def _files(self) -> list[tuple[float, int, str, int]]:
        """``(last use, bytes, name, inode)`` of every file."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, entry.name, status.st_ino))
        return sorted(found)

    def _remove_abandoned(self) -> None:
        """Drop what killed writers left."""
        for last_use, _, name, _ in self._files():
            if name.startswith(_TEMPORARY) and time.time() - last_use > _ABANDONED_SECONDS:
                with suppress(OSError):  # where others may write, and this engine may not
                    (self.folder / name).unlink(missing_ok=True)

    def _make_room(self, max_bytes: int) -> None:
        """Of more than the quota, remove the longest unused blocks until a tenth of it is free."""
        sizes: dict[int, int] = {}
        names: dict[int, list[str]] = {}
        for _, size, name, inode in self._files():
            sizes[inode] = size
            names.setdefault(inode, []).append(name)
        used = sum(sizes.values())
        most = max_bytes if used <= max_bytes else max_bytes * 9 // 10
        for inode, size in sizes.items():
            if used <= most:
                break
            for name in names[inode]:
                (self.folder / name).unlink(missing_ok=True)
            used -= size
        self._room = min(max_bytes - used, max_bytes // 10)


class FileToLoad(NamedTuple):
    """A file, and the blocks that get its content one after the other."""

    key: BlockKey
    blocks: list[int]


class SharedStorageConnector(PrefixConnector[FileToLoad, SavedContent]):
    """Blocks of every group between the pool and files."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None, "made by the engine, which has a plan"
        folder, max_bytes = _read_options(self._kv_transfer_config.kv_connector_extra_config)
        name = fingerprint(vllm_config, kv_cache_config)
        self._blocks = StoredBlocks(folder / name, max_bytes)
        self._staged: list[tuple[list[BlockKey], Path]] = []  # of the step under way
        self._keeps_step = True
        self._states = StateLayout(kv_cache_config)
        self._state_group_ids = kv_cache_config.recurrent_group_ids
        if role is KVConnectorRole.SCHEDULER:
            self._index = NumberedIndex(len(self._state_group_ids), self._blocks.has)
            self._tracker = PrefixTracker(vllm_config, kv_cache_config, self._index)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        folder, _ = _read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        _make(folder)

    # ---- worker side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.drop_saves()  # of a step that did not come to its end
        self._keeps_step = True

    def drop_saves(self) -> None:
        self._keeps_step = False
        for _, staged in self._staged:
            staged.unlink(missing_ok=True)
        self._staged.clear()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for key, blocks in self._step().loads:
            try:
                self._put(key, blocks, bytearray(self._blocks.read(key)))
            except (OSError, DamagedBlockError, ValueError) as error:
                logger.warning("a stored block could not be loaded: %s", error)
                self._lost.update(blocks)
                self._keeps_step = False

    def _put(self, key: BlockKey, blocks: list[int], data: bytearray) -> None:
        content = torch.frombuffer(data, dtype=torch.int8)
        if key[0] in self._state_group_ids:
            self._states.write(self._pool, blocks, content)
            return
        (block,) = blocks
        if len(content) != self._pool.shape[1]:
            raise ValueError(f"{len(content)} bytes for a block of {self._pool.shape[1]}")
        self._pool[block].copy_(content)

    def wait_for_save(self) -> None:
        if not self._keeps_step:
            return
        for saved in self._step().saves:
            if saved.is_state:
                content = self._states.read(self._pool, saved.blocks)
            else:
                content = self._pool[saved.blocks[0]].cpu()
            try:
                staged = self._blocks.stage(content.numpy().tobytes())
                self._staged.append((saved.keys, staged))
            except OSError as error:
                logger.warning_once("blocks are not stored: %s", error)

    def build_connector_worker_meta(self) -> EndedStep | None:
        """Last in a step: by now every connector has said what it could not load."""
        for keys, staged in self._staged:
            try:
                self._blocks.publish(keys, staged)
            except OSError as error:
                logger.warning_once("blocks are not stored: %s", error)
        self._staged.clear()
        return super().build_connector_worker_meta()

    # ---- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._index.forget_numbers()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def begin(self, request: Request, load: Load) -> list[FileToLoad]:
        return [FileToLoad(self._index.key_of(n), blocks) for n, blocks in load.targets.items()]

    def place(self, step_number: int, saves: list[SavedContent]) -> list[SavedContent]:
        return saves


def fingerprint(vllm_config: VllmConfig, plan: KVCacheConfig) -> str:
    """What the bytes of a block depend on besides its prefix, as the name of a folder.

    The model with its weights and what is made of them, and how its layers lie in a block. Of
    recurrent states only what they are: they are stored as every kernel can read them
    (``StateLayout``).
    """
    model = vllm_config.model_config
    load_format = vllm_config.load_config.load_format
    speculative = vllm_config.speculative_config
    facts = {
        "model": str(model.model),
        "config": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "weights": _weights_of(Path(model.model).expanduser()),
        "load": [load_format, model.seed if load_format == "dummy" else None],
        "options": [model.computed_otherwise, model.disable_sliding_window],
        "layers": list(speculative.hidden_state_layer_ids) if speculative else None,
        "block_bytes": plan.block_bytes,
        "groups": [
            [(name, plan.page_runs(name)) for name in group.layer_names]
            + [group.kv_cache_spec.block_size]
            for group in plan.kv_cache_groups
            if not group.kv_cache_spec.is_recurrent
        ],
        "states": StateLayout(plan).facts(),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_of(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a local checkpoint's files."""
    if not folder.is_dir():
        return []
    files = [*sorted(folder.glob("*.safetensors")), *torch_files(folder)]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _make(folder: Path) -> None:
    """ValueError: it is not there, and cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"shared_storage_path: no folder can be made: {error}") from error


def _read_options(options: Mapping[str, Any]) -> tuple[Path, int | None]:
    check_options("SharedStorageConnector", options, OPTIONS)
    folder, max_bytes = options.get("shared_storage_path"), options.get("max_bytes")
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"shared_storage_path={folder!r} is not a path; name a folder")
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
        raise ValueError(f"max_bytes={max_bytes!r} is not a positive number of bytes")
    return Path(folder), max_bytes

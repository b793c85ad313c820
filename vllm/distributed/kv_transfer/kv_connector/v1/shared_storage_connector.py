"""The connector that keeps blocks in a folder, which several engines may share.

Every block that a step fills becomes a file named by the hash of its prefix, and so do kept states
of recurrent layers and rows of hidden states. Any engine of the same model, also a later one, finds
it. Options (``kv_connector_extra_config``):

    shared_storage_path   the folder; it is made if it does not exist
    max_bytes             quota for the files of one model, which ranks share; None: no limit
    mixed_kernels         load blocks that other kernels computed (another instruction set), whose
                          last bits may differ; false by default

    <folder>/<fingerprint>/<group>-<hash of the prefix>-<index>.block

Each rank of tensor parallelism or pipeline stages has its own folder for the caches that it fills.
The fingerprint says the sizes and the rank. A prefix is found if all ranks have stored it.

A file holds ``[digest | length of the header | header | block]``. The header is JSON: the
fingerprint, and all names of this block. The digest covers everything after it. So a file that
was damaged, or copied to another name or folder, is not loaded.

A file is written under a temporary name and renamed when its step has ended, so files appear
atomically even if a process is killed; writers of the same block write the same bytes. Further
names of a block, for shorter prefixes that it also holds, are hard links. When the quota is
reached, the least recently read blocks are removed first.

A file that is missing or damaged when it is to be loaded counts as a failed load
(``kv_load_failure_policy``). Blocks that cannot be written are not stored, and the engine goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import torch
from pydantic import Strict, StrictBool

from vllm.config.identity import value_identity
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_connector import (
    EndedSaves,
    PrefixConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prefix_tracker import (
    Load,
    NumberedIndex,
    PrefixTracker,
    SavedContent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.rank_share import (
    configs_of_ranks,
    plan_of_rank,
)
from vllm.logger import init_logger
from vllm.ops.sources import kernels_of
from vllm.utils.checked import FolderPath, at_least, config
from vllm.utils.regular_files import is_regular, open_regular
from vllm.utils.text import parse_json
from vllm.utils.whole_files import remove_temporary, temporary_path
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.core.block_pool import BlockKey
from vllm.v1.kv_offload.state_layout import StateLayout
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.cache_kinds.base import KVCacheReferences
    from vllm.v1.request import Request

logger = init_logger(__name__)

SUFFIX = ".block"
_DIGEST_BYTES = 16
_LENGTH_BYTES = 4
_MOST_HEADER_BYTES = 1 << 20
_ABANDONED_SECONDS = 3600.0
"""Temporary files of this age are abandoned."""


class DamagedBlockError(Exception):
    """A file does not hold the block that was written to it."""


class StoredBlocks:
    """One folder of blocks; its name is the fingerprint of the engines that can load them."""

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        _make(folder)
        self._room = 0
        """Bytes to write before the next scan of the folder, to which others write too."""
        remove_temporary(folder, least_age_seconds=_ABANDONED_SECONDS)

    def path(self, key: BlockKey) -> Path:
        """Return the path of a block, which may not exist."""
        return self.folder / f"{_name_of(key)}{SUFFIX}"

    def has(self, key: BlockKey) -> bool:
        """Return whether there is a file for the block that this user may read."""
        path = self.path(key)
        return is_regular(path) and os.access(path, os.R_OK)

    def stage(self, keys: Sequence[BlockKey], data: bytes) -> Path:
        """Write a block to a temporary file, to be published or unlinked. OSError: it failed, and
        there is no file."""
        staged = Path(temporary_path(self.path(keys[0])))
        header = json.dumps({"fits": self.folder.name, "names": [*map(_name_of, keys)]}).encode()
        parts = (len(header).to_bytes(_LENGTH_BYTES, "little"), header, data)
        try:
            with self._create(staged) as file:
                file.write(_digest_of(*parts))
                file.writelines(parts)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def _create(self, path: Path) -> BinaryIO:
        try:
            return open(path, "wb")
        except FileNotFoundError:  # somebody removed the folder of this model
            self.folder.mkdir(exist_ok=True)
            return open(path, "wb")

    def publish(self, keys: Sequence[BlockKey], staged: Path) -> None:
        """Give a block all its names. OSError: it is not stored."""
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

    def read(self, key: BlockKey, num_bytes: int) -> bytearray:
        """Read a block of ``num_bytes`` bytes.

        OSError: there is no such file, or it is not a regular file.
        DamagedBlockError: the file is damaged, too large, or holds another block; it is removed.
        """
        path = self.path(key)
        most = _DIGEST_BYTES + _LENGTH_BYTES + _MOST_HEADER_BYTES + num_bytes
        with open_regular(path) as file:
            content = file.read(most + 1)
        try:
            if len(content) > most:
                raise DamagedBlockError(f"{path.name} has more than {most:,} bytes")
            data = self._check(key, content, num_bytes)
        except DamagedBlockError:
            path.unlink(missing_ok=True)
            raise
        with suppress(OSError):
            os.utime(path)
        return data

    def _check(self, key: BlockKey, content: bytes, num_bytes: int) -> bytearray:
        """Return the block in the content of a file. DamagedBlockError: damaged, or another."""
        name = f"{_name_of(key)}{SUFFIX}"
        digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if _digest_of(rest) != digest:
            raise DamagedBlockError(f"{name} does not match its checksum")
        end = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
        try:
            header = parse_json(rest[_LENGTH_BYTES:end])
            fits, names = header["fits"], list(header["names"])
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedBlockError(f"{name} does not say what it holds") from error
        if fits != self.folder.name or _name_of(key) not in names:
            raise DamagedBlockError(f"{name} holds other blocks instead: {names[:1]}")
        data = bytearray(memoryview(rest)[end:])
        if len(data) != num_bytes:
            raise DamagedBlockError(f"{name} holds {len(data)} bytes, not {num_bytes}")
        return data

    def _files(self) -> list[tuple[float, int, str, int]]:
        """Return ``(last use, bytes, name, inode)`` of every file, the oldest first.

        Folders and links, which the engine does not make, are left alone.
        """
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.name, status.st_ino))
        return sorted(found)

    def _make_room(self, max_bytes: int) -> None:
        """Beyond the quota, remove the least recently used blocks until a tenth of it is free."""
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


def _name_of(key: BlockKey) -> str:
    group_id, digest, index = key
    return f"{group_id}-{digest.hex()}-{index}"


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


@config("kv_connector_extra_config", frozen=True)
class SharedStorageOptions:
    """The checked ``kv_connector_extra_config`` of the shared-storage connector."""

    shared_storage_path: FolderPath
    max_bytes: Annotated[int, Strict(), at_least(1)] | None = None
    """Bytes that all files of one model may take; the least recently used are removed first. Each
    rank has an equal part of them."""
    mixed_kernels: StrictBool = False
    """Share blocks between machines whose kernels may differ in the last bits."""


class FileToLoad(NamedTuple):
    """A file, and the blocks of the pool that get its content, in this order."""

    key: BlockKey
    blocks: list[int]


class FileToSave(NamedTuple):
    """Blocks of the pool that become a file, and its keys."""

    request_id: str
    blocks: list[int]
    keys: list[BlockKey]


class StoredRuns:
    """The bytes of a block that a rank stores: all if there is one rank, else the runs of the
    layers whose caches it fills."""

    def __init__(self, share: KVCacheConfig, group_id: int, *, takes_whole: bool) -> None:
        names = share.kv_cache_groups[group_id].layer_names
        runs = sorted(run for name in names for run in share.page_runs(name))
        self._runs = [(0, share.block_bytes)] if takes_whole else runs
        self.num_bytes = sum(length for _, length in self._runs)

    def read(self, block: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a block int8 [block_bytes] on the host."""
        parts = [block[start : start + length] for start, length in self._runs]
        return torch.cat(parts).cpu()

    def write(self, block: torch.Tensor, content: torch.Tensor) -> None:
        """Reverse :meth:`read`."""
        parts = torch.split(content, [length for _, length in self._runs])
        for (start, length), part in zip(self._runs, parts, strict=True):
            block[start : start + length].copy_(part)


class SharedStorageConnector(PrefixConnector[FileToLoad, FileToSave]):
    """Copies blocks of every group between the pool and files."""

    outlives_engine = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert kv_cache_config is not None, "made by the engine, which has a plan"
        options = SharedStorageOptions(**self._kv_transfer_config.kv_connector_extra_config)
        self._staged: list[tuple[FileToSave, Path]] = []  # of the step under way
        self._dropped: set[str] = set()
        self._states = StateLayout(kv_cache_config)
        self._state_group_ids = kv_cache_config.recurrent_group_ids
        self._num_ranks = vllm_config.parallel_config.world_size
        values = identity(vllm_config, options.mixed_kernels)

        def blocks_of(config: VllmConfig, share: KVCacheConfig) -> StoredBlocks:
            folder = Path(options.shared_storage_path) / fingerprint(config, values, share)
            quota = None if options.max_bytes is None else options.max_bytes // self._num_ranks
            return StoredBlocks(folder, quota)

        if role is KVConnectorRole.WORKER:
            self._own_groups = _own_groups(kv_cache_config)
            self._blocks = blocks_of(vllm_config, kv_cache_config)
            return
        shares = [(c, plan_of_rank(c, kv_cache_config)) for c in configs_of_ranks(vllm_config)]
        self._of_ranks = [(blocks_of(c, share), _own_groups(share)) for c, share in shares]
        self._blocks = self._of_ranks[vllm_config.parallel_config.rank][0]
        self._index = NumberedIndex(len(self._state_group_ids), self._is_stored)
        self._tracker = PrefixTracker(vllm_config, kv_cache_config, self._index)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        _make(Path(SharedStorageOptions(**extra_config).shared_storage_path))

    # Worker side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for _, staged in self._staged:  # left by a step that did not end
            staged.unlink(missing_ok=True)
        self._staged.clear()
        self._dropped = set()

    def drop_computed(self, request_ids: set[str]) -> None:
        self._dropped = self._dropped | request_ids

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for key, blocks in self._step().loads:
            try:
                self._load(key, blocks)
            except (OSError, DamagedBlockError) as error:
                logger.warning("a stored block could not be loaded: %s", error)
                self._failed_blocks.update(blocks)

    def register_kv_cache_references(self, references: KVCacheReferences) -> None:
        super().register_kv_cache_references(references)
        assert self._kv_cache_config is not None
        takes_whole = self._num_ranks == 1
        self._runs = {
            group_id: StoredRuns(self._kv_cache_config, group_id, takes_whole=takes_whole)
            for group_id in self._own_groups.difference(self._state_group_ids)
        }

    def _load(self, key: BlockKey, blocks: list[int]) -> None:
        group_id = key[0]
        if group_id not in self._own_groups:
            return
        if group_id in self._state_group_ids:
            content = self._read(key, self._states.num_bytes)
            self._states.write(self._pool, blocks, content)
        else:
            runs, (block,) = self._runs[group_id], blocks
            runs.write(self._pool[block], self._read(key, runs.num_bytes))

    def _read(self, key: BlockKey, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self._blocks.read(key, num_bytes), dtype=torch.int8)

    def wait_for_save(self) -> None:
        for saved in self._step().saves:
            group_id = saved.keys[0][0]
            if saved.request_id in self._dropped or group_id not in self._own_groups:
                continue
            if group_id in self._state_group_ids:
                content = self._states.read(self._pool, saved.blocks)
            else:
                content = self._runs[group_id].read(self._pool[saved.blocks[0]])
            try:
                staged = self._blocks.stage(saved.keys, content.numpy().tobytes())
                self._staged.append((saved, staged))
            except OSError as error:
                logger.warning_once("blocks are not stored: %s", error.strerror or error)

    def build_connector_worker_meta(self) -> EndedSaves | None:
        """Publish the saves; this hook is the last in a step, so all failed loads are known."""
        for saved, staged in self._staged:
            try:
                if saved.request_id in self._dropped:
                    staged.unlink(missing_ok=True)
                else:
                    self._blocks.publish(saved.keys, staged)
            except FileNotFoundError:
                logger.warning_once("blocks are not stored: another engine made room for its own")
            except OSError as error:
                logger.warning_once("blocks are not stored: %s", error.strerror or error)
        self._staged.clear()
        return super().build_connector_worker_meta()

    # Scheduler side

    def _is_stored(self, key: BlockKey) -> bool:
        """Return whether all ranks that fill a part of a block have stored it."""
        return all(blocks.has(key) for blocks, groups in self._of_ranks if key[0] in groups)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._index.forget_numbers()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def begin(self, request: Request, load: Load) -> list[FileToLoad]:
        return [FileToLoad(self._index.key_of(n), blocks) for n, blocks in load.targets.items()]

    def place(self, step_number: int, saves: list[SavedContent]) -> list[FileToSave]:
        return [FileToSave(one.request.request_id, one.blocks, one.keys) for one in saves]


def _own_groups(share: KVCacheConfig) -> frozenset[int]:
    """Return the groups of which a rank stores something; recurrent states have the first's key."""
    recurrent = share.recurrent_group_ids
    own = {i for i, group in enumerate(share.kv_cache_groups) if group.layer_names}
    states = recurrent[:1] if own.intersection(recurrent) else []
    return frozenset(own.difference(recurrent).union(states))


def identity(vllm_config: VllmConfig, mixes_kernels: bool) -> dict[str, Any]:
    """Return all that values in a block depend on, the same on all ranks."""
    kernels = "" if mixes_kernels else kernels_of(vllm_config.device_config.device_type)
    return value_identity(vllm_config, kernels)


def fingerprint(vllm_config: VllmConfig, values: dict[str, Any], share: KVCacheConfig) -> str:
    """Return the name of the folder for blocks of this rank: a hash of all that the bytes of a
    block depend on besides its prefix (``values``, and the layout of layers), then the rank.

    For recurrent states the layout in the pool does not count: they are stored in a layout that
    every kernel can read (``StateLayout``).
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    size, rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
    place = f"-tensor-{rank}-of-{size}-stage-{parallel.stage}-of-{parallel.pipeline_parallel_size}"
    facts = {
        "engine_version": __version__,
        "values": values,
        "layers": list(speculative.hidden_state_layer_ids) if speculative else None,
        "block_bytes": share.block_bytes,
        "groups": [
            [(name, share.page_runs(name)) for name in group.layer_names]
            + [group.kv_cache_spec.block_size]
            for group in share.kv_cache_groups
            if not group.kv_cache_spec.is_recurrent
        ],
        "states": StateLayout(share).facts(),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return name + place if parallel.world_size > 1 else name


def _make(folder: Path) -> None:
    """Make a folder unless it exists. ValueError: it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"shared_storage_path: the folder cannot be made: {error}") from error

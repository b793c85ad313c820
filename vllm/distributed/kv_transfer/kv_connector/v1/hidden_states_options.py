"""The options of the hidden-states connector, and the paths that these options allow."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Strict, StrictBool

from vllm.logger import init_logger
from vllm.utils.checked import FolderPath, at_least, config, require_at_first
from vllm.utils.regular_files import open_regular
from vllm.utils.text import brief, safe_name

logger = init_logger(__name__)

_MEBIBYTE = 1 << 20
_MOST_PATH_BYTES = 4095
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 2**20
"""The beginning of a safetensors file: the length of its header, and the header."""
_NAMES_IN_FILES = (b'"hidden_states"', b'"token_ids"')


@config("kv_connector_extra_config", frozen=True)
class HiddenStatesOptions:
    """The checked ``kv_connector_extra_config`` of the hidden-states connector."""

    shared_storage_path: FolderPath = "/tmp"
    """Folder of the files; it is made if it does not exist."""
    num_writer_threads: Annotated[int, Strict(), at_least(1)] = 8
    allow_custom_save_path: Annotated[
        bool | Literal["inside"],
        require_at_first(
            lambda value: isinstance(value, bool) or value == "inside",
            'use true, false or "inside"',
        ),
    ] = False
    """Let requests set ``kv_transfer_params["hidden_states_path"]``: true allows any path that this
    user can write, "inside" only paths inside ``shared_storage_path``."""
    extract_only_when_asked: StrictBool = False
    """Write files only for requests that have ``kv_transfer_params``, which may be empty."""
    use_synchronization_lock: StrictBool = True
    """Hold ``<path>.lock`` while a file is being made."""
    max_bytes_in_flight: Annotated[int, Strict(), at_least(1)] = 64 * _MEBIBYTE
    """Host memory for rows on their way to the disk; the engine waits when it is full."""

    @classmethod
    def among(cls, extra_config: Mapping[str, Any]) -> HiddenStatesOptions:
        """Take the options from ``extra_config``, which may hold other entries too.

        Raises ValueError that names the option, the value and what would work.
        """
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in extra_config.items() if name in names})

    def prepare_storage(self) -> None:
        """Make the storage folder. Raises ValueError if it cannot be written."""
        try:
            os.makedirs(self.shared_storage_path, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.shared_storage_path):
                pass
        except OSError as error:
            raise ValueError(
                f"shared_storage_path={self.shared_storage_path!r} cannot be written: "
                f"{error.strerror}; name a folder where this user may create files"
            ) from error

    def writes_file(self, params: Mapping[str, Any] | None) -> bool:
        """Return whether a request with these ``kv_transfer_params`` gets a file."""
        return params is not None or not self.extract_only_when_asked

    def save_path(self, request_id: str, params: Mapping[str, Any]) -> str:
        """Return the path of a request's file; it is not checked, see :meth:`check_save_path`."""
        custom = params.get("hidden_states_path")
        if custom is not None and self.allow_custom_save_path:
            # An absolute path replaces the folder, a relative one is inside it.
            return os.path.join(self.shared_storage_path, str(custom))
        return os.path.join(self.shared_storage_path, safe_name(request_id) + ".safetensors")

    def check_save_path(self, path: str) -> None:
        """Raise ValueError unless a file may be written at a path from :meth:`save_path`."""
        name = os.path.basename(path)
        is_path = "\0" not in path and _can_be_named(path)
        if not is_path or name in ("", ".", "..") or os.path.isdir(path):
            raise ValueError(f"hidden_states_path={brief(path)} is not the path of a file")
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(
                f"hidden_states_path={brief(path)} is a link, a device or a pipe, which a file "
                "would replace; choose another path"
            )
        if os.path.lexists(path) and not _may_be_replaced(path):
            raise ValueError(
                f"hidden_states_path={brief(path)} is a file without hidden states, which would be "
                "lost; choose another path, or remove it first"
            )
        if name.endswith(".lock"):
            raise ValueError(
                f"hidden_states_path={brief(path)}: names that end in .lock are for locks"
            )
        folder = os.path.realpath(self.shared_storage_path)
        inside = os.path.realpath(path).startswith(os.path.join(folder, ""))
        if self.allow_custom_save_path == "inside" and not inside:
            raise ValueError(
                f"hidden_states_path={brief(path)} lies outside shared_storage_path={folder!r}; "
                "choose a path inside it (allow_custom_save_path=true would allow any)"
            )

    def warn_of_any_path(self) -> None:
        """Log a warning if requests may name any path."""
        if self.allow_custom_save_path is True:
            logger.warning_once(
                "allow_custom_save_path is true: every client can make this process write, and "
                'overwrite, any file that its user can; "inside" keeps them to %s',
                self.shared_storage_path,
            )


def _can_be_named(path: str) -> bool:
    try:
        return 0 < len(os.fsencode(path)) <= _MOST_PATH_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _may_be_replaced(path: str) -> bool:
    """Return whether a regular file is empty or has rows of an earlier request."""
    try:
        with open_regular(path) as file:
            start = file.read(_LENGTH_BYTES + _MOST_HEADER_BYTES)
    except OSError:
        return False
    header = start[_LENGTH_BYTES:][: int.from_bytes(start[:_LENGTH_BYTES], "little")]
    return not start or (header[:1] == b"{" and any(name in header for name in _NAMES_IN_FILES))

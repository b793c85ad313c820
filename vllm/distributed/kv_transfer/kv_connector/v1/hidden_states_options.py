"""The options of the hidden-states connector, and the paths that they allow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.utils import check_options
from vllm.logger import init_logger
from vllm.utils.text import safe_name

logger = init_logger(__name__)

_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class HiddenStatesOptions:
    """``kv_connector_extra_config``, checked."""

    shared_storage_path: str = "/tmp"
    """Folder of the files; made when it is missing."""
    num_writer_threads: int = 8
    allow_custom_save_path: bool | Literal["inside"] = False
    """Requests may set ``kv_transfer_params["hidden_states_path"]``: to any path that this user
    can write, or only inside ``shared_storage_path``."""
    use_synchronization_lock: bool = True
    """Hold ``<path>.lock`` while a file is being made."""
    max_bytes_in_flight: int = 64 * _MEBIBYTE
    """Host memory for rows on their way to the disk; the engine waits when it is full."""

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> HiddenStatesOptions:
        """The options among ``extra_config``, which may hold others.

        Raises ValueError that names the option, the value and what would work.
        """
        return cls(
            **{
                field.name: _checked(field.name, extra_config[field.name], type(field.default))
                for field in fields(cls)
                if field.name in extra_config
            }
        )

    @classmethod
    def reject_unknown(cls, extra_config: Mapping[str, Any]) -> None:
        """Raise ValueError for a name that is no option."""
        names = [field.name for field in fields(cls)]
        check_options("kv_connector_extra_config", extra_config, names)

    def prepare_storage(self) -> None:
        """Make the storage folder. Raises ValueError when it cannot be written."""
        try:
            os.makedirs(self.shared_storage_path, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.shared_storage_path):
                pass
        except OSError as error:
            raise ValueError(
                f"shared_storage_path={self.shared_storage_path!r} cannot be written: "
                f"{error.strerror}; name a folder where this user may create files"
            ) from error

    def save_path(self, request_id: str, params: Mapping[str, Any]) -> str:
        """Where a request's file goes; pure, see :meth:`check_save_path`."""
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
            raise ValueError(f"hidden_states_path={path!r} is not the path of a file")
        if name.endswith(".lock"):
            raise ValueError(f"hidden_states_path={path!r}: names that end in .lock are for locks")
        folder = os.path.realpath(self.shared_storage_path)
        inside = os.path.realpath(path).startswith(os.path.join(folder, ""))
        if self.allow_custom_save_path == "inside" and not inside:
            raise ValueError(
                f"hidden_states_path={path!r} lies outside shared_storage_path={folder!r}; choose "
                "a path inside it (allow_custom_save_path=true would allow any)"
            )

    def warn_of_any_path(self) -> None:
        """For the log at the start."""
        if self.allow_custom_save_path is True:
            logger.warning_once(
                "allow_custom_save_path is true: every client can make this process write, and "
                'overwrite, any file that its user can; "inside" keeps them to %s',
                self.shared_storage_path,
            )


def _can_be_named(path: str) -> bool:
    try:
        return bool(os.fsencode(path))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _checked(name: str, value: Any, expected: type[Any]) -> Any:
    """The value, when it is one of the expected type and not empty."""
    if name == "allow_custom_save_path" and value == "inside":
        return value
    if expected is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    fits = type(value) is expected and value != "" and not (expected is int and value < 1)
    if not fits:
        wanted = {bool: "true or false", int: "a whole number above 0", str: "a folder's path"}
        choice = ', or "inside"' if name == "allow_custom_save_path" else ""
        raise ValueError(
            f"kv_connector_extra_config[{name!r}]={value!r} must be {wanted[expected]}{choice}"
        )
    return value

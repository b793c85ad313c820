"""The weights of a server, which its endpoints replace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.errors import ApiError, bad_request
from vllm.utils.text import brief
from vllm.v1.engine.weight_transfers import WeightTransfers

if TYPE_CHECKING:
    from vllm.entrypoints.openai.cli_args import ServerSettings
    from vllm.v1.engine.async_llm import AsyncLLM


class ServedWeights:
    """The weights of one server: folders that they may come from, and the group of a trainer."""

    def __init__(self, settings: ServerSettings, engine: AsyncLLM) -> None:
        config = settings.weight_transfer_config
        self._folders = [Path(one).expanduser().resolve() for one in settings.weight_folders]
        self._has_group = config is not None
        self.is_packed = False
        """The default of /update_weights."""
        self._transfers = WeightTransfers(
            engine,
            uses_nccl=config is not None and config.backend == "nccl",
            timeout=300.0 if config is None else config.timeout,
        )

    @property
    def transfers(self) -> WeightTransfers:
        """The transfers from trainers. ApiError: the server was started without them."""
        if not self._has_group:
            raise ApiError(
                501,
                "this server cannot take weights from a trainer: start it with "
                '--weight-transfer-config \'{"backend": "gloo"}\', or "nccl" on CUDA devices',
            )
        return self._transfers

    async def load_folder(self, path: str) -> None:
        """Replace all weights by those in a folder.

        ApiError: the server may not read there. ValueError: the weights do not fit.
        """
        folder = Path(path).expanduser().resolve()
        if not any(folder.is_relative_to(one) for one in self._folders):
            raise ApiError(
                403,
                f"path={brief(path)} is not in a folder that the server may load weights from; "
                "name one in --weight-folders",
            )
        if not folder.is_dir():
            raise bad_request(f"path={brief(path)}: there is no such folder")
        await self._transfers.load_folder(str(folder))

    async def finish(self) -> None:
        """End an update that was not started by a call of its own. FailureError: it failed."""
        await self._transfers.finish(only_announced=True)

    async def leave(self) -> None:
        """Leave the group of a trainer, and end its update. FailureError: it failed."""
        await self._transfers.leave()

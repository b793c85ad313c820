"""Engine cores on other machines, seen from the front end.

A node there (``node_process.py``) comes to the front end, which sends it the config and the places
of the sockets of each of its engines. When the connection to the node ends, its engines have ended.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.storage_folder import storage_options
from vllm.v1.engine.core_client import START_POLL_MILLISECONDS, AnyCoreHandle
from vllm.v1.executor.node_links import MeetingPlace, SocketPlace
from vllm.v1.executor.node_meeting import NodeMeeting
from vllm.v1.executor.rank_terms import terms_of

if TYPE_CHECKING:
    import zmq

    from vllm.config import VllmConfig


def remote_cores(config: VllmConfig) -> list[RemoteCoreHandle]:
    """Listen for the nodes that have the engines which are not on this machine, if there are any.

    ValueError: the address or the port cannot be used.
    """
    parallel = config.parallel_config
    others = [one for one in parallel.engines_served if one not in parallel.engines_here]
    if not others:
        return []
    meeting = NodeMeeting(
        MeetingPlace.of_engines(parallel),
        f"data_parallel_size={parallel.data_parallel_size}",
        "engine",
        others,
        terms_of(config),
        parallel.distributed_timeout_seconds,
    )
    return [RemoteCoreHandle(meeting, config, number) for number in others]


@contextmanager
def _mark_of_folder(config: VllmConfig) -> Iterator[str | None]:
    """Make a file in the folder for hidden states, by which engines know it; None: there is none.

    ValueError: it cannot be written.
    """
    options = storage_options(config)
    if options is None:
        yield None
        return
    options.prepare_storage()
    with NamedTemporaryFile(dir=options.shared_storage_path, prefix=".shared-") as file:
        yield os.path.abspath(file.name)


class RemoteCoreHandle(AnyCoreHandle):
    """The process of an engine core on another machine."""

    def __init__(self, meeting: NodeMeeting, config: VllmConfig, number: int) -> None:
        self._meeting, self._config, self._number = meeting, config, number
        self._places: dict[str, SocketPlace] = {}

    @property
    def is_alive(self) -> bool:
        return self._meeting.links[self._number].ending(self._number) is None

    def wait_for_end(self) -> str:
        return self._meeting.links[self._number].wait_for_end(self._number)

    def bind(self, commands: zmq.Socket[Any], reports: zmq.Socket[Any]) -> None:
        host = self._meeting.place.host
        for name, socket in (("commands", commands), ("reports", reports)):
            self._places[name] = SocketPlace.bind(socket, host)

    @asynccontextmanager
    async def beginning(self) -> AsyncGenerator[None, None]:
        """Wait for all nodes, then hand the config over."""
        while not self._meeting.is_complete():
            await asyncio.sleep(START_POLL_MILLISECONDS / 1000)
        self._meeting.stop_listening()
        with _mark_of_folder(self._config) as mark:
            message = {"engine": self._number, "mark": mark, **self._places}
            self._meeting.links[self._number].send(message, pickle.dumps(self._config))
            yield

    def make_stop_watch(self) -> Callable[[], bool]:
        link = self._meeting.links[self._number]
        return lambda: self._number in link.stopped

    def end(self, grace_seconds: float = 0.0) -> None:
        self._meeting.end(grace_seconds)

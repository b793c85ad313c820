"""The meeting of nodes at the start: the engine, or the front end, of node 0 takes others in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import AuthenticationError

from vllm.logger import init_logger
from vllm.v1.executor.node_links import (
    BAD_MESSAGE,
    MeetingPlace,
    NodeLink,
    authenticate,
    connection_over,
    receive,
)
from vllm.v1.executor.rank_terms import differences

logger = init_logger(__name__)


class NodeMeeting:
    """Listens until nodes have brought all members. Members are nodes, or the nodes' engines."""

    def __init__(
        self,
        place: MeetingPlace,
        option: str,
        noun: str,
        members: Collection[int],
        terms: dict[str, str],
        timeout_seconds: float,
    ) -> None:
        """Listen. ValueError: the address cannot be used.

        option: the one that says how many members there are, with its value. noun: what a member
        is, "node" or "engine". terms: in which nodes must not differ from node 0.
        """
        self.place, self._option, self._noun = place, option, noun
        self._missing, self._terms = set(members), terms
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self.links: dict[int, NodeLink] = {}
        """The connection to the node of each member."""
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._listener = place.listen()
        logger.info("waiting at %s for %s", place, self._named(members))
        threading.Thread(target=self._accept, daemon=True).start()

    def _named(self, members: Collection[int]) -> str:
        noun = self._noun if len(members) == 1 else f"{self._noun}s"
        return f"{noun} {', '.join(map(str, sorted(members)))}"

    def wait(self) -> None:
        """Wait until all members are there. ValueError: a node differs, or does not come."""
        with self._changed:
            while not self.is_complete():
                self._changed.wait(max(0.0, self._deadline - time.monotonic()))

    def is_complete(self) -> bool:
        """Return whether all members are there. ValueError: a node differs, or does not come."""
        with self._changed:
            if self._problem is not None:
                raise ValueError(self._problem)
            if self._missing and time.monotonic() >= self._deadline:
                raise ValueError(
                    f"{self._option}: {self._noun} {min(self._missing)} has not come to "
                    f"{self.place} for {self._timeout_seconds:g} s (distributed_timeout_seconds)"
                )
            return not self._missing

    def stop_listening(self) -> None:
        with suppress(OSError):  # it was stopped already
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._listener.close()

    def end(self, grace_seconds: float) -> None:
        """Let the processes of all nodes end, and take no more in."""
        self.stop_listening()
        with self._changed:
            self._problem = self._problem or f"{self._option}: node 0 has ended"
        for link in dict.fromkeys(self.links.values()):
            link.end(grace_seconds)

    def _accept(self) -> None:
        while True:
            try:
                accepted, (host, _) = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(accepted, host), daemon=True).start()

    def _greet(self, accepted: socket.socket, address: str) -> None:
        """Take in a node that has come, or tell it why not."""
        connection = connection_over(accepted)
        try:
            authenticate(connection, is_engine=True)
            hello = receive(connection)
            members = [int(member) for member in hello["members"]]
            name = f"{self._named(members)} ({hello['host']})"
            if self._noun != "node":
                name = f"the node of {name}"
            different = differences([self._terms, dict(hello["terms"])], ["node 0", name])
        except (AuthenticationError, EOFError, OSError, *BAD_MESSAGE) as error:
            logger.warning("a connection from %s is refused: %s", address, error or "it ended")
            connection.close()
            return
        self._take_in(NodeLink(connection, name, hello["noun"]), members, different)

    def _take_in(self, link: NodeLink, members: list[int], different: str) -> None:
        with self._changed:
            if different and self._problem is None:
                self._problem = f"{self._option}: nodes differ: {different}"
            if self._problem is not None:
                link.send({"error": self._problem})
            elif others := sorted(set(members) - self._missing):
                problem = f"{self._option}: {self._named(others)}"
                link.send({"error": f"{problem}: not awaited, or there already"})
            else:
                self.links |= dict.fromkeys(members, link)
                self._missing.difference_update(members)
                threading.Thread(target=link.listen, daemon=True).start()
            self._changed.notify_all()

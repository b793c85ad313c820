"""Messages in memory that processes share: any lengths, slow readers, readers that are gone."""

from __future__ import annotations

import random
import threading
import time

import pytest

from vllm.distributed.broadcast import RING_BYTES, BroadcastReceiver, BroadcastSender

LENGTHS = (0, 1, 7, 1500, RING_BYTES - 8, RING_BYTES - 7, RING_BYTES, 3 * RING_BYTES + 5)


class Patience:
    """Gives up when a message is not taken for long."""

    def __init__(self) -> None:
        self._end = time.monotonic() + 60

    def __call__(self, reader: int) -> None:
        assert time.monotonic() < self._end, f"reader {reader} takes nothing"


def make_messages(seed: int, count: int) -> list[bytes]:
    drawn = random.Random(seed)
    lengths = [drawn.choice([*LENGTHS, drawn.randrange(5000)]) for _ in range(count)]
    return [drawn.randbytes(length) for length in lengths]


@pytest.mark.parametrize("readers", [1, 3])
def test_all_readers_get_all_messages(readers: int) -> None:
    sender = BroadcastSender(readers)
    messages = make_messages(readers, 40)
    received: list[list[bytes]] = [[] for _ in range(readers)]

    def read(reader: int) -> None:
        receiver = BroadcastReceiver(sender.places[reader])
        for number in range(len(messages)):
            received[reader].append(receiver.receive())
            if number % 7 == reader:
                time.sleep(0.01)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        sender.send(message, Patience())
    for thread in threads:
        thread.join(60)
    sender.close_file()
    assert all(one == messages for one in received)


def test_a_reader_that_takes_nothing_is_looked_at() -> None:
    sender = BroadcastSender(2)
    quick = BroadcastReceiver(sender.places[0])
    sender.close_file()
    for _ in range(3):
        sender.send(b"x" * (RING_BYTES // 4), Patience())
        assert quick.receive() == b"x" * (RING_BYTES // 4)
    looked = []

    def give_up(reader: int) -> None:
        looked.append(reader)
        if len(looked) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        sender.send(b"y" * (RING_BYTES // 2), give_up)
    assert looked == [1, 1]

"""Requests per second of the front end of many engines: ``python benchmarks/front_end.py``.

What is measured, for each request: the choice of an engine, its message and the sending of that,
and taking in the engine's last report of it (``CoreGroup`` and its clients, as in ``vllm serve``).
What is not: HTTP, tokenising, detokenising, and engines. These are simulated by one other process,
which answers whatever has come with one report per engine, of one token for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_balancer import BALANCERS
from vllm.v1.engine.core_client import AnyCoreHandle
from vllm.v1.engine.core_group import CoreGroup
from vllm.v1.engine.core_messages import (
    AddRequest,
    CoreCommand,
    CoreReport,
    CoreStarted,
    EngineStats,
    ReportEncoder,
    Shutdown,
    command_address,
    report_address,
)

ROOT = Path(__file__).resolve().parent.parent


class SimulatedCore(AnyCoreHandle):
    """An engine of the other process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_for_end(self) -> str:
        assert self.process is not None
        return f"the simulation ended with status {self.process.wait()}"

    def bind(self, commands: zmq.Socket[Any], reports: zmq.Socket[Any]) -> None:
        commands.bind(command_address(str(self._folder)))
        reports.bind(report_address(str(self._folder)))

    @asynccontextmanager
    async def beginning(self) -> AsyncGenerator[None, None]:
        yield

    def make_stop_watch(self) -> Callable[[], bool]:
        return lambda: False

    def end(self, grace_seconds: float = 0.0) -> None:
        pass


def simulate_engines(folder: Path, num_engines: int) -> None:
    """Answer requests until each engine was told to end."""
    context: zmq.Context[Any] = zmq.Context()
    poller, reports_of = zmq.Poller(), {}
    for number in range(num_engines):
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        commands.connect(command_address(str(folder / str(number))))
        reports.connect(report_address(str(folder / str(number))))
        reports.send(msgspec.msgpack.encode(CoreStarted()))
        poller.register(commands, zmq.POLLIN)
        reports_of[commands] = reports
    decoder, encoder = msgspec.msgpack.Decoder(list[CoreCommand]), ReportEncoder()
    num_running = num_engines
    while num_running:
        for commands, _ in poller.poll():
            outputs = []
            while commands.poll(0):
                for command in decoder.decode(commands.recv()):
                    if isinstance(command, AddRequest):
                        output = EngineCoreOutput(
                            request_id=command.request.request_id, new_token_ids=[7]
                        )
                        output.end(FinishReason.LENGTH, None)
                        outputs.append(output)
                    num_running -= isinstance(command, Shutdown)
            report = CoreReport(outputs=outputs, stats=EngineStats())
            reports_of[commands].send_multipart(encoder.encode(report), copy=False)


@contextmanager
def simulated_cores(num_engines: int) -> Iterator[list[SimulatedCore]]:
    with tempfile.TemporaryDirectory() as folder:
        cores = [SimulatedCore(Path(folder) / str(number)) for number in range(num_engines)]
        command = [sys.executable, "-m", "benchmarks.front_end", "--simulate", folder]
        process = subprocess.Popen([*command, "--engines", str(num_engines)], cwd=ROOT)
        for core in cores:
            core.process = process
        try:
            yield cores
        finally:
            process.kill()
            process.wait()


async def measure(
    cores: list[SimulatedCore],
    num_requests: int,
    num_in_flight: int,
    num_tokens: int,
    balancing: str = "least-loaded",
) -> tuple[float, float]:
    """Return the seconds that all requests took, and those of this process's CPU time."""
    finished: dict[str, asyncio.Event] = {}

    def take_report(report: CoreReport) -> None:
        for output in report.outputs:
            finished.pop(output.request_id).set()

    names = [f"engine {number}" for number in range(len(cores))]
    group = CoreGroup(names, cores, take_report, print, balancing)
    await group.start()
    numbers = iter(range(num_requests))
    params, prompt = SamplingParams(max_tokens=1), list(range(1000, 1000 + num_tokens))

    async def caller() -> None:
        for number in numbers:
            name = f"cmpl-{number:032x}"
            done = finished[name] = asyncio.Event()
            request = EngineCoreRequest(
                request_id=name, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0
            )
            await group.send(AddRequest(request))
            await done.wait()

    begin, begin_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(num_in_flight)))
    seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    await group.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--balancing", default="least-loaded", choices=[*BALANCERS])
    parser.add_argument("--simulate", type=Path)
    args = parser.parse_args()
    if args.simulate is not None:
        simulate_engines(args.simulate, args.engines)
        return
    with simulated_cores(args.engines) as cores:
        work = measure(cores, args.requests, args.in_flight, args.tokens, args.balancing)
        wall, cpu = uvloop.run(work)
    per_second, per_cpu_second = args.requests / wall, args.requests / cpu
    print(
        f"{args.engines} engines, {args.requests:,} requests of {args.tokens} tokens, "
        f"{args.in_flight} at a time: {per_second:,.0f} requests/s, "
        f"{per_cpu_second:,.0f} per second of the front end's CPU time"
    )


if __name__ == "__main__":
    main()

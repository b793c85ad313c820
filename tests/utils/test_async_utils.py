"""Calls that block, beside a loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from vllm.utils.async_utils import call_in_thread


def test_a_call_is_made_in_the_loop_if_no_thread_can_be_started() -> None:
    """As at the end of the interpreter, when an engine that nobody closed is ended."""

    def thread_and_argument(seconds: float) -> tuple[int, float]:
        return threading.get_ident(), seconds

    async def main() -> None:
        here = threading.get_ident()
        thread, seconds = await call_in_thread(thread_and_argument, 3.5)
        assert thread != here and seconds == 3.5
        executor = ThreadPoolExecutor()
        executor.shutdown()
        asyncio.get_running_loop().set_default_executor(executor)
        assert await call_in_thread(thread_and_argument, 2.5) == (here, 2.5)

    asyncio.run(main())

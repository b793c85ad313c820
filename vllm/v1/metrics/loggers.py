"""Log lines at intervals that say how busy the engine is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.logger import init_logger
from vllm.v1.engine.core_messages import EngineStats

logger = init_logger(__name__)

LOG_SECONDS = 10.0


async def log_stats_forever(
    read_stats: Callable[[], EngineStats], connector: KVConnectorLogging
) -> None:
    """Log throughput, use of the pool and the KV connector's counts, every few seconds in which
    the engine made steps."""
    before = read_stats()
    while True:
        await asyncio.sleep(LOG_SECONDS)
        now = read_stats()
        if now.num_steps != before.num_steps:
            line, counts = stats_line(before, now, LOG_SECONDS), connector.take_line()
            logger.info("%s", f"{line}; KV connector: {counts}" if counts else line)
        before = now


def stats_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generation = (now.num_generation_tokens - before.num_generation_tokens) / seconds
    line = (
        f"{now.num_running} running, {now.num_waiting} waiting; prompts {prompt:.1f} tokens/s, "
        f"generation {generation:.1f} tokens/s; pool {100 * now.kv_cache_usage:.1f} % in use"
    )
    files = now.files_written - before.files_written
    return f"{line}; {files} files written" if files else line

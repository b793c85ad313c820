"""Metrics for Prometheus (``/metrics``), and two pages for people: the state of the server (``/``,
which reads the metrics every two seconds) and the API. The pages load nothing external."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import HTMLResponse, Response

from vllm.entrypoints.openai.errors import hide_local_paths
from vllm.entrypoints.openai.state import ServerState, State
from vllm.utils.disk import free_bytes
from vllm.version import PRODUCT, VERSION

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def get_metrics(state: State) -> Response:
    """Return counts and latencies for Prometheus."""
    return Response(await _measure(state), media_type=CONTENT_TYPE_LATEST)


@router.get("/metrics/", response_class=Response, include_in_schema=False)
async def get_metrics_plain(state: State) -> Response:
    """Return counts and latencies in the older text format."""
    return Response(await _measure(state), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _measure(state: ServerState) -> bytes:
    if state.storage_folder is not None:  # a network disk may take its time
        free = await asyncio.to_thread(free_bytes, state.storage_folder)
        state.metrics.disk_free_bytes = free
    await state.count_all()
    return generate_latest(state.metrics.registry)


@cache
def _page(name: str) -> tuple[str, dict[str, str]]:
    """Return a page, and headers that let it talk to this server only."""
    page = Path(__file__).with_name(name).read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    named = page.replace("{{product}}", PRODUCT).replace("{{version}}", VERSION)
    return named, {
        "content-security-policy": f"default-src 'none'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def get_status_page(state: State) -> HTMLResponse:
    """Return the status page."""
    page, headers = _page("status_page.html")
    page = page.replace("{{name}}", html.escape(state.model_name))
    return HTMLResponse(page.replace("{{facts}}", _facts(state)), headers=headers)


def _facts(state: ServerState) -> str:
    """Return rows of a table. On a server with keys paths are hidden: the page needs no key."""
    rows = []
    for name, value in state.facts:
        shown = hide_local_paths(value) if state.settings.accepted_keys else value
        head, cell = html.escape(name), html.escape(shown)
        rows.append(f'<tr><th scope="row">{head}</th><td>{cell}</td></tr>')
    return "\n".join(rows)


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def get_api_page() -> HTMLResponse:
    """Return the page of the API, which reads the endpoints from /openapi.json."""
    page, headers = _page("api_page.html")
    return HTMLResponse(page, headers=headers)

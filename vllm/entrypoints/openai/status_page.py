"""The page at ``/``: how the server does, from ``/metrics`` and ``/load``, every two seconds.

One document without external parts; its policy lets it talk to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.openai.state import ServerState


def make_router(state: ServerState) -> APIRouter:
    """``/``: the status page."""
    router = APIRouter()
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("{{version}}", __version__)
    page = page.replace("{{name}}", html.escape(state.served_model_names[0]))
    headers = {
        "content-security-policy": f"default-src 'none'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def get_status_page() -> HTMLResponse:
        """How the server does."""
        return HTMLResponse(page, headers=headers)

    return router
